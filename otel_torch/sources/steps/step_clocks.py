"""Numbers the step that each forward belongs to.

Two recordings can be compared only if they number their steps alike, so every record gets its step
here. `StepTracker` asks the clocks in this order, and the first that knows the step says it:

1. `trace_step`: the program names the step itself.
2. `framework`: the framework warms up, and each warm-up is a step (`warm_ups.py`).
3. `framework`: a supported framework knows it (see `Hint`).
4. `optimizer`: the model is trained. Its framework counts the steps, or the busiest optimizer that
   holds its parameters, or the changes of its parameters do.
5. `optimizer`: the model is not trained, but runs in a training step of another one, such as a
   criterion, an EMA, a teacher or a frozen encoder (`training_steps.py`).
6. `schedule`: the completed steps of the busiest denoise schedule that is not used up.
7. `forward`: the completed outermost forwards of the model. Each forward is a step.
"""

from __future__ import annotations

import threading
from typing import Any

from otel_torch import session
from otel_torch.process.console import say
from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.settings import Settings
from otel_torch.sources.events import RunEvents
from otel_torch.sources.source import Source
from otel_torch.sources.steps.active_steps import WARM_UP, ActiveStep, ActiveSteps, Position
from otel_torch.sources.steps.cadence import Cadence, Kind
from otel_torch.sources.steps.denoising import Denoising
from otel_torch.sources.steps.forwards import (
    NO_INPUTS,
    Forward,
    ForwardContext,
    Hint,
    Inputs,
    PendingForward,
    TrackedModel,
    ask_for_hint,
)
from otel_torch.sources.steps.schedules import Schedules
from otel_torch.sources.steps.trace_step import current_step_idx
from otel_torch.sources.steps.training_steps import TrainingSteps
from otel_torch.sources.steps.updates import UpdateEvents
from otel_torch.sources.steps.warm_ups import PHASE, is_warming_up
from otel_torch.torch_private import unseen_by_function_modes


def current_step_tracker() -> StepTracker | None:
    """Return the step tracker of the current session, or None while nothing is recorded."""
    running = session.current()
    return None if running is None else running.step_tracker


class StepTracker(Source):
    """Numbers the steps of one session, and opens and closes their scopes.

    >>> from otel_torch.records import Losses
    >>> from otel_torch.sources.steps.calls import CallCounter
    >>> from otel_torch.sources.steps.trace_step import trace_step
    >>> from otel_torch.sources.steps.training_clock import TrainingClock
    >>> from types import SimpleNamespace
    >>> recorder = Recorder(read=lambda pending: None, connect=list, losses=Losses())
    >>> tracker = StepTracker(Settings.from_env({}), recorder, RunEvents())
    >>> net = SimpleNamespace(name="Net", completed=0, calls=CallCounter(), clock=TrainingClock(),
    ...     parameter_ids=frozenset, trainable_parameters=list, is_in_training_mode=bool)
    >>> def forward():
    ...     context = tracker.begin_forward(net)
    ...     tracker.end_forward(net, context)
    ...     return context.rule, context.step
    >>> forward(), forward()  # nothing else is known: each forward is a step
    (('forward', 0), ('forward', 1))
    >>> with trace_step(7):
    ...     forward()
    ('trace_step', 7)
    >>> schedule = type("Schedule", (), {})()
    >>> tracker.schedule_set(schedule, 2)
    >>> forward(), forward()  # two forwards of one denoise step, such as with and without a prompt
    (('schedule', 0), ('schedule', 0))
    >>> tracker.schedule_stepped(schedule); forward()
    ('schedule', 1)
    >>> tracker.schedule_stepped(schedule); forward()  # the schedule is used up
    ('forward', 6)
    """

    def __init__(self, settings: Settings, recorder: Recorder, events: RunEvents) -> None:
        self._steps, self._events = settings.steps, events
        self.cadence = Cadence(settings.budget) if settings.budget is not None else None
        self.denoising = Denoising()
        self.pending_forward = PendingForward()
        self.seen_forwards = 0
        self.recorded_forwards = 0
        self._active = ActiveSteps(recorder, self.cadence, events)
        self.training = TrainingSteps(self._active, self.denoising)
        self.updates = UpdateEvents(events)
        self._schedules = Schedules()
        self.loop = 0
        self._warm_ups = 0
        self._loop_has_stepped = False
        self._last_traced: dict[tuple[int, int], int] = {}
        self._clocks = (
            self._by_trace_step,
            self._by_warm_up,
            self._by_framework,
            self.training.position,
            self.training.surrounding,
            self._by_schedule,
        )

    # -- lifecycle

    def forked(self) -> None:
        """Drop the steps and the forwards of the parent, and count from 0."""
        self.denoising = Denoising()
        self._active.forked()
        self.training.forked(self.denoising)
        self.pending_forward = PendingForward()
        self.seen_forwards = self.recorded_forwards = 0
        if self.cadence is not None:
            self.cadence.forked()

    @property
    def lock(self) -> Any:
        """The lock of steps, held by the thread that begins or ends one."""
        return self._active.lock

    def end_run(self) -> None:
        """End the active steps and flush: the program ends."""
        with self._active.lock:
            self.end_pending_forward()
            self._active.end_all(self._active.all())
            self.denoising.finish()
            self._active.flush(None)

    def finish(self) -> None:
        """Report what the budget did, and a selection of steps that matched none."""
        if self.cadence is not None:
            say(self.cadence.line())
        if not self.recorded_forwards:
            say(
                f"OTEL_TORCH_STEPS selects none of the steps of {self.seen_forwards} forwards, "
                "so no activation was recorded"
            )

    # -- schedules

    def schedule_set(self, schedule: Any, length: int) -> None:
        """Begin a denoise schedule of `length` steps, in a new loop if the last one has stepped."""
        with self._active.lock:
            if self._loop_has_stepped:
                self._begin_loop()
                self._schedules.clear()
            self._schedules.set(schedule, length)

    def schedule_stepped(self, schedule: Any, *, last: bool = False) -> None:
        """Count a completed step of a denoise schedule.

        `last` ends a schedule that makes fewer steps than its length because it began halfway.
        """
        with self._active.lock:
            self._schedules.stepped(schedule, last=last)
            self._loop_has_stepped = True
            active = self._active.of(None)
            if active and active.position.rule in ("schedule", "framework"):
                self._active.end(active)
            # A framework reports the end of its loop itself.
            if self._schedules.step() is None and not (
                active and active.position.rule == "framework"
            ):
                self.denoising.end_denoising()

    def _begin_loop(self) -> None:
        self.loop += 1
        self._loop_has_stepped = False
        self._last_traced.clear()

    # -- forwards

    @unseen_by_function_modes
    def begin_forward(self, model: TrackedModel, inputs: Inputs = NO_INPUTS) -> ForwardContext:
        """Begin an outermost forward of `model` in this thread, and a step if none is active."""
        with self._active.lock:
            hint = Hint(phase=PHASE) if is_warming_up() else ask_for_hint() or Hint()
            forward = Forward(model, inputs, hint, self.training.trained_by(model))
            position, phase = self._position(forward), self.training.phase(forward)
            active, is_new = self._enter(position, model)
            if phase != PHASE:
                self.training.note(forward, phase, active)
            if active.trains and phase == "forward" and forward.optimizers is not None:
                for notify in self._events.training_forward:
                    notify(active, inputs)
            context = ForwardContext(
                position.step,
                position.loop,
                phase,
                hint.branch,
                position.rule,
                position.step in self._steps,
                model.calls.of(phase, position.loop, position.step),
                active,
                is_new,
            )
            if self.cadence is not None:
                kind = Kind(position.rule, model.name, phase)
                context.recording = self.cadence.choose(
                    kind, position.step, position.loop, context.recording
                )
            self.recorded_forwards += context.recording
            self.seen_forwards += 1
            return context

    def _enter(self, position: Position, model: TrackedModel) -> tuple[ActiveStep, bool]:
        trained = self.training.trained_model
        if position.rule == "optimizer" and position.owner != model.name and trained is not None:
            model = trained
        if position.rule == "schedule":
            self.denoising.start_denoising()
        return self._active.enter(position, model)

    def end_forward(
        self, model: TrackedModel, context: ForwardContext, error: BaseException | None = None
    ) -> None:
        """End an outermost forward, and its step if it is a step by itself."""
        with self._active.lock:
            model.completed += error is None and context.phase != PHASE
            active = context.active
            if context.opened_step and not active.position.lasts:
                self._active.end(active, error)
            elif self._active.is_flush_due:
                self._active.flush(active.scope)

    def end_pending_forward(self) -> None:
        """End the forward of this thread whose end was not reported, if any."""
        pending = self.pending_forward
        model, context = pending.model, pending.context
        pending.model = pending.context = None
        pending.whole_ran = False
        if model is not None and context is not None:
            model.method_run.forget()
            self.end_forward(model, context)

    # -- clocks

    def _position(self, forward: Forward) -> Position:
        for clock in self._clocks:
            position = clock(forward)
            if position is not None:
                return position
        model = forward.model
        self.training.end_stopped()
        self.training.end_evaluations()
        model.clock.next_step = model.completed + 1
        return Position("forward", model.completed, self._loop_of(forward), model.name, lasts=False)

    def _loop_of(self, forward: Forward) -> int:
        loop = forward.hint.loop
        return self.loop if loop is None else loop

    def _by_trace_step(self, forward: Forward) -> Position | None:
        step = current_step_idx()
        if step is None:
            return None
        # A forward begins this step only where the block has not: in a thread that outlives the
        # block, or in a block that was entered before recording began.
        return Position("trace_step", step, self._loop_of(forward), None, lasts=False, bounded=True)

    def _by_warm_up(self, forward: Forward) -> Position | None:
        if forward.hint.phase != PHASE:
            return None
        return Position("framework", self._warm_ups, self._loop_of(forward), WARM_UP)

    def _by_framework(self, forward: Forward) -> Position | None:
        hint, model = forward.hint, forward.model
        if hint.step is None:
            return None
        if hint.phase == "eval":
            if forward.optimizers is not None:
                return None
            return Position("framework", hint.step, model.clock.loop, model.name, lasts=False)
        loop = self._loop_of(forward)
        return Position("framework", hint.step, loop, None, bounded=hint.bounded)

    def _by_schedule(self, forward: Forward) -> Position | None:
        step = self._schedules.step()
        if step is None:
            return None
        return Position("schedule", step, self._loop_of(forward), None, bounded=True)

    # -- steps

    @property
    def step_scope(self) -> Scope | None:
        """The scope of the step that began last and is active, if any."""
        return next((step.scope for step in reversed(self._active.all())), None)

    def begin_traced_step(self, step: int, depth: int) -> ActiveStep | None:
        """Begin the step of a `trace_step` block; None if the block is nested in another one.

        `depth` counts the blocks around this thread. Threads that trace at the same time each
        count their own loops.
        """
        with self._active.lock:
            place = threading.get_ident(), depth
            last = self._last_traced.get(place)
            if last is not None and step <= last:
                self._begin_loop()
            self._last_traced[place] = step
            self._loop_has_stepped = True
            active = self._active.of(None)
            if active is not None and active.position.rule == "trace_step":
                return None
            return self._active.begin(Position("trace_step", step, self.loop, None, bounded=True))

    def end_framework_step(self) -> None:
        """End the last step of a framework's loop, so that later forwards are not part of it."""
        with self._active.lock:
            active = self._active.of(None)
            if active is not None and active.position.rule == "framework":
                self._active.end(active)

    def end_warm_up(self) -> None:
        """End the step of a warm-up, if a forward has begun it."""
        with self._active.lock:
            active = self._active.of(WARM_UP)
            if active is not None:
                self._active.end(active)
                self._warm_ups += 1

    def end_step(self, active: ActiveStep, error: BaseException | None = None) -> None:
        """End a step. Does nothing if it has ended."""
        self._active.end(active, error)
