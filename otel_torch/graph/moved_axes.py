"""Values that are equal once one axis stands elsewhere: channels last in one program, first in the
other.

Where axes were measured (OTEL_TORCH_GRAPH_AXES), a graph has of each value what it is with each of
its axes moved last, made by a reading.
"""

from __future__ import annotations

import numpy as np

from otel_torch.graph.contents import ContentPairs, Contents
from otel_torch.graph.graph import AXIS_LAST, NOTHING, Flags, Graph, Indices


def moves_axis(graph: Graph) -> Flags:
    """Return which nodes read a value with an axis moved last."""
    moves_axis = np.array([operation == AXIS_LAST for operation in graph.operations], bool)
    return moves_axis[graph.nodes.operation]


def made_by(graph: Graph, nodes: Flags) -> Flags:
    """Return which values some nodes have made."""
    is_made: Flags = np.append(nodes, False)[graph.values.maker]
    return is_made


def plain_contents(graphs: tuple[Graph, Graph], contents: list[Contents]) -> tuple[Flags, Flags]:
    """Return which contents a value has that is more than another one with an axis moved."""
    plain = []
    for graph, content in zip(graphs, contents, strict=True):
        is_plain = np.zeros(len(content.first), bool)
        is_plain[content.content[~made_by(graph, moves_axis(graph))]] = True
        plain.append(is_plain)
    return plain[0], plain[1]


def with_axes_moved(
    graphs: tuple[Graph, Graph],
    contents: list[Contents],
    pairs: ContentPairs,
    is_open: list[Flags],
) -> ContentPairs:
    """Return the pairs of contents that are equal once an axis of one or both is moved.

    An order that a program gives to the elements of a value says nothing: it may be the wrong one.

    Args:
        is_open: Which values of each program have no surer relation.
    """
    computed = [
        _computed_contents(graph, content) for graph, content in zip(graphs, contents, strict=True)
    ]
    left, right = computed[0][pairs.left], computed[1][pairs.right]
    is_new = [np.zeros(len(content.first), bool) for content in contents]
    for content, flags, values in zip(contents, is_new, is_open, strict=True):
        flags[content.content[values]] = True
    chosen = (left != NOTHING) & (right != NOTHING) & (is_new[0][left] | is_new[1][right])
    return ContentPairs(left[chosen], right[chosen], pairs.errors[chosen])


def _computed_contents(graph: Graph, content: Contents) -> Indices:
    """Return for each content the one that a program has computed or selected: itself, or what it
    is with an axis moved; NOTHING where there is none.
    """
    computed = np.full(len(content.first), NOTHING, np.int64)
    for node in np.flatnonzero(moves_axis(graph)).tolist():
        made, read = graph.nodes.makes[node], graph.nodes.reads[node]
        computed[content.content[made]] = content.content[read]
    own = content.content[~_is_reordered(graph)]
    computed[own] = own
    return computed


def _is_reordered(graph: Graph) -> Flags:
    """Return which values hold the elements of another one, in an order of their own."""
    nodes, numel = graph.nodes, graph.values.numel
    is_reordered = np.zeros(len(numel), bool)
    for node in np.flatnonzero(nodes.moves).tolist():
        reads, made = nodes.reads[node], nodes.makes[node]
        is_reordered[made] = np.isin(numel[made], numel[reads[reads >= 0]])
    return is_reordered
