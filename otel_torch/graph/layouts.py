"""In which order the axes of the port's values lie, beside those of the reference.

A wrong value does not show its layout, nor does a shape with two axes of one size. A right value of
the same shapes does: the last one before it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from itertools import product

import numpy as np

from otel_torch.graph.distances import relative_distances
from otel_torch.graph.equality import EQUAL, MOVED
from otel_torch.graph.graph import AXIS_LAST, Graph
from otel_torch.graph.states import ComparedProgram

# an axis of the reference and one of the port that are the same: moved last, both values are equal
Axes = tuple[int, int]
LAST = -1
Shape = tuple[int, ...]


class Layouts:
    """The layouts of values that are right, by their shapes.

    Args:
        programs: Reference and port.
    """

    def __init__(self, programs: tuple[ComparedProgram, ComparedProgram]) -> None:
        self._graphs = programs[0].graph, programs[1].graph
        self._readings = _readings(programs[0].graph), _readings(programs[1].graph)
        side = programs[1].side
        self._right: dict[tuple[Shape, Shape], list[int]] = defaultdict(list)
        is_known = np.isin(side.relation, (MOVED, EQUAL)) & programs[1].is_informed
        for value in np.flatnonzero(is_known).tolist():
            self._right[self._shapes(int(side.partner[value]), value)].append(value)
        self._side = side

    def of(self, reference: int, port: int) -> Axes | None:
        """Return which axes of two values are the same; None where nothing right tells."""
        right = self._right.get(self._shapes(reference, port), [])
        place = bisect_left(right, port)
        # the last one before it, else the first one after it
        nearest = right[place - 1 : place] or right[place : place + 1]
        return self._same_axes(int(self._side.partner[nearest[0]]), nearest[0]) if nearest else None

    def _shapes(self, reference: int, port: int) -> tuple[Shape, Shape]:
        first, second = self._graphs
        return first.values.shape[reference], second.values.shape[port]

    def _same_axes(self, reference: int, port: int) -> Axes:
        """Return which axes of two right values are the same: those by which they are nearest."""
        first, second = (graph.values.sketch for graph in self._graphs)
        readings = product(
            ((LAST, reference), *self._readings[0].get(reference, ())),
            ((LAST, port), *self._readings[1].get(port, ())),
        )
        _, axes = min(
            (float(relative_distances(first[[made]], second[[moved]])[0]), (own, other))
            for (own, made), (other, moved) in readings
        )
        return axes


def _readings(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """Return of each value the axes that were moved last, and what that made."""
    readings: dict[int, list[tuple[int, int]]] = defaultdict(list)
    nodes = graph.nodes
    for node in np.flatnonzero(graph.nodes_of(AXIS_LAST)).tolist():
        axis = int(json.loads(graph.arguments[nodes.argument[node]])[1])
        readings[int(nodes.reads[node][0])].append((axis, int(nodes.makes[node][0])))
    return readings
