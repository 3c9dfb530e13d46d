"""Compare the gradients of one training step, each with the limit that rounding explains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from otel_torch.parity.call_graph import enclosing_names
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.rules import grow_limits, limits_under_noise
from otel_torch.parity.sides import Sides
from otel_torch.parity.tolerance import NOISE_FACTOR, SINGLE, Tolerance
from otel_torch.parity.training.outputs import pair_outputs
from otel_torch.parity.training.parameters import TrainedPair
from otel_torch.parity.training.steps import (
    GradientKey,
    ParameterKey,
    RecordedStep,
    RecordedTensor,
)
from otel_torch.parity.training.tensors import distance, factor_of, norm_of

# how much more a backward pass rounds than a forward, in single precision and coarser
_BACKWARD_FINE, _BACKWARD_COARSE = 10.0, 4.0
# how much a difference of the parameters before the step may grow in its gradients
_DRIFT_GROWTH = 30.0
# a gradient this small a part of the largest one is what rounding leaves of larger terms: the bias
# of a key in attention, or in front of a norm, has the gradient zero
_NEGLIGIBLE = 1e-2
# a gradient that may be off by this much is rounding alone, and its parameter has no influence
NOISE_ALONE = 0.1

State = Literal["right", "wrong", "missing", "unknown"]


@dataclass(slots=True, eq=False)
class GradientPair:
    """Two gradients that should be equal.

    Attributes:
        trained: The parameter, None for the gradient of an output.
        keys: The outputs, None for a parameter.
        error, limit: Relative L2, NaN where unknown.
        state: `missing` if one side has no such gradient.
        time: Orders them as the reference's backward pass computed them.
    """

    reference: list[RecordedTensor]
    port: list[RecordedTensor]
    trained: TrainedPair | None
    keys: Sides[GradientKey] | None
    error: float
    limit: float
    state: State
    time: tuple[float, int] = (0.0, 0)

    @property
    def factor(self) -> float | None:
        """By what the port's gradient is the reference's times a number, None if it is not."""
        if len(self.reference) != 1 or len(self.port) != 1:
            return None
        return factor_of(self.reference[0].sketch, self.port[0].sketch, self.limit)

    @property
    def is_telling(self) -> bool:
        """Whether it is more than rounding, on the side that has it."""
        return self.state == "missing" or (self.limit < NOISE_ALONE and norm_of(self.reference) > 0)

    def divided_by(self, factor: float) -> GradientPair:
        """Return the pair with the port's gradient divided by a number, as by clipping."""
        if self.state not in ("right", "wrong"):
            return self
        port = [tensor.divided_by(factor) for tensor in self.port]
        gap = distance(self.reference, port, self.trained is None or self.trained.in_order)
        size = norm_of(self.reference)
        if gap is None or not size:
            return self
        state: State = "right" if gap <= self.limit * size else "wrong"
        return replace(self, port=port, error=gap / size, state=state)


class GradientComparison:
    """Compares the gradients of one step.

    Args:
        steps: Of both sides.
        noise: The reference's step under noise, or None.
        drift: Relative difference of the parameters before this step.
    """

    def __init__(
        self,
        steps: Sides[RecordedStep],
        noise: RecordedStep | None,
        tolerance: Tolerance,
        drift: float,
    ) -> None:
        self._steps = steps
        self._noise = noise
        base = tolerance.base(_dtypes(steps))
        factor = _BACKWARD_FINE if base <= SINGLE else _BACKWARD_COARSE
        self._base = factor * base + _DRIFT_GROWTH * drift

    # -- of parameters

    def of_parameters(self, pairs: Iterable[TrainedPair]) -> list[GradientPair]:
        """Compare the gradients of the parameters, in the order of the backward pass."""
        tables = self._steps.map(lambda step: step.parameter_gradients)
        largest = max((part.l2 for part in tables.reference.values()), default=0.0)
        contributions = self._contributions()
        times = _times_of_parameters(self._steps.reference)
        complete = _times_of_values(tables.reference, times)
        ported = Counter(tensor.record.value for tensor in tables.port.values())
        compared = []
        for number, trained in enumerate(pairs):
            reference, port = trained.of(tables)
            if reference is None and port is None:
                continue
            owner = trained.keys.reference[0].module
            floor = max(_NEGLIGIBLE * largest, contributions.get(owner, 0.0))
            noise = None
            if self._noise is not None:
                noise = trained.of(Sides(self._noise.parameter_gradients, {})).reference
            pair = self._compare(reference, port, noise, floor, trained.in_order)
            pair.trained = trained
            time = times.get(owner, math.inf)
            if reference and port and ported[port[0].record.value] > 1:
                end = complete.get(reference[0].record.value, time)
                time = end + 0.25 if end > time else time
            pair.time = time, -number  # of one module, the last one first
            compared.append(pair)
        return sorted(compared, key=lambda pair: pair.time)

    def _contributions(self) -> dict[str, float]:
        """Return the norm of the gradients of each module's outputs, as its parameters get them.

        A loss scale is divided out of a parameter's gradient, and clipping scales it.
        """
        step = self._steps.reference
        norm, clipped = step.scalar("grad_norm"), step.scalar("grad_norm_clipped")
        scale = clipped / norm if norm and clipped is not None else 1.0
        scale /= step.scalar("loss_scale") or 1.0
        squares: dict[str, float] = {}
        for key, gradient in step.gradients.items():
            if math.isfinite(gradient.l2):
                squares[key.module] = squares.get(key.module, 0.0) + gradient.l2**2
        return {module: scale * math.sqrt(square) for module, square in squares.items()}

    # -- of outputs

    def of_outputs(self, matched: dict[ModulePath, ModulePath]) -> list[GradientPair]:
        """Compare the gradients of outputs that both programs compute, as far as they are paired.

        Args:
            matched: Module of the reference -> module of the port.
        """
        reference, port = self._steps
        if not all(_gradients_inside(step) for step in self._steps):
            return []  # of a compiled graph only what it returns has a gradient
        largest = max((gradient.l2 for gradient in reference.gradients.values()), default=0.0)
        counterparts = pair_outputs(self._steps, matched)
        compared = []
        for time, (key, gradient) in enumerate(reference.gradients.items()):
            port_key = counterparts.get(key)
            if port_key is None:
                continue
            found = port.gradients.get(port_key)
            noise = None if self._noise is None else self._noise.gradients.get(key)
            pair = self._compare(
                [gradient],
                None if found is None else [found],
                None if noise is None else [noise],
                _NEGLIGIBLE * largest,
                True,
            )
            pair.keys, pair.time = Sides(key, port_key), (float(time), 0)
            compared.append(pair)
        return compared

    # -- both

    def _compare(
        self,
        reference: list[RecordedTensor] | None,
        port: list[RecordedTensor] | None,
        noise: list[RecordedTensor] | None,
        floor: float,
        in_order: bool,
    ) -> GradientPair:
        """Compare two gradients.

        Args:
            noise: The reference's under noise.
            floor: The norm below which a gradient is rounding of what it is computed from.
        """
        pair = GradientPair(reference or [], port or [], None, None, math.nan, math.nan, "missing")
        if reference is None or port is None:
            present = reference or port or []
            is_zero = norm_of(present) <= self._base * floor
            pair.state = "right" if is_zero else "missing"
            return pair
        gap = distance(reference, port, in_order)
        norm = norm_of(reference)
        if gap is None or math.isnan(norm):
            pair.state = "unknown"
            return pair
        size = norm or norm_of(port) or 1.0
        pair.error = gap / size
        pair.limit = self._base * max(norm, floor) / size
        if noise is not None and (moved := distance(reference, noise, True)) is not None:
            limits = limits_under_noise(
                np.array([pair.limit]), np.array([moved / size]), NOISE_FACTOR
            )
            pair.limit = float(limits[0])
        pair.state = "right" if pair.error <= pair.limit else "wrong"
        return pair


def grow(pairs: Sequence[GradientPair]) -> None:
    """Raise the limits of wrong pairs by the legal errors before them, in place."""
    known = [pair for pair in pairs if pair.state in ("right", "wrong")]
    error = np.array([pair.error for pair in known])
    limit = np.array([pair.limit for pair in known])
    right = np.array([pair.state == "right" for pair in known], dtype=bool)
    # rounding alone says nothing of what comes after it
    counted = np.where(limit < NOISE_ALONE, error, 0.0)
    for index, grown in grow_limits(np.where(right, counted, error), limit, right, ~right):
        known[index].limit, known[index].state = grown, "right"


def _gradients_inside(step: RecordedStep) -> bool:
    """Return whether the gradients of outputs other than the model's are recorded."""
    return any(key.module for key in step.gradients)


def _dtypes(steps: Sides[RecordedStep]) -> list[str]:
    """Return the dtypes that took part in the forwards and backward passes of a model."""
    return [
        kind.dtype
        for step in steps
        for kind in step.kinds.kinds
        if kind.model == step.model and kind.phase in ("forward", "backward", "attach")
    ]


def _times_of_values(
    gradients: Mapping[ParameterKey, RecordedTensor], times: Mapping[str, float]
) -> dict[int | None, float]:
    """Return when each gradient is complete: that of a tied weight with the last module's part."""
    complete: dict[int | None, float] = {}
    for key, gradient in gradients.items():
        time = times.get(key.module, -math.inf)
        value = gradient.record.value
        if value is not None:
            complete[value] = max(complete.get(value, time), time)
    return complete


def _times_of_parameters(step: RecordedStep) -> dict[str, float]:
    """Return when the gradients of the parameters of each module are computed: after its output's.

    Not of a module with others inside, whose parameters may be used before or after these.
    """
    times: dict[str, float] = {}
    for time, key in enumerate(step.gradients):
        times.setdefault(key.module, time + 0.5)
    outer = {name for module in times for name in enclosing_names(module)}
    return {module: time for module, time in times.items() if module not in outer}
