"""Explain in a sentence or two why a fault is where the judge puts it."""

from __future__ import annotations

from otel_torch.parity.faults import Fault, Location

_DIFFERENCES = {
    "value": "differs",
    "layout": "holds the right numbers in another order",
    "nonfinite": "is finite in one program only",
    "shape": "has another shape",
}


def explain(fault: Fault) -> str:
    """Return one or two sentences: the wrong tensor, and what is right before it."""
    port, reference = fault.port, fault.reference
    if fault.kind == "missing":
        return _explain_missing(fault)
    if fault.kind == "weights":
        return _explain_weights(fault)
    difference = _DIFFERENCES.get(fault.kind, "differs")
    if port is None:
        return f"A value {difference}."
    name = _module_name(port)
    if port.side == "input":
        reason = (
            f"The input of {name} {difference}, and no module made it: the code before {name} "
            "did, from right values."
        )
    else:
        reason = f"The output of {name} {difference}, while {_inputs_state(port)}."
    if reference is None or (reference.side, reference.module) == (port.side, port.module):
        return reason
    return f"{reason} In the reference, this value is {_tensor_name(reference)}."


def _inputs_state(port: Location) -> str:
    if port.call is None or port.call.inputs:
        return "its input is right"
    return "its input was not recorded"


def _explain_weights(fault: Fault) -> str:
    names = ", ".join(sorted({part.full_name for pair in fault.weights for part in pair.port}))
    return (
        f"{_module_name(fault.port)} was loaded with other weights than the reference ({names}). "
        "Its input is right."
    )


def _explain_missing(fault: Fault) -> str:
    if fault.port is not None and fault.port.call is None:
        idle_side, calling_side = "port", "reference"
        idle: Location | None = fault.port
        called = fault.reference
    else:
        idle_side, calling_side = "reference", "port"
        idle, called = fault.reference, fault.port
    return (
        f"The {idle_side} never calls {_module_name(idle)}; "
        f"the {calling_side} calls {_module_name(called)}."
    )


def _module_name(location: Location | None) -> str:
    if location is None:
        return "a module"
    return location.module[1] or location.module[0]


def _tensor_name(location: Location) -> str:
    side = "an input" if location.side == "input" else "an output"
    return f"{side} of {_module_name(location)}"
