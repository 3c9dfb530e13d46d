"""Where a port has made the weights that a fault's region reads: fused, split or turned as it was
converted. Between these lines and the region nothing is a value of the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.graph.compare import GraphComparison, GraphFault
from otel_torch.graph.equality import MOVED
from otel_torch.graph.graph import NOTHING, WEIGHT_KINDS, Floats
from otel_torch.graph.states import ComparedProgram, moved_back
from otel_torch.recording.graph_values import PROGRAM

# what a model computes with and was not given: a port by functions has its weights as constants
_KINDS = (*WEIGHT_KINDS, "constant", "attribute")


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """The content of a weight, by which it is found in another recording of the same program."""

    shape: tuple[int, ...]
    sketch: Floats


def rearranged_weights(comparison: GraphComparison, fault: GraphFault) -> list[Weight]:
    """Return the port's weights that a fault's region reads and the reference has in another form.

    If an operation reads another value than the reference's, what has made that is asked, too.
    """
    program, place = comparison.programs[1], fault.port
    if place is None or place.leaf != NOTHING:
        return []
    values = moved_back(program, _read(program, (*place.nodes[:1], *place.region)))
    if fault.explanation.kind in ("operand", "exchanged"):
        makers = {program.maker[value] for value in values} - {NOTHING}
        values |= moved_back(program, _read(program, makers))
    first = _first_of_models(program)
    return [
        Weight(program.graph.values.shape[value], program.graph.values.sketch[value])
        for value in sorted(values)
        if _is_rearranged(program, value, first)
    ]


def preparing_nodes(program: ComparedProgram, weights: Sequence[Weight]) -> list[int]:
    """Return what has made weights of values that the reference has as they are.

    Args:
        program: The port, recorded from its first operation on.
    """
    values = program.graph.values
    waiting: list[int] = []
    for weight in weights:
        has_size = values.numel == np.prod(weight.shape, dtype=np.int64)
        is_same = has_size & (values.sketch == weight.sketch).all(axis=1)
        waiting += np.flatnonzero(is_same).tolist()[:1]
    nodes, seen = set[int](), set(waiting)
    while waiting:
        value = waiting.pop()
        node = program.maker[value]
        if node < 0:
            continue
        reads = [read for read in program.reads[node] if read >= 0]
        # a view, and a copy into the parameter, leave a weight as it is
        if not any(np.array_equal(values.sketch[read], values.sketch[value]) for read in reads):
            nodes.add(node)
        new = {read for read in reads if program.side.relation[read] < MOVED} - seen
        seen |= new
        waiting += new
    return sorted(nodes)


def _read(program: ComparedProgram, nodes: Iterable[int]) -> set[int]:
    return {read for node in nodes for read in program.reads[node] if read >= 0}


def _first_of_models(program: ComparedProgram) -> int:
    """Return the first node that runs in a model; 0 if none does."""
    modules = np.array([not name.startswith(f"{PROGRAM}:") for name in program.graph.modules], bool)
    return int(modules[program.graph.nodes.module].argmax()) if modules.any() else 0


def _is_rearranged(program: ComparedProgram, value: int, first: int) -> bool:
    """Return whether a value is a weight, by its kind or made before any model ran, and the
    reference has it in another form.
    """
    graph, leaf = program.graph, program.graph.values.leaf[value]
    is_weight = leaf != NOTHING and graph.leaf_kinds[leaf] in _KINDS
    is_prepared = 0 <= program.maker[value] < first
    is_other = program.is_informed[value] and program.side.relation[value] < MOVED
    return bool(is_other and (is_weight or is_prepared))
