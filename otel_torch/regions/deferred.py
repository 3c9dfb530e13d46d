"""Regions that have ended, on their way to the sinks that can wait for them.

A region is entered thousands of times a second by code that has work to do: at its ends only the
clock is read and its span made the current one. Tables, histograms and messages are filled from
what is kept here, by a thread of its own, and not before the device has said how long it took. The
thread starts with the first region that ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from time import time_ns
from typing import Any, Protocol

from otel_torch import at_fork
from otel_torch.at_fork import ForkOrder
from otel_torch.console import say_once
from otel_torch.recorder import Recorder, Sink
from otel_torch.records import Scope
from otel_torch.telemetry.providers import watch_tracer_provider

# how long a region's end may be kept before it is handed on
LINGER_S = 0.1
# how long a region is kept for its device time: a device that is further behind is not asked any
# more
DEVICE_S = 30.0
# regions that may be kept; beyond that the thread that ends one hands them on itself
MAX_KEPT = 50_000


class Measured(Protocol):
    """Device time between two points of a program; `otel_torch.regions.device_time` measures it."""

    def end(self) -> None:
        """The second point is reached now."""

    def seconds(self) -> float | None:
        """What was measured; None while it is not known yet, and for ever where it cannot be."""

    @property
    def pending(self) -> bool:
        """Whether an answer may still come."""


class Label:
    """What a region is called. region: its registered name, or its own. span: the name of its
    span.
    """

    __slots__ = ("attributes", "region", "registered", "span")

    def __init__(self, region: str, span: str, registered: bool) -> None:
        self.region, self.span, self.registered = region, span, registered
        self.attributes: dict[str, Any] = {"torch.region": region}


class Entrance(Protocol):
    """A sink that wants to know of a region at once, to make its span the current one."""

    def enter(self, late: Late, label: Label, start_ns: int) -> Stay | None:
        """A region begins, as a span that is current now; None where that takes a scope: see
        `Sink.open`.
        """

    def leave(self, stay: Any, end_ns: int, error: BaseException | None) -> None:
        """It ends, and so does its span."""

    def hand_over(self, stays: list[Any]) -> None:
        """What the device took is known, or given up: the spans among these that are kept for that
        (`later`) may be sent.
        """

    def step_out(self, scope: Scope) -> None:
        """A scope that was opened ends: its span is no longer current. `close` follows later, from
        another thread.
        """

    def forget(self) -> None:
        """In a forked child: every span that is open belongs to the parent, which sends it."""


class Stay:
    """One stay in a region, from its entry until all sinks know of it."""

    end_ns = 0
    device: Measured | None = None
    later = False

    def __init__(self, late: Late, label: Label, start_ns: int) -> None:
        self.late = late
        self.label = label
        self.start_ns = start_ns

    def close(self, error: BaseException | None) -> None:
        """The region ends now."""
        late = self.late
        if self.device is not None:
            self.device.end()
        self.end_ns = end_ns = time_ns()
        if late.entrance is not None:
            late.entrance.leave(self, end_ns, error)
        if not late.dead:
            late.kept.append(self)
            if late.idle or len(late.kept) > MAX_KEPT:
                late.attend()

    def make_scope(self) -> Scope:
        """The region as a scope that has ended."""
        label = self.label
        scope = Scope(
            "region", label.span, True, label.attributes.copy(), self.start_ns, self.end_ns
        )
        if self.device is not None:
            scope.device_s = self.device.seconds()
        return scope


class _Opened(Stay):
    """A stay in a region that was opened as a scope, and has ended."""

    def __init__(self, late: Late, scope: Scope, device: Measured) -> None:
        super().__init__(late, Label(scope.name, scope.name, True), scope.start_ns)
        self.scope, self.end_ns, self.device = scope, scope.end_ns, device

    def make_scope(self) -> Scope:
        if self.device is not None:
            self.scope.device_s = self.device.seconds()
        return self.scope


def _can_wait(sink: Sink) -> bool:
    """Whether a sink may hear of regions late, because it says so or does not listen."""
    cls = type(sink)
    return bool(getattr(cls, "late", False)) or (cls.open is Sink.open and cls.close is Sink.close)


class Late(Sink):
    """Stands last among a recorder's sinks, so that at the end it is asked first, and takes regions
    to those before it.

    A sink whose class says `late = True` may be told of a region after it has ended, from another
    thread; one that has an `entrance` (None while there is none) is told through that as well, at
    once. One that says neither is told by `Recorder.open` and `Recorder.close`, and then no region
    comes this way: `usable` is False.
    """

    late = True

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._others = [sink for sink in recorder.sinks if not isinstance(sink, Late)]
        self.sinks: list[Sink] = []
        self.watch = watch_tracer_provider()
        self.installed = self.watch()
        entrances = [
            entrance
            for sink in self._others
            if (entrance := getattr(sink, "entrance", None)) is not None
        ]
        self.entrance: Entrance | None = entrances[0] if entrances else None
        # (late, label, start_ns): a stay in a region that begins; None where that takes a scope
        self.enter: Callable[[Late, Label, int], Stay | None] = (
            self.entrance.enter if self.entrance is not None else Stay
        )
        self.usable = len(entrances) < 2 and all(map(_can_wait, self._others))
        self._before: Late | None = None  # which takes what began in its time
        self.kept: deque[Stay] = deque()
        self._waiting: list[Stay] = []  # for the device
        self._thread: threading.Thread | None = None
        self.idle = True
        self._begin()
        self.dead = False  # its sinks have ended, or belong to a parent process
        at_fork.register(ForkOrder.REGION_CLOSERS, in_child=self._forked)

    @classmethod
    def of(cls, recorder: Recorder) -> Late:
        """The one that stands last among a recorder's sinks now, made where there is none, or where
        they have changed.
        """
        sinks = recorder.sinks
        standing = next((sink for sink in sinks if isinstance(sink, Late)), None)
        if standing is not None and standing.fresh():
            return standing
        made = cls(recorder)
        if made.usable:
            if standing is not None:
                sinks.remove(standing)
                made._before = standing
            sinks.append(made)
        made.sinks = sinks.copy()
        return made

    @property
    def wanted(self) -> bool:
        return False

    # -- the program's side
    # --------------------------------------------------------------------------------------------

    def fresh(self) -> bool:
        """Whether the recorder's sinks and the program's provider are those that this was made
        for.
        """
        return self.recorder.sinks == self.sinks and self.installed is self.watch()

    def close(self, scope: Scope) -> None:
        """Nothing: regions come by `Stay.close`."""

    def keep_scope(self, scope: Scope, error: BaseException | None, device: Measured) -> None:
        """Take a region that was opened as a scope and ends now, and is to be closed once its
        device time is known.
        """
        scope.end_ns = scope.end_ns or time_ns()
        scope.error = error
        if self.entrance is not None:
            self.entrance.step_out(scope)
        if not self.dead:
            self.kept.append(_Opened(self, scope, device))
            if self.idle:
                self.attend()

    def attend(self) -> None:
        """Something is kept, and nobody attends to it, or too much is."""
        if self.idle:
            self._wake()
        else:
            self.settle()

    def _wake(self) -> None:
        self.idle = False
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._work, name="otel_torch-regions", daemon=True
                    )
                    try:
                        self._thread.start()
                    except RuntimeError:  # the interpreter is ending: `finish` does the work
                        pass
        self._something.set()

    # -- the sinks' side
    # ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self.dead:
            self._something.wait()
            self._something.clear()
            while not self.dead:
                self._ending.wait(LINGER_S)
                self.idle = True  # from here on the next region wakes this thread again
                self.settle()
                if not self._waiting:
                    break

    def settle(self, *, give_up: bool = False) -> None:
        """Hand on what can be handed on now; with `give_up` also what the device has not answered
        for.
        """
        with self._settling:
            ready: list[Stay] = []
            waiting: list[Stay] = []
            oldest = time_ns() - int(DEVICE_S * 1e9)
            stays, self._waiting = self._waiting, []
            while self.kept:
                stays.append(self.kept.popleft())
            for stay in stays:
                if stay.device is not None:
                    stay.device.seconds()
                    if stay.device.pending and not give_up and stay.end_ns > oldest:
                        waiting.append(stay)
                        continue
                    if stay.device.pending:
                        stay.device = None
                ready.append(stay)
            self._waiting = waiting
            if ready:
                self._hand_on(ready)
        if self._before is not None:
            self._before.settle(give_up=give_up)

    def _hand_on(self, stays: list[Stay]) -> None:
        if self.entrance is not None:
            try:
                self.entrance.hand_over(stays)
            except Exception as error:
                self.recorder.losses.count("span", "sink_failed", len(stays))
                say_once(
                    f"spans of regions could not be handed on: {type(error).__name__}: {error}"
                )
        scopes = [stay.make_scope() for stay in stays]
        for sink in self._others[::-1]:
            if sink.wanted:
                try:
                    for scope in scopes:
                        sink.close(scope)
                except Exception as error:
                    self._others.remove(sink)
                    say_once(
                        f"{type(sink).__name__} failed and hears of no more regions: {type(error).__name__}: {error}"
                    )

    def _await_device(self, deadline: float) -> None:
        """Hand on all there is, with half of the time that is left for the device, and half for the
        sinks.
        """
        now = time.monotonic()
        until = now + (deadline - now) / 2
        self.settle()
        while self.waiting and time.monotonic() < until:
            time.sleep(0.005)
            self.settle()

    @property
    def waiting(self) -> bool:
        """Whether there are regions whose device time is not known yet."""
        return bool(self._waiting) or (self._before is not None and self._before.waiting)

    def drain(self, deadline: float) -> None:
        self._await_device(deadline)
        for sink in self._others:
            sink.drain(deadline)

    def finish(self, deadline: float) -> None:
        self._await_device(deadline)
        self.settle(give_up=True)
        self.die()

    def die(self) -> None:
        """Take nothing more: these sinks are others than they were, or have ended."""
        self.dead, self.sinks = True, []  # no recorder has these
        if self._before is not None:
            self._before.die()
        self._ending.set()
        self._something.set()

    def _begin(self) -> None:
        self.kept.clear()
        self._waiting, self._thread, self.idle = [], None, True
        self._settling, self._starting = threading.RLock(), threading.Lock()
        self._something, self._ending = threading.Event(), threading.Event()

    def _forked(self) -> None:
        """In a child what was kept is the parent's, and so are the thread, the locks and every span
        that is open.
        """
        self.dead, self.sinks = True, []
        self._begin()
        if self.entrance is not None:
            self.entrance.forget()
