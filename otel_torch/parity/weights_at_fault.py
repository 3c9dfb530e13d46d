"""The weights with which a fault begins."""

from __future__ import annotations

from otel_torch.graph.compare import GraphFault
from otel_torch.graph.graph import NOTHING
from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Parameter, Role
from otel_torch.parity.compared_calls import ComparedCalls
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.parameters import ParameterPair


def weights_at(compared: ComparedCalls, found: GraphFault) -> list[ParameterPair]:
    """Return the weights that a fault begins with, with all of their module that differ.

    What differs and is read there is at fault before the code that reads it.
    """
    for side, place in enumerate(found.places):
        if place is None:
            continue
        births = compared.graphs[side].births
        leaves = [-1 - origin for origin in (-1 - place.leaf, *place.suspects) if origin < 0]
        if place.nodes:
            leaves += _read_surely(compared, side, place.nodes[0])
        for leaf in leaves:
            birth = births[leaf] if leaf != NOTHING else None
            differ = _that_differ(compared.alignment, birth) if isinstance(birth, Parameter) else []
            if any(weight.differs for weight in differ):
                return differ
    role = compared.first_role(1, found.port)
    return [] if role is None else _tied(compared.alignment, role)


def kinds_that_differ_in_all(alignment: Alignment) -> set[str]:
    """Return the weights, by their names in any block, that differ in all of several blocks:
    they may have been changed by right.
    """
    equal: dict[str, list[bool]] = {}
    for weights in alignment.modules.weights.values():
        for weight in weights:
            equal.setdefault(kind_in_any_block(weight), []).append(weight.equal)
    return {kind for kind, flags in equal.items() if len(flags) > 1 and not any(flags)}


def kind_in_any_block(weight: ParameterPair) -> str:
    """Return the name of a weight with any number in the place of its block's."""
    return pattern(weight.port[0].full_name)


def _read_surely(compared: ComparedCalls, side: int, node: int) -> list[int]:
    """Return the weights that a node reads: of code between calls, those of its own module."""
    graph = compared.graphs[side]
    call = graph.calls[node]
    return [
        value
        for value in compared.comparison.programs[side].reads[node]
        if isinstance(birth := graph.births[value], Parameter)
        if call is not None and birth.module_path == call.module_path
    ]


def _tied(alignment: Alignment, made: Role) -> list[ParameterPair]:
    """Return the weights that differ of a module that returns what it should, if they may be
    those of a head as well: one row for each channel of the output.
    """
    shape = made.row.get("shape")
    if made.side != "output" or not isinstance(shape, list) or not shape:
        return []
    if not made.call.children and made.call.module_path in alignment.modules.owners.port:
        return []
    for (_, module), weights in alignment.modules.weights.items():
        differ = [weight for weight in weights if weight.differs]
        is_wide = any(
            weight.port[0].shape[:1] == (shape[-1],) and len(weight.port[0].shape) > 1
            for weight in differ
        )
        outputs = [
            pair
            for pair in alignment.pairs
            if pair.is_output and pair.port[0].call.module_path == module
        ]
        if is_wide and outputs and all(pair.is_right for pair in outputs):
            return differ
    return []


def _that_differ(alignment: Alignment, parameter: Parameter) -> list[ParameterPair]:
    """Return the weights of a parameter's module that are not known to be equal."""
    for weights in alignment.modules.weights.values():
        if any(parameter in (*pair.reference, *pair.port) for pair in weights):
            return [pair for pair in weights if not pair.equal]
    return []
