"""Find the lines that built the weights which a fault reads, where the port keeps them in another
form than the reference: fused, split or transposed. Nothing between these lines and the fault is a
value of the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from otel_torch.graph.compare import GraphComparison, GraphFault
from otel_torch.graph.equality import MOVED
from otel_torch.graph.graph import NOTHING, WEIGHT_KINDS, Floats
from otel_torch.graph.states import ComparedProgram, made_from, moved_back

# what a model computes with and was not given: a port by functions has its weights as constants
_KINDS = (*WEIGHT_KINDS, "constant", "attribute")


def rearranged_weights(comparison: GraphComparison, fault: GraphFault) -> list[Floats]:
    """Return the sketches of the port's weights that a fault's region reads and the reference has
    in another form: by these they are found in another recording of the same program.

    If an operation reads another value than the reference's, what has made that is asked, too.
    """
    program, place = comparison.programs[1], fault.port
    if place is None or place.leaf != NOTHING or fault.explanation.kind == "rows":
        return []
    values = moved_back(program, _read(program, (*place.nodes[:1], *place.region)))
    if fault.explanation.kind in ("operand", "exchanged"):
        makers = {program.maker[value] for value in values} - {NOTHING}
        values |= moved_back(program, _read(program, makers))
    first = _first_of_models(program)
    return [
        program.graph.values.sketch[value]
        for value in sorted(values)
        if _is_rearranged(program, value, first)
    ]


def preparing_nodes(program: ComparedProgram, weights: Sequence[Floats]) -> list[int]:
    """Return the nodes that built weights from values that the reference has as they are.

    Args:
        program: The port, recorded from its first operation on.
        weights: Their sketches.
    """
    sketch, relation = program.graph.values.sketch, program.side.relation
    first = [
        value
        for weight in weights
        for value in np.flatnonzero((sketch == weight).all(axis=1)).tolist()[:1]
    ]

    def is_other(value: int) -> bool:
        return bool(relation[value] < MOVED)

    def is_kept(value: int) -> bool:
        # a view, and a copy into the parameter, leave a weight as it is
        reads = program.reads[program.maker[value]]
        return any(read >= 0 and np.array_equal(sketch[read], sketch[value]) for read in reads)

    built = made_from(program, first, is_other)
    return sorted(
        {
            program.maker[value]
            for value in built
            if is_other(value) and program.maker[value] >= 0 and not is_kept(value)
        }
    )


def _read(program: ComparedProgram, nodes: Iterable[int]) -> set[int]:
    return {read for node in nodes for read in program.reads[node] if read >= 0}


def _first_of_models(program: ComparedProgram) -> int:
    """Return the first node that runs in a model; 0 if none does."""
    in_models = ~program.graph.is_before_models
    return int(in_models.argmax()) if in_models.any() else 0


def _is_rearranged(program: ComparedProgram, value: int, first: int) -> bool:
    """Return whether a value is a weight, by its kind or made before any model ran, and the
    reference has it in another form.
    """
    graph, leaf = program.graph, program.graph.values.leaf[value]
    is_weight = leaf != NOTHING and graph.leaf_kinds[leaf] in _KINDS
    is_prepared = 0 <= program.maker[value] < first
    is_other = program.is_informed[value] and program.side.relation[value] < MOVED
    return bool(is_other and (is_weight or is_prepared))
