"""Says in a sentence or two why a fault is where it is said to be: what a person must believe
before they go there.
"""

from __future__ import annotations

from otel_torch.parity.judge import Fault, Location

_KINDS = {
    "value": "differs",
    "layout": "holds the right numbers in another order",
    "nonfinite": "is finite in one program only",
    "shape": "has another shape",
}


def explain(fault: Fault) -> str:
    """Why this place: what is wrong there, and what is right before it."""
    port, reference = fault.port, fault.reference
    if fault.kind == "missing":
        return _missing(fault)
    if fault.kind == "weights":
        names = ", ".join(sorted({part.full_name for pair in fault.weights for part in pair.port}))
        return f"{_called(port)} was loaded with other numbers than the reference ({names}). What enters it is right."
    what = _KINDS.get(fault.kind, "differs")
    if port is None:
        return f"A value {what}."
    if port.side == "input":
        why = f"What enters {_called(port)} {what}, and no module made it: the code in front of it did, of values that are right."
    else:
        entered = (
            "what enters it is right"
            if port.call is None or port.call.inputs
            else "what enters it was not recorded"
        )
        why = f"What {_called(port)} returns {what}, while {entered}."
    if reference is None or (reference.side, reference.module) == (port.side, port.module):
        return why
    return f"{why} The reference has this value as {_where(reference)}."


def _missing(fault: Fault) -> str:
    idle, runs = (
        (fault.port, fault.reference)
        if fault.port and fault.port.call is None
        else (fault.reference, fault.port)
    )
    side, other = ("port", "reference") if idle is fault.port else ("reference", "port")
    return f"The {side} never calls {_called(idle)}; the {other} calls {_called(runs)}."


def _called(spot: Location | None) -> str:
    if spot is None:
        return "a module"
    return spot.module[1] or spot.module[0]


def _where(spot: Location) -> str:
    return f"{'an input' if spot.side == 'input' else 'an output'} of {_called(spot)}"
