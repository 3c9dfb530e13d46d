"""Numbers the step that each forward belongs to.

Two recordings can be compared only if they number their steps alike, so every record gets its step
here, by the first rule that applies:

1. `trace_step`: the program names the step itself.
2. `framework`: a supported framework knows it (see `Hint`).
3. `optimizer`: the completed steps of the busiest optimizer that holds parameters of the model.
4. `schedule`: the completed steps of the busiest denoise schedule that is not used up.
5. `forward`: the completed outermost forwards of the model. Each forward is a step.

`StepTracker` has an example of each rule that needs no framework.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

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
from otel_torch.sources.source import Source
from otel_torch.sources.uncalled_roots import RootMethodRun
from otel_torch.torch_private import unobserved

Rule = Literal["trace_step", "framework", "optimizer", "schedule", "forward"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A framework's knowledge of the forward that is about to run; None for what is unknown.

    `bounded`: whether the framework's loop has a known length.
    """

    step: int | None = None
    loop: int | None = None
    branch: str | None = None
    bounded: bool = True


# Asked in order, in the calling thread, at the start of every outermost forward. The first that
# returns a hint wins.
hint_providers: list[Callable[[], Hint | None]] = []


class TrackedModel(Protocol):
    """The part of a model that the tracker needs."""

    name: str
    completed: int
    calls: CallCounter
    method_run: RootMethodRun

    def parameter_ids(self) -> frozenset[int]: ...


@dataclass(slots=True)
class ForwardContext:
    """One outermost forward: the part of a record's key that all its modules share.

    `calls` counts the module calls of the step. `opened_step`: whether this forward began the
    active step.
    """

    step: int
    loop: int
    phase: str
    branch: str | None
    rule: Rule
    recording: bool
    calls: StepCalls
    opened_step: bool = False


@dataclass(slots=True)
class ActiveStep:
    """The current step, from its first forward to its end, as a scope.

    `region` is the open `training_step` region, if any.
    """

    scope: Scope
    rule: Rule
    step: int
    loop: int
    model: TrackedModel | None
    region: Scope | None = None


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


@dataclass(slots=True)
class _Schedule:
    length: int
    completed: int = 0

    @property
    def is_running(self) -> bool:
        return self.completed < self.length


# The `trace_step` blocks of a thread or task. `_newest` is shared, so that a worker thread started
# inside a block sees its step.
_traced: ContextVar[tuple[int, ...]] = ContextVar("otel_torch.trace_step", default=())
_newest: list[int] = []


def current_step_idx() -> int | None:
    """Return the step of the innermost `trace_step` block of this thread.

    A thread without a block gets the newest block of any thread; None if there is no block.
    """
    if stack := _traced.get():
        return stack[-1]
    return _newest[-1] if _newest else None


def current_step_tracker() -> StepTracker | None:
    """Return the step tracker of the current session, or None while nothing is recorded."""
    running = session.current()
    return None if running is None else running.step_tracker


class trace_step:  # lower case: a context manager that reads as a verb, as in FastVideo
    """Declare which step a block is: `with trace_step(i): ...`.

    Blocks nest, and leaving one restores the step around it. A step that is not larger than the
    last one begins the next loop.

    >>> with trace_step(3):
    ...     current_step_idx()
    3
    """

    __slots__ = ("_active", "_step")

    def __init__(self, step_idx: int) -> None:
        self._step = int(step_idx)
        self._active: ActiveStep | None = None

    def __enter__(self) -> None:
        _traced.set((*_traced.get(), self._step))
        _newest.append(self._step)
        if (step_tracker := current_step_tracker()) is not None:
            self._active = step_tracker.begin_traced_step(self._step, len(_traced.get()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (step_tracker := current_step_tracker()) is not None and self._active is not None:
            step_tracker.end_step(self._active, error)
        _traced.set(_traced.get()[:-1])
        if self._step in _newest:
            _newest.reverse()
            _newest.remove(self._step)
            _newest.reverse()


class StepTracker(Source):
    """Numbers the steps of one session, and opens and closes their scopes.

    >>> from otel_torch.records import Losses
    >>> from types import SimpleNamespace
    >>> recorder = Recorder(read=lambda pending: None, connect=list, losses=Losses())
    >>> tracker = StepTracker(Settings.from_env({}), recorder, RunEvents())
    >>> net = SimpleNamespace(name="Net", completed=0, calls=CallCounter(), parameter_ids=frozenset)
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
        self.pending_forward = PendingForward()
        self.seen_forwards = 0
        self.recorded_forwards = 0
        self._lock = threading.RLock()
        self._active: ActiveStep | None = None
        self._optimizers: Any = WeakIdKeyDictionary()  # optimizer -> completed steps
        self._optimized: Any = WeakIdKeyDictionary()  # optimizer -> (size, parameter ids)
        self._schedules: Any = WeakIdKeyDictionary()
        self._loop = 0
        self._loop_has_stepped = False
        self._last_traced: dict[tuple[int, int], int] = {}

    # -- lifecycle
    # ----------------------------------------------------------------------------------------------

    def forked(self) -> None:
        """Drop the step and the forwards of the parent, and count from 0."""
        self._lock = threading.RLock()
        self._active = None
        self.denoising = Denoising()
        self.pending_forward = PendingForward()
        self.seen_forwards = self.recorded_forwards = 0
        if self.cadence is not None:
            self.cadence.forked()

    def end_run(self) -> None:
        """End the active step and flush: the program ends."""
        with self._lock:
            self.end_pending_forward()
            if self._active:
                self.end_step(self._active)
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

    # -- optimizers and schedules
    # ----------------------------------------------------------------------------------------------

    def optimizer_made(self, optimizer: Any) -> None:
        """Count the steps of a new optimizer from 0."""
        self._optimizers.setdefault(optimizer, 0)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a completed optimizer step: it ends the training step of the model it holds."""
        with self._lock:
            self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
            active = self._active
            if (
                active
                and active.rule == "optimizer"
                and active.model
                and self._optimizes(optimizer, active.model)
            ):
                self.end_step(active)

    def schedule_set(self, schedule: Any, length: int) -> None:
        """Begin a denoise schedule of `length` steps, in a new loop if the last one has stepped."""
        with self._lock:
            if self._loop_has_stepped:
                self._begin_loop()
                self._schedules.clear()  # a schedule that the last loop left unfinished is over
            self._schedules[schedule] = _Schedule(length)

    def schedule_stepped(self, schedule: Any, *, last: bool = False) -> None:
        """Count a completed step of a denoise schedule.

        `last` ends a schedule that makes fewer steps than its length because it began halfway.
        """
        with self._lock:
            state = self._schedules.setdefault(schedule, _Schedule(0))
            state.completed += 1
            if last:
                state.length = min(state.length, state.completed)
            self._loop_has_stepped = True
            active = self._active
            if active and active.rule in ("schedule", "framework"):
                self.end_step(active)
            # A framework reports the end of its loop itself.
            if not self._running_schedules() and not (active and active.rule == "framework"):
                self.denoising.end_denoising()

    def steps_of(self, optimizer: Any) -> int:
        """Return how many steps the optimizer has completed."""
        return int(self._optimizers.get(optimizer, 0))

    def optimizer_steps(self, model: TrackedModel) -> int | None:
        """Return the completed steps of the busiest optimizer of `model`, or None without one."""
        steps = [
            completed
            for optimizer, completed in list(self._optimizers.items())
            if self._optimizes(optimizer, model)
        ]
        return max(steps, default=None)

    def _optimizes(self, optimizer: Any, model: TrackedModel) -> bool:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        cached = self._optimized.get(optimizer)
        if cached is None or cached[0] != size:
            self._optimized[optimizer] = cached = (size, optimized_parameters(optimizer))
        return not cached[1].isdisjoint(model.parameter_ids())

    def _running_schedules(self) -> list[_Schedule]:
        return [schedule for schedule in list(self._schedules.values()) if schedule.is_running]

    @property
    def loop(self) -> int:
        """The current loop, from 0."""
        return self._loop

    def _begin_loop(self) -> None:
        self._loop += 1
        self._loop_has_stepped = False
        self._last_traced.clear()

    # -- forwards
    # ----------------------------------------------------------------------------------------------

    def begin_forward(self, model: TrackedModel) -> ForwardContext:
        """Begin an outermost forward of `model` in this thread, and a step if none is active."""
        with self._lock:
            hint = _ask_for_hint()
            optimizer_steps = self.optimizer_steps(model)
            loop = hint.loop if hint is not None and hint.loop is not None else self._loop
            rule, step = self._number_step(model, hint, optimizer_steps)
            is_training = optimizer_steps is not None
            phase = "eval" if is_training and not torch.is_grad_enabled() else "forward"
            context = ForwardContext(
                step,
                loop,
                phase,
                hint.branch if hint else None,
                rule,
                step in self._steps,
                model.calls.of(phase, loop, step),
            )
            self._join_step(model, context, hint)
            if self.cadence is not None:
                kind = Kind(rule, model.name, phase)
                context.recording = self.cadence.choose(kind, step, loop, context.recording)
            self.recorded_forwards += context.recording
            self.seen_forwards += 1
            return context

    def _number_step(
        self, model: TrackedModel, hint: Hint | None, optimizer_steps: int | None
    ) -> tuple[Rule, int]:
        """Return the rule that applies and its step number, as in the module docstring."""
        traced = current_step_idx()
        if traced is not None:
            return "trace_step", traced
        if hint is not None and hint.step is not None:
            return "framework", hint.step
        if optimizer_steps is not None:
            return "optimizer", optimizer_steps
        if running := self._running_schedules():
            return "schedule", max(schedule.completed for schedule in running)
        return "forward", model.completed

    def _join_step(self, model: TrackedModel, context: ForwardContext, hint: Hint | None) -> None:
        """Make the forward part of the active step, or end that and begin the forward's own."""
        active, rule = self._active, context.rule
        if (
            active is not None
            and (active.step, active.loop) != (context.step, context.loop)
            and self._ends_step(active, rule, model)
        ):
            self.end_step(active)
            active = None
        if active is None:
            if rule == "schedule":
                self.denoising.start_denoising()
            bounded = rule in ("trace_step", "schedule") or (
                rule == "framework" and hint is not None and hint.bounded
            )
            active = self._begin_step(rule, context.step, context.loop, model, bounded=bounded)
            context.opened_step = True
        elif active.model is None:
            active.model = model
            active.scope.attributes.setdefault("torch.model", model.name)
        if active.rule == "optimizer" and active.region is None and context.phase == "forward":
            active.region = entry.open_region("training_step", lexical=False, around=active.scope)

    @staticmethod
    def _ends_step(active: ActiveStep, rule: Rule, model: TrackedModel) -> bool:
        """Return whether a forward with another step number ends the active step.

        A framework's step holds the forwards of all models. Any other step belongs to one model,
        except that of `trace_step`, which its block ends.
        """
        if active.rule == "framework":
            return rule == "framework"
        return active.rule != "trace_step" and active.model is model

    def end_forward(
        self, model: TrackedModel, context: ForwardContext, error: BaseException | None = None
    ) -> None:
        """End an outermost forward, and its step if it is a step by itself."""
        with self._lock:
            model.completed += error is None
            active = self._active
            # A forward opens a `trace_step` step only where the block has not: in a thread that
            # outlives the block, or in a block that was entered before recording began.
            if (
                active
                and context.opened_step
                and active.rule in ("forward", "trace_step")
                and active.model is model
            ):
                self.end_step(active, error)
            elif self._recorder.is_flush_due:
                self._flush(active.scope if active else None)

    def end_pending_forward(self) -> None:
        """End the forward of this thread whose end was not reported, if any."""
        pending = self.pending_forward
        model, context = pending.model, pending.context
        pending.model = pending.context = None
        if model is not None and context is not None:
            model.method_run.forget()
            self.end_forward(model, context)

    # -- steps
    # ----------------------------------------------------------------------------------------------

    @property
    def step_scope(self) -> Scope | None:
        """The scope of the active step, if any."""
        return self._active.scope if self._active else None

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
            if self._active and self._active.rule == "trace_step":
                return None
            return self._begin_step("trace_step", step, self._loop, None, bounded=True)

    def end_framework_step(self) -> None:
        """End the last step of a framework's loop, so that later forwards are not part of it."""
        with self._lock:
            if self._active and self._active.rule == "framework":
                self.end_step(self._active)

    def _begin_step(
        self, rule: Rule, step: int, loop: int, model: TrackedModel | None, *, bounded: bool
    ) -> ActiveStep:
        if self._active:
            self.end_step(self._active)
        if self.cadence is not None:
            self.cadence.begin()
        attributes: dict[str, Any] = {"torch.step": step, "torch.loop": loop}
        if model is not None:
            attributes["torch.model"] = model.name
        scope = Scope(
            "step",
            "torch.step",
            lexical=False,
            attributes=attributes,
            bounded=bounded,
            training=rule == "optimizer",
        )
        self._active = active = ActiveStep(scope, rule, step, loop, model)
        self._recorder.open(scope)
        return active

    def end_step(self, active: ActiveStep, error: BaseException | None = None) -> None:
        """Flush the records of a step, then close its scope. Does nothing if it has ended."""
        with self._lock:
            if self._active is not active:
                return
            self._active = None
            self._flush(active.scope)
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


def optimized_parameters(optimizer: Any) -> frozenset[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return frozenset(
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    )


def _ask_for_hint() -> Hint | None:
    for provider in hint_providers:
        try:
            hint = provider()
        except Exception:
            hint = None
        if hint is not None:
            return hint
    return None
