"""Closes regions after they have ended, away from the code that they time.

A program may enter a region thousands of times a second. Its thread only reads the clock twice and
makes the region's span the current one; a background thread fills tables, histograms and export
messages later, once the device time is known. One region, from entry to sinks:

    with region("training_step"):  entry._enter looks up the name's RegionLabel in the session
                                   closer.start_region(closer, label, now) -> RegionEntry, which is
                                     a LightSpan if a sink makes spans; the current span from here
        ...                        the program's code
                                   entry.close(error): end_ns is read, the span ends, and the entry
                                     is appended to `closer.ended`
    (thread otel_torch-regions)    closer.flush: RegionEntry -> Scope(kind="region", end_ns=...),
                                     then `sink.close(scope)` for every sink, last to first

The recorder owns the closer and connects it to its sinks. The background thread starts when the
first region ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol

from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder
from otel_torch.process.console import say_once
from otel_torch.records import Losses, Scope

if TYPE_CHECKING:
    from otel_torch.recorder import Sink

# seconds between the end of a region and the flush that closes it
FLUSH_DELAY_S = 0.1
# a region whose device time is not known after so many seconds is closed without it
MAX_DEVICE_WAIT_S = 30.0
# with more ended regions than this, the thread that ends one flushes them itself
MAX_ENDED = 50_000


class DeviceTimer(Protocol):
    """Device time between two points of a program; see `otel_torch.regions.device_time`."""

    def end(self) -> None:
        """Mark the second point."""

    def seconds(self) -> float | None:
        """Return the measured time; None if it is not known yet or could not be measured."""

    @property
    def pending(self) -> bool:
        """Whether `seconds` may still become known."""


class RegionLabel:
    """The names of a region in one session.

    Args:
        region: the registered name, or the name as entered if it is not registered.
        span_name: name of the region's span; empty if the session opens none for it.
        is_registered: whether the region is in the registry.
    """

    __slots__ = ("attributes", "is_registered", "region", "span_name")

    def __init__(self, region: str, span_name: str, is_registered: bool) -> None:
        self.region, self.span_name, self.is_registered = region, span_name, is_registered
        self.attributes: dict[str, Any] = {"torch.region": region}


class RegionEntry:
    """One entry of a region, from its start until all sinks have closed it."""

    has_span = False  # whether `RegionSpans.start_region` made it
    end_ns = 0
    device_timer: DeviceTimer | None = None

    def __init__(self, closer: RegionCloser, label: RegionLabel, start_ns: int) -> None:
        self.closer = closer
        self.label = label
        self.start_ns = start_ns

    def close(self, error: BaseException | None) -> None:
        """End the region now; the sinks close it later."""
        closer = self.closer
        if self.device_timer is not None:
            self.device_timer.end()
        self.end_ns = end_ns = time_ns()
        if self.has_span:
            closer.spans.end_region(self, end_ns, error)
        if not closer.is_finished:
            closer.ended.append(self)
            if closer.is_idle or len(closer.ended) > MAX_ENDED:
                closer.wake_or_flush()

    def make_scope(self) -> Scope:
        label = self.label
        attributes = label.attributes.copy()
        scope = Scope("region", label.span_name, True, attributes, self.start_ns, self.end_ns)
        if self.device_timer is not None:
            scope.device_s = self.device_timer.seconds()
        return scope


class _OpenedScope(RegionEntry):
    """A region that was opened as a scope and has ended; its device time is still to come."""

    def __init__(self, closer: RegionCloser, scope: Scope, device_timer: DeviceTimer) -> None:
        super().__init__(closer, RegionLabel(scope.name, scope.name, True), scope.start_ns)
        self.scope, self.end_ns, self.device_timer = scope, scope.end_ns, device_timer

    def make_scope(self) -> Scope:
        if self.device_timer is not None:
            self.scope.device_s = self.device_timer.seconds()
        return self.scope


class RegionSpans:
    """The fast path of a sink that makes spans: starts a region's span without a scope.

    This class itself makes none.
    """

    def start_region(
        self, closer: RegionCloser, label: RegionLabel, start_ns: int
    ) -> RegionEntry | None:
        """Start a region and make its span the current one. None if that takes `Sink.open`.

        An entry without a span (a plain `RegionEntry`) is allowed.
        """
        return RegionEntry(closer, label, start_ns)

    def end_region(self, span: Any, end_ns: int, error: BaseException | None) -> None:
        """End a span that `start_region` returned."""

    def release_spans(self, entries: list[Any]) -> None:
        """Export the spans that were held back for their device time, now known or given up."""

    def detach_scope(self, scope: Scope) -> None:
        """Make the span of an opened scope no longer current; another thread closes the scope."""

    def discard_open_spans(self) -> None:
        """Forget the open spans; called in a forked child, because the parent sends them."""


class RegionCloser:
    """Closes ended regions in the sinks of the recorder that owns it.

    can_defer: whether all sinks accept regions after their end. If not, every region is opened and
    closed as a scope. start_region: starts a region, as `RegionSpans.start_region` does.
    """

    def __init__(self, losses: Losses) -> None:
        self.can_defer = False
        self.is_finished = False
        # kept after its sink has failed, to end the spans that it has started
        self.spans = RegionSpans()
        self.start_region: Callable[[RegionCloser, RegionLabel, int], RegionEntry | None]
        self._losses = losses
        self._sinks: list[Sink] = []
        self.connect([])
        self._reset()
        at_fork.register(ForkOrder.REGION_CLOSERS, in_child=self._reset_in_child)

    def _reset(self) -> None:
        self.ended: deque[RegionEntry] = deque()
        self.is_idle = True  # no flush is due
        self._awaiting_device: list[RegionEntry] = []
        self._thread: threading.Thread | None = None
        self._flush_lock, self._start_lock = threading.RLock(), threading.Lock()
        self._has_work, self._is_ending = threading.Event(), threading.Event()

    def _reset_in_child(self) -> None:
        """In a forked child, leave the ended regions and the open spans to the parent."""
        self.is_finished = True
        self._reset()
        self.spans.discard_open_spans()

    # -- sinks

    def connect(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.can_defer = bool(sinks) and all(sink.accepts_deferred_regions for sink in sinks)
        self.reconnect_spans()

    def reconnect_spans(self) -> None:
        """Ask the sinks for their `region_spans` again when the next region starts."""
        self._has_found_spans = False
        self.start_region = RegionCloser._start_first_region

    def _start_first_region(self, label: RegionLabel, start_ns: int) -> RegionEntry | None:
        self._find_spans()
        return self.start_region(self, label, start_ns) if self.can_defer else None

    def _find_spans(self) -> None:
        candidates = [spans for sink in self._sinks if (spans := sink.region_spans) is not None]
        self._has_found_spans = True
        self.start_region = candidates[0].start_region if candidates else RegionEntry
        if candidates:
            self.spans = candidates[0]
        if len(candidates) > 1:  # a region can have one current span
            self.can_defer = False

    # -- threads of the program

    def defer_scope(
        self, scope: Scope, error: BaseException | None, device_timer: DeviceTimer
    ) -> None:
        """End a region that was opened as a scope; close it once its device time is known."""
        scope.end_ns = scope.end_ns or time_ns()
        scope.error = error
        if not self._has_found_spans:
            self._find_spans()
        self.spans.detach_scope(scope)
        if not self.is_finished:
            self.ended.append(_OpenedScope(self, scope, device_timer))
            if self.is_idle:
                self.wake_or_flush()

    def wake_or_flush(self) -> None:
        """Wake the background thread; if it is awake already and too slow, flush here."""
        if not self.is_idle:
            self.flush()
            return
        self.is_idle = False
        if self._thread is None:
            self._start_thread()
        self._has_work.set()

    def _start_thread(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="otel_torch-regions", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is exiting: `finish` flushes
                    pass

    # -- background thread

    def _run(self) -> None:
        while not self.is_finished:
            self._has_work.wait()
            self._has_work.clear()
            while not self.is_finished:
                self._is_ending.wait(FLUSH_DELAY_S)
                self.is_idle = True  # the next region that ends wakes this thread again
                self.flush()
                if not self._awaiting_device:
                    break

    def flush(self, *, await_device: bool = True) -> None:
        """Close the ended regions in the sinks, except those whose device time is still pending.

        With `await_device=False` those are closed as well, without a device time.
        """
        with self._flush_lock:
            entries, self._awaiting_device = self._awaiting_device, []
            while self.ended:
                entries.append(self.ended.popleft())
            oldest_ns = time_ns() - int(MAX_DEVICE_WAIT_S * 1e9)
            ready: list[RegionEntry] = []
            for entry in entries:
                timer = entry.device_timer
                if timer is not None:
                    timer.seconds()  # updates `pending`
                    if timer.pending and await_device and entry.end_ns > oldest_ns:
                        self._awaiting_device.append(entry)
                        continue
                    if timer.pending:
                        entry.device_timer = None
                ready.append(entry)
            if ready:
                self._close_all(ready)

    def _close_all(self, entries: list[RegionEntry]) -> None:
        try:
            self.spans.release_spans(entries)
        except Exception as error:
            self._losses.count("span", "sink_failed", len(entries))
            say_once(f"{len(entries)} spans of regions are lost: {type(error).__name__}: {error}")
        scopes = [entry.make_scope() for entry in entries]
        for sink in self._sinks[::-1]:
            if not sink.has_destination:
                continue
            try:
                for scope in scopes:
                    sink.close(scope)
            except Exception as error:
                self._sinks.remove(sink)
                reason = f"{type(error).__name__}: {error}"
                say_once(f"{type(sink).__name__} failed and gets no more regions: {reason}")

    @property
    def has_pending(self) -> bool:
        return bool(self._awaiting_device)

    def drain(self, deadline: float) -> None:
        """Flush; wait for device times during half of the time until `deadline` (`monotonic`)."""
        now = time.monotonic()
        until = now + (deadline - now) / 2
        self.flush()
        while self.has_pending and time.monotonic() < until:
            time.sleep(0.005)
            self.flush()

    def finish(self, deadline: float) -> None:
        """Drain, close what is left without device times, and stop the thread."""
        self.drain(deadline)
        self.flush(await_device=False)
        self.is_finished, self.can_defer = True, False
        self._is_ending.set()
        self._has_work.set()
