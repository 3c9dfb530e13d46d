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
        self._when_idle: Callable[[], None] | None = None

    def add_sink(self, sink: Sink) -> None:
        """Hand everything from here on to `sink` as well."""
        self.sinks.append(sink)

    @property
    def sinks(self) -> list[Sink]:
        """Where everything goes; made now, if this is the first time that somebody asks."""
        if self._sinks is None:
            with self._lock:
                if self._sinks is None:
                    self._sinks = list(self._connect())
        return self._sinks

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
        """Read all pending tensors and hand their records to the sinks; `step` is the step scope they belong to."""
        with self._lock:
            self._flushing = True
            try:
                self._hand_on(step)
            finally:
                self._flushing = False
            action, self._when_idle = self._when_idle, None
            if action is not None:
                action()

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run `action` now, or, called by a signal that came in the middle of a flush, right after that flush."""
        if self._flushing:
            self._when_idle = action
        else:
            action()

    def _hand_on(self, step: Scope | None) -> None:
        pending, self._pending = self._pending, []
        self._last_flush = time.monotonic()
        if not pending or self._closed:
            return
        try:
            records = list(self._read(pending))
        except Exception as error:
            self.losses.count("record", "unreadable", len(pending))
            say_once(f"the numbers of {len(pending)} tensors could not be read: {type(error).__name__}: {error}")
            return
        self.written += len(records)
        self._each("write", Batch(records, step))

    def finish(self, deadline: float, step: Scope | None = None) -> None:
        """Flush, then finish every sink, and say what was lost. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self.flush(step)
            self._closed = True
            if self._sinks is not None:
                self._each("finish", deadline)
        lost = ", ".join(f"{number} {what}s ({reason})" for what, reason, number in self.losses.items())
        if lost:
            say(f"lost: {lost}")

    def restart(self, losses: Losses) -> None:
        """Begin anew in a forked child: what is pending, the sinks and their threads belong to the parent."""
        self._lock = threading.RLock()
        self._pending, self._sinks, self.losses = [], None, losses
        self.written, self._closed = 0, False

    def _each(self, method: str, argument: Any, backwards: bool = False) -> None:
        for sink in self.sinks[::-1] if backwards else self.sinks.copy():
            try:
                getattr(sink, method)(argument)
            except Exception as error:
                if sink in self.sinks:
                    self.sinks.remove(sink)
                say_once(f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}")
