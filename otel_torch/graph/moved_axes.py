"""Values that are equal once one axis stands elsewhere: channels last in one program, first in the
other.

Where axes were measured (OTEL_TORCH_GRAPH_AXES), a graph has of each value what it is with each of
its axes moved last, made by a reading.
"""

from __future__ import annotations

import numpy as np

from otel_torch.graph.contents import ContentPairs, Contents
from otel_torch.graph.graph import AXIS_LAST, NOTHING, Flags, Graph, Indices, Rows


def plain_contents(graphs: tuple[Graph, Graph], contents: list[Contents]) -> tuple[Flags, Flags]:
    """Return which contents are those of any value, and not only of one with an axis moved."""
    plain = []
    for graph, content in zip(graphs, contents, strict=True):
        is_plain = np.zeros(len(content.first), bool)
        is_plain[content.content[~graph.made_by(graph.nodes_of(AXIS_LAST))]] = True
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
    if not any(AXIS_LAST in graph.operations for graph in graphs):
        return ContentPairs.of(())
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
    for node in np.flatnonzero(graph.nodes_of(AXIS_LAST)).tolist():
        made, read = graph.nodes.makes[node], graph.nodes.reads[node]
        computed[content.content[made]] = content.content[read]
    own = content.content[~_is_reordered(graph)]
    computed[own] = own
    return computed


def _is_reordered(graph: Graph) -> Flags:
    """Return which values hold the elements of another one, in an order of their own."""
    nodes, numel = graph.nodes, graph.values.numel
    sizes = numel - numel.min(initial=0)
    count = int(sizes.max(initial=0)) + 1

    def keys(values: Rows) -> tuple[Indices, Indices]:
        """Return the values of nodes that move, and a number of each node and size."""
        owners, own = values.owners(), values.content
        chosen = nodes.moves[owners] & (own >= 0)
        return own[chosen], owners[chosen] * count + sizes[own[chosen]]

    made, sizes_made = keys(nodes.makes)
    is_reordered = np.zeros(len(numel), bool)
    is_reordered[made] = np.isin(sizes_made, keys(nodes.reads)[1])
    return is_reordered
