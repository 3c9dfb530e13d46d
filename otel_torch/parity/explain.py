"""Explain in a sentence or two why a fault is where the judge puts it."""

from __future__ import annotations

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import ModuleCall, TensorValue, is_informative
from otel_torch.parity.faults import Fault, Location
from otel_torch.parity.finding import Before
from otel_torch.parity.modules import counterpart
from otel_torch.parity.parameter_names import pattern

_DIFFERENCES = {
    "value": "differs",
    "layout": "holds the right numbers in another order",
    "nonfinite": "is finite in one program only",
    "shape": "has another shape",
}
_INPUTS = {
    "right": "its input is right",
    "wrong": "its input differs, too",
    "unknown": "its input was not compared",
}


def explain(fault: Fault, alignment: Alignment) -> str:
    """Return one or two sentences: the wrong tensor, and what is right before it."""
    port, reference = fault.port, fault.reference
    if fault.kind == "missing":
        return _explain_missing(fault, alignment)
    if fault.kind == "weights":
        return _explain_weights(fault, alignment)
    difference = _DIFFERENCES.get(fault.kind, "differs")
    if port is None:
        return f"A value {difference}."
    name = _module_name(port)
    if is_exchanged(reference, port, alignment):
        return (
            f"The port calls {name} with what the reference gives {_module_name(reference)}: these "
            "modules run in another order."
        )
    if port.side == "input":
        reason = f"The input of {name} {difference}, and no recorded module made it: "
        if _has_right_values_before(port, alignment):
            reason += f"the code before {name} did, from right values."
        else:
            reason += f"the code that calls {name} did, or was given it."
    else:
        reason = f"The output of {name} {difference}, while {_inputs_state(port, alignment)}."
    if argument := _one_sided_arguments(reference, port, alignment):
        reason += f" {argument}"
    if reference is None or (reference.side, reference.module) == (port.side, port.module):
        return reason
    return f"{reason} In the reference, this value is {_tensor_name(reference)}."


def _one_sided_arguments(
    reference: Location | None, port: Location, alignment: Alignment
) -> str | None:
    """Return which arguments of the module that made a value only one program passes, or None.

    A module whose arguments have other names in the other program shows nothing.
    """
    calls = [None if place is None else place.maker for place in (reference, port)]
    if calls[0] is None or calls[1] is None or alignment.partner.get(calls[0]) is not calls[1]:
        return None
    given, port_given = (
        {name: None for role in call.inputs if (name := role.row.get("argument"))}
        for call in calls
        if call is not None
    )
    for names, others, side in ((given, port_given, "reference"), (port_given, given, "port")):
        if others and others.keys() < names.keys():
            listed = " and ".join(f"`{name}`" for name in names if name not in others)
            name = calls[1].module or calls[1].model
            return f"Only the {side} passes {listed} to {name}."
    return None


def is_exchanged(reference: Location | None, port: Location, alignment: Alignment) -> bool:
    """Return whether a module receives what the same module of another block should."""
    if reference is None or not reference.side == port.side == "input":
        return False
    match = None if reference.call is None else alignment.partner.get(reference.call)
    return match is not None and port.call is not None and are_twins(match, port.call)


def are_twins(first: ModuleCall, second: ModuleCall) -> bool:
    """Return whether two calls of one program are of the same module in two blocks."""
    if first.module_path == second.module_path or first.cls != second.cls:
        return False
    return pattern(first.module) == pattern(second.module)


def _has_right_values_before(port: Location, alignment: Alignment) -> bool:
    """Return whether a right value was seen before an input."""
    role = port.role
    return role is not None and any(
        pair.is_right and pair.port[0].time < role.time for pair in alignment.pairs
    )


def state_before(fault: Fault, alignment: Alignment) -> Before:
    """Return what is known of the inputs of the faulty module, or of what precedes its input."""
    port = fault.port
    if port is None or port.role is None or port.side != "input":
        state = _state_of_inputs(port, alignment)
        passes_alike = port is None or not _one_sided_arguments(fault.reference, port, alignment)
        return state if state != "right" or passes_alike else "partly"
    earlier = [pair.is_right for pair in alignment.pairs if pair.port[0].time < port.role.time]
    if not earlier:
        return "unknown"
    return "right" if all(earlier) else "wrong"


def _inputs_of(location: Location | None) -> list[TensorValue]:
    if location is None or location.call is None:
        return []
    return [role.value for role in location.call.inputs]


def _inputs_state(port: Location | None, alignment: Alignment) -> str:
    """Return what the comparison knows of the inputs of a call."""
    values = _inputs_of(port)
    if not values:
        return "its input was not recorded"
    state = _state_of_inputs(port, alignment)
    if state != "partly":
        return _INPUTS[state]
    compared = {role.value for pair in alignment.pairs for role in pair.port}
    makers = {
        value.birth.call.module
        for value in values
        if value not in compared and value.birth.side == "output" and is_informative(value.birth)
    }
    unknown = f": what {' and '.join(sorted(makers))} returned was not" if makers else ""
    return f"its input is right, as far as it was compared{unknown}"


def _state_of_inputs(port: Location | None, alignment: Alignment) -> Before:
    values = _inputs_of(port)
    compared = {role.value for pair in alignment.pairs for role in pair.port}
    right = {role.value for pair in alignment.pairs if pair.is_right for role in pair.port}
    if any(value in compared and value not in right for value in values):
        return "wrong"
    if right.isdisjoint(values):
        return "unknown"
    return "right" if right.issuperset(values) else "partly"


def _explain_weights(fault: Fault, alignment: Alignment) -> str:
    names = ", ".join(sorted({part.full_name for pair in fault.weights for part in pair.port}))
    reader = None if fault.port is None else fault.port.call
    if reader is not None and fault.port is not None and reader.module_path != fault.port.module:
        return (
            f"{_module_name(fault.port)} was loaded with other weights than the reference "
            f"({names}). The code of {reader.module or reader.model}, which is the first to make "
            "a wrong tensor, can read them without calling the module."
        )
    state = _inputs_state(fault.port, alignment)
    return (
        f"{_module_name(fault.port)} was loaded with other weights than the reference ({names}). "
        f"{state[0].upper()}{state[1:]}."
    )


def _explain_missing(fault: Fault, alignment: Alignment) -> str:
    if fault.port is not None and fault.port.call is None:
        idle_side, calling_side = "port", "reference"
        idle: Location | None = fault.port
        called = fault.reference
    else:
        idle_side, calling_side = "reference", "port"
        idle, called = fault.reference, fault.port
    return (
        f"The {idle_side} never calls {_module_name(idle)}; "
        f"the {calling_side} calls {_module_name(called)}{_instead(called, alignment)}."
    )


def _instead(called: Location | None, alignment: Alignment) -> str:
    """Return what the other side calls in place of a module, "" if nothing."""
    if called is None or called.call is None:
        return ""
    call = called_instead(alignment, called.call)
    return "" if call is None else f", in whose place {call.module} is called there"


def called_instead(alignment: Alignment, call: ModuleCall) -> ModuleCall | None:
    """Return the port's call in place of the reference's, if any: of another block's module, or
    once more of a neighbour with as large a result.
    """
    partner, owners = alignment.partner, alignment.modules.owners.port
    place = counterpart(call.module_path, alignment.modules.matched)
    parent = None if call.parent is None else partner.get(call.parent)
    candidates = [partner[call]] if call in partner else [] if parent is None else parent.children
    for candidate in candidates:
        is_free = partner.get(candidate) in (None, call)
        is_same_module = pattern(candidate.module) == pattern(place[1])
        if not is_free or candidate.module_path == place:
            continue
        if is_same_module:
            return candidate
        is_as_large = candidate.module_path in owners and _sizes(candidate) == _sizes(call)
        if is_as_large and candidate in alignment.further_calls():
            return candidate
    return None


def _sizes(call: ModuleCall) -> list[int]:
    """Return the size of the first output of a call."""
    return [role.value.numel for role in call.outputs[:1]]


def _module_name(location: Location | None) -> str:
    if location is None:
        return "a module"
    return location.module[1] or location.module[0]


def _tensor_name(location: Location) -> str:
    side = "an input" if location.side == "input" else "an output"
    return f"{side} of {_module_name(location)}"
