"""Rows of tokens that the other program never had, such as paddings, and rows that are wrong.

Both are nowhere in the other program. Further tokens come with inputs that differ, or with zeros or
constants that something is joined with; what is computed of neither has wrong rows only, and so has
what is joined with something unknown.
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


def _comes_with_further(graph: Graph, is_unknown: Flags) -> Flags:
    """Return which values come from inputs that differ, or from what constants added rows to."""
    values, nodes = graph.values, graph.nodes
    is_weight = np.array([kind in WEIGHT_KINDS for kind in graph.leaf_kinds] + [False], bool)
    is_constant = [False] * len(values)
    widths = np.array([shape[-1] if shape else 1 for shape in values.shape])
    rows = (values.numel // np.maximum(widths, 1)).tolist()
    are_padded = _are_padded(graph)
    is_given = (values.leaf != NOTHING) & ~is_weight[values.leaf]
    comes = (is_given & (is_unknown | are_padded)).tolist()

    def most_rows(some: list[int]) -> int:
        return max((rows[value] for value in some), default=0)

    tables = zip(nodes.reads.lists(), nodes.makes.lists(), nodes.moves.tolist(), strict=True)
    for all_reads, makes, is_moving in tables:
        reads = [value for value in all_reads if value >= 0]
        computed = [value for value in reads if not is_constant[value]]
        if any(comes[value] for value in reads):
            has_more = True
        elif is_moving:
            has_more = 0 < len(computed) < len(reads) and _are_joined(graph, reads, makes)
            has_more |= bool(are_padded[makes].any())
        else:
            has_more = 0 < most_rows(computed) < most_rows(makes)
        for value in makes:
            comes[value], is_constant[value] = has_more, not computed
    return np.array(comes, bool)


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
