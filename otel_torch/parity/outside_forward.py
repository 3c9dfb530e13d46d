"""Differences that no module of a forward made: the inputs of the program, and updated parameters.

The judge names the module whose output is wrong though its inputs are right. That is true as long
as its parameters are the recorded ones. A training program changes them after the first step, by a
backward pass and an optimizer that are not compared: from then on, what differs is a consequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Program, Role
from otel_torch.parity.faults import Fault, Judgment, Location
from otel_torch.parity.finding import OTHER_INPUTS, Cause, Finding
from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.loaded_recording import LoadedRecording
from otel_torch.parity.sides import Sides
from otel_torch.parity.values import Comparer

_Position = tuple[int | None, int | None]  # loop and step


@dataclass(frozen=True, slots=True)
class ParameterState:
    """What is known of the parameters that a pair of forwards uses.

    Attributes:
        state: `loaded` before any update, `trained` by compared updates, `unknown` after others,
            `wrong` after a finding in training.
        drift: How far the two sides are apart by legal errors, relative L2.
        apart: Module of the reference -> how far each element of its vectors may be apart, though
            rounding alone trained them: it moves the module's output and nothing after it.
    """

    state: Literal["loaded", "trained", "unknown", "wrong"]
    drift: float = 0.0
    apart: Mapping[str, float] = field(default_factory=dict)

    def add_to(self, comparer: Comparer, reference: Program) -> None:
        """Allow the outputs of modules what their own parameters make of them."""
        for role in reference.roles:
            apart = self.apart.get(role.call.module, 0.0)
            size = role.value.row.get("l2")
            if apart and role.side == "output" and isinstance(size, float) and size > 0:
                comparer.apart[role.value] = apart * math.sqrt(role.value.numel) / size


class Updates:
    """Tells which forwards ran after the parameters of their model had changed."""

    def __init__(self, recordings: Sides[LoadedRecording]) -> None:
        self._recordings = recordings
        self._first: Sides[dict[str, _Position]] = Sides({}, {})
        self._updated: dict[str, _Position] = {}

    def precede(self, forwards: Sides[ForwardRows]) -> bool:
        """Return whether an update came before either forward; both follow those seen so far."""
        is_after = False
        for recording, forward, first in zip(self._recordings, forwards, self._first, strict=True):
            position = forward.loop, forward.step
            is_later = position != first.setdefault(forward.model, position)
            is_after = is_after or (is_later and recording.is_trained(forward.model))
        if is_after:
            reference = forwards.reference.model
            self._updated.setdefault(reference, self._first.reference[reference])
        return is_after

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each model whose parameters changed."""
        for model, (_, step) in self._updated.items():
            yield (
                f"the parameters of {model or 'a model'} changed after step {step} and were not "
                "recorded again: what differs later may come from gradients or the optimizer, so "
                "no module is named for it"
            )


def update_finding(alignment: Alignment, fault: Fault) -> Finding:
    """Return the finding for a forward that is wrong after an update, which caused it or not."""
    reference, port = alignment.reference.calls[0], alignment.port.calls[0]
    where = fault.port or fault.reference
    seen = "" if where is None else f", first {_name(where)}"
    return Finding(
        *(reference.model, "", "param", reference.loop, reference.step, 0, "update"),
        *(port.model, "", "param", port.loop, port.step, 0),
        rank=None,
        side="parameter",
        port_side="parameter",
        kind="weights",
        error=None if fault.relation is None else fault.relation.error,
        floor=None if fault.relation is None else fault.relation.limit,
        explanation=(
            f"What {port.model or 'the model'} computes differs{seen}. Every step before matches, "
            "and the parameters were updated in between: the losses, the gradients or the "
            "optimizers of the two programs differ, and no forward pass is known to be wrong."
        ),
    )


def allow_other_split(alignment: Alignment, judgment: Judgment) -> Judgment:
    """Return the judgment of a forward in a step whose gradients show the same batch.

    Two ranks, or accumulated batches, may each have a part of what the other program has at once.
    """
    if judgment.faults and other_inputs(alignment, judgment.faults[0]):
        return Judgment(False, [], [*judgment.healed, *judgment.wrong])
    return judgment


def other_inputs(alignment: Alignment, fault: Fault) -> Cause | None:
    """Return the cause of a fault at an input of a model itself, which no code here made.

    What enters a part of a model that was called from outside of any recorded call was made by a
    method of the model, such as `encode`, or by modules that were not recorded.
    """
    roles = [where.role for where in (fault.reference, fault.port) if where is not None]
    if len(roles) < 2 or not all(map(_is_given, roles)):
        return None
    first, second = (role.row.get("shape") for role in roles if role is not None)
    if first != second:
        difference = f"has shape {first} in the reference and {second} in the port"
        advice = "the same batch, image size, padding and number of tokens in each forward"
    else:
        difference = f"has shape {first} in both, but other values"
        advice = "the same prompt or data in the same order, and the same seed"
    tensor = fault.port.role.tensor if fault.port and fault.port.role else "an input"
    text = (
        f"the two programs were given different inputs, or prepare them differently: `{tensor}` "
        f"{difference}. Give both {advice}"
    )
    return Cause(OTHER_INPUTS, True, text)


def _is_given(role: Role | None) -> bool:
    """Return whether a tensor came from outside of all recorded calls."""
    return (
        role is not None
        and role.side == "input"
        and role.call.parent is None
        and not role.call.module
        and all(use.side == "input" for use in role.value.roles if use.time <= role.time)
    )


def _name(location: Location) -> str:
    model, module = location.module
    return f"the {location.side} of {module or model}"
