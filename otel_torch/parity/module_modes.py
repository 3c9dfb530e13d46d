"""Compare the modes of modules: training or eval, by the changes in the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_torch.parity.call_graph import ModuleCall
from otel_torch.parity.faults import Fault
from otel_torch.parity.finding import Cause
from otel_torch.parity.sides import Sides

_WORDS = {True: "training", False: "eval"}


class ModuleModes:
    """The modes of the modules of one recording."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        models = meta.get("models")
        self._changes = {
            model: facts.get("modes", ())
            for model, facts in (models.items() if isinstance(models, dict) else ())
        }

    def of(self, call: ModuleCall) -> bool | None:
        """Return whether a module is in training mode; None if its code does not ask for it."""
        model, module = call.module_path
        position = call.loop or 0, call.step or 0
        mode = None
        for change in self._changes.get(model, ()):
            begin = change.get("loop", 0), change.get("step", 0)
            if change.get("phase") != call.phase or begin > position:
                continue
            if begin == position and change.get("call", 0) > (_outermost(call).number or 0):
                continue
            if module in change.get("training", ()):
                mode = True
            elif module in change.get("eval", ()):
                mode = False
        return mode


def _outermost(call: ModuleCall) -> ModuleCall:
    while call.parent is not None:
        call = call.parent
    return call


def other_mode(modes: Sides[ModuleModes], fault: Fault) -> Cause | None:
    """Return the cause where what made a wrong tensor is in another mode on each side."""
    locations = fault.reference, fault.port
    call, port_call = (None if place is None else place.maker for place in locations)
    if call is None or port_call is None:
        return None
    reference, port = modes.reference.of(call), modes.port.of(port_call)
    if reference is None or port is None or reference == port:
        return None
    model, module = port_call.module_path
    text = (
        f"{module or model} is in {_WORDS[port]} mode in the port, and in {_WORDS[reference]} mode "
        "in the reference"
    )
    is_own = fault.port is not None and fault.port.side == "output"
    return Cause("training_mode", is_own, text)
