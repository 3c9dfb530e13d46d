"""Between sources and sinks: keeps a step's tensors until their numbers can be read at once, then
hands records on.

Nothing that goes wrong here or in a sink reaches the program: it is counted, said once, and a
failing sink is left out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from otel_torch.console import say, say_once
from otel_torch.records import Batch, Losses, Record, Scope

# beyond this many tensors the numbers are read though the step goes on (a long validation inside
# one training step)
MAX_PENDING = 20_000
# ... and so they are where the last reading is longer ago, so that little is lost when the process is killed
FLUSH_INTERVAL_S = 1.0
# so many readings may wait for their device; then the program waits, or memory would grow
_MAX_READINGS = 8


class Reading(Protocol):
    """The numbers of a step's tensors on their way from their devices."""

    def ready(self) -> bool:
        """Whether they have arrived, so that nothing would have to wait."""

    def records(self) -> list[Record]:
        """The records, in order; waits for the devices. Raises what they raise."""


class Sink:
    """Takes records and scopes somewhere. Every method may be called from any thread, one call at a
    time for `write`.
    """

    @property
    def wanted(self) -> bool:
        """Whether records would go anywhere from here."""
        return True

    def open(self, scope: Scope) -> None:
        """A scope begins; called in its thread, so that its span may become the thread's current
        one.
        """

    def close(self, scope: Scope) -> None:
        """A scope has ended; `end_ns`, `error`, `events` and the final attributes are set."""

    def write(self, batch: Batch) -> None:
        """Records in order of completion. Called before the step scope that they belong to is
        closed.
        """

    def drain(self, deadline: float) -> None:
        """Everything accepted so far should be out by `deadline` (`time.monotonic`): the process
        may be about to die.
        """

    def finish(self, deadline: float) -> None:
        """No more calls will come. Everything accepted goes out by `deadline` (`time.monotonic`),
        or is counted as lost.
        """


class Recorder:
    """Collects what sources see and fans it out to the sinks.

    read: begins to bring the numbers of pending tensors to the host. A CPU's are there; a device's
    arrive while the program goes on, and are handed on at the next flush. What was seen first is
    handed on first, steps' ends included. connect: makes the sinks, at the first scope or record:
    only then a process is sure to know its rank.
    """

    def __init__(
        self,
        read: Callable[[list[Any]], Reading],
        connect: Callable[[], Sequence[Sink]],
        losses: Losses,
    ) -> None:
        self.losses = losses
        self.written = 0
        self._read = read
        self._connect = connect
        self._sinks: list[Sink] | None = None
        self._pending: list[Any] = []
        self._lock = threading.RLock()
        self._last_flush = time.monotonic()
        self._closed = False
        self._flushing = False
        self._flow: deque[tuple[Reading | None, Scope | None, int]] = (
            deque()
        )  # to be read, or a step to be closed
        self._undelivered: list[tuple[Sink, Batch]] = []
        self._left_out = 0
        self._finish_by: float | None = None

    def add_sink(self, sink: Sink) -> None:
        """Hand everything from here on to `sink` as well."""
        self.sinks.append(sink)

    @property
    def sinks(self) -> list[Sink]:
        """Where everything goes; made now, if this is the first time that somebody asks."""
        if self._sinks is None:
            with self._lock:
                if self._sinks is None:
                    self._sinks = self._make_sinks()
        return self._sinks

    def _make_sinks(self) -> list[Sink]:
        try:
            return list(self._connect())
        except Exception as error:
            say_once(f"nothing is recorded: {type(error).__name__}: {error}")
            return []

    def add(self, tensor: Any) -> None:
        """Keep one measured tensor until the next flush. The hot path: one append."""
        self._pending.append(tensor)

    @property
    def due(self) -> bool:
        """Whether there is something to hand on though the step has not ended."""
        pending = len(self._pending)
        if self._flow and self._arrived():
            return True
        return pending > MAX_PENDING or (
            pending > 0 and time.monotonic() - self._last_flush > FLUSH_INTERVAL_S
        )

    def open(self, scope: Scope) -> None:
        """Start a scope now, unless its `start_ns` says when, and tell the sinks."""
        scope.start_ns = scope.start_ns or time.time_ns()
        self._each("open", scope)

    def close(self, scope: Scope, error: BaseException | None = None) -> None:
        """End a scope now, unless its `end_ns` says when, and tell the sinks; of a step, once they
        have its records.
        """
        scope.end_ns = scope.end_ns or time.time_ns()
        scope.error = error
        if scope.kind == "step" and self._flow:
            self._flow.append((None, scope, 0))
        else:
            self._each("close", scope, backwards=True)

    def flush(self, step: Scope | None, *, wait: bool = False) -> None:
        """Begin to read all pending tensors, and hand the records that have arrived to the sinks;
        `wait`: all of them. `step` is the step scope that the pending ones belong to.

        What the program raises in the middle of it (a Ctrl-C) loses nothing: the next flush goes on
        where this one was.
        """
        with self._lock:
            if (
                self._flushing
            ):  # called by a signal handler of the program, which came in the middle of a flush
                return
            self._flushing = True
            try:
                self._begin_reading(step)
                self._deliver(wait or len(self._flow) > _MAX_READINGS)
            finally:
                self._flushing = False
            finish_by, self._finish_by = self._finish_by, None
            if finish_by is not None:
                self.finish(finish_by)

    def _begin_reading(self, step: Scope | None) -> None:
        pending = self._pending[:]
        self._last_flush = time.monotonic()
        if not pending or self._closed:
            return
        try:
            reading = self._read(pending)
        except Exception as error:
            self._unreadable(len(pending), error)
        else:
            self._flow.append((reading, step, len(pending)))
        # other threads append meanwhile; what is read leaves only once it is kept elsewhere
        del self._pending[: len(pending)]

    def _arrived(self) -> bool:
        reading = self._flow[0][0]
        try:
            return reading is None or reading.ready()
        except Exception:
            return True  # its records say what is wrong

    def _deliver(self, wait: bool) -> None:
        while True:
            while self._undelivered:
                sink, batch = self._undelivered[0]
                try:
                    sink.write(batch)
                except Exception as error:
                    self._leave_out(sink, error)
                    self.losses.count("record", "sink_failed", len(batch.records))
                del self._undelivered[0]
            if not self._flow or not (wait or self._arrived()):
                return
            reading, step, count = self._flow[0]
            if reading is not None:
                try:
                    records = reading.records()
                except Exception as error:
                    self._unreadable(count, error)
                    records = []
                batch = Batch(records, step)
                self._undelivered = [(sink, batch) for sink in self.sinks] if records else []
                del self._flow[0]
                self.written += len(records)
                self.losses.count("record", "sink_failed", self._left_out * len(records))
            elif step is not None:
                del self._flow[0]
                self._each("close", step, backwards=True)

    def _unreadable(self, count: int, error: Exception) -> None:
        self.losses.count("record", "unreadable", count)
        say_once(
            f"the numbers of {count} tensors could not be read: {type(error).__name__}: {error}"
        )

    def drain(self, seconds: float) -> None:
        """Give what was recorded so far up to `seconds` to get out, where the program may be killed
        for an error.
        """
        with self._lock:
            if self._flow and not self._flushing:
                self._flushing = True
                try:
                    self._deliver(wait=True)
                finally:
                    self._flushing = False
        self._each("drain", time.monotonic() + seconds)

    def finish(self, deadline: float, step: Scope | None = None) -> None:
        """Flush, then finish every sink, and say what was lost. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            if self._flushing:  # see `flush`: that one first
                self._finish_by = deadline
                return
            self.flush(step, wait=True)
            self._closed = True
            if self._sinks is not None:
                # the recording, which is the first, last: its metadata tells what the others lost
                self._each("finish", deadline, backwards=True)
        if lost := self.losses.describe():
            say(f"lost: {lost}")

    def restart(self, losses: Losses) -> None:
        """Begin anew in a forked child: what is pending, the sinks, their threads and a flush that
        another thread was in belong to the parent.
        """
        self._lock = threading.RLock()
        self._pending, self._undelivered, self._sinks, self.losses = [], [], None, losses
        self._flow.clear()
        self.written, self._left_out, self._closed, self._flushing, self._finish_by = (
            0,
            0,
            False,
            False,
            None,
        )

    def _each(self, method: str, argument: Any, backwards: bool = False) -> None:
        for sink in self.sinks[::-1] if backwards else self.sinks.copy():
            try:
                getattr(sink, method)(argument)
            except Exception as error:
                self._leave_out(sink, error)

    def _leave_out(self, sink: Sink, error: Exception) -> None:
        if sink in self.sinks:
            self.sinks.remove(sink)
            self._left_out += 1
        say_once(
            f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}"
        )
