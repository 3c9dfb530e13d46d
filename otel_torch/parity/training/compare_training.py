"""Follow the training steps of two recordings up to the first thing that is wrong.

iterate_steps          one step of a model after another, of either side
GradientComparison     its gradients, with what rounding explains
judge_gradients        the first wrong one, or the loss
UpdateComparison       what the optimizers made of right gradients
judge_updates          the first wrong update, and the setting that made it
TrainingReport         the first finding, and what the comparison of the forwards needs
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from otel_torch.parity.finding import Finding
from otel_torch.parity.forwards import read_parameters
from otel_torch.parity.loaded_recording import LoadedRecording
from otel_torch.parity.program_match import ProgramMatch
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.sides import Sides
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.training.given_inputs import judge_given_inputs
from otel_torch.parity.training.gradients import NOISE_ALONE, GradientComparison, GradientPair
from otel_torch.parity.training.judge_gradients import (
    RightStep,
    judge_absent_gradients,
    judge_gradients,
)
from otel_torch.parity.training.judge_updates import (
    describe_hidden_settings,
    judge_skipped,
    judge_updates,
)
from otel_torch.parity.training.optimizers import OptimizerTable
from otel_torch.parity.training.parameters import TrainedPair, trained_pairs
from otel_torch.parity.training.step_context import StepContext
from otel_torch.parity.training.steps import RecordedStep, iterate_steps
from otel_torch.parity.training.updates import UpdateComparison, UpdatePair, parameters_at_start

Position = tuple[int, int]  # loop and step
# the legal error of a gradient that only order-blind statistics compare
_UNSEEN_ERROR = 1e-6


@dataclass(slots=True)
class TrainingReport:
    """What the training steps show.

    Attributes:
        first: The first finding, in the reference's step `position`.
        pairs: How many pairs of tensors were compared.
        same_batch: Steps of each side whose gradients show that both programs trained on the
            same data, however each split it into forwards.
        known: Models of the reference whose updates were compared, so that their parameters are
            known in every forward.
        hidden_settings: By model: in which settings its optimizers differ, though the updates of a
            step match.
    """

    first: Finding | None = None
    position: Position | None = None
    pairs: int = 0
    same_batch: Sides[set[Position]] = field(
        default_factory=lambda: Sides[set[Position]](set(), set())
    )
    known: set[str] = field(default_factory=set)
    hidden_settings: dict[str, str] = field(default_factory=dict)
    _drift: dict[str, dict[Position, float]] = field(default_factory=dict)
    _apart: dict[str, dict[Position, dict[str, float]]] = field(default_factory=dict)

    def add_drift(self, model: str, position: Position, drift: float) -> None:
        """Note how far the parameters of a model are apart after a step."""
        self._drift.setdefault(model, {})[position] = drift

    def add_apart(self, model: str, position: Position, modules: dict[str, float]) -> None:
        """Note how far vectors without influence are apart after a step, RMS, by their modules."""
        self._apart.setdefault(model, {})[position] = modules

    def apart_before(self, model: str, position: Position) -> dict[str, float]:
        """Return how far vectors without influence are apart before a step, likewise."""
        apart = self._apart.get(model, {})
        latest = max((at for at in apart if at < position), default=None)
        return {} if latest is None else apart[latest]

    def drift_before(self, model: str, position: Position) -> float:
        """Return how far the parameters are apart before a step, relative L2, by legal errors."""
        drifts = self._drift.get(model, {})
        return max((drift for at, drift in drifts.items() if at < position), default=0.0)

    def is_over(self, model: str, position: Position, port: Position) -> bool:
        """Return whether a forward comes after the first finding, on either side.

        A port that steps more often is at a later step with the same batch.
        """
        first = self.first
        if first is None or self.position is None or model != first.model:
            return False
        return position > self.position or port > (first.port_loop or 0, first.port_step or 0)


def compare_training(
    recordings: Sides[LoadedRecording],
    match: ProgramMatch,
    noise: RecordingSource | None,
    tolerance: Tolerance,
) -> TrainingReport:
    """Compare the training steps of two recordings; without any, the report is empty.

    Args:
        noise: The reference's recording under noise, or None.
    """
    report = TrainingReport()
    if not all({"gradients", "updates"} & recording.captures for recording in recordings):
        return report
    pairs = trained_pairs(match.parameters, recordings.reference.parameters)
    steps = recordings.map(lambda side: iterate_steps(side.source, side.parameters))
    noise_steps = None
    if noise is not None:
        noise_steps = iterate_steps(noise, read_parameters(noise))
    comparison = _TrainingComparison(recordings, match, pairs, tolerance, report)
    for reference, port in _pair_steps(steps, match.models):
        comparison.add(Sides(reference, port), _step_under_noise(noise_steps, reference))
        if report.first is not None:
            break
    return report


def _pair_steps(
    steps: Sides[Iterator[RecordedStep]], models: Mapping[str, str]
) -> Iterator[Sides[RecordedStep]]:
    """Yield the steps of paired models that correspond: in order."""
    waiting: dict[str, deque[RecordedStep]] = {}
    for reference in steps.reference:
        model = models.get(reference.model)
        if model is None:
            continue
        queue = waiting.setdefault(model, deque())
        while not queue:
            port = next(steps.port, None)
            if port is None:
                return
            waiting.setdefault(port.model, deque()).append(port)
        yield Sides(reference, queue.popleft())


def _step_under_noise(
    steps: Iterator[RecordedStep] | None, reference: RecordedStep
) -> RecordedStep | None:
    for step in steps or ():
        if (step.model, step.position) == (reference.model, reference.position):
            return step
    return None


class _TrainingComparison:
    """Compares one step after another; see `compare_training`."""

    def __init__(
        self,
        recordings: Sides[LoadedRecording],
        match: ProgramMatch,
        pairs: Sequence[TrainedPair],
        tolerance: Tolerance,
        report: TrainingReport,
    ) -> None:
        self._recordings = recordings
        self._matched = match.modules.matched
        self._pairs = pairs
        self._tolerance = tolerance
        self._report = report
        self._optimizers = recordings.map(lambda recording: OptimizerTable(recording.meta))
        self._updates: dict[str, UpdateComparison] = {}
        self._gradient_errors: dict[TrainedPair, float] = {}
        self._right_before: dict[str, RightStep] = {}  # the latest right step of each model
        self._compared: set[str] = set()  # models that had a step

    def add(self, steps: Sides[RecordedStep], noise: RecordedStep | None) -> None:
        """Compare the next step of a model."""
        model, report = steps.reference.model, self._report
        is_first = model not in self._compared
        self._compared.add(model)
        if not is_first and model not in report.known:
            return  # what the step before made of the parameters is not recorded
        pairs = [pair for pair in self._pairs if pair.models == steps.map(lambda step: step.model)]
        context = StepContext(steps, self._matched, self._optimizers)
        gradients = self._compare_gradients(context, pairs, noise)
        if report.first is None and pairs:  # without pairs, updates show nothing of the parameters
            self._compare_updates(context, pairs, gradients)
        if report.first is not None:
            report.position = steps.reference.position

    def _compare_gradients(
        self, context: StepContext, pairs: Sequence[TrainedPair], noise: RecordedStep | None
    ) -> list[GradientPair]:
        steps, report = context.steps, self._report
        if not all(step.parameter_gradients for step in steps):
            if pairs and all("gradients" in recording.captures for recording in self._recordings):
                report.first = judge_absent_gradients(context)
            return []
        drift = report.drift_before(steps.reference.model, steps.reference.position)
        comparison = GradientComparison(steps, noise, self._tolerance, drift)
        model = steps.reference.model
        parameters = comparison.of_parameters(pairs)
        verdict = judge_gradients(context, parameters, comparison, self._right_before.get(model))
        if verdict.finding is None:
            self._right_before[model] = context, comparison
        report.pairs += verdict.compared
        report.first = verdict.finding
        if report.first is not None and report.first.phase == "loss":
            report.first = judge_given_inputs(context) or report.first
        if verdict.same_batch:
            for positions, step in zip(report.same_batch, steps, strict=True):
                positions.add(step.position)
        for pair in verdict.pairs:
            if pair.trained is not None:
                error = (
                    pair.error if pair.state == "right" and pair.trained.in_order else _UNSEEN_ERROR
                )
                known = self._gradient_errors.get(pair.trained, 0.0)
                self._gradient_errors[pair.trained] = max(
                    known, 0.0 if math.isnan(error) else error
                )
        return verdict.pairs

    def _compare_updates(
        self, context: StepContext, pairs: Sequence[TrainedPair], gradients: Sequence[GradientPair]
    ) -> None:
        steps, report = context.steps, self._report
        model = steps.reference.model
        if not all(step.updated for step in steps):
            if any(map(_is_last_copy, self._recordings, steps)):
                return  # no forward follows that would show it
            report.known.discard(model)
            if all(map(_knows_updates, self._recordings)):
                report.first = judge_skipped(context)
            return
        updates = self._updates.get(model)
        if updates is None:
            before = Sides(
                *(
                    parameters_at_start(recording.parameters, step.model)
                    for recording, step in zip(self._recordings, steps, strict=True)
                )
            )
            updates = self._updates[model] = UpdateComparison(before)
        compared = updates.compare(context, pairs, self._gradient_errors)
        compared += self._not_held_elsewhere(context)
        report.pairs += len(compared)
        report.known.add(model)
        report.first = judge_updates(context, compared, bool(gradients))
        if report.first is None and (hidden := describe_hidden_settings(context, compared)):
            report.hidden_settings.setdefault(model, hidden)
        alone = {pair.trained for pair in gradients if pair.limit >= NOISE_ALONE}
        alone |= {pair.trained for pair in compared if pair.limit >= NOISE_ALONE}
        report.add_drift(model, steps.reference.position, _drift(compared, alone))
        apart = {
            key.module: pair.gap / math.sqrt(max(pair.numel, 1))
            for pair in compared
            if pair.trained in alone and pair.is_vector
            for key in pair.trained.keys.reference
        }
        report.add_apart(model, steps.reference.position, apart)

    def _not_held_elsewhere(self, context: StepContext) -> list[UpdatePair]:
        """Return the parameters that the port has in another model, which nothing trains.

        A plain list hides modules from the model that calls them, and from its optimizer.
        """
        steps, tables = context.steps, context.optimizers
        if not tables.port:
            return []
        return [
            UpdatePair(pair, "missing")
            for pair in self._pairs
            if pair.models.reference == steps.reference.model
            and pair.models.port != steps.port.model
            and pair.keys.reference[0] in steps.reference.updated
            and tables.reference.group_of(pair.names.reference, steps.reference.step) is not None
            and tables.port.group_of(pair.names.port, steps.port.step) is None
        ]


def _is_last_copy(recording: LoadedRecording, step: RecordedStep) -> bool:
    """Return whether an optimizer's copies were copied back after this step at the end of the
    program: the parameters are seen before the next forward.
    """
    optimizers = recording.meta.get("optimizers") or ()
    return any(own.get("copies") and own.get("last_step") == step.step for own in optimizers)


def _knows_updates(recording: LoadedRecording) -> bool:
    """Return whether a step without updates was skipped.

    Optimizers that step and hold no parameter of a model have others of which they are made, such
    as a flat copy, or masters in another dtype.
    """
    have_stepped = "torch.optimizer.step" in recording.meta.get("regions", {})
    has_others = have_stepped and not recording.meta.get("optimizers")
    return "updates" in recording.captures and not has_others


def _drift(updates: Sequence[UpdatePair], alone: set[TrainedPair | None]) -> float:
    """Return how far the parameters are apart, relative L2.

    Args:
        alone: Parameters whose gradients may be rounding alone: they have no influence.
    """
    counted = [pair for pair in updates if pair.state != "unknown" and pair.trained not in alone]
    size = math.sqrt(sum(pair.norm**2 for pair in counted))
    return math.sqrt(sum(pair.gap**2 for pair in counted)) / size if size else 0.0
