"""Which rows of one program's values are rows of the other's, in whatever value they are.

Tokens come in other batches: packed by an engine, padded, in chunks. A row along the last axis
stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from otel_torch.graph.distances import (
    distinct,
    in_windows,
    most_of_estimate,
    relative_distances,
    sketch_norms,
)
from otel_torch.graph.graph import NOTHING, Flags, Floats, Graph, Indices, RowSketches

# How likely two rows may be equal by chance: a program has up to a million.
_CHANCE = 1e-9
# Directions by which equal rows are looked for: each takes a sort.
_DIRECTIONS = 4
# What a product of two rows may be off by its own arithmetic, relative to their sizes.
_ROUNDOFF = 1e-14


@dataclass(frozen=True, slots=True, eq=False)
class MatchedRows:
    """What the rows of some values of a program say.

    Attributes:
        values: Those with rows that tell something, ascending.
        unmatched: The share of these rows that are nowhere in the other program, per value.
        partner: The value of the other program that has most of the others; NOTHING for none.
        error: The relative error of these, together.
        holders: The values of the other program that have them, counting only the rows that this
            program made last: causal attention passes the value of the first token on.
    """

    values: Indices
    unmatched: Floats
    partner: Indices
    error: Floats
    holders: list[Indices]

    def are_all(self, is_whole: Flags) -> Flags:
        """Return which values have no row that should be in the other program.

        Either all of their rows are there, or only further tokens, such as paddings, are not: then
        whatever has any of their rows has no row of its own.

        Args:
            is_whole: Of the other program's values, which have no row that is not in this one.
        """
        no_more = [len(held) > 0 and bool(is_whole[held].all()) for held in self.holders]
        are_all: Flags = (self.unmatched == 0) | np.array(no_more, bool)
        return are_all


@dataclass(frozen=True, slots=True, eq=False)
class _DistinctRows:
    """The distinct rows of some values.

    Attributes:
        content: Their sketches, by ascending norm.
        norm, limit: Of each; the largest relative error of all values that have it.
        owner: The first value that has it.
        of_value: Each row's value, ascending, its place among the distinct rows, and the first
            value of the program that has it.
    """

    content: Floats
    norm: Floats
    limit: Floats
    owner: Indices
    of_value: tuple[Indices, Indices, Indices]


def find_equal_rows(
    own: Graph, other: Graph, limits: tuple[Floats, Floats], chosen: Flags, among: Flags
) -> MatchedRows:
    """Return which rows of one program the other has, too: of what it computed in what the other
    computed, of leaves in leaves. Any row of an embedding is one of its weight's.

    Args:
        own, other: Two programs.
        limits: The largest relative error of each value of both.
        chosen: The values of the first program that are asked for.
        among: The values of the second one that are looked through.
    """
    is_leaf = [graph.values.maker < 0 for graph in (own, other)]
    found = [
        _find(
            _distinct(own.values.rows, limits[0], chosen & (is_leaf[0] == leaves)),
            _distinct(other.values.rows, limits[1], among & (is_leaf[1] == leaves)),
        )
        for leaves in (False, True)
    ]
    computed, leaves = found
    return MatchedRows(
        np.concatenate([computed.values, leaves.values]),
        np.concatenate([computed.unmatched, leaves.unmatched]),
        np.concatenate([computed.partner, leaves.partner]),
        np.concatenate([computed.error, leaves.error]),
        computed.holders + leaves.holders,
    )


def _find(rows: _DistinctRows, theirs: _DistinctRows) -> MatchedRows:
    partners, errors = _nearest(rows, theirs)
    owner, place, first_owner = rows.of_value
    values, starts, counts = np.unique(owner, return_index=True, return_counts=True)
    if not len(values):
        return MatchedRows(values, np.zeros(0), values, np.zeros(0), [])
    partner = partners[place]
    is_matched = partner != NOTHING
    matched = np.add.reduceat(is_matched.astype(np.int64), starts)
    squares = np.where(is_matched, rows.norm[place] ** 2, 0.0)
    distances = np.where(is_matched, errors[place], 0.0) ** 2 * squares
    sizes = np.maximum(np.add.reduceat(squares, starts), np.finfo(float).tiny)
    error = np.sqrt(np.add.reduceat(distances, starts) / sizes)
    found_in = np.full(len(partner), NOTHING, np.int64)
    found_in[is_matched] = theirs.owner[partner[is_matched]]
    held = [np.unique(part, return_counts=True) for part in np.split(found_in, starts[1:])]
    known = [(own[own != NOTHING], often[own != NOTHING]) for own, often in held]
    most = [int(own[often.argmax()]) if len(own) else NOTHING for own, often in known]
    newest = np.repeat(np.maximum.reduceat(first_owner, starts), counts)
    is_last = is_matched & (first_owner == newest)
    last = np.split(np.where(is_last, found_in, NOTHING), starts[1:])
    holders = [own[own != NOTHING] for own in map(np.unique, last)]
    return MatchedRows(values, 1 - matched / counts, np.array(most, np.int64), error, holders)


def _distinct(rows: RowSketches, limits: Floats, chosen: Flags) -> _DistinctRows:
    """Return the distinct rows of values that tell something.

    The error of a value is spread over its rows: one that is small beside the others may be off by
    more of itself. What is off by more than rows are by chance tells nothing.
    """
    is_chosen = chosen[rows.owner]
    owner, content = rows.owner[is_chosen], rows.content[is_chosen]
    first_owner = rows.first_owner[is_chosen]
    norms = sketch_norms(content)
    _, starts, counts = np.unique(owner, return_index=True, return_counts=True)
    squares = np.add.reduceat(norms**2, starts) if len(starts) else norms
    usual = np.repeat(np.sqrt(squares / np.maximum(counts, 1)), counts)
    width = content.shape[1]
    slack = most_of_estimate(width)
    with np.errstate(all="ignore"):
        limit = slack * limits[owner] * np.maximum(usual / norms, 1.0)
    is_some = (norms > 0) & np.isfinite(norms) & (limit < _most_limit(width))
    owner, content, norms, limit = owner[is_some], content[is_some], norms[is_some], limit[is_some]
    first_owner = first_owner[is_some]
    first, inverse = distinct(content)
    largest = np.zeros(len(first))
    np.maximum.at(largest, inverse, limit)
    order = np.argsort(norms[first], kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    first = first[order]
    return _DistinctRows(
        content[first],
        norms[first],
        largest[order],
        owner[first],
        (owner, place[inverse], first_owner),
    )


def _most_limit(width: int) -> float:
    """Return the error from which on sketches of rows are equal by chance."""
    return float(_CHANCE ** (1 / width))


def _nearest(rows: _DistinctRows, others: _DistinctRows) -> tuple[Indices, Floats]:
    """Return the nearest equal row among others of each, and its error; NOTHING where none is."""
    partners = np.full(len(rows.norm), NOTHING, np.int64)
    errors = np.full(len(rows.norm), np.inf)
    most = _most_limit(rows.content.shape[1])
    tables = _Numbers.of(rows, others), _Numbers.of(others, others)
    # of rows with close limits few are candidates; one with a coarse limit would make all of them
    scale = np.floor(np.log10(np.maximum(others.limit, np.finfo(float).tiny)))
    for level in np.unique(scale):
        alike = scale == level
        span = np.minimum(np.hypot(rows.limit, others.limit[alike].max()), most) * 1.01
        for own, other in _candidates(tables, alike, rows.norm * (span / (1 - span) + _ROUNDOFF)):
            distance = relative_distances(rows.content[own], others.content[other])
            is_equal = distance <= np.hypot(rows.limit[own], others.limit[other])
            own, other, distance = own[is_equal], other[is_equal], distance[is_equal]
            order = np.argsort(-distance, kind="stable")  # the nearest is written last
            own, other, distance = own[order], other[order], distance[order]
            is_nearer = distance < errors[own]
            own, other, distance = own[is_nearer], other[is_nearer], distance[is_nearer]
            partners[own], errors[own] = other, distance
    return partners, errors


class _Numbers(NamedTuple):
    """Numbers of each row that differ by no more than two rows do: its norm, and its products with
    some directions.

    Attributes:
        table: Of each row, shape (rows, numbers).
        order: Of each number, the rows in its order, shape (numbers, rows).
    """

    table: Floats
    order: Indices

    @classmethod
    def of(cls, rows: _DistinctRows, others: _DistinctRows) -> _Numbers:
        """Return the numbers of rows, with the directions along which the others spread most."""
        directions = _directions(others.content / others.norm[:, None])
        table = np.column_stack([rows.norm, rows.content @ directions])
        return cls(table, np.argsort(table, axis=0, kind="stable").T)


def _candidates(
    tables: tuple[_Numbers, _Numbers], alike: Flags, most: Floats
) -> Iterator[tuple[Indices, Indices]]:
    """Yield pairs of rows and others, all of whose numbers differ by at most `most` of the row.

    What a norm makes has one size, but spreads along some direction: each row goes by the number of
    which it has the fewest candidates.

    Args:
        alike: Which others are looked through.
    """
    (own, own_order), (other, other_order) = tables
    starts, ends = np.empty(own.shape, np.int64), np.empty(own.shape, np.int64)
    places = [order[alike[order]] for order in other_order]
    for column, place in enumerate(places):
        numbers, row = other[place, column], own_order[column]
        # in their order, which keeps what is searched in the cache
        starts[row, column] = np.searchsorted(numbers, own[row, column] - most[row])
        ends[row, column] = np.searchsorted(numbers, own[row, column] + most[row], side="right")
    fewest = (ends - starts).argmin(axis=1)
    for column, place in enumerate(places):
        chosen = np.flatnonzero(fewest == column)
        for row, position in in_windows(starts[chosen, column], ends[chosen, column]):
            first, second = chosen[row], place[position]
            for numbers, theirs in zip(own.T, other.T, strict=True):
                is_near = np.abs(numbers[first] - theirs[second]) <= most[first]
                first, second = first[is_near], second[is_near]
            yield first, second


def _directions(unit: Floats) -> Floats:
    """Return the directions along which rows of length 1 spread most, shape (width, directions)."""
    _, vectors = np.linalg.eigh(unit.T @ unit)
    directions: Floats = vectors[:, -_DIRECTIONS:]
    return directions
