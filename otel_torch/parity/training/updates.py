"""Compare what the optimizers made of equal gradients: the change of each parameter in a step.

The sketch is linear, so that of a change is the difference of two. Adam divides a gradient by its
own size: where a gradient is near zero, rounding decides its sign, and with it the whole update of
that element. If all elements are off by a part e of their typical size, a share of about e of them
lies that close to zero, and the update as a whole is off by about the root of e.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from otel_torch.parity.call_graph import Parameter, Sketch
from otel_torch.parity.sides import Sides
from otel_torch.parity.tolerance import half_ulp
from otel_torch.parity.training.parameters import TrainedPair
from otel_torch.parity.training.step_context import StepContext
from otel_torch.parity.training.steps import ParameterKey, RecordedTensor
from otel_torch.parity.training.tensors import distance, factor_of, norm_of
from otel_torch.recording.row_schema import record_of

# the error of a change: relative to it, by its gradient (as it is, and by the root of its error),
# and by the rounding of the parameter, in half units of the last place
_LEGAL, _BY_GRADIENT, _BY_SIGNS, _ROUNDINGS = 1e-5, 3.0, 4.0, 6.0
# likewise of a vector, of which any part may be rounding alone
_VECTOR = 1.5
# order-blind statistics tell a parameter within this part of its norm
_BY_STATISTICS = 1e-5

State = Literal["right", "wrong", "missing", "unknown"]


@dataclass(slots=True, eq=False)
class UpdatePair:
    """The change of a parameter in a step, on both sides.

    Attributes:
        state: `missing` if an optimizer updates it on one side only.
        error, limit: Of the changes, relative L2; NaN where unknown.
        gap, norm: The L2 distance of the parameters after the step, and the reference's norm.
        is_vector, numel: Whether it has one dimension, and its elements in the port.
        changes: Whether the reference changes it by more than rounding.
        factor: By what the port's change is the reference's times a number, or None.
    """

    trained: TrainedPair
    state: State
    error: float = math.nan
    limit: float = math.nan
    gap: float = math.nan
    norm: float = math.nan
    is_vector: bool = False
    numel: int = 0
    changes: bool = True
    factor: float | None = None


def parameters_at_start(
    parameters: Sequence[Parameter], model: str
) -> dict[ParameterKey, RecordedTensor]:
    """Return the parameters of a model before its first forward."""
    return {
        ParameterKey(parameter.module, parameter.name): RecordedTensor(
            record_of(parameter.row), parameter.sketch
        )
        for parameter in parameters
        if parameter.model == model
    }


class UpdateComparison:
    """Compares the updates of one model, step after step.

    Args:
        before: Its parameters before the first step, on both sides.
    """

    def __init__(self, before: Sides[dict[ParameterKey, RecordedTensor]]) -> None:
        self._before = before.map(dict)

    def compare(
        self,
        context: StepContext,
        pairs: Sequence[TrainedPair],
        gradient_errors: Mapping[TrainedPair, float],
    ) -> list[UpdatePair]:
        """Compare the updates of a step, in the order of the parameters.

        Args:
            gradient_errors: The largest legal error of each parameter's gradients so far.
        """
        after = context.steps.map(lambda step: step.updated)
        compared = []
        for trained in pairs:
            tensors, before = trained.of(after), trained.of(self._before)
            if (tensors.reference is None) != (tensors.port is None):
                compared.append(UpdatePair(trained, "missing"))
            elif None not in tensors and None not in before:
                error = gradient_errors.get(trained, 0.0)
                pair = UpdatePair(trained, "unknown")
                pair.numel = sum(tensor.numel for tensor in tensors.port or ())
                pair.is_vector = any(len(tensor.shape) < 2 for tensor in tensors.reference or ())
                is_excused = _is_adaptive(context, trained)
                relative = _relative_limit(error, pair.is_vector, is_excused)
                # no rounding of a gradient leaves a parameter as it is
                unchanged = _relative_limit(error, pair.is_vector, False)
                _compare(pair, before, tensors, relative, unchanged)
                compared.append(pair)
        for known, updated in zip(self._before, after, strict=True):
            known.update(updated)
        return compared


def _is_adaptive(context: StepContext, trained: TrainedPair) -> bool:
    """Return whether a tiny gradient may be updated by much, and no setting differs instead."""
    group = context.groups_of(trained.names).reference
    is_adaptive = group is None or group.is_adaptive
    return is_adaptive and not context.setting_differences(trained.names)


def _relative_limit(gradient_error: float, is_vector: bool, is_adaptive: bool) -> float:
    """Return the legal error of a change, by the error of the gradient that it is made of.

    A part of a vector may have no gradient but rounding: the bias of the keys in a fused one.
    """
    limit = _LEGAL + _BY_GRADIENT * gradient_error
    if is_adaptive and gradient_error:
        limit += _VECTOR if is_vector else _BY_SIGNS * math.sqrt(gradient_error)
    return limit


def _compare(
    pair: UpdatePair,
    before: Sides[list[RecordedTensor] | None],
    after: Sides[list[RecordedTensor] | None],
    relative_limit: float,
    unchanged_limit: float,
) -> None:
    """Compare a parameter before and after a step, and fill in what was found.

    Args:
        unchanged_limit: Counts if the port does not change the parameter at all.
    """
    reference, port = after
    assert reference is not None and port is not None
    trained, pair.norm = pair.trained, norm_of(reference)
    gap = distance(reference, port, trained.in_order)
    if gap is None or math.isnan(pair.norm):
        return
    pair.gap = gap
    dtypes = [tensor.record.dtype for side in (reference, port) for tensor in side]
    absolute = _ROUNDINGS * half_ulp(dtypes) * pair.norm
    changes = Sides(*(_change(*side) for side in zip(before, after, strict=True)))
    if trained.in_order and changes.reference is not None and changes.port is not None:
        gap = float(np.linalg.norm(changes.port - changes.reference))
        size = float(np.linalg.norm(changes.reference))
    else:
        absolute += _BY_STATISTICS * pair.norm
        size = _joined_change(before.reference, reference)
    if changes.port is not None and not changes.port.any():
        relative_limit = unchanged_limit
    pair.error = 0.0 if gap <= absolute else gap / size if size else math.inf
    pair.limit = relative_limit + (absolute / size if size else 0.0)
    pair.state = "right" if gap <= absolute + relative_limit * size else "wrong"
    pair.changes = size > absolute
    if pair.state == "wrong" and pair.changes and changes.port is not None:
        is_unchanged = float(np.linalg.norm(changes.port)) <= absolute
        pair.factor = factor_of(changes.reference, changes.port, 2 * pair.limit)
        pair.factor = 0.0 if is_unchanged else pair.factor


def _change(
    before: list[RecordedTensor] | None, after: list[RecordedTensor] | None
) -> Sketch | None:
    """Return the sketch of the change of a parameter that is one tensor."""
    if before is None or after is None or len(before) != 1 or len(after) != 1:
        return None
    first, second = before[0].sketch, after[0].sketch
    return None if first is None or second is None else second - first


def _joined_change(before: list[RecordedTensor] | None, after: list[RecordedTensor]) -> float:
    changes = [_change([old], [new]) for old, new in zip(before or (), after, strict=False)]
    return math.sqrt(sum(float(change @ change) for change in changes if change is not None))
