"""Find where a program recomputes a checkpointed forward with another result.

The backward pass then takes activations that the loss was not computed with. A checkpoint that does
not keep the random state does this: its dropout drops other elements the second time.

    forward     blocks.0.drop out   sum 101.5
    recompute   blocks.0.drop out   sum  91.4    and the gradient of blocks.0.down is wrong
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from otel_torch.parity.diagnosis.rounding import keeps_squares
from otel_torch.parity.finding import Cause, Finding
from otel_torch.parity.modules import counterpart
from otel_torch.parity.sides import Sides
from otel_torch.parity.tolerance import BASES
from otel_torch.parity.training.step_context import Deviation, Place, StepContext
from otel_torch.parity.training.steps import RecordedStep, RecordedTensor
from otel_torch.parity.training.tensors import distance

# a smaller error may be rounding: the second computation may be in another dtype
_ROUNDING = BASES["torch.bfloat16"]


class _Recomputed(NamedTuple):
    """A tensor that differs when it is recomputed; `error` is relative L2."""

    forward: RecordedTensor
    tensor: RecordedTensor
    error: float


def recomputed_otherwise(context: StepContext) -> Finding | None:
    """Return the finding where only one side recomputes a tensor with another result."""
    differing = context.steps.map(_first_differing)
    if differing.reference is not None and differing.port is None:
        side, found, matched = "reference", differing.reference, context.matched
    elif differing.port is not None and differing.reference is None:
        reverse = {port: reference for reference, port in context.matched.items()}
        side, found, matched = "port", differing.port, reverse
    else:
        return None
    record = found.tensor.record
    place = Place(
        record.module, record.tensor, "output" if record.tensor.startswith("out") else "input"
    )
    _, match = counterpart((record.model, record.module), matched)
    other_place = Place(match, place.tensor, place.side)
    places = Sides(place, other_place) if side == "reference" else Sides(other_place, place)
    subject = f"the {place.side} of {record.module or record.model}"
    cause = None
    if keeps_squares(found.forward.l2, found.tensor.l2, found.tensor.numel):
        text = (
            f"the {side} draws other random numbers for {subject} when it recomputes it in the "
            "backward pass: the checkpoint does not keep the random state"
        )
        cause = Cause("random_stream", False, text)
    explanation = (
        f"The {side} recomputes {subject} in the backward pass with another result than in the "
        "forward pass. The gradients are computed from that."
    )
    deviation = Deviation(found.error, _ROUNDING)
    return context.finding("recompute", places, explanation, cause, deviation)


def _first_differing(step: RecordedStep) -> _Recomputed | None:
    """Return the first tensor that is in no forward of the step as it is when recomputed."""
    forward: dict[tuple[str, str], list[RecordedTensor]] = defaultdict(list)
    for tensor in step.forward_rows(("forward", "recompute")):
        record = tensor.record
        known = forward[record.module, record.tensor]
        if record.phase == "forward":
            known.append(tensor)
            continue
        gaps = [distance([other], [tensor], in_order=True) for other in known]
        gap = min((gap for gap in gaps if gap is not None), default=0.0)
        if gap > _ROUNDING * tensor.l2:
            nearest = known[gaps.index(gap)]
            return _Recomputed(nearest, tensor, gap / tensor.l2)
    return None
