"""Watches what a training loop does between forwards: backward passes and optimizer steps.

Each backward pass and each optimizer step becomes a region, and an optimizer step ends the training
step of its models.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
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
from otel_torch.sources.modules import Model, ModelRegistry
from otel_torch.sources.optimizer_facts import OptimizerFacts
from otel_torch.sources.source import Source
from otel_torch.sources.steps import StepTracker
from otel_torch.sources.training_steps import TrainingStep
from otel_torch.sources.updates import Update


class Training(Source):
    """Watches every optimizer and every `backward` of the process."""

    def __init__(
        self, step_tracker: StepTracker, registry: ModelRegistry, events: RunEvents
    ) -> None:
        self._step_tracker = step_tracker
        self._registry = registry
        self._events = events
        self.facts = OptimizerFacts(step_tracker.training.optimizers)
        self._scaler: GradScaler | None = None  # whose step is running
        self._scaled_steps = self._skipped_steps = 0
        self._scopes: dict[int, Scope | None] = {}  # the open region of each stepping optimizer
        self._restore: list[Callable[[], None]] = []

    def install(self) -> None:
        """Watch from here on, including optimizers that exist already."""
        self._replace(Optimizer, "__init__", self._wrap_init)
        self._replace(Optimizer, "load_state_dict", self._wrap_load)
        self._replace(GradScaler, "step", self._wrap_scaled_step)
        self._replace(torch.autograd, "backward", self._wrap_backward)
        for function in (entry.open_region, entry.close_region):
            torch_private.keep_out_of_frames(function)
        self._restore += [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        for item in gc.get_objects():
            if issubclass(type(item), Optimizer):
                self._step_tracker.training.optimizers.found(item)

    def _replace(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(owner, name)
        replacement = functools.wraps(original)(wrap(original))
        setattr(owner, name, replacement)

        def restore() -> None:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

        self._restore.append(restore)

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
            self._scaler = scaler if scaler.is_enabled() else None
            try:
                result = scaled_step(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaler = None
            if before is not None:
                self._scaled_steps += 1
                self._skipped_steps += optimizers.completed(optimizer) == before
            return result

        return step

    def _wrap_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def traced_backward(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return backward(*args, **kwargs)
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
        """Stop watching."""
        while self._restore:
            self._restore.pop()()

    @torch_private.keep_out_of_frames
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Report the gradients of this step now, or after each evaluation of its closure."""
        _leave_graph()
        self._scopes[id(optimizer)] = entry.open_region("training_optimizer", lexical=False)
        report = functools.partial(self._report_gradients, optimizer)
        if len(args) > 1 and callable(args[1]):
            return (args[0], _followed_by(report, args[1]), *args[2:]), kwargs
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": _followed_by(report, closure)}
        report()
        return None

    def _report_gradients(self, optimizer: Optimizer) -> None:
        """Emit `gradients_ready` for every model: their gradients are complete now."""
        try:
            self._emit_gradients_ready(optimizer)
        except Exception as error:
            say_once(f"the gradients of a step are not recorded: {type(error).__name__}: {error}")

    def _emit_gradients_ready(self, optimizer: Optimizer) -> None:
        tracker = self._step_tracker
        tracker.training.optimizers.stepping(optimizer)
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
        models = list(self._registry.models)[::-1]
        # a parameter that several models hold belongs to the one that this optimizer trains most of
        updated = {
            model: tracker.training.optimizers.updated_by(optimizer, model) for model in models
        }
        models.sort(key=lambda model: len(updated[model] & model.parameter_ids()), reverse=True)
        reported: frozenset[int] = frozenset()
        updates = []
        for model in models:
            context = model.forward_context
            if tracker.cadence is not None and context is not None and not context.recording:
                continue  # the budget skips this step
            parameters = updated[model] - reported
            if not parameters.isdisjoint(model.parameter_ids()):
                step = self._notify(model, parameters, scale)
                updates.append(Update(model, parameters, step))
                reported |= model.parameter_ids()
        self.facts.add(optimizer, updates, self._scaler)
        tracker.updates.begin(optimizer, updates)

    def _notify(
        self, model: Model, parameters: frozenset[int], scale: Tensor | None = None
    ) -> TrainingStep:
        step = self._step_tracker.training.step_of(model, self._step_tracker.loop)
        for notify in self._events.gradients_ready:
            notify(model, parameters, step, scale)
        return step

    @torch_private.keep_out_of_frames
    def _after_backward(self) -> None:
        """Emit `gradients_ready` for the models that the program updates without an optimizer."""
        try:
            updated = self._step_tracker.training.backward_ended()
            for model in updated:
                self._notify(model, model.parameter_ids())
            self._step_tracker.training.flush_late_gradients()
        except Exception as error:
            say_once(f"a backward pass is not counted: {type(error).__name__}: {error}")

    @torch_private.keep_out_of_frames
    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _leave_graph()
        entry.close_region(self._scopes.pop(id(optimizer), None))
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
