"""How the port's values lie beside those of the reference: in which order their axes are, and which
part of a value a rank has.

A wrong value shows neither, nor does a shape with two axes of one size. A right value of the same
shapes does: the last one before it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from otel_torch.graph.counterparts import with_parts
from otel_torch.graph.distances import relative_distances
from otel_torch.graph.equality import EQUAL, MOVED
from otel_torch.graph.graph import AXIS_LAST, Graph
from otel_torch.graph.states import Programs
from otel_torch.graph.terms import is_summed_later

# an axis of the reference and one of the port that are the same: moved last, both values are equal
Axes = tuple[int, int]
LAST = -1
Shape = tuple[int, ...]
# how a value was cut, and which of its parts it is
Label = tuple[int, int]
# of each axis, which of its elements a part has
Part = tuple[range, ...]


class Layouts:
    """The layouts of values that are right, by their shapes."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._graphs = programs[0].graph, programs[1].graph
        self._moved = _moved(programs[0].graph), _moved(programs[1].graph)
        self._shares = _shares(programs[1].graph)
        side = programs[1].side
        self._right: dict[tuple[Shape, Shape], list[int]] = defaultdict(list)
        self._held: dict[tuple[Shape, Shape, int], dict[int, Label | None]] = defaultdict(dict)
        is_known = np.isin(side.relation, (MOVED, EQUAL)) & programs[1].is_informed
        for value in np.flatnonzero(is_known).tolist():
            partner = int(side.partner[value])
            self._right[self._shapes(partner, value)].append(value)
            whole, label = self._whole_of(partner)
            self._held[self._shapes_on_rank(whole, value)][value] = label
        self._side = side

    def axes(self, reference: int, port: int) -> Axes | None:
        """Return which axes of two values are the same; None where nothing right tells."""
        nearest = _nearest(self._right.get(self._shapes(reference, port), []), port)
        if nearest is None:
            return None
        return self._same_axes(int(self._side.partner[nearest]), nearest)

    def held(self, reference: int, port: int) -> int | None:
        """Return what a value of the port should be: a value of the reference, or a part of it.

        None where no part has its size, and where the port has a term or a share of it.
        """
        fitting = self._fitting(reference, port)
        if not (fitting and self._graphs[0].is_split):
            return next(iter(fitting), None)
        if self._is_term(0, reference) or self._is_term(1, port):
            return None
        pairs = list(product(fitting, [port, *self._shares.get(port, ())]))
        first, second = (graph.values.sketch for graph in self._graphs)
        errors = relative_distances(
            first[[own for own, _ in pairs]], second[[share for _, share in pairs]]
        )
        held, share = pairs[int(np.nan_to_num(errors, nan=np.inf).argmin())]
        return held if share == port else None

    def _fitting(self, reference: int, port: int) -> list[int]:
        """Return which of a value and its parts have the size of a value of the port, only the part
        that a right value of the same shapes is, if there is one.
        """
        numel, size = self._graphs[0].values.numel, self._graphs[1].values.numel[port]
        values = with_parts(self._programs[0], reference)
        fitting = [value for value in values if numel[value] == size]
        right = self._held.get(self._shapes_on_rank(reference, port), {})
        nearest = _nearest(list(right), port)
        if nearest is None:
            return fitting
        return [v for v in fitting if self._whole_of(v)[1] == right[nearest]] or fitting

    def _is_term(self, side: int, value: int) -> bool:
        """Return whether a program adds up what its ranks have of a value later on."""
        program = self._programs[side]
        return program.maker[value] >= 0 and is_summed_later(program, program.maker[value])

    def part(self, reference: int) -> tuple[int, Part | None]:
        """Return the whole to which a value of the reference belongs, and which part of that it is;
        None if it is the whole itself.
        """
        whole, label = self._whole_of(reference)
        if label is None:
            return whole, None
        graph = self._graphs[0]
        argument, place = label
        counts = json.loads(graph.arguments[argument])[1]
        return whole, _part(graph.values.shape[whole], counts, place)

    def _whole_of(self, reference: int) -> tuple[int, Label | None]:
        """Return the value of which a value of the reference was recorded as a part, and how."""
        program = self._programs[0]
        node = program.maker[reference]
        if node < program.own_nodes or len(program.makes[node]) < 2:
            return reference, None
        argument = int(program.graph.nodes.argument[node])
        return program.reads[node][0], (argument, program.makes[node].index(reference))

    def _shapes(self, reference: int, port: int) -> tuple[Shape, Shape]:
        first, second = self._graphs
        return first.values.shape[reference], second.values.shape[port]

    def _shapes_on_rank(self, reference: int, port: int) -> tuple[Shape, Shape, int]:
        return *self._shapes(reference, port), int(self._graphs[1].values.process[port])

    def _same_axes(self, reference: int, port: int) -> Axes:
        """Return which axes of two right values are the same: those by which they are nearest."""
        first, second = (graph.values.sketch for graph in self._graphs)
        readings = product(
            ((LAST, reference), *self._moved[0].get(reference, ())),
            ((LAST, port), *self._moved[1].get(port, ())),
        )
        _, axes = min(
            (float(relative_distances(first[[made]], second[[moved]])[0]), (own, other))
            for (own, made), (other, moved) in readings
        )
        return axes


def _nearest(values: Sequence[int], value: int) -> int | None:
    """Return the last one of some values before another, else the first one after it, if any."""
    place = bisect_left(values, value)
    nearest = values[place - 1 : place] or values[place : place + 1]
    return nearest[0] if nearest else None


def _part(shape: Shape, counts: Mapping[str, int], place: int) -> Part:
    """Return one of the parts into which a tensor is cut.

    Args:
        counts: The number of parts, by axis.

    >>> _part((4, 6), {"1": 2}, 1)
    (range(0, 4), range(3, 6))
    """
    parts: list[Part] = [tuple(range(size) for size in shape)]
    for name, count in counts.items():
        axis = int(name)
        size = math.ceil(shape[axis] / count)
        starts = range(0, shape[axis], size)
        parts = [
            (*own[:axis], range(start, min(start + size, shape[axis])), *own[axis + 1 :])
            for own in parts
            for start in starts
        ]
    return parts[place]


def _moved(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """Return of each value the axes that were moved last, and what that made."""
    readings: dict[int, list[tuple[int, int]]] = defaultdict(list)
    nodes = graph.nodes
    for node in np.flatnonzero(graph.nodes_of(AXIS_LAST)).tolist():
        axis = int(json.loads(graph.arguments[nodes.argument[node]])[1])
        readings[int(nodes.reads[node][0])].append((axis, int(nodes.makes[node][0])))
    return readings


def _shares(graph: Graph) -> dict[int, list[int]]:
    """Return the shares of each value, as it is read beside those of other ranks."""
    readings: dict[int, list[int]] = defaultdict(list)
    nodes = graph.nodes
    for node in np.flatnonzero(nodes.is_reading & ~graph.nodes_of(AXIS_LAST)).tolist():
        read, made = nodes.reads[node].tolist(), nodes.makes[node].tolist()
        if len(read) == len(made) == 1:
            readings[read[0]].append(made[0])
    return readings
