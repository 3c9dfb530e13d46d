"""Rows of tokens that the other program never had, such as paddings, and rows that are wrong.

Both are nowhere in the other program. Further tokens come with inputs that differ, or with zeros or
constants that something is joined with; what is computed of neither has wrong rows only, and so has
what is joined with something unknown. Zeros make further tokens of what is computed of them alone:
a cache that has room for more makes none of what attends to it, nor does a buffer once it is full.
"""

from __future__ import annotations

import numpy as np

from otel_torch.graph.distances import sketch_norms
from otel_torch.graph.graph import NOTHING, WEIGHT_KINDS, Flags, Graph, Indices


def may_be_further(graph: Graph, is_unknown: Flags) -> Flags:
    """Return which values may hold rows of further tokens.

    Args:
        is_unknown: Which values identify a place, and have rows that the other program lacks.
    """
    return _comes_with_further(graph, is_unknown) & ~_is_joined_with(graph, is_unknown)


# what a value may have beside rows of tokens that the other program has, too
_NOTHING, _ZEROS, _FURTHER = range(3)


def _comes_with_further(graph: Graph, is_unknown: Flags) -> Flags:
    """Return which values come from inputs that differ, or from what constants added rows to."""
    values, nodes = graph.values, graph.nodes
    is_weight = np.array([kind in WEIGHT_KINDS for kind in graph.leaf_kinds] + [False], bool)
    is_constant = [False] * len(values)
    widths = _widths(graph)
    rows = (values.numel // np.maximum(widths, 1)).tolist()
    zeros = np.where(_are_padded(graph), _ZEROS, _NOTHING)
    is_given = (values.leaf != NOTHING) & ~is_weight[values.leaf]
    is_other = is_unknown & ~_selects_known(graph, is_given & is_unknown, is_unknown)
    levels = np.where(is_given, np.where(is_other, _FURTHER, zeros), _NOTHING).tolist()
    shown = zeros.tolist()
    is_measured = (np.bincount(values.rows.owner, minlength=len(values)) > 0).tolist()
    carries = is_given.tolist()  # whether a value has rows of tokens at all

    def most_rows(some: list[int]) -> int:
        return max((rows[value] for value in some), default=0)

    tables = zip(nodes.reads.lists(), nodes.makes.lists(), nodes.moves.tolist(), strict=True)
    for all_reads, makes, is_moving in tables:
        reads = [value for value in all_reads if value >= 0]
        computed = [value for value in reads if not is_constant[value]]
        tokens = [value for value in reads if carries[value]]
        most = max((levels[value] for value in reads), default=_NOTHING)
        if is_moving:
            are_added = 0 < len(computed) < len(reads) and _are_joined(graph, reads, makes)
        else:
            are_added = 0 < most_rows(computed) < most_rows(makes)
            if most == _ZEROS and all(levels[value] for value in tokens):
                most = _FURTHER
        for value in makes:
            if most == _FURTHER:
                levels[value] = _FURTHER
            elif are_added:
                levels[value] = shown[value] or _FURTHER
            elif is_moving and not is_measured[value]:
                levels[value] = most
            elif is_moving or most:
                levels[value] = shown[value]
            is_constant[value], carries[value] = not computed, bool(tokens)
    comes: Flags = np.array(levels) == _FURTHER  # rows of zeros are not looked for
    return comes


def _selects_known(graph: Graph, leaves: Flags, is_unknown: Flags) -> Flags:
    """Return which of some leaves are one row of places, as ids of a packed batch, by which no
    unknown row is selected, or of as many, as its positions: that batch has no paddings, and the
    row is in no other.
    """
    values, nodes, readers = graph.values, graph.nodes, graph.readers().lists()

    def selected(place: int) -> list[int]:
        """Return what is selected by a place, or by what whole numbers are computed of it."""
        rows, waiting, seen = list[int](), [place], {place}
        while waiting:
            place = waiting.pop()
            for node in readers[place]:
                for made in set(nodes.makes[node].tolist()) - seen:
                    if values.roundoff[made] == 0 and values.numel[made] == values.numel[place]:
                        seen.add(made)
                        waiting.append(made)
                    elif nodes.moves[node]:
                        rows.append(made)
        return rows

    are_places: Flags = leaves & (values.roundoff == 0) & (values.numel == _widths(graph))
    counts = set[int]()
    for leaf in np.flatnonzero(are_places).tolist():
        rows = selected(leaf)
        if rows and not is_unknown[rows].any():
            counts.add(int(values.numel[leaf]))
    return are_places & np.isin(values.numel, list(counts))


def _widths(graph: Graph) -> Indices:
    """Return how many elements a row of each value has."""
    return np.array([shape[-1] if shape else 1 for shape in graph.values.shape], np.int64)


def _are_padded(graph: Graph) -> Flags:
    """Return which values have rows of zeros beside others."""
    rows = graph.values.rows
    is_zero = sketch_norms(rows.content) == 0
    zeros, others = (
        np.bincount(rows.owner[chosen], minlength=len(graph.values)) > 0
        for chosen in (is_zero, ~is_zero)
    )
    flags: Flags = zeros & others
    return flags


def _is_joined_with(graph: Graph, is_unknown: Flags) -> Flags:
    """Return which values are joined with something unknown, and what is moved from them."""
    nodes = graph.nodes
    origin = np.arange(len(is_unknown))  # what each value was moved from
    is_joined = np.zeros(len(origin), bool)
    for node in np.flatnonzero(nodes.moves & ~nodes.is_reading).tolist():
        reads, makes = nodes.reads[node], nodes.makes[node]
        reads = reads[reads >= 0]
        is_joined[makes] = is_joined[reads].any()
        if len(reads) == 1:
            origin[makes] = origin[reads[0]]
        elif _are_joined(graph, reads, makes):
            is_joined[makes] |= (is_unknown[reads] & is_unknown[origin[reads]]).any()
    return is_joined


def _are_joined(graph: Graph, reads: Indices | list[int], makes: Indices | list[int]) -> bool:
    """Return whether what is made has the content of all that is read: no index is among it."""
    numel = graph.values.numel
    return bool(numel[makes].sum() == numel[reads].sum())
