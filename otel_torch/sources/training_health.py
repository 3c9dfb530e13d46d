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
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.session import Session
from otel_torch.sources.active_steps import ActiveStep
from otel_torch.sources.dead_units import DeadUnits
from otel_torch.sources.events import RunEvents
from otel_torch.sources.forwards import Inputs
from otel_torch.sources.gradient_clipping import ClipWatch
from otel_torch.sources.gradient_norms import GradientNorms
from otel_torch.sources.losses import PendingLosses
from otel_torch.sources.models import Model
from otel_torch.sources.optimizers import Optimizers, optimized_parameters, steps_counted
from otel_torch.sources.owned_parameters import ParameterOwners
from otel_torch.sources.parameter_updates import ParameterUpdates
from otel_torch.sources.replacements import Replacements
from otel_torch.sources.selection import ModuleSelection
from otel_torch.sources.source import Source
from otel_torch.sources.throughput import Throughput
from otel_torch.sources.training_rows import TrainingRows
from otel_torch.sources.training_steps import TrainingStep
from otel_torch.sources.updates import OptimizerStep
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
    """

    def __init__(
        self,
        session: Session,
        selection: ModuleSelection,
        optimizers: Optimizers,
        events: RunEvents,
        is_observed: Callable[[nn.Module], bool],
    ) -> None:
        self._rows = TrainingRows(session, selection, optimizers)
        self._losses, self._clips = PendingLosses(), ClipWatch()
        owners = ParameterOwners()
        self._gradient_norms = GradientNorms(self._rows, owners, self._clips)
        self._parameter_updates = ParameterUpdates(self._rows, owners, optimizers)
        self._dead_units = DeadUnits(self._rows, is_observed)
        self._first_groups = FirstGroups()
        # to compare two recordings
        self._counts_steps = "updates" in session.settings.capture
        self.throughput = Throughput(events)
        self._stepping = _SteppingOptimizer()
        self._replacements = Replacements()
        events.forward_starting.append(_guarded(self._parameter_updates.forward_starting))
        events.training_forward.append(_guarded(self._on_training_forward))
        events.training_forward.append(_guarded(self._losses.forward_starting))
        events.training_forward.append(_guarded(self._dead_units.forward_starting))
        events.backward_starting.append(_guarded(self._on_backward_starting))
        events.backward_ended.append(_guarded(self._losses.backward_ended))
        events.optimizer_stepping.append(_guarded(self._on_optimizer_stepping))
        events.gradients_ready.append(_guarded(self._on_gradients_ready))
        events.optimizer_stepped.append(_guarded(self._parameter_updates.ended))
        events.optimizer_stepped.append(self._on_optimizer_left)
        events.optimizer_skipped.append(_guarded(self._on_optimizer_skipped))
        events.optimizer_skipped.append(self._on_optimizer_left)

    def install(self) -> None:
        """Watch clipping and the gradient scaler."""
        self._clips.install(self._replacements)
        self._replacements.replace(GradScaler, "scale", self._wrap_scale)
        self._replacements.replace(GradScaler, "unscale_", self._wrap_unscale)

    def uninstall(self) -> None:
        """Stop watching."""
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
        self._clips.keeps_each = self._rows.are_detailed(active.position)

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
        early = self._clips.take_early(parameter_ids)
        self._clips.use(parameter_ids)
        if self._rows.are_wanted(model, step):
            if early:
                self._rows.add_numbers(model, step, [("", "early_clips")], [float(early)])
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
        if self._rows.are_wanted(model, step):
            for loss in losses:
                self._rows.add(model, step, "loss", loss.measurement)

    def _add_rates(self, optimizer_step: OptimizerStep) -> None:
        """Add the learning rates and weight decays, before a scheduler changes them."""
        optimizer = optimizer_step.optimizer
        for model, parameter_ids, step in optimizer_step.updates:
            if not self._rows.are_wanted(model, step):
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
            self._rows.add_numbers(model, step, labels, list(numbers.values()))
        for label, value in settings.items():
            values = whole_values(value) if isinstance(value, Tensor) else None
            if values is not None and values.numel() == 1:
                self._rows.add_numbers(model, step, [("", label)], _flat(values))

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
            if self._rows.are_wanted(model, step):
                self._rows.add_numbers(model, step, [("", "loss_scale")], _flat(scale))
                self._rows.add_numbers(model, step, [("", "skipped")], skipped)


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
