"""Pairs what the models of one program return with what the other, without models, computes on its
way: a port in plain functions picks a token by its logits and keeps none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set

import numpy as np

from otel_torch.graph.ends import nearest_in_order
from otel_torch.graph.graph import Indices, Values
from otel_torch.graph.shapes import without_ones
from otel_torch.graph.states import ComparedProgram, Programs

_Sizes = tuple[int, ...]


def find_returned_within(programs: Programs, replaced: Set[int]) -> list[tuple[int, int]]:
    """Return pairs of what the models of one program return, and what some code of the other one
    computes of the same shape and as often: of several the code that comes nearest, and the last of
    these. None where both programs have models, or neither has.

    Args:
        replaced: Values of the port in whose place others were put.
    """
    have_names = [any(program.graph.end_names) for program in programs]
    if have_names[0] == have_names[1]:
        return []
    side = have_names.index(True)
    own, other = programs[side], programs[1 - side]
    tables = own.graph.values, other.graph.values
    computed = _computed(other, frozenset() if side else replaced)
    pairs = [
        pair
        for sizes, ends in _returned(own).items()
        for pair in _pair_with_nearest(tables, ends, computed[sizes])
    ]
    return [(second, first) for first, second in pairs] if side else pairs


def _pair_with_nearest(
    tables: tuple[Values, Values], ends: Indices, computed: Iterable[Indices]
) -> list[tuple[int, int]]:
    """Pair ends with the values of the nearest code that makes as many; of equally near code it is
    the last.
    """
    lines = [
        (values, nearest_in_order(tables, (ends, values)))
        for values in computed
        if len(values) == len(ends)
    ]
    if not lines:
        return []
    values, places = min(reversed(lines), key=lambda line: sum(far for *_, far in line[1]))
    return [(int(ends[first]), int(values[second])) for first, second, _ in places]


def _returned(program: ComparedProgram) -> dict[_Sizes, Indices]:
    """Return by their shapes the values that the models of a program return."""
    ends: dict[_Sizes, list[int]] = defaultdict(list)
    for end, name in zip(program.graph.ends.tolist(), program.graph.end_names, strict=True):
        if name and program.is_informed[end]:
            ends[without_ones(program.graph.values.shape[end])].append(end)
    return {sizes: np.array(values) for sizes, values in ends.items()}


def _computed(program: ComparedProgram, without: Set[int]) -> dict[_Sizes, list[Indices]]:
    """Return by their shapes the values that each code of a program computes."""
    made: dict[tuple[_Sizes, object], list[int]] = defaultdict(list)
    is_computed = program.is_informed & program.graph.made_by(~program.graph.nodes.moves)
    for value in np.flatnonzero(is_computed).tolist():
        if value not in without:
            sizes = without_ones(program.graph.values.shape[value])
            made[sizes, program.code(program.maker[value])].append(value)
    computed: dict[_Sizes, list[Indices]] = defaultdict(list)
    for (sizes, _), values in made.items():
        computed[sizes].append(np.array(values))
    return computed
