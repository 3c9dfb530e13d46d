"""Find an input of the model that its outputs do not depend on, and its loss does: the labels."""

from __future__ import annotations

from otel_torch.parity.finding import OTHER_INPUTS, Cause, Finding
from otel_torch.parity.sides import Sides
from otel_torch.parity.training.step_context import Deviation, Place, StepContext
from otel_torch.parity.training.steps import RecordedStep, RecordedTensor
from otel_torch.parity.training.tensors import distance

# what rounding leaves of equal inputs, relative L2; they are given, and not computed
_SAME = 1e-6


def judge_given_inputs(context: StepContext) -> Finding | None:
    """Return the finding for the first input of a step's forwards that differs, if any."""
    inputs = context.steps.map(_inputs_of)
    for key, reference in inputs.reference.items():
        port = inputs.port.get(key)
        if port is None or reference.record.dtype != port.record.dtype:
            continue
        gap = distance([reference], [port], True)
        size = reference.l2 or 1.0
        if gap is None or not gap > _SAME * size:
            continue
        tensor, call = key
        place = Place("", tensor, "input", call)
        text = (
            f"the two programs were given different inputs: `{tensor}` has other values. The "
            "outputs of the model do not depend on it, and the loss does: give both the same data "
            "in the same order"
        )
        cause = Cause(OTHER_INPUTS, True, text)
        return context.finding(
            "forward", Sides(place, place), "", cause, Deviation(gap / size, _SAME)
        )
    return None


def _inputs_of(step: RecordedStep) -> dict[tuple[str, int], RecordedTensor]:
    """Return what the model itself was given in a step, by label and call."""
    return {
        (row.record.tensor, row.record.call or 0): row
        for row in step.forward_rows()
        if not row.record.module and row.record.tensor.startswith("in")
    }
