"""Run a reference and its port together, and compare them wherever their modules correspond.

Recordings show where a port diverges. With both models in one process, nothing needs to be recorded
in full: the port stops where it differs, with both tensors available, or continues from the
reference's values.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.capture.interleaving.interleave_error import InterleaveError
from otel_torch.capture.interleaving.interleaved_model import InterleavedModel
from otel_torch.capture.interleaving.interleaved_run import InterleavedRun
from otel_torch.capture.interleaving.lockstep_events import (
    ModelCaller,
    PairedEvent,
    TensorLocation,
    find_paired_events,
)
from otel_torch.capture.tensor_structure import replace_leaves
from otel_torch.parity.tolerance import Tolerance
from otel_torch.sources.interventions.conform_tensor import CannotConform, conform
from otel_torch.sources.tensors.values import walk, walk_inputs


@dataclass
class LockstepFault:
    """A tensor of the port that is wrong although everything it was computed from was right.

    Args:
        module, tensor, call: The tensor in the port.
        kind: `output` if the module computes it, `input` if the code before the module does.
        reference_module: The module of the reference.
        error: The relative L2 distance; infinite if the reference's tensor has no form that fits
            the port's.
        limit: The distance that legal arithmetic may cause.
        reference: The reference's tensor, in the port's shape and dtype if that is possible.
        port: The port's tensor.
        unmet: Modules of the port since the previous comparison whose outputs had no counterpart,
            so that they may have caused it.
    """

    module: str
    tensor: str
    call: int
    kind: str
    reference_module: str
    error: float
    limit: float
    reference: Tensor
    port: Tensor
    unmet: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        module, reference = self.module or "the root", self.reference_module or "the root"
        cause = "this module" if self.kind == "output" else "code before this module"
        text = (
            f"{module} ({reference} of the reference), {self.tensor}, call {self.call}: "
            f"computed by {cause}; error {self.error:.2g}, limit {self.limit:.2g}"
        )
        if self.unmet:
            text += f"; not compared since the last match: {', '.join(self.unmet)}"
        return text


@dataclass
class Lockstep:
    """The result of `lockstep`.

    Args:
        faults: In the port's order.
        compared: The number of compared tensors.
        alone: Modules of the port without a counterpart.
        result: The port's return value, None if it stopped at its first fault.
    """

    faults: list[LockstepFault] = field(default_factory=list)
    compared: int = 0
    alone: list[str] = field(default_factory=list)
    result: Any = None

    def __repr__(self) -> str:
        faults = "\n".join(map(str, self.faults)) or "no fault"
        count = len(self.alone)
        unpaired = f"; {count} modules of the port have no counterpart" if count else ""
        return f"{faults}\n{self.compared} tensors compared{unpaired}"


def lockstep(
    reference: nn.Module,
    port: nn.Module,
    inputs: Any,
    *,
    port_inputs: Any = None,
    heal: bool = False,
    rtol: float | None = None,
    map: str | Path | None = None,
) -> Lockstep:
    """Run `reference` and `port` on the same inputs and find where the port goes wrong.

    Names need not agree: modules are paired as in `otel-torch diff`, from one forward of each model
    that is recorded in a temporary folder. After each comparison the port continues from the
    reference's values, so that an error counts once, where it is made. Two models that do not fit
    on a device together: see `enable_layerwise_offload`. Both run without gradients.

    Args:
        inputs: A tensor, a tuple of arguments, a dict of keyword arguments, or a function that
            calls the model it is given.
        port_inputs: The same for the port, if its forward takes other arguments.
        heal: Continue after a fault and list all of them; by default it stops at the first.
        rtol: The tolerance, by default what the coarser of the two dtypes allows.
        map: A TOML file that pairs modules, as for `otel-torch diff`.

    Raises:
        ValueError: No modules correspond.
        RuntimeError: A session is recording.
        Exception: Whatever the models raise.
    """
    call_reference = _make_caller(inputs)
    call_port = call_reference if port_inputs is None else _make_caller(port_inputs)
    with torch.no_grad():
        events, unpaired = find_paired_events((reference, call_reference), (port, call_port), map)
        comparison = _LockstepComparison(Tolerance(rtol), heal, Lockstep(alone=unpaired))
        return comparison.run(
            InterleavedRun(InterleavedModel(reference), call_reference, (reference,), {}),
            InterleavedRun(InterleavedModel(port), call_port, (port,), {}),
            events,
        )


def _make_caller(inputs: Any) -> ModelCaller:
    if callable(inputs) and not isinstance(inputs, Tensor):
        function: ModelCaller = inputs
        return function

    def call_model(model: nn.Module) -> Any:
        # a model may change its inputs in place while the other still needs them
        copied = replace_leaves(inputs, Tensor, torch.clone)
        if isinstance(copied, Mapping):
            return model(**copied)
        return model(*copied) if isinstance(copied, (tuple, list)) else model(copied)

    return call_model


@dataclass
class _LockstepComparison:
    """Compare paired events, and replace the port's tensors by the reference's."""

    tolerance: Tolerance
    heal: bool
    outcome: Lockstep

    def run(
        self, reference: InterleavedRun, port: InterleavedRun, events: list[PairedEvent]
    ) -> Lockstep:
        # one tensor of the reference may correspond to several of the port, however far apart
        uses = Counter(location.event for event in events for location in event.tensors.values())
        reference.retain(uses)
        with reference, port:
            for event in events:
                self._compare_event(reference, port, event)
                for location in event.tensors.values():
                    uses[location.event] -= 1
                    if not uses[location.event]:
                        reference.forget(*location.event)
                port.forget(*event.event)
                if self.outcome.faults and not self.heal:
                    return self.outcome
            self.outcome.result = port.result
        return self.outcome

    def _compare_event(
        self, reference: InterleavedRun, port: InterleavedRun, event: PairedEvent
    ) -> None:
        try:
            port_value = port.ask(*event.event)
        except InterleaveError:
            return  # with healed values it takes another path than when it was recorded
        port_tensors = _label_tensors(event.field, port_value)
        replacements: dict[int, Tensor] = {}
        for label, location in event.tensors.items():
            reference_value = reference.ask(*location.event)
            reference_tensor = _label_tensors(location.field, reference_value).get(location.label)
            port_tensor = port_tensors.get(label)
            if port_tensor is None or reference_tensor is None:
                continue
            replacement = self._compare(event, label, location, reference_tensor, port_tensor)
            if replacement is not None:
                replacements[id(port_tensor)] = replacement
        if replacements:
            healed = replace_leaves(
                port_value, Tensor, lambda tensor: replacements.get(id(tensor), tensor)
            )
            port.put(*event.event, healed)

    def _compare(
        self,
        event: PairedEvent,
        label: str,
        location: TensorLocation,
        reference_tensor: Tensor,
        port_tensor: Tensor,
    ) -> Tensor | None:
        """Compare two tensors; return the port's replacement, or None if it keeps its own."""
        self.outcome.compared += 1
        limit = self.tolerance.base((str(reference_tensor.dtype), str(port_tensor.dtype)))
        conformed: Tensor | None = None
        error = float("inf")
        with contextlib.suppress(CannotConform):
            conformed = conform(reference_tensor, port_tensor)
            error = _relative_distance(conformed, port_tensor)
        if not error <= limit:  # an error of NaN is a fault too
            fault = LockstepFault(
                module=event.module,
                tensor=label,
                call=event.call,
                kind="output" if event.field == "output" else "input",
                reference_module=location.module,
                error=error,
                limit=limit,
                reference=reference_tensor if conformed is None else conformed,
                port=port_tensor.clone(),
                unmet=event.uncompared,
            )
            self.outcome.faults.append(fault)
        return conformed


def _label_tensors(field: str, value: Any) -> dict[str, Tensor]:
    return dict(walk_inputs(*value) if field == "inputs" else walk(value, "out"))


def _relative_distance(reference: Tensor, port: Tensor) -> float:
    """Return the relative L2 distance; NaN or Inf if only one of the tensors has such values."""
    dtype = torch.complex128 if reference.is_complex() else torch.float64
    expected, actual = reference.to(dtype), port.to(dtype)
    if torch.equal(expected, actual) or torch.equal(expected.nan_to_num(), actual.nan_to_num()):
        return 0.0
    return float((expected - actual).norm() / expected.norm().clamp_min(1e-30))
