"""Between sources and sinks: keeps a step's tensors until their numbers can be read at once, then hands records on.

Nothing that goes wrong here or in a sink reaches the program: it is counted, said once, and a failing sink is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from otel_torch.console import say, say_once
from otel_torch.records import Batch, Losses, Record, Scope

# beyond this many tensors the numbers are read though the step goes on (a long validation inside one training step)
MAX_PENDING = 20_000
# ... and so they are where the last reading is longer ago, so that little is lost when the process is killed
FLUSH_INTERVAL_S = 1.0


class Sink:
    """Takes records and scopes somewhere. Every method may be called from any thread, one call at a time for `write`."""

    @property
    def wanted(self) -> bool:
        """Whether records would go anywhere from here."""
        return True

    def open(self, scope: Scope) -> None:
        """A scope begins; called in its thread, so that its span may become the thread's current one."""

    def close(self, scope: Scope) -> None:
        """A scope has ended; `end_ns`, `error`, `events` and the final attributes are set."""

    def write(self, batch: Batch) -> None:
        """Records in order of completion. Called before the step scope that they belong to is closed."""

    def drain(self, deadline: float) -> None:
        """Everything accepted so far should be out by `deadline` (`time.monotonic`): the process may be about to die."""

    def finish(self, deadline: float) -> None:
        """No more calls will come. Everything accepted goes out by `deadline` (`time.monotonic`), or is counted as lost."""


class Recorder:
    """Collects what sources see and fans it out to the sinks.

    read: turns pending tensors, in order, into records; the one device synchronisation of a step happens there.
    connect: makes the sinks, at the first scope or record: only then a process is sure to know its rank.
    """

    def __init__(
        self, read: Callable[[list[Any]], Iterable[Record]], connect: Callable[[], Sequence[Sink]], losses: Losses
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
        """Whether the pending tensors should be read though the step has not ended."""
        pending = len(self._pending)
        return pending > MAX_PENDING or (pending > 0 and time.monotonic() - self._last_flush > FLUSH_INTERVAL_S)

    def open(self, scope: Scope) -> None:
        """Start a scope now, unless its `start_ns` says when, and tell the sinks."""
        scope.start_ns = scope.start_ns or time.time_ns()
        self._each("open", scope)

    def close(self, scope: Scope, error: BaseException | None = None) -> None:
        """End a scope now, unless its `end_ns` says when, and tell the sinks."""
        scope.end_ns = scope.end_ns or time.time_ns()
        scope.error = error
        self._each("close", scope, backwards=True)

    def flush(self, step: Scope | None) -> None:
        """Read all pending tensors and hand their records to the sinks; `step` is the step scope they belong to.

        What the program raises in the middle of it (a Ctrl-C) loses nothing: the next flush goes on where this one was.
        """
        with self._lock:
            if self._flushing:  # called by a signal handler of the program, which came in the middle of a flush
                return
            self._flushing = True
            try:
                self._deliver()
                self._read_pending(step)
                self._deliver()
            finally:
                self._flushing = False
            finish_by, self._finish_by = self._finish_by, None
            if finish_by is not None:
                self.finish(finish_by)

    def _read_pending(self, step: Scope | None) -> None:
        pending = self._pending[:]
        self._last_flush = time.monotonic()
        if not pending or self._closed:
            return
        try:
            records = list(self._read(pending))
        except Exception as error:
            self.losses.count("record", "unreadable", len(pending))
            say_once(f"the numbers of {len(pending)} tensors could not be read: {type(error).__name__}: {error}")
            records = []
        batch = Batch(records, step)
        # other threads append meanwhile; what is read leaves only once it is kept elsewhere
        self._undelivered = [(sink, batch) for sink in self.sinks] if records else []
        del self._pending[: len(pending)]
        self.written += len(records)
        self.losses.count("record", "sink_failed", self._left_out * len(records))

    def _deliver(self) -> None:
        while self._undelivered:
            sink, batch = self._undelivered[0]
            try:
                sink.write(batch)
            except Exception as error:
                self._leave_out(sink, error)
                self.losses.count("record", "sink_failed", len(batch.records))
            del self._undelivered[0]

    def drain(self, seconds: float) -> None:
        """Give what was recorded so far up to `seconds` to get out, where the program may be killed for an error."""
        self._each("drain", time.monotonic() + seconds)

    def finish(self, deadline: float, step: Scope | None = None) -> None:
        """Flush, then finish every sink, and say what was lost. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            if self._flushing:  # see `flush`: that one first
                self._finish_by = deadline
                return
            self.flush(step)
            self._closed = True
            if self._sinks is not None:
                # the recording, which is the first, last: its metadata tells what the others lost
                self._each("finish", deadline, backwards=True)
        if lost := self.losses.describe():
            say(f"lost: {lost}")

    def restart(self, losses: Losses) -> None:
        """Begin anew in a forked child: what is pending, the sinks, their threads and a flush that another thread was in
        belong to the parent."""
        self._lock = threading.RLock()
        self._pending, self._undelivered, self._sinks, self.losses = [], [], None, losses
        self.written, self._left_out, self._closed, self._flushing, self._finish_by = 0, 0, False, False, None

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
        say_once(f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}")
