"""Records what a training program looks at first: loss, rates, norms, the gradient scaler.

    training_forward    the units that no sample activates
    backward_starting   measure the loss
    optimizer_stepping  rates, scale, and the parameters as they are
    gradients_ready     the losses since the last step, and the gradient norms
    optimizer_stepped   how much the parameters have changed

Each becomes a row of phase `train` of the step that the optimizer completes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.laws.facts import FEWEST_STEPS
from otel_torch.process.console import say_once
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.replacements import Replacements
from otel_torch.sources.source import Source
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import Inputs
from otel_torch.sources.steps.optimizers import Optimizers, optimized_parameters, steps_counted
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.training.dead_units import DeadUnits
from otel_torch.sources.training.equal_outputs import EqualOutputs
from otel_torch.sources.training.gradient_clearing import GradientClearing
from otel_torch.sources.training.gradient_clipping import ClipWatch
from otel_torch.sources.training.gradient_norms import GradientNorms
from otel_torch.sources.training.loop_lines import LoopLines
from otel_torch.sources.training.losses import PendingLosses
from otel_torch.sources.training.model_states import ModelStates
from otel_torch.sources.training.owned_parameters import ParameterOwners
from otel_torch.sources.training.parameter_updates import ParameterUpdates
from otel_torch.sources.training.repeated_batches import RepeatedBatches
from otel_torch.sources.training.throughput import Throughput
from otel_torch.sources.training.training_modes import TrainingModes
from otel_torch.sources.training.training_rows import ENDED, TrainingRows
from otel_torch.statistics.norms import whole_values
from otel_torch.training_quantities import row_label

_P = ParamSpec("_P")
# by the key of an optimizer's group
_GROUP_ROWS = {"lr": "lr", "weight_decay": "weight_decay"}


def _guarded(observe: Callable[_P, None]) -> Callable[_P, None]:
    """Report an error of an observer once; the program and the other observers go on."""

    @functools.wraps(observe)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            observe(*args, **kwargs)
        except Exception as error:
            say_once(f"training health is not recorded: {type(error).__name__}: {error}")

    return call


class _SteppingOptimizer(threading.local):
    """`held`: the parameters of the optimizer that steps in a thread."""

    held: frozenset[int] = frozenset()


class TrainingHealth(Source):
    """Records the rows of phase `train` for one session.

    Args:
        is_observed: whether the outputs of a module are recorded.
        models: returns the models that have run.
        idle: returns the optimizers that have changed nothing.

    Attributes:
        rows: takes rows of phase `train`.
        states: of the models that train.
    """

    def __init__(
        self,
        session: Session,
        selection: ModuleSelection,
        optimizers: Optimizers,
        events: RunEvents,
        is_observed: Callable[[nn.Module], bool],
        models: Callable[[], Iterable[Model]],
        idle: Callable[[], Sequence[object]],
    ) -> None:
        self.rows = TrainingRows(session, selection, optimizers)
        self._losses, self._clips = PendingLosses(), ClipWatch()
        owners = ParameterOwners()
        self._gradient_norms = GradientNorms(self.rows, owners, self._clips)
        self._parameter_updates = ParameterUpdates(self.rows, owners, optimizers)
        self._dead_units = DeadUnits(self.rows, is_observed)
        self._clearing, self._modes = GradientClearing(self.rows), TrainingModes(self.rows)
        self._lines = LoopLines()
        self._batches, self._outputs = RepeatedBatches(self.rows), EqualOutputs(self.rows)
        self._models, self._idle = models, idle
        self.states = ModelStates(
            lambda module: any(model.root() is module for model in models()),
            self._parameter_updates.describe,
        )
        self._first_groups = FirstGroups()
        # to compare two recordings
        self._counts_steps = "updates" in session.settings.capture
        self.throughput = Throughput(events)
        self._stepping = _SteppingOptimizer()
        self._replacements = Replacements()
        subscribers: tuple[tuple[list[Any], tuple[Callable[..., None], ...]], ...] = (
            (events.forward_starting, (self._parameter_updates.forward_starting,)),
            (
                events.forward_began,
                (self._modes.forward_began, self.states.forward_began, self._lines.forward_began),
            ),
            (
                events.training_forward,
                (
                    self._on_training_forward,
                    self._losses.forward_starting,
                    self._dead_units.forward_starting,
                    self._modes.training_forward,
                    self._batches.training_forward,
                    self._outputs.training_forward,
                    self.states.training_forward,
                    self._lines.training_forward,
                ),
            ),
            (events.forward_returned, (self._outputs.forward_returned,)),
            (
                events.backward_starting,
                (self._on_backward_starting, self._clearing.backward_starting),
            ),
            (events.backward_ended, (self._losses.backward_ended, self._clearing.backward_ended)),
            (
                events.optimizer_stepping,
                (
                    self._on_optimizer_stepping,
                    self._modes.optimizer_stepping,
                    self._lines.optimizer_stepping,
                ),
            ),
            (events.gradients_ready, (self._on_gradients_ready,)),
            (
                events.optimizer_stepped,
                (
                    self._parameter_updates.ended,
                    self._clearing.optimizer_stepped,
                    self.states.optimizer_stepped,
                    self._on_optimizer_left,
                ),
            ),
            (events.optimizer_skipped, (self._on_optimizer_skipped, self._on_optimizer_left)),
        )
        for event, observers in subscribers:
            event += map(_guarded, observers)

    def install(self) -> None:
        """Watch clipping and the gradient scaler."""
        self._clips.install(self._replacements)
        self.states.install(self._replacements)
        self._replacements.replace(GradScaler, "scale", self._wrap_scale)
        self._replacements.replace(GradScaler, "unscale_", self._wrap_unscale)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what is as it should not be by model, with the lines of its loop."""
        loops = self.states.describe()
        models = {model.name for model in self._models() if model.clock.is_trained}
        return {
            name: {**loops.get(name, {}), "lines": self._lines.of(name)}
            for name in sorted(models | loops.keys())
        }

    def finish(self) -> None:
        """Add a row for a model whose losses no optimizer has used, though there is one."""
        unused, step = self._losses.unused(), TrainingStep(0, 0, ENDED)
        ran = list(self._models())
        if not self._idle() or any(model.clock.is_trained for model in ran):
            return
        for model in ran:
            count = unused[model] + unused[None]
            if count >= FEWEST_STEPS and self.rows.are_wanted(model, step):
                self.rows.add_of_untrained(model, step, "unused_losses", float(count))

    def uninstall(self) -> None:
        self._replacements.restore()
        self._dead_units.uninstall()

    # -- the gradient scaler

    def _wrap_scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        def scale_and_remember(scaler: GradScaler, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if not torch.compiler.is_compiling():
                self._on_scaled(scaler, outputs, result)
            return result

        return scale_and_remember

    def _on_scaled(self, scaler: GradScaler, outputs: Any, result: Any) -> None:
        try:
            self._losses.scaled(scaler, outputs, result)
            self._clips.scale = torch_private.scale_of(scaler)
        except Exception as error:
            say_once(f"a scaled loss is not recorded: {type(error).__name__}: {error}")

    def _wrap_unscale(self, unscale: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_and_note(scaler: GradScaler, optimizer: Any) -> Any:
            result = unscale(scaler, optimizer)
            self._clips.scale = None
            return result

        return unscale_and_note

    # -- events

    def _on_training_forward(self, active: ActiveStep, inputs: Inputs) -> None:
        self._clips.keeps_each = self.rows.are_detailed(active.position)

    def _on_optimizer_left(self, _: OptimizerStep) -> None:
        self._clips.forget_each()

    def _on_backward_starting(self, roots: Any) -> None:
        self._clips.forget()
        self._losses.backward_starting(roots)

    def _on_optimizer_stepping(self, optimizer_step: OptimizerStep) -> None:
        self._stepping.held = optimized_parameters(optimizer_step.optimizer)
        self._add_rates(optimizer_step)
        self._add_scale(optimizer_step, is_skipped=False)
        self._parameter_updates.starting(optimizer_step)

    def _on_gradients_ready(
        self,
        model: Model,
        parameter_ids: frozenset[int],
        step: TrainingStep,
        scale: Tensor | None = None,
    ) -> None:
        self._add_losses(model, step)
        early, late = self._clips.take_early(parameter_ids), self._clips.take_late()
        if early or late:
            self._lines.clipped(model, self._clips.line)
        self._clips.use(parameter_ids)
        if self.rows.are_wanted(model, step):
            for label, count in (("early_clips", early), ("late_clips", late)):
                if count:
                    self.rows.add_numbers(model, step, [("", label)], [float(count)])
            holds_copies = not (parameter_ids & model.parameter_ids()) <= self._stepping.held
            are_elsewhere = holds_copies and torch_private.has_other_ranks()
            self._gradient_norms.record(model, parameter_ids, step, scale, are_elsewhere)

    def _on_optimizer_skipped(self, optimizer_step: OptimizerStep) -> None:
        for model, _, step in optimizer_step.updates:
            self._add_losses(model, step)
        self._add_scale(optimizer_step, is_skipped=True)

    # -- rows

    def _add_losses(self, model: Model, step: TrainingStep) -> None:
        losses = self._losses.take(model)
        if self.rows.are_wanted(model, step):
            for loss in losses:
                self.rows.add(model, step, "loss", loss.measurement)

    def _add_rates(self, optimizer_step: OptimizerStep) -> None:
        """Add the learning rates and weight decays, before a scheduler changes them."""
        optimizer = optimizer_step.optimizer
        for model, parameter_ids, step in optimizer_step.updates:
            if not self.rows.are_wanted(model, step):
                continue
            first = self._first_groups.of(model, optimizer)
            own = parameter_ids & model.parameter_ids()
            holds_copies = own.isdisjoint(self._stepping.held)
            settings = {}
            for index, group in enumerate(optimizer.param_groups):
                if holds_copies or any(id(parameter) in own for parameter in group["params"]):
                    name = group.get("name")
                    label = name if isinstance(name, str) and name else str(first + index)
                    for quantity, key in _GROUP_ROWS.items():
                        settings[row_label(quantity, label)] = group.get(key)
                    if self._counts_steps:
                        settings[row_label("optimizer_step", label)] = steps_counted(
                            optimizer, group
                        )
            self._add_settings(model, step, settings)

    def _add_settings(self, model: Model, step: TrainingStep, settings: dict[str, Any]) -> None:
        """Add numbers of an optimizer's groups, some of which may be on a device."""
        numbers = {
            label: float(value)
            for label, value in settings.items()
            if isinstance(value, (int, float))
        }
        if numbers:
            labels = [("", label) for label in numbers]
            self.rows.add_numbers(model, step, labels, list(numbers.values()))
        for label, value in settings.items():
            values = whole_values(value) if isinstance(value, Tensor) else None
            if values is not None and values.numel() == 1:
                self.rows.add_numbers(model, step, [("", label)], _flat(values))

    def _add_scale(self, optimizer_step: OptimizerStep, *, is_skipped: bool) -> None:
        """Add the scale of a gradient scaler, and whether it has skipped the step."""
        scale = (
            None if optimizer_step.scaler is None else torch_private.scale_of(optimizer_step.scaler)
        )
        if scale is None:
            return
        found = getattr(
            optimizer_step.optimizer, "found_inf", None
        )  # a fused optimizer skips it itself
        skipped = _flat(found).clamp(max=1) if isinstance(found, Tensor) else [float(is_skipped)]
        for model, _, step in optimizer_step.updates:
            if self.rows.are_wanted(model, step):
                self.rows.add_numbers(model, step, [("", "loss_scale")], _flat(scale))
                self.rows.add_numbers(model, step, [("", "skipped")], skipped)


@torch_private.unobserved
def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(1)


class FirstGroups:
    """Numbers the groups of optimizers: those of a model's second optimizer continue the first's.

    >>> from types import SimpleNamespace
    >>> two_groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}]
    >>> adam, muon = torch.optim.Adam(two_groups), torch.optim.SGD(two_groups)
    >>> model, first_groups = SimpleNamespace(name="Net"), FirstGroups()
    >>> [first_groups.of(model, optimizer) for optimizer in (adam, muon, adam)]
    [0, 2, 0]
    """

    def __init__(self) -> None:
        self._first: Any = WeakIdKeyDictionary()  # by optimizer, then by the model's name
        self._next: dict[str, int] = {}

    def of(self, model: Any, optimizer: Any) -> int:
        """Return the number of the first group of the optimizer in a model."""
        first: dict[str, int] = self._first.setdefault(optimizer, {})
        if model.name not in first:
            first[model.name] = self._next.get(model.name, 0)
            self._next[model.name] = first[model.name] + len(optimizer.param_groups)
        return first[model.name]
