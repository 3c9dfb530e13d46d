"""Says in a sentence what a fault is: what a person reads first."""

from __future__ import annotations

from otel_torch.parity.align import Alignment
from otel_torch.parity.judge import Fault, Spot

_KINDS = {
    "value": "differs",
    "layout": "holds the right numbers in another order",
    "nonfinite": "is finite in one program and not in the other",
    "shape": "has another shape",
    "dtype": "has another type",
}


def explain(fault: Fault, alignment: Alignment) -> str:
    """One sentence: what is wrong, where, and why it is not somebody else's fault."""
    port, reference = fault.port, fault.reference
    if fault.kind == "missing":
        return _missing(fault, alignment)
    if fault.kind == "weights" and port is not None:
        names = ", ".join(sorted({pair.port[0].full for pair in fault.weights}))
        return (
            f"{_called(port)} was loaded with other numbers ({names}) before any forward; its inputs are right, its output is not"
        )
    what = _KINDS.get(fault.kind, "differs")
    if port is None:
        return f"a value {what}"
    against = f"; in the reference this is {_where(reference)}" if reference is not None else ""
    if port.side == "input":
        return (
            f"what enters {_called(port)} {what}, although all that was recorded before it is right: "
            f"the code in front of it is at fault{against}"
        )
    return f"what {_called(port)} returns {what}, although what enters it is right{against}"


def _missing(fault: Fault, alignment: Alignment) -> str:
    port, reference = fault.port, fault.reference
    if port is not None and port.call is None:
        return f"{_called(port)} is never called in the port, though the reference calls {_called(reference)}"
    return f"{_called(reference)} is never called in the reference, though the port calls {_called(port)}"


def _called(spot: Spot | None) -> str:
    if spot is None:
        return "a module"
    return spot.module[1] or spot.module[0]


def _where(spot: Spot) -> str:
    return f"{'what enters' if spot.side == 'input' else 'the output of'} {_called(spot)}"
