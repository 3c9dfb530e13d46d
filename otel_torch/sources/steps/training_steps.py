"""Follows training loops: which step a model that is trained is in, and what runs around it.

A training step ends when every optimizer of the process has stepped. If some do not, it ends before
the next forward that is no part of it: a second optimizer of the model may still step, and a
generator's loss may run the critic again, whose optimizer has stepped.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from otel_torch.records import Scope
from otel_torch.regions import entry
from otel_torch.sources.steps.active_steps import FIRST, ActiveStep, ActiveSteps, Position
from otel_torch.sources.steps.denoising import Denoising
from otel_torch.sources.steps.forwards import Forward, ForwardContext, Inputs, TrackedModel
from otel_torch.sources.steps.optimizers import OptimizerClock, Optimizers
from otel_torch.sources.steps.training_clock import UpdateWatch
from otel_torch.torch_private import unseen_by_function_modes


class TrainingStep(NamedTuple):
    """The training step of a model. `scope`: None if no forward of the model has begun it."""

    step: int
    loop: int
    scope: Scope | None


@dataclass(slots=True)
class TrainingLoop:
    """The training loop that the program is in: what a model without a clock of its own follows.

    Attributes:
        model: the trained model that ran last.
        phase: of its last forward.
        mode: whether the model was in training mode then.
        step: the training step that it began or continued, until an optimizer steps.
        begun: how many training steps have begun.
    """

    model: TrackedModel | None = None
    phase: str = "forward"
    mode: bool = True
    step: ActiveStep | None = None
    begun: int = 0

    def evaluates(self) -> bool:
        """Return whether what runs without gradients now is part of an evaluation.

        The last forward of the trained model tells, unless its mode was switched since then.
        """
        if self.model is None:
            return False
        mode = self.model.is_in_training_mode()
        return self.phase == "eval" if mode == self.mode else not mode


class _WatchedModels(threading.local):
    """The models without an optimizer that a thread has run, whose gradients it may read."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()


class TrainingSteps:
    """The training steps of one session."""

    def __init__(self, steps: ActiveSteps, denoising: Denoising) -> None:
        self.optimizers = Optimizers()
        self._steps, self._denoising = steps, denoising
        self._loop = TrainingLoop()
        self._of_thread = _WatchedModels()
        self._undivided = 0  # how many blocks of `one_training_step` are running

    def forked(self, denoising: Denoising) -> None:
        """Follow no loop of the parent."""
        self._denoising, self._loop = denoising, TrainingLoop()

    # -- what training does

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a completed optimizer step, which ends training steps."""
        with self._steps.lock:
            clock = self.optimizers.stepped(optimizer)
            self._loop.step = None
            for active in self._steps.training():
                active.stepped.add(clock.serial)
                model = active.model
                trains = model is not None and clock in self.optimizers.training(model)
                if model is not None and trains:
                    model.clock.is_trained = True
                is_last = len(active.stepped) >= len(self.optimizers) and not self._undivided
                if trains or active.is_resumed:
                    self._stop(active, flush=not is_last)
                if is_last:
                    self._steps.end(active)  # which flushes

    @contextmanager
    def one_training_step(self) -> Iterator[None]:
        """Make the block at most one training step, however many optimizers step in it."""
        self._undivided += 1
        try:
            yield
        finally:
            self._undivided -= 1
            with self._steps.lock:
                self.end_stopped()

    @unseen_by_function_modes
    def backward_ended(self) -> list[Any]:
        """Return the models that the program updates without an optimizer, and watch them."""
        with self._steps.lock:
            models, updated = list(self._of_thread.models), []
            self._of_thread.models.clear()
            for model in models:
                if model.clock.updates is not None and not self.optimizers.training(model):
                    model.clock.updates.backward_ended()
                    updated.append(model)
            return updated if not self.optimizers.has_stepped else []

    def flush_late_gradients(self) -> None:
        """Flush the gradients of steps that have ended, before another one begins."""
        with self._steps.lock:
            if not self._steps.all():
                self._steps.flush(None)

    def step_of(self, model: TrackedModel, loop: int) -> TrainingStep:
        """Return the training step of a model; `loop` is that of one that was never trained."""
        active = self._steps.of(model.name) or self._steps.of(None)
        if active is not None and active.position.rule == "optimizer":
            return TrainingStep(active.position.step, active.position.loop, active.scope)
        scope = None if active is None else active.scope
        optimizers = self.optimizers.training(model)
        if not optimizers and not model.clock.is_trained:
            return TrainingStep(max(0, model.completed - 1), loop, scope)
        step = self._next_step(model, optimizers)
        return TrainingStep(step, model.clock.loop_of(step, optimizers), scope)

    def _next_step(self, model: TrackedModel, optimizers: list[OptimizerClock]) -> int:
        return self.optimizers.step_of(optimizers) if optimizers else model.clock.next_step

    def _stop(self, active: ActiveStep, *, flush: bool = True) -> None:
        """Note that a training step is over, unless something still belongs to it."""
        if flush and not active.stopped_ns:
            self._steps.flush(active.scope)
        active.stopped_ns = time.time_ns()

    # -- where a forward is

    @property
    def trained_model(self) -> TrackedModel | None:
        """The trained model that ran last, if any."""
        return self._loop.model

    def _current(self) -> ActiveStep | None:
        """Return the training step that a trained model is in, until an optimizer steps."""
        step = self._loop.step
        if step is None or self._steps.of(step.position.owner) is not step:
            return None
        return step

    def trained_by(self, model: TrackedModel) -> list[OptimizerClock] | None:
        """Return the optimizers that train a model; None if it is not trained."""
        optimizers = self.optimizers.training(model)
        clock = model.clock
        if not optimizers:
            self._watch_updates(model)
            return optimizers if clock.is_trained else None
        # Copies of an unknown model's parameters: without gradients it is rather a teacher.
        is_presumed = not (optimizers[0].is_claimed or clock.is_trained)
        return None if is_presumed and not torch.is_grad_enabled() else optimizers

    def position(self, forward: Forward) -> Position | None:
        """Return the step of a forward of a model that is trained."""
        model, optimizers = forward.model, forward.optimizers
        if optimizers is None:
            return None
        active = self._steps.of(model.name)
        step = self._next_step(model, optimizers)
        if active is not None:
            if self._is_part_of(forward, active, step):
                active.stopped_ns, active.count = 0, step
                return active.position
            self._steps.end(active)
        if not torch.is_grad_enabled():
            self.end_stopped()
        return Position("optimizer", step, model.clock.loop_of(step, optimizers), model.name)

    def surrounding(self, forward: Forward) -> Position | None:
        """Return the step of a forward around which another model is trained."""
        model, trained = forward.model, self._loop.model
        if (current := self._current()) is not None:
            return current.position
        if trained is None:
            first = self.optimizers.first_step()
            return None if first is None else Position("optimizer", first, 0, FIRST)
        optimizers = self.optimizers.training(trained)
        step = self._next_step(trained, optimizers)
        loop = trained.clock.loop_of(step, optimizers)
        if not torch.is_grad_enabled() and self._is_evaluating(model):
            self.end_stopped()
            return Position("optimizer", step, loop, trained.name)
        if self._follows(model) and self._is_alive(trained):
            # Between two training steps: part of the last if it first ran there, else of the next.
            self.end_stopped()
            if model.clock.trails == trained.name:
                last = trained.clock.next_step - 1
                return Position("optimizer", last, trained.clock.loop, model.name, lasts=False)
            position = Position("optimizer", step, loop, trained.name)
            self._loop.step, _ = self._steps.enter(position, trained)
            return position
        return None

    def phase(self, forward: Forward) -> str:
        if forward.hint.phase is not None:
            return forward.hint.phase
        if torch.is_grad_enabled():
            return "forward"
        if forward.optimizers is not None or self._is_evaluating(forward.model):
            return "eval"
        return "forward"

    def note(self, forward: Forward, phase: str, active: ActiveStep) -> None:
        """Keep what models without a clock of their own follow."""
        loop, model = self._loop, forward.model
        if forward.optimizers is None:
            clock = model.clock
            current = self._current()
            if clock.ran_before is None and loop.begun and loop.model and current is None:
                clock.trails = loop.model.name
            clock.follows |= current is not None
            clock.ran_before = loop.begun
            return
        loop.model = model
        if not self._denoising.is_in_pipeline:  # whose end ends an evaluation
            loop.phase, loop.mode = phase, model.is_in_training_mode()
        if phase != "forward" or active.position.rule != "optimizer":
            return
        loop.step = active
        if not active.trains:
            active.trains = True
            loop.begun += 1
            model.clock.begin(active.position.step, forward.optimizers)
            active.region = entry.open_region("training_step", lexical=False, around=active.scope)

    @unseen_by_function_modes
    def continues(self, context: ForwardContext, model: TrackedModel, inputs: Inputs) -> bool:
        """Return whether a call is still part of the step of a pending forward."""
        active = context.active
        return not active.stopped_ns or self._resumes(active, model, inputs)

    def end_stopped(self) -> None:
        """End training steps that are over, before a forward that is part of none."""
        self._steps.end_all([step for step in self._steps.all() if step.stopped_ns])

    def end_evaluations(self) -> None:
        """End evaluations, before a forward that is part of none."""
        self._steps.end_all([step for step in self._steps.training() if not step.trains])

    def _watch_updates(self, model: TrackedModel) -> None:
        """See whether the parameters of a model without an optimizer have changed."""
        clock = model.clock
        if clock.updates is not None and clock.updates.has_changed:
            clock.updates = None
            if not clock.is_trained:
                clock.is_trained = clock.is_updated_in_place = True
                clock.next_step = model.completed
            elif (active := self._steps.of(model.name)) is not None:
                self._stop(active)
        if torch.is_grad_enabled():
            if clock.updates is None and (parameters := model.trainable_parameters()):
                clock.updates = UpdateWatch((parameters[0], parameters[-1]))
            if clock.updates is not None:
                self._of_thread.models.add(model)

    def _is_part_of(self, forward: Forward, active: ActiveStep, step: int) -> bool:
        """Return whether a forward of a trained model is part of its active step."""
        if active.position.rule != "optimizer" or not active.position.lasts:
            return False
        if active.stopped_ns:
            return self._resumes(active, forward.model, forward.inputs)
        return not forward.optimizers or active.count == step

    def _resumes(self, active: ActiveStep, model: TrackedModel, inputs: Inputs) -> bool:
        """Return whether a forward is part of a training step although an optimizer has stepped.

        It is if the optimizers of the called module have not, or if its inputs come from another
        forward of the step whose optimizer has not.
        """
        if self._undivided:
            return True
        if not torch.is_grad_enabled():
            return False
        own = self.optimizers.training(model)
        if inputs.module is not None:
            parameters = model.parameter_ids_of(inputs.module)
            holding = [clock.serial for clock in own if clock.trains(parameters)]
            if holding and active.stepped.isdisjoint(holding):
                return True
        if not inputs.carry_gradients():
            return False
        step = self._current()
        if step is not None and step.model is not None:
            own = own + self.optimizers.training(step.model)
        return any(clock.serial not in active.stepped for clock in own)

    def _is_evaluating(self, model: TrackedModel) -> bool:
        """Return whether a model that runs without gradients takes part in an evaluation."""
        trained = self._loop.model
        if trained is None:
            return False
        is_known = self._follows(model) or self._is_alive(trained)
        return is_known and (self._denoising.is_in_pipeline or self._loop.evaluates())

    def _is_alive(self, trained: TrackedModel) -> bool:
        """Return whether the training of a model may go on."""
        return trained.clock.is_updated_in_place or bool(self.optimizers.training(trained))

    def _follows(self, model: TrackedModel) -> bool:
        """Return whether a model has run in training steps, or in front of one."""
        clock = model.clock
        clock.follows |= clock.ran_before is not None and clock.ran_before < self._loop.begun
        return clock.follows
