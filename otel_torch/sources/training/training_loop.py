"""Watches what a training loop does between forwards: backward passes and optimizer steps.

Each backward pass and each optimizer step becomes a region, and an optimizer step ends the training
step of its models.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from otel_torch import torch_private
from otel_torch.process.console import say, say_once
from otel_torch.records import Scope
from otel_torch.regions import entry
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.models.model_registry import ModelRegistry
from otel_torch.sources.replacements import Replacements
from otel_torch.sources.source import Source
from otel_torch.sources.steps.step_clocks import StepTracker
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.steps.updates import OptimizerStep, Update
from otel_torch.sources.training.learning_rate_schedules import LearningRateSchedules
from otel_torch.sources.training.optimizer_facts import OptimizerFacts


class _RunningStep(threading.local):
    """`scaler`: the gradient scaler whose step is running in a thread."""

    scaler: GradScaler | None = None


class Training(Source):
    """Watches every optimizer and every `backward` of the process."""

    def __init__(
        self, step_tracker: StepTracker, registry: ModelRegistry, events: RunEvents
    ) -> None:
        self._step_tracker = step_tracker
        self._registry = registry
        self._events = events
        self._schedules = LearningRateSchedules()
        self.facts = OptimizerFacts(step_tracker.training.optimizers, self._schedules)
        self._running = _RunningStep()
        self._scaled_steps = self._skipped_steps = 0
        # by optimizer that is stepping: its open region, and what it does
        self._scopes: dict[int, Scope | None] = {}
        self._steps: dict[int, OptimizerStep] = {}
        self._replacements = Replacements()

    def install(self) -> None:
        """Watch from here on, including optimizers that exist already."""
        replace = self._replacements.replace
        replace(Optimizer, "__init__", self._wrap_init)
        replace(Optimizer, "load_state_dict", self._wrap_load)
        self._schedules.install(self._replacements)
        replace(GradScaler, "step", self._wrap_scaled_step)
        replace(torch.autograd, "backward", self._wrap_backward)
        for function in (entry.open_region, entry.close_region):
            torch_private.keep_out_of_frames(function)
        self._replacements.on_restore(register_optimizer_step_pre_hook(self._before_step).remove)
        self._replacements.on_restore(register_optimizer_step_post_hook(self._after_step).remove)
        for item in gc.get_objects():
            if issubclass(type(item), Optimizer):
                self._step_tracker.training.optimizers.found(item)

    def _wrap_init(self, make: Callable[..., None]) -> Callable[..., None]:
        optimizers = self._step_tracker.training.optimizers

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            optimizers.made(optimizer)

        return init

    def _wrap_load(self, load: Callable[..., None]) -> Callable[..., None]:
        optimizers = self._step_tracker.training.optimizers

        def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            load(optimizer, *args, **kwargs)
            optimizers.loaded(optimizer)

        return load_state_dict

    def _wrap_scaled_step(self, scaled_step: Callable[..., Any]) -> Callable[..., Any]:
        optimizers = self._step_tracker.training.optimizers

        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = optimizers.completed(optimizer)
            self._running.scaler = scaler if scaler.is_enabled() else None
            try:
                result = scaled_step(scaler, optimizer, *args, **kwargs)
                if before is not None:
                    self._scaled_steps += 1
                    if optimizers.completed(optimizer) == before:
                        self._skipped_steps += 1
                        self._emit(self._events.optimizer_skipped, self._step_of(optimizer))
                return result
            finally:
                self._running.scaler = None

        return step

    def _wrap_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def traced_backward(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return backward(*args, **kwargs)
            self._before_backward(args, kwargs)
            scope = entry.open_region("training_backward")
            try:
                backward(*args, **kwargs)
            except BaseException as error:
                entry.close_region(scope, error)
                raise
            entry.close_region(scope)
            self._after_backward()
            self._events.resume_program()
            return None

        torch_private.keep_out_of_frames(traced_backward, with_callees=False)
        return traced_backward

    def finish(self) -> None:
        """Record the last update, and report the steps that a GradScaler has skipped."""
        self._step_tracker.updates.emit_copied()
        if self._skipped_steps:
            say(
                f"GradScaler skipped {self._skipped_steps} of {self._scaled_steps} optimizer steps "
                "because of a NaN or Inf: their forwards are calls of the step that followed"
            )

    def uninstall(self) -> None:
        self._replacements.restore()

    @torch_private.keep_out_of_frames
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Report the gradients of this step now, or after each evaluation of its closure."""
        _leave_graph()
        return self._begin_step(optimizer, args, kwargs)

    @torch_private.keep_out_of_frames
    def _begin_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._scopes[id(optimizer)] = entry.open_region("training_optimizer", lexical=False)
        self._steps[id(optimizer)] = step = self._step_of(optimizer)
        self._emit(self._events.optimizer_stepping, step)

        def report() -> None:
            self._report_gradients(self._after_closure(optimizer))

        if len(args) > 1 and callable(args[1]):
            return (args[0], _followed_by(report, args[1]), *args[2:]), kwargs
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": _followed_by(report, closure)}
        self._report_gradients(step)
        return None

    def _after_closure(self, optimizer: Optimizer) -> OptimizerStep:
        """Return the running step, and emit `optimizer_stepping` for models first called in it."""
        step = self._step_of(optimizer)
        begun = self._steps.get(id(optimizer), step).updates
        known = {update.model for update in begun}
        found = [update for update in step.updates if update.model not in known]
        if found:
            new = dataclasses.replace(step, updates=found)
            self._emit(self._events.optimizer_stepping, new)
            both = dataclasses.replace(step, updates=[*begun, *found])
            self._steps[id(optimizer)] = both
        return step

    @staticmethod
    def _emit(subscribers: Sequence[Callable[[OptimizerStep], None]], step: OptimizerStep) -> None:
        for notify in subscribers:
            try:
                notify(step)
            except Exception as error:
                say_once(f"an optimizer step is not recorded: {type(error).__name__}: {error}")

    def _step_of(self, optimizer: Optimizer) -> OptimizerStep:
        try:
            updates = self._updates_by(optimizer)
        except Exception as error:
            say_once(f"an optimizer step is not recorded: {type(error).__name__}: {error}")
            updates = []
        return OptimizerStep(optimizer, updates, self._running.scaler)

    def _updates_by(self, optimizer: Optimizer) -> list[Update]:
        """Return what a step of the optimizer changes, without what the budget skips."""
        tracker = self._step_tracker
        optimizers = tracker.training.optimizers
        optimizers.stepping(optimizer)
        models = list(self._registry.models)[::-1]
        # a parameter that several models hold belongs to the one that this optimizer trains most of
        updated = {model: optimizers.updated_by(optimizer, model) for model in models}
        models.sort(key=lambda model: len(updated[model] & model.parameter_ids()), reverse=True)
        reported: frozenset[int] = frozenset()
        updates = []
        for model in models:
            context = model.forward_context
            if tracker.cadence is not None and context is not None and not context.recording:
                continue  # the budget skips this step
            parameters = updated[model] - reported
            if not parameters.isdisjoint(model.parameter_ids()):
                step = tracker.training.step_of(model, tracker.loop)
                updates.append(Update(model, parameters, step))
                reported |= model.parameter_ids()
        return updates

    def _report_gradients(self, optimizer_step: OptimizerStep) -> None:
        """Emit `gradients_ready` for every model: their gradients are complete now."""
        optimizer, updates = optimizer_step.optimizer, optimizer_step.updates
        try:
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
            for model, parameters, step in updates:
                self._notify(model, parameters, step, scale)
            self.facts.add(optimizer, updates, optimizer_step.scaler)
            self._step_tracker.updates.begin(optimizer, updates)
        except Exception as error:
            say_once(f"the gradients of a step are not recorded: {type(error).__name__}: {error}")

    def _notify(
        self,
        model: Model,
        parameters: frozenset[int],
        step: TrainingStep,
        scale: Tensor | None = None,
    ) -> None:
        for notify in self._events.gradients_ready:
            notify(model, parameters, step, scale)

    @torch_private.keep_out_of_frames
    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Emit `backward_starting`, unless another backward pass makes this one."""
        try:
            if torch_private.graph_task_id() == -1:
                roots = args[0] if args else kwargs["tensors"]
                roots = (roots,) if isinstance(roots, Tensor) else tuple(roots)
                for notify in self._events.backward_starting:
                    notify(roots)
        except Exception as error:
            say_once(f"the start of a backward pass is not recorded: {error}")

    @torch_private.keep_out_of_frames
    def _after_backward(self) -> None:
        """Emit `gradients_ready` for the models that the program updates without an optimizer."""
        try:
            if torch_private.graph_task_id() == -1:
                for notify in self._events.backward_ended:
                    notify()
            training = self._step_tracker.training
            for model in training.backward_ended():
                step = training.step_of(model, self._step_tracker.loop)
                self._notify(model, model.parameter_ids(), step)
            training.flush_late_gradients()
        except Exception as error:
            say_once(f"a backward pass is not counted: {type(error).__name__}: {error}")

    @torch_private.keep_out_of_frames
    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _leave_graph()
        self._end_step(optimizer)

    @torch_private.keep_out_of_frames
    def _end_step(self, optimizer: Optimizer) -> None:
        entry.close_region(self._scopes.pop(id(optimizer), None))
        step = self._steps.pop(id(optimizer), None)
        if step is not None:
            self._emit(self._events.optimizer_stepped, step)
        try:
            self._step_tracker.updates.end(optimizer)
            self._step_tracker.training.optimizer_stepped(optimizer)
        except Exception as error:
            say_once(
                f"a step of {type(optimizer).__name__} is not counted: "
                f"{type(error).__name__}: {error}"
            )
        self._events.resume_program()


def _followed_by(report: Callable[[], None], closure: Callable[..., Any]) -> Callable[..., Any]:
    """Return a closure that does the same, and reports the gradients that it computed.

    Before a closure runs, the parameters still have the gradients of the step before.
    """

    @functools.wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        report()
        return loss

    torch_private.keep_out_of_frames(evaluate, with_callees=False)
    return evaluate


def _leave_graph() -> None:
    """Keep the calling hook out of the graph, if the compiler is tracing it.

    Torch breaks the graph around every optimizer step anyway.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
