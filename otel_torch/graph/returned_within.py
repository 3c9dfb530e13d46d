"""What one program returns and another one, which has no models, only has on its way: a port in
plain functions reads its logits for a token and keeps none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

import numpy as np

from otel_torch.graph.ends import nearest_in_order
from otel_torch.graph.states import ComparedProgram, Programs


def find_returned_within(programs: Programs, replaced: Set[int]) -> list[tuple[int, int]]:
    """Return pairs of what the models of one program return, and what the other one computes of the
    same shape: as many, or what is near to each of them. None where both programs have models, or
    neither has.

    Args:
        replaced: Values of the port in whose place others were put.
    """
    have_names = [any(program.graph.end_names) for program in programs]
    if have_names[0] == have_names[1]:
        return []
    side = have_names.index(True)
    own, other = programs[side], programs[1 - side]
    returned: dict[object, list[int]] = defaultdict(list)
    for end, name in zip(own.graph.ends.tolist(), own.graph.end_names, strict=True):
        if name and own.is_informed[end]:
            returned[_sizes(own, end)].append(end)
    computed: dict[object, list[int]] = defaultdict(list)
    is_computed = other.is_informed & other.graph.made_by(~other.graph.nodes.moves)
    for value in np.flatnonzero(is_computed).tolist():
        if side or value not in replaced:
            computed[_sizes(other, value)].append(value)
    tables = own.graph.values, other.graph.values
    pairs = []
    for sizes, ends in returned.items():
        values = np.array(ends), np.array(computed[sizes], np.int64)
        near = list(nearest_in_order(tables, values)) if computed[sizes] else []
        if len(ends) == len(computed[sizes]) or sum(is_near for *_, is_near in near) == len(ends):
            pairs += [(int(values[0][first]), int(values[1][second])) for first, second, _ in near]
    return [(second, first) for first, second in pairs] if side else pairs


def _sizes(program: ComparedProgram, value: int) -> tuple[int, ...]:
    return tuple(size for size in program.graph.values.shape[value] if size != 1)
