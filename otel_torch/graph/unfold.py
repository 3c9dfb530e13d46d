"""Look inside fused operations: where parts of one were recorded, the parts decide.

One program may call a fused kernel where the other writes out the formula. A fused operation keeps
the values that the program got; its parts show the values in between.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from otel_torch.graph.distances import relative_distances
from otel_torch.graph.graph import NOTHING, Floats, Graph, Indices, Rows


def unfold(graph: Graph, limits: Floats) -> Graph:
    """Let operations with parts read the result of their parts.

    Args:
        graph: Any graph.
        limits: The relative error, per value, up to which a part's result is that of the whole.

    Returns:
        The graph, in which each operation whose result one of its parts made only moves that
        result, and comes right after its parts. Others stay as they are.
    """
    nodes = graph.nodes
    parts = np.flatnonzero(nodes.inside >= 0)
    if not len(parts):
        return graph
    parts = parts[np.argsort(nodes.inside[parts], kind="stable")]
    wholes, starts = np.unique(nodes.inside[parts], return_index=True)
    reads, makes, moves = nodes.reads.lists(), nodes.makes.lists(), nodes.moves.copy()
    place = np.arange(len(nodes), dtype=np.float64)
    for whole, inner in zip(wholes.tolist(), np.split(parts, starts[1:]), strict=True):
        place[whole] = max(whole, inner.max() + 0.5)
        made = np.array([value for part in inner.tolist() for value in makes[part]], np.int64)
        results = [_nearest(graph, value, made, limits) for value in makes[whole]]
        if results and results[0] != NOTHING:
            reads[whole] = [result for result in results if result != NOTHING]
            moves[whole] = True
    order = np.argsort(place, kind="stable")
    position = np.empty(len(nodes) + 1, np.int64)
    position[order] = np.arange(len(nodes))
    position[NOTHING] = NOTHING
    labels = ("operation", "argument", "casts", "random", "line", "module", "is_reading", "phase")
    return replace(
        graph,
        values=replace(graph.values, maker=position[graph.values.maker]),
        nodes=replace(
            nodes,
            **{name: getattr(nodes, name)[order] for name in labels},
            moves=moves[order],
            inside=position[nodes.inside[order]],
            reads=Rows.of([reads[node] for node in order.tolist()]),
            makes=Rows.of([makes[node] for node in order.tolist()]),
        ),
    )


def _nearest(graph: Graph, value: int, candidates: Indices, limits: Floats) -> int:
    """Return the candidate that equals a value, or NOTHING."""
    values = graph.values
    candidates = candidates[values.numel[candidates] == values.numel[value]]
    if not len(candidates):
        return NOTHING
    sketch = values.sketch[[value]]
    errors = relative_distances(np.repeat(sketch, len(candidates), 0), values.sketch[candidates])
    nearest = int(np.argmin(np.where(np.isnan(errors), np.inf, errors)))
    return int(candidates[nearest]) if errors[nearest] <= limits[value] else NOTHING
