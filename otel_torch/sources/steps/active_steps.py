"""The steps that are going on, from their first forward to their end, as scopes.

A step of the whole program (a denoise step, a block of `trace_step`) ends all others. Training
steps of different models may overlap, as those of a generator and a critic do.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.regions import entry
from otel_torch.sources.events import RunEvents
from otel_torch.sources.steps.cadence import Cadence
from otel_torch.torch_private import unobserved

if TYPE_CHECKING:
    from otel_torch.sources.steps.forwards import TrackedModel

Rule = Literal["trace_step", "framework", "optimizer", "schedule", "forward"]
# Whose step it is: a model's name, or None for a step of the whole program.
Owner = str | None
# Owns a training step until the model that is trained runs.
FIRST = ""
# Owns the step of a warm-up. No model has this name, and no step of a model is ended by it.
WARM_UP = "(warm-up)"


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


class ActiveSteps:
    """The active steps of one session: begins and ends their scopes, and flushes their records."""

    def __init__(self, recorder: Recorder, cadence: Cadence | None, events: RunEvents) -> None:
        self.lock = threading.RLock()
        self._recorder, self._cadence, self._events = recorder, cadence, events
        self._active: dict[Owner, ActiveStep] = {}

    def forked(self) -> None:
        """Drop the steps of the parent."""
        self.lock = threading.RLock()
        self._active = {}

    def of(self, owner: Owner) -> ActiveStep | None:
        return self._active.get(owner)

    def all(self) -> list[ActiveStep]:
        """Return the active steps, the one that began last at the end."""
        return list(self._active.values())

    def training(self) -> list[ActiveStep]:
        return [step for step in self._active.values() if step.position.rule == "optimizer"]

    @property
    def is_flush_due(self) -> bool:
        """Whether records should be flushed although no step ends."""
        return self._recorder.is_flush_due

    def enter(self, position: Position, model: TrackedModel) -> tuple[ActiveStep, bool]:
        """Return the active step of a position, and whether it begins now."""
        active = self._active.get(position.owner)
        if active is None and position.rule == "optimizer":
            active = self._active.get(FIRST)
        if active is not None and active.holds(position):
            if active.position.owner == FIRST != position.owner:
                del self._active[FIRST]
                self._active[position.owner], active.position = active, position
            if active.model is None and position.owner != FIRST:
                active.model = model
                active.scope.attributes.setdefault("torch.model", model.name)
            return active, False
        return self.begin(position, None if position.owner == FIRST else model), True

    def begin(self, position: Position, model: TrackedModel | None = None) -> ActiveStep:
        """Begin a step, and end what it replaces."""
        if position.owner is None:
            self.end_all(self.all())
        elif (replaced := self._active.get(position.owner)) is not None:
            self.end(replaced)
        if self._cadence is not None:
            self._cadence.begin()
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

    def end_all(self, steps: list[ActiveStep]) -> None:
        for step in steps:
            self.end(step)

    def end(self, active: ActiveStep, error: BaseException | None = None) -> None:
        """Flush the records of a step, then close its scope. Does nothing if it has ended."""
        with self.lock:
            if self._active.get(active.position.owner) is not active:
                return
            del self._active[active.position.owner]
            self.flush(active.scope)
            active.scope.end_ns = active.stopped_ns
            if active.region is not None:
                active.region.end_ns = active.stopped_ns
            entry.close_region(active.region, error)
            self._recorder.close(active.scope, error)
            for notify in self._events.step_ended:
                notify(active)
            if self._cadence is not None:
                self._cadence.end()

    @unobserved  # sinks write whole tensors
    def flush(self, scope: Scope | None) -> None:
        """Flush pending tensors, and charge the time to the budget, if any."""
        if self._cadence is None:
            self._recorder.flush(scope)
            return
        started, written = time.perf_counter(), self._recorder.written
        self._recorder.flush(scope)
        if self._recorder.written > written:
            self._cadence.read(time.perf_counter() - started)
        for notify in self._events.step_flushed:
            notify()
