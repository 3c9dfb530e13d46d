"""Which rows of the reference the rows of each wrong value of the port should be.

Two programs may divide their tokens otherwise: padded or packed, all at once or in turn.
But all calls of a weight together read all tokens, and make as many rows. Where these are right
they show which row is which; another weight that is called as often, for as many rows, has the
same tokens at the same places.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from otel_torch.graph.counterparts import (
    is_beside,
    root_of,
    weights_alone,
)
from otel_torch.graph.distances import distinct, sketch_norms
from otel_torch.graph.error_model import MOST_ERROR
from otel_torch.graph.graph import NOTHING, Floats, Indices
from otel_torch.graph.shapes import have_same_order
from otel_torch.graph.states import RIGHT, ComparedProgram, Programs

# pairs of rows whose distances are in memory at once
_PAIRS_AT_ONCE = 1 << 22
# of more pairs no distance is computed: it would take longer than the programs
_MOST_PAIRS = 1 << 30

Applied = tuple[int, ...]


class RowsOf(NamedTuple):
    """Rows along the last axis of a value of the reference, and the rows of the port's value in
    whose place they are put.
    """

    reference: int
    rows: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowCounterpart:
    """The reference's rows to put into a value of the port; its other rows stay as they are."""

    port: int
    sources: tuple[RowsOf, ...]

    @property
    def references(self) -> tuple[int, ...]:
        """The values of the reference that have the rows."""
        return tuple(source.reference for source in self.sources)


class _Application(NamedTuple):
    """The values that some calls of a weight read, or make, in the order of execution."""

    reference: Applied
    port: Applied


def find_row_counterparts(programs: Programs) -> dict[int, RowCounterpart]:
    """Return the rows that each value of the port that is not right should have, where they are
    known, by what the value is a view of (see `root_of`).
    """
    found: dict[int, RowCounterpart] = {}
    of_all_calls = list(_in_both(programs))
    # a sampler may be right in its first step alone, and each has its tokens at the same places
    of_repetitions = [part for own in of_all_calls for part in _repetitions(own)]
    for known in (of_all_calls, of_repetitions):
        for applications in _of_same_tokens(programs, known):
            for counterpart in _counterparts_of(programs, applications):
                found.setdefault(root_of(programs[1], counterpart.port), counterpart)
    return found


def _in_both(programs: Programs) -> Iterator[_Application]:
    """Yield what all calls of each weight read, and what they make."""
    reference, port = map(_applications, programs)
    for key in reference.keys() & port.keys():
        yield _Application(tuple(reference[key]), tuple(port[key]))


def _repetitions(application: _Application) -> Iterator[_Application]:
    """Yield the calls of each repetition of both programs, as often as they may repeat at most."""
    count = math.gcd(*map(len, application))
    sizes = [len(values) // count for values in application]
    for first in range(count if count > 1 else 0):
        yield _Application(
            *(
                values[first * size : (first + 1) * size]
                for values, size in zip(application, sizes, strict=True)
            )
        )


def _of_same_tokens(
    programs: Programs, applications: Iterable[_Application]
) -> Iterable[list[_Application]]:
    """Return those that have as many rows in as many calls, each in the order of execution."""
    same: dict[object, list[_Application]] = defaultdict(list)
    for application in sorted(applications, key=lambda own: own.port):
        counts = tuple(
            tuple(_row_count(program, value) for value in values)
            for program, values in zip(programs, application, strict=True)
        )
        if NOTHING not in counts[0] + counts[1]:
            same[counts].append(application)
    return same.values()


def _counterparts_of(
    programs: Programs, applications: list[_Application]
) -> Iterator[RowCounterpart]:
    """Yield what to put in the place of the port's values, by those before them that are right."""
    right = [own for own in applications if _is_right(programs[1], own.port)]
    rows: dict[_Application, Indices] = {}
    for application in applications if right else ():
        before = bisect_right(right, application.port, key=lambda own: own.port)
        known = right[max(before - 1, 0)]
        if known not in rows:
            rows[known] = _same_rows(programs, known)
        yield from _counterparts(programs, application, rows[known])


def _applications(program: ComparedProgram) -> dict[object, list[int]]:
    """Return the values that weights are applied to, and what that makes, by the weights."""
    applications: dict[object, list[int]] = defaultdict(list)
    for node in range(program.own_nodes):
        applied = weights_alone(program, node)
        if applied is None or not program.makes[node]:
            continue
        weights, value = applied
        # a bias may be added in the product, or after it; a head may share the embedding's weight
        is_picked = bool(program.graph.nodes.moves[node])
        for key, own in ((weights[0], value), (frozenset(weights), program.makes[node][0])):
            if own >= 0 and not is_beside(program, own):
                applications[key, is_picked].append(own)
    return {key: _by_turns(program, values) for key, values in applications.items()}


def _by_turns(program: ComparedProgram, values: Sequence[int]) -> list[int]:
    """Return values as if the processes of a program took turns: they run at the same time."""
    turns: Counter[int] = Counter()
    turn_of: dict[int, int] = {}
    process = program.graph.values.process
    for value in values:
        turn_of[value] = turns[int(process[value])]
        turns[int(process[value])] += 1
    return sorted(values, key=lambda value: (turn_of[value], value))


def _is_right(program: ComparedProgram, values: Applied) -> bool:
    return all(program.state[value] == RIGHT and program.is_informed[value] for value in values)


def _row_count(program: ComparedProgram, value: int) -> int:
    """Return how many rows along the last axis a value has; NOTHING unless all were recorded."""
    shape = program.graph.values.shape[value]
    count = len(program.graph.values.rows.of(value))
    is_whole = bool(shape) and count * shape[-1] == program.graph.values.numel[value] > 0
    return count if is_whole else NOTHING


def _same_rows(programs: Programs, known: _Application) -> Indices:
    """Return which row of the reference each row of the port is; NOTHING for further tokens."""
    first, second = (
        np.concatenate([program.graph.values.rows.of(value) for value in values])
        for program, values in zip(programs, known, strict=True)
    )
    nearest = _nearest(first, second)
    _, content = distinct(first)
    free: dict[int, dict[int, None]] = defaultdict(dict)
    for row, own in enumerate(content.tolist()):
        free[own][row] = None
    taken, last = {NOTHING}, NOTHING
    for place in np.flatnonzero(nearest != NOTHING).tolist():
        same = free[int(content[nearest[place]])]
        if same:  # of equal rows, such as those of a word that comes twice, the one that comes next
            follows = (row for row in same if row - 1 in taken)
            nearest[place] = last + 1 if last + 1 in same else next(follows, next(iter(same)))
            del same[int(nearest[place])]
        last = int(nearest[place])
        taken.add(last)
    return nearest


def _nearest(rows: Floats, others: Floats) -> Indices:
    """Return the row that is nearest to each of some others; NOTHING where none is similar."""
    nearest = np.full(len(others), NOTHING, np.int64)
    if len(rows) * len(others) > _MOST_PAIRS:
        return nearest
    norms = sketch_norms(rows)
    at_once = max(1, _PAIRS_AT_ONCE // max(1, len(rows)))
    for first in range(0, len(others), at_once):
        part = others[first : first + at_once]
        size = sketch_norms(part)
        squares = norms**2 - 2 * (part @ rows.T) + (size**2)[:, None]
        squares[np.isnan(squares)] = np.inf
        best = squares.argmin(1)
        largest = np.maximum(norms[best], size)
        least = squares[np.arange(len(best)), best]
        is_similar = (least <= (MOST_ERROR * largest) ** 2) & (largest > 0)
        nearest[first : first + at_once] = np.where(is_similar, best, NOTHING)
    return nearest


def _counterparts(
    programs: Programs, application: _Application, rows: Indices
) -> Iterator[RowCounterpart]:
    """Yield what to put in the place of the port's values that are not right.

    Args:
        rows: Of all values of the reference together, that of each row of the port's.
    """
    reference, port = programs
    ends = np.cumsum([_row_count(reference, value) for value in application.reference])
    first = 0
    for value in application.port:
        own = rows[first : first + _row_count(port, value)]
        first += len(own)
        if port.state[value] == RIGHT:
            continue
        holder = np.searchsorted(ends, own, side="right")
        sources = []
        for index, source in enumerate(application.reference):
            places = np.flatnonzero((own != NOTHING) & (holder == index))
            if len(places):
                begin = ends[index] - _row_count(reference, source)
                sources.append(
                    RowsOf(source, tuple((own[places] - begin).tolist()), tuple(places.tolist()))
                )
        if sources:
            yield RowCounterpart(_with_same_rows(port, value), tuple(sources))


def _with_same_rows(program: ComparedProgram, value: int) -> int:
    """Return what a value is a view of, if that has the same rows."""
    root, shape = root_of(program, value), program.graph.values.shape
    has_same = shape[root][-1:] == shape[value][-1:] and have_same_order(shape[root], shape[value])
    return root if has_same else value
