"""Which step is it? Said by `trace_step` or a framework, else found: optimizer steps, denoise
schedules, forwards.

Telling steps apart is what makes two recordings comparable, so the rules are few and every record
goes through them: `trace_step`, then the framework, then the busiest optimizer that holds the
model's parameters, then the busiest running schedule, then the model's own completed outermost
forwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import session
from otel_torch.records import Scope
from otel_torch.regions import entry
from otel_torch.sources.cadence import Cadence, Kind
from otel_torch.sources.calls import Calls, StepCalls
from otel_torch.sources.denoising import Denoising


@dataclass(frozen=True, slots=True)
class Hint:
    """What a framework says of the forward that is about to run; None where it does not know."""

    step: int | None = None
    loop: int | None = None
    branch: str | None = None
    bounded: bool = True


# asked in order, in the calling thread, at the start of every outermost forward; the first that
# knows is believed
providers: list[Callable[[], Hint | None]] = []


class Forwards(Protocol):
    """What the clock needs to know of a model."""

    name: str
    completed: int
    calls: Calls

    def parameter_ids(self) -> frozenset[int]: ...


@dataclass(slots=True)
class Moment:
    """When an outermost forward runs: the part of a record's key that its modules share. calls:
    what is counted in its step.
    """

    step: int
    loop: int
    phase: str
    branch: str | None
    rule: str
    recording: bool
    calls: StepCalls
    opened_turn: bool = False


@dataclass(slots=True)
class _Turn:
    """The step that is going on, from its first forward to its end, as a scope."""

    scope: Scope
    rule: str
    step: int
    loop: int
    model: Forwards | None
    region: Scope | None = None


@dataclass(slots=True)
class _Schedule:
    length: int
    done: int = 0

    @property
    def running(self) -> bool:
        return self.done < self.length


# the `trace_step` blocks of a thread or task; `newest` is shared, so that a worker thread inside
# one is not blind
_traced: ContextVar[tuple[int, ...]] = ContextVar("otel_torch.trace_step", default=())
_newest: list[int] = []


def current_step_idx() -> int | None:
    """The step of the innermost `trace_step` around this thread, or around another one if this has
    none; else None.
    """
    if stack := _traced.get():
        return stack[-1]
    return _newest[-1] if _newest else None


class trace_step:  # a context manager that reads as a verb, as in FastVideo
    """Says which step the block is: `with trace_step(i): ...`. Nests, restores the step before, and
    counts loops: a step not larger than the last begins the next loop.

    >>> with trace_step(3):
    ...     current_step_idx()
    3
    """

    __slots__ = ("_scope", "_step")

    def __init__(self, step_idx: int) -> None:
        self._step = int(step_idx)
        self._scope: _Turn | None = None

    def __enter__(self) -> None:
        _traced.set((*_traced.get(), self._step))
        _newest.append(self._step)
        if (clock := _clock) is not None:
            self._scope = clock.enter_traced(self._step, len(_traced.get()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (clock := _clock) is not None and self._scope is not None:
            clock.end_turn(self._scope, error)
        _traced.set(_traced.get()[:-1])
        if self._step in _newest:
            _newest.reverse()
            _newest.remove(self._step)
            _newest.reverse()


class Clock:
    """Tells the step of every forward and opens and closes the step scopes of one session."""

    def __init__(self, running: session.Session) -> None:
        self._recorder = running.recorder
        self._steps = running.settings.steps
        self._budget = running.settings.budget
        self.cadence = Cadence(self._budget) if self._budget is not None else None
        self.denoising = Denoising()
        self.settle: Callable[[], None] = lambda: (
            None
        )  # ends a forward whose end nobody told; the registry's
        self.collect: Callable[[], None] = lambda: (
            None
        )  # reads what was watched in a step that was not recorded; the watch's
        self._lock = threading.RLock()
        self._turn: _Turn | None = None
        self._optimizers: Any = WeakIdKeyDictionary()
        self._held: Any = WeakIdKeyDictionary()
        self._schedules: Any = WeakIdKeyDictionary()
        self._loop = 0
        self._advanced = False  # whether the loop has made a step since it began
        self._last_traced: dict[tuple[int, int], int] = {}
        self.seen_steps = 0
        self.recorded_steps = 0

    # -- what the program does
    # ---------------------------------------------------------------------------------------

    def optimizer_made(self, optimizer: Any) -> None:
        """An optimizer was constructed: its steps count from here."""
        self._optimizers.setdefault(optimizer, 0)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has completed a step: the end of a training step for the models it holds."""
        with self._lock:
            self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
            turn = self._turn
            if (
                turn
                and turn.rule == "optimizer"
                and turn.model
                and self._holds(optimizer, turn.model)
            ):
                self.end_turn(turn)

    def schedule_set(self, schedule: Any, length: int) -> None:
        """A denoise schedule of `length` steps was set: a new loop, if the one before has made a
        step.
        """
        with self._lock:
            if self._advanced:
                self._next_loop()
                self._schedules.clear()  # one that the loop before left unfinished says nothing of this one
            self._schedules[schedule] = _Schedule(length)

    def schedule_stepped(self, schedule: Any, *, last: bool = False) -> None:
        """A denoise schedule has completed a step; `last` where it says so itself, because it began
        half-way.
        """
        with self._lock:
            state = self._schedules.setdefault(schedule, _Schedule(0))
            state.done += 1
            if last:
                state.length = min(state.length, state.done)
            self._advanced = True
            turn = self._turn
            if turn and turn.rule in ("schedule", "framework"):
                self.end_turn(turn)
            # a framework says itself when its loop is over
            if not self.schedule_running() and not (turn and turn.rule == "framework"):
                self.denoising.schedule_used_up()

    def steps_of(self, optimizer: Any) -> int:
        """How many steps the optimizer has completed."""
        return int(self._optimizers.get(optimizer, 0))

    @property
    def loop(self) -> int:
        """The loop that is going on, from 0."""
        return self._loop

    def schedule_running(self) -> bool:
        """Whether a schedule is set and not used up."""
        return any(schedule.running for schedule in list(self._schedules.values()))

    def end_framework_step(self) -> None:
        """A framework's loop is over: what runs next is no part of its last step."""
        with self._lock:
            if self._turn and self._turn.rule == "framework":
                self.end_turn(self._turn)

    def saw(self, place: Hashable, finite: bool) -> None:
        """A tensor was seen, recorded or not; see `Cadence.saw`."""
        if self.cadence is not None:
            self.cadence.saw(place, finite)

    # -- trace_step
    # ----------------------------------------------------------------------------------------------

    def enter_traced(self, step: int, depth: int) -> _Turn | None:
        with self._lock:
            place = (
                threading.get_ident(),
                depth,
            )  # threads that trace at the same time each count for themselves
            last = self._last_traced.get(place)
            if last is not None and step <= last:
                self._next_loop()
            self._last_traced[place] = step
            self._advanced = True
            if self._turn and self._turn.rule == "trace_step":
                return None  # a nested block is part of the outer step
            return self._begin_turn("trace_step", step, self._loop, None, bounded=True)

    def _next_loop(self) -> None:
        self._loop += 1
        self._advanced = False
        self._last_traced.clear()

    # -- forwards
    # ----------------------------------------------------------------------------------------------

    def begin_forward(self, model: Forwards) -> Moment:
        """An outermost forward of `model` begins in this thread."""
        with self._lock:
            hint = self._hint()
            optimizer_steps = self.optimizer_steps(model)
            traced = current_step_idx()
            loop = hint.loop if hint is not None and hint.loop is not None else self._loop
            if traced is not None:
                rule, step = "trace_step", traced
            elif hint is not None and hint.step is not None:
                rule, step = "framework", hint.step
            elif optimizer_steps is not None:
                rule, step = "optimizer", optimizer_steps
            elif self.schedule_running():
                rule, step = (
                    "schedule",
                    max(s.done for s in list(self._schedules.values()) if s.running),
                )
            else:
                rule, step = "forward", model.completed
            phase = (
                "eval" if optimizer_steps is not None and not torch.is_grad_enabled() else "forward"
            )
            branch = hint.branch if hint else None
            moment = Moment(
                step,
                loop,
                phase,
                branch,
                rule,
                step in self._steps,
                model.calls.of(phase, loop, step),
            )
            turn = self._turn
            if (
                turn is not None
                and (turn.step, turn.loop) != (step, loop)
                and self._ends(turn, rule, model)
            ):
                self.end_turn(turn)
                turn = None
            if turn is None:
                if rule == "schedule":
                    self.denoising.step_begins()
                bounded = rule in ("trace_step", "schedule") or (
                    rule == "framework" and hint is not None and hint.bounded
                )
                turn = self._begin_turn(rule, step, loop, model, bounded=bounded)
                moment.opened_turn = True
            elif turn.model is None:
                turn.model = model
                turn.scope.attributes.setdefault("torch.model", model.name)
            if turn.rule == "optimizer" and turn.region is None and phase == "forward":
                turn.region = entry.open_region("training_step", lexical=False)
            if self.cadence is not None:
                moment.recording = self.cadence.choose(
                    Kind(rule, model.name, phase), step, loop, moment.recording
                )
            self.recorded_steps += moment.recording
            self.seen_steps += 1
            return moment

    @staticmethod
    def _ends(turn: _Turn, rule: str, model: Forwards) -> bool:
        """Whether a forward of another step ends the open one: a framework's step is one for all
        models, any other is its model's own, and `trace_step` ends by itself.
        """
        if turn.rule == "framework":
            return rule == "framework"
        return turn.rule != "trace_step" and turn.model is model

    def end_forward(
        self, model: Forwards, moment: Moment, error: BaseException | None = None
    ) -> None:
        """The outermost forward is over; a forward that is a step of its own ends that step."""
        with self._lock:
            model.completed += error is None
            turn = self._turn
            # a forward opens a `trace_step` turn itself only where the block's own is over: in a
            # thread, or before `start`
            if (
                turn
                and moment.opened_turn
                and turn.rule in ("forward", "trace_step")
                and turn.model is model
            ):
                self.end_turn(turn, error)
            elif self._recorder.due:
                self._flush(turn.scope if turn else None)

    @property
    def step_scope(self) -> Scope | None:
        """The scope of the step that is going on."""
        return self._turn.scope if self._turn else None

    def finish(self) -> None:
        """End what is going on: the program ends."""
        with self._lock:
            self.settle()
            if self._turn:
                self.end_turn(self._turn)
            self.denoising.finish()
            self._flush(None)

    def forked(self) -> None:
        """Forget what was going on: in a forked child it belongs to the parent."""
        self._lock = threading.RLock()
        self._turn = None
        self.denoising = Denoising()
        self.cadence = Cadence(self._budget) if self._budget is not None else None

    # -- turns
    # ----------------------------------------------------------------------------------------------

    def _begin_turn(
        self, rule: str, step: int, loop: int, model: Forwards | None, *, bounded: bool
    ) -> _Turn:
        if self._turn:
            self.end_turn(self._turn)
        if self.cadence is not None:
            self.cadence.begin()
        attributes: dict[str, Any] = {"torch.step": step, "torch.loop": loop}
        if model is not None:
            attributes["torch.model"] = model.name
        training = rule == "optimizer"
        scope = Scope(
            "step",
            "torch.step",
            lexical=False,
            attributes=attributes,
            bounded=bounded,
            training=training,
        )
        self._turn = turn = _Turn(scope, rule, step, loop, model)
        self._recorder.open(scope)
        return turn

    def end_turn(self, turn: _Turn, error: BaseException | None = None) -> None:
        """End a step: read its numbers, hand on its records, close its scope."""
        with self._lock:
            if self._turn is not turn:
                return
            self._turn = None
            self._flush(turn.scope)
            entry.close_region(turn.region, error)
            self._recorder.close(turn.scope, error)
            if self.cadence is not None:
                self.cadence.end()

    def _flush(self, scope: Scope | None) -> None:
        """Read what is pending; where there is a budget, at its expense."""
        if self.cadence is None:
            self._recorder.flush(scope)
            return
        started, written = time.perf_counter(), self._recorder.written
        self._recorder.flush(scope)
        if self._recorder.written > written:
            self.cadence.read(time.perf_counter() - started)
        self.collect()

    # -- rules
    # ----------------------------------------------------------------------------------------------

    def _hint(self) -> Hint | None:
        for provider in providers:
            try:
                hint = provider()
            except Exception:
                hint = None
            if hint is not None:
                return hint
        return None

    def optimizer_steps(self, model: Forwards) -> int | None:
        """The completed steps of the busiest optimizer that holds parameters of `model`, None where
        none does.
        """
        holding = [
            steps
            for optimizer, steps in list(self._optimizers.items())
            if self._holds(optimizer, model)
        ]
        return max(holding, default=None)

    def _holds(self, optimizer: Any, model: Forwards) -> bool:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._held.get(optimizer)
        if known is None or known[0] != size:
            ids = frozenset(
                id(parameter) for group in optimizer.param_groups for parameter in group["params"]
            )
            self._held[optimizer] = known = (size, ids)
        return not known[1].isdisjoint(model.parameter_ids())


_clock: Clock | None = None


def become(clock: Clock | None) -> None:
    """Make `clock` the one that `trace_step` tells; None ends that."""
    global _clock
    _clock = clock


def current_clock() -> Clock | None:
    """The running session's clock."""
    return _clock
