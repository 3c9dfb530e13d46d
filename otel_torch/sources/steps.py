"""Numbers the step that each forward belongs to.

Two recordings can be compared only if they number their steps alike, so every record gets its step
here. `StepTracker` asks the clocks in this order, and the first that knows the step says it:

1. `trace_step`: the program names the step itself.
2. `framework`: a supported framework knows it (see `Hint`).
3. `optimizer`: the model is trained. Its framework counts the steps, or the busiest optimizer that
   holds its parameters, or the changes of its parameters do.
4. `optimizer`: the model is not trained, but runs in a training step of another one, such as a
   criterion, an EMA, a teacher or a frozen encoder: see `TrainingLoop`.
5. `schedule`: the completed steps of the busiest denoise schedule that is not used up.
6. `forward`: the completed outermost forwards of the model. Each forward is a step.

A training step ends when every optimizer of the process has stepped. If some do not, it ends before
the next forward that is no part of it: a second optimizer of the model may still step, and a
generator's loss may run the critic again, whose optimizer has stepped.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from otel_torch import session
from otel_torch.process.console import say
from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.regions import entry
from otel_torch.settings import Settings
from otel_torch.sources.cadence import Cadence, Kind
from otel_torch.sources.calls import CallCounter, StepCalls
from otel_torch.sources.denoising import Denoising
from otel_torch.sources.events import RunEvents
from otel_torch.sources.optimizers import OptimizerClock, Optimizers
from otel_torch.sources.schedules import Schedules
from otel_torch.sources.source import Source
from otel_torch.sources.trace_step import current_step_idx
from otel_torch.sources.training_clock import TrainingClock, UpdateWatch
from otel_torch.sources.uncalled_roots import RootMethodRun
from otel_torch.torch_private import unobserved, unseen_by_function_modes

Rule = Literal["trace_step", "framework", "optimizer", "schedule", "forward"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A framework's knowledge of the forward that is about to run; None for what is unknown.

    `bounded`: whether the framework's loop has a known length.
    """

    step: int | None = None
    loop: int | None = None
    branch: str | None = None
    phase: str | None = None
    bounded: bool = True


# Asked in order, in the calling thread, at the start of every outermost forward. The first that
# returns a hint wins.
hint_providers: list[Callable[[], Hint | None]] = []


class TrackedModel(Protocol):
    """The part of a model that the tracker needs."""

    name: str
    completed: int
    calls: CallCounter
    clock: TrainingClock
    method_run: RootMethodRun

    def parameter_ids(self) -> frozenset[int]: ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]: ...

    def is_in_training_mode(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an outermost forward was called with. `module`: None if a compiled graph was called."""

    module: nn.Module | None = None
    values: tuple[Any, ...] = ()

    def carry_gradients(self) -> bool:
        """Return whether an input was computed from parameters that a backward pass will reach."""
        return any(
            isinstance(value, torch.Tensor) and value.grad_fn is not None for value in self.values
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """An outermost forward that begins.

    `optimizers`: those that train the model; empty if the program updates it without any; None if
    it is not trained.
    """

    model: TrackedModel
    inputs: Inputs
    hint: Hint
    optimizers: list[OptimizerClock] | None


@dataclass(slots=True)
class ForwardContext:
    """One outermost forward: the part of a record's key that all its modules share.

    `calls` counts the module calls of the step. `opened_step`: whether this forward began `active`.
    """

    step: int
    loop: int
    phase: str
    branch: str | None
    rule: Rule
    recording: bool
    calls: StepCalls
    active: ActiveStep
    opened_step: bool = False


# Whose step it is: a model's name, or None for a step of the whole program.
Owner = str | None
# Owns a training step until the model that is trained runs.
_FIRST = ""


@dataclass(frozen=True, slots=True)
class Position:
    """The step that a clock says. `lasts`: whether it goes on after the forward that began it."""

    rule: Rule
    step: int
    loop: int
    owner: Owner
    lasts: bool = True
    bounded: bool = False


@dataclass(slots=True, eq=False)
class ActiveStep:
    """A step from its first forward to its end, as a scope.

    Attributes:
        model: the first one that ran in it; of a training step the one that is trained.
        trains: whether that one has run with gradients in it; it may have been evaluated only.
        region: the open `training_step` region, if any.
        stepped: the serials of the optimizers that have stepped since it began.
        stopped_ns: when the last optimizer of its model stepped; 0 if the step was resumed since.
        count: what the clock of its model says while it is not stopped.
    """

    scope: Scope
    position: Position
    model: TrackedModel | None
    trains: bool = False
    region: Scope | None = None
    stepped: set[int] = field(default_factory=set)
    stopped_ns: int = 0
    count: int = 0

    @property
    def is_resumed(self) -> bool:
        """Whether it continues although an optimizer of its model has stepped."""
        return self.count != self.position.step

    def holds(self, position: Position) -> bool:
        """Return whether a forward at a position is part of this step of the same owner.

        `trace_step` steps, whatever they number, end with their block, and a framework's step ends
        with the next one.
        """
        own = self.position
        return (
            (own.step, own.loop) == (position.step, position.loop)
            or own.rule == "trace_step"
            or (own.rule == "framework" and position.rule != "framework")
        )


class TrainingStep(NamedTuple):
    """The training step of a model. `scope`: None if no forward of the model has begun it."""

    step: int
    loop: int
    scope: Scope | None


class PendingForward(threading.local):
    """A forward of this thread whose end torch does not report.

    `vae.decode(z)` calls the modules of `vae` but never `vae` itself, and a compiled function calls
    no module at all. Such a forward ends when the next one begins, or at a point where it must have
    ended, such as the end of a pipeline.
    """

    def __init__(self) -> None:
        self.model: TrackedModel | None = None
        self.context: ForwardContext | None = None
        self.first_compiled: object = None  # the compiled module whose call began the forward
        self.whole_ran = False  # whether a module that holds every parameter has run in it


def current_step_tracker() -> StepTracker | None:
    """Return the step tracker of the current session, or None while nothing is recorded."""
    running = session.current()
    return None if running is None else running.step_tracker


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


class StepTracker(Source):
    """Numbers the steps of one session, and opens and closes their scopes.

    >>> from otel_torch.records import Losses
    >>> from otel_torch.sources.trace_step import trace_step
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
        self._recorder = recorder
        self._steps = settings.steps
        self._events = events
        self.cadence = Cadence(settings.budget) if settings.budget is not None else None
        self.denoising = Denoising()
        self.optimizers = Optimizers()
        self.pending_forward = PendingForward()
        self.seen_forwards = 0
        self.recorded_forwards = 0
        self._lock = threading.RLock()
        self._active: dict[Owner, ActiveStep] = {}
        self._training = TrainingLoop()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()  # models
        self._schedules = Schedules()
        self._undivided = 0  # how many blocks of `one_training_step` are running
        self._loop = 0
        self._loop_has_stepped = False
        self._last_traced: dict[tuple[int, int], int] = {}
        self._clocks = (
            self._by_trace_step,
            self._by_framework,
            self._by_training,
            self._by_surrounding_training,
            self._by_schedule,
        )

    # -- lifecycle
    # ----------------------------------------------------------------------------------------------

    def forked(self) -> None:
        """Drop the steps and the forwards of the parent, and count from 0."""
        self._lock = threading.RLock()
        self._active = {}
        self._training = TrainingLoop()
        self.denoising = Denoising()
        self.pending_forward = PendingForward()
        self.seen_forwards = self.recorded_forwards = 0
        if self.cadence is not None:
            self.cadence.forked()

    @property
    def lock(self) -> Any:
        """The lock of steps, held by the thread that begins or ends one."""
        return self._lock

    def end_run(self) -> None:
        """End the active steps and flush: the program ends."""
        with self._lock:
            self.end_pending_forward()
            self._end_steps(list(self._active.values()))
            self.denoising.finish()
            self._flush(None)

    def finish(self) -> None:
        """Report what the budget did, and a selection of steps that matched none."""
        if self.cadence is not None:
            say(self.cadence.line())
        if not self.recorded_forwards:
            say(
                f"OTEL_TORCH_STEPS selects none of the steps of {self.seen_forwards} forwards, "
                "so no activation was recorded"
            )

    # -- training
    # ----------------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a completed optimizer step, which ends training steps."""
        with self._lock:
            clock = self.optimizers.stepped(optimizer)
            self._training.step = None
            for active in self._training_steps():
                active.stepped.add(clock.serial)
                if active.model is not None and clock in self.optimizers.training(active.model):
                    active.model.clock.is_trained = True
                    self._stop(active)
                elif active.is_resumed:
                    self._stop(active)
                if len(active.stepped) >= len(self.optimizers) and not self._undivided:
                    self.end_step(active)

    @contextmanager
    def one_training_step(self) -> Iterator[None]:
        """Make the block at most one training step, however many optimizers step in it."""
        self._undivided += 1
        try:
            yield
        finally:
            self._undivided -= 1
            with self._lock:
                self._end_stopped()

    @unseen_by_function_modes
    def backward_ended(self) -> list[Any]:
        """Return the models that the program updates without an optimizer, and watch them."""
        with self._lock:
            models, updated = list(self._watched), []
            self._watched.clear()
            for model in models:
                if model.clock.updates is not None and not self.optimizers.training(model):
                    model.clock.updates.backward_ended()
                    updated.append(model)
            return updated if not self.optimizers.has_stepped else []

    def flush_late_gradients(self) -> None:
        """Flush the gradients of steps that have ended, before another one begins."""
        with self._lock:
            if not self._active:
                self._flush(None)

    def training_step_of(self, model: TrackedModel) -> TrainingStep:
        """Return the training step that the model is in."""
        active = self._active.get(model.name) or self._active.get(None)
        if active is not None and active.position.rule == "optimizer":
            return TrainingStep(active.position.step, active.position.loop, active.scope)
        scope = None if active is None else active.scope
        optimizers = self.optimizers.training(model)
        if not optimizers and not model.clock.is_trained:
            return TrainingStep(max(0, model.completed - 1), self._loop, scope)
        step = self._next_step(model, optimizers)
        return TrainingStep(step, model.clock.loop_of(step, optimizers), scope)

    def _next_step(self, model: TrackedModel, optimizers: list[OptimizerClock]) -> int:
        return self.optimizers.step_of(optimizers) if optimizers else model.clock.next_step

    def _training_steps(self) -> list[ActiveStep]:
        return [step for step in self._active.values() if step.position.rule == "optimizer"]

    def _stop(self, active: ActiveStep) -> None:
        """Note that a training step is over, unless something still belongs to it."""
        if not active.stopped_ns:
            self._flush(active.scope)
        active.stopped_ns = time.time_ns()

    def _end_stopped(self) -> None:
        """End training steps that are over, before a forward that is part of none."""
        self._end_steps([step for step in self._active.values() if step.stopped_ns])

    def _end_evaluations(self) -> None:
        self._end_steps([step for step in self._training_steps() if not step.trains])

    # -- schedules
    # ----------------------------------------------------------------------------------------------

    def schedule_set(self, schedule: Any, length: int) -> None:
        """Begin a denoise schedule of `length` steps, in a new loop if the last one has stepped."""
        with self._lock:
            if self._loop_has_stepped:
                self._begin_loop()
                self._schedules.clear()
            self._schedules.set(schedule, length)

    def schedule_stepped(self, schedule: Any, *, last: bool = False) -> None:
        """Count a completed step of a denoise schedule.

        `last` ends a schedule that makes fewer steps than its length because it began halfway.
        """
        with self._lock:
            self._schedules.stepped(schedule, last=last)
            self._loop_has_stepped = True
            active = self._active.get(None)
            if active and active.position.rule in ("schedule", "framework"):
                self.end_step(active)
            # A framework reports the end of its loop itself.
            if self._schedules.step() is None and not (
                active and active.position.rule == "framework"
            ):
                self.denoising.end_denoising()

    def _begin_loop(self) -> None:
        self._loop += 1
        self._loop_has_stepped = False
        self._last_traced.clear()

    # -- forwards
    # ----------------------------------------------------------------------------------------------

    @unseen_by_function_modes
    def begin_forward(self, model: TrackedModel, inputs: Inputs = Inputs()) -> ForwardContext:
        """Begin an outermost forward of `model` in this thread, and a step if none is active."""
        with self._lock:
            hint = _ask_for_hint() or Hint()
            forward = Forward(model, inputs, hint, self._trained_by(model))
            position, phase = self._position(forward), self._phase(forward)
            trained = self._training.model
            of_another = position.rule == "optimizer" and position.owner != model.name
            active, is_new = self._enter(position, trained if trained and of_another else model)
            self._note_training(forward, phase, active)
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

    def _phase(self, forward: Forward) -> str:
        if forward.hint.phase is not None:
            return forward.hint.phase
        if torch.is_grad_enabled():
            return "forward"
        if forward.optimizers is not None or self._is_evaluating(forward.model):
            return "eval"
        return "forward"

    def _note_training(self, forward: Forward, phase: str, active: ActiveStep) -> None:
        """Keep what models without a clock of their own follow."""
        loop, model = self._training, forward.model
        if forward.optimizers is None:
            clock = model.clock
            if clock.ran_before is None:
                clock.trails = loop.begun > 0 and loop.step is None
            clock.follows |= loop.step is not None
            clock.ran_before = loop.begun
            return
        loop.model = model
        if not self.denoising.is_in_pipeline:  # whose end ends an evaluation
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

    def end_forward(
        self, model: TrackedModel, context: ForwardContext, error: BaseException | None = None
    ) -> None:
        """End an outermost forward, and its step if it is a step by itself."""
        with self._lock:
            model.completed += error is None
            active = context.active
            if context.opened_step and not active.position.lasts:
                self.end_step(active, error)
            elif self._recorder.is_flush_due:
                self._flush(active.scope)

    def end_pending_forward(self) -> None:
        """End the forward of this thread whose end was not reported, if any."""
        pending = self.pending_forward
        model, context = pending.model, pending.context
        pending.model = pending.context = None
        pending.whole_ran = False
        if model is not None and context is not None:
            model.method_run.forget()
            self.end_forward(model, context)

    # -- clocks, in the order in which they are asked
    # ----------------------------------------------------------------------------------------------

    def _position(self, forward: Forward) -> Position:
        for clock in self._clocks:
            position = clock(forward)
            if position is not None:
                return position
        model = forward.model
        self._end_stopped()
        self._end_evaluations()
        model.clock.next_step = model.completed + 1
        return Position("forward", model.completed, self._loop_of(forward), model.name, lasts=False)

    def _loop_of(self, forward: Forward) -> int:
        loop = forward.hint.loop
        return self._loop if loop is None else loop

    def _by_trace_step(self, forward: Forward) -> Position | None:
        step = current_step_idx()
        if step is None:
            return None
        # A forward begins this step only where the block has not: in a thread that outlives the
        # block, or in a block that was entered before recording began.
        return Position("trace_step", step, self._loop_of(forward), None, lasts=False, bounded=True)

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

    def _by_training(self, forward: Forward) -> Position | None:
        model, optimizers = forward.model, forward.optimizers
        if optimizers is None:
            return None
        active = self._active.get(model.name)
        step = self._next_step(model, optimizers)
        if active is not None:
            if self._is_part_of(forward, active, step):
                active.stopped_ns, active.count = 0, step
                return active.position
            self.end_step(active)
        if not torch.is_grad_enabled():
            self._end_stopped()
        return Position("optimizer", step, model.clock.loop_of(step, optimizers), model.name)

    def _by_surrounding_training(self, forward: Forward) -> Position | None:
        model, training = forward.model, self._training
        if training.step is not None:
            return training.step.position
        if training.model is None:
            first = self.optimizers.first_step()
            return None if first is None else Position("optimizer", first, 0, _FIRST)
        trained = training.model
        optimizers = self.optimizers.training(trained)
        step = self._next_step(trained, optimizers)
        loop = trained.clock.loop_of(step, optimizers)
        if not torch.is_grad_enabled() and self._is_evaluating(model):
            self._end_stopped()
            return Position("optimizer", step, loop, trained.name)
        if self._follows(model) and self._is_alive(trained):
            # Between two training steps: part of the last if it first ran there, else of the next.
            self._end_stopped()
            if model.clock.trails:
                last = trained.clock.next_step - 1
                return Position("optimizer", last, trained.clock.loop, model.name, lasts=False)
            position = Position("optimizer", step, loop, trained.name)
            training.step, _ = self._enter(position, trained)
            return position
        return None

    def _by_schedule(self, forward: Forward) -> Position | None:
        step = self._schedules.step()
        if step is None:
            return None
        return Position("schedule", step, self._loop_of(forward), None, bounded=True)

    # -- training steps
    # ----------------------------------------------------------------------------------------------

    def _trained_by(self, model: TrackedModel) -> list[OptimizerClock] | None:
        """Return the optimizers that train a model; None if it is not trained."""
        optimizers = self.optimizers.training(model)
        clock = model.clock
        if not optimizers:
            self._watch_updates(model)
            return optimizers if clock.is_trained else None
        # Copies of an unknown model's parameters: without gradients it is rather a teacher.
        is_presumed = not (optimizers[0].is_claimed or clock.is_trained)
        return None if is_presumed and not torch.is_grad_enabled() else optimizers

    def _watch_updates(self, model: TrackedModel) -> None:
        """See whether the parameters of a model without an optimizer have changed."""
        clock = model.clock
        if clock.updates is not None and clock.updates.has_changed:
            clock.updates = None
            if not clock.is_trained:
                clock.is_trained = clock.is_updated_in_place = True
                clock.next_step = model.completed
            elif (active := self._active.get(model.name)) is not None:
                self._stop(active)
        if torch.is_grad_enabled():
            if clock.updates is None and (parameters := model.trainable_parameters()):
                clock.updates = UpdateWatch((parameters[0], parameters[-1]))
            if clock.updates is not None:
                self._watched.add(model)

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
            parameters = frozenset(map(id, inputs.module.parameters()))
            holding = [clock.serial for clock in own if clock.trains(parameters)]
            if holding and active.stepped.isdisjoint(holding):
                return True
        if not inputs.carry_gradients():
            return False
        step = self._training.step
        if step is not None and step.model is not None:
            own = own + self.optimizers.training(step.model)
        return any(clock.serial not in active.stepped for clock in own)

    def _is_evaluating(self, model: TrackedModel) -> bool:
        """Return whether a model that runs without gradients takes part in an evaluation."""
        trained = self._training.model
        if trained is None:
            return False
        is_known = self._follows(model) or self._is_alive(trained)
        return is_known and (self.denoising.is_in_pipeline or self._training.evaluates())

    def _is_alive(self, trained: TrackedModel) -> bool:
        """Return whether the training of a model may go on."""
        return trained.clock.is_updated_in_place or bool(self.optimizers.training(trained))

    def _follows(self, model: TrackedModel) -> bool:
        """Return whether a model has run in training steps, or in front of one."""
        clock = model.clock
        clock.follows |= clock.ran_before is not None and clock.ran_before < self._training.begun
        return clock.follows

    # -- steps
    # ----------------------------------------------------------------------------------------------

    @property
    def step_scope(self) -> Scope | None:
        """The scope of the step that began last and is active, if any."""
        return next((step.scope for step in reversed(self._active.values())), None)

    def begin_traced_step(self, step: int, depth: int) -> ActiveStep | None:
        """Begin the step of a `trace_step` block; None if the block is nested in another one.

        `depth` counts the blocks around this thread. Threads that trace at the same time each
        count their own loops.
        """
        with self._lock:
            place = threading.get_ident(), depth
            last = self._last_traced.get(place)
            if last is not None and step <= last:
                self._begin_loop()
            self._last_traced[place] = step
            self._loop_has_stepped = True
            active = self._active.get(None)
            if active is not None and active.position.rule == "trace_step":
                return None
            return self._begin_step(Position("trace_step", step, self._loop, None, bounded=True))

    def end_framework_step(self) -> None:
        """End the last step of a framework's loop, so that later forwards are not part of it."""
        with self._lock:
            active = self._active.get(None)
            if active is not None and active.position.rule == "framework":
                self.end_step(active)

    def _enter(self, position: Position, model: TrackedModel) -> tuple[ActiveStep, bool]:
        """Return the active step of a position, and whether it begins now."""
        active = self._active.get(position.owner)
        if active is None and position.rule == "optimizer":
            active = self._active.get(_FIRST)
        if active is not None and active.holds(position):
            if active.position.owner == _FIRST != position.owner:
                del self._active[_FIRST]
                self._active[position.owner], active.position = active, position
            if active.model is None and position.owner != _FIRST:
                active.model = model
                active.scope.attributes.setdefault("torch.model", model.name)
            return active, False
        if position.rule == "schedule":
            self.denoising.start_denoising()
        return self._begin_step(position, None if position.owner == _FIRST else model), True

    def _begin_step(self, position: Position, model: TrackedModel | None = None) -> ActiveStep:
        if position.owner is None:
            self._end_steps(list(self._active.values()))
        elif (replaced := self._active.get(position.owner)) is not None:
            self.end_step(replaced)
        if self.cadence is not None:
            self.cadence.begin()
        attributes: dict[str, Any] = {"torch.step": position.step, "torch.loop": position.loop}
        if model is not None:
            attributes["torch.model"] = model.name
        scope = Scope(
            "step",
            "torch.step",
            lexical=False,
            attributes=attributes,
            bounded=position.bounded,
            training=position.rule == "optimizer",
        )
        active = ActiveStep(scope, position, model, count=position.step)
        self._active[position.owner] = active
        self._recorder.open(scope)
        return active

    def _end_steps(self, steps: list[ActiveStep]) -> None:
        for step in steps:
            self.end_step(step)

    def end_step(self, active: ActiveStep, error: BaseException | None = None) -> None:
        """Flush the records of a step, then close its scope. Does nothing if it has ended."""
        with self._lock:
            if self._active.get(active.position.owner) is not active:
                return
            del self._active[active.position.owner]
            if self._training.step is active:
                self._training.step = None
            self._flush(active.scope)
            active.scope.end_ns = active.stopped_ns
            if active.region is not None:
                active.region.end_ns = active.stopped_ns
            entry.close_region(active.region, error)
            self._recorder.close(active.scope, error)
            if self.cadence is not None:
                self.cadence.end()

    @unobserved  # sinks write whole tensors
    def _flush(self, scope: Scope | None) -> None:
        """Flush pending tensors, and charge the time to the budget, if any."""
        if self.cadence is None:
            self._recorder.flush(scope)
            return
        started, written = time.perf_counter(), self._recorder.written
        self._recorder.flush(scope)
        if self._recorder.written > written:
            self.cadence.read(time.perf_counter() - started)
        for notify in self._events.step_flushed:
            notify()


def _ask_for_hint() -> Hint | None:
    for provider in hint_providers:
        try:
            hint = provider()
        except Exception:
            hint = None
        if hint is not None:
            return hint
    return None
