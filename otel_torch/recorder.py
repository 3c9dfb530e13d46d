"""Passes what the sources observe on to the sinks, one step at a time.

Sources measure tensors on their device and must not wait for it. The recorder keeps their rows
until a flush, reads them all at once, and gives the sinks batches of records. One step of a model
with two modules, on an accelerator:

    open(step)        each sink's `open(step)`
    add(row), add(row)               pending: 2 rows
    flush(step)       one Reading copies both rows to the host; queue: [reading]
    close(step)       the records come first, so queue: [reading, end of step]
    add(row), add(row)               the next step; the device finishes the copy meanwhile
    flush(next step)  reading.ready(): each sink's `write(Batch(records, step))`, then each sink's
                      `close(step)`, last sink first; queue: [reading of the next step]

Rows on a CPU are ready at once, so there `flush` writes them and `close` closes the step.

No error of the recorder or of a sink reaches the program: it is counted in `Losses` and reported
once, and the failed sink gets no more calls.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from otel_torch.process import at_fork
from otel_torch.process.console import say, say_once
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.regions.closer import RegionCloser, RegionSpans

# with more pending rows than this, a flush is due before the step ends (a long validation inside a
# training step)
MAX_PENDING = 20_000
# ... and also after this time, so that a killed process loses little
FLUSH_INTERVAL_S = 1.0
# with more readings in flight than this, a flush waits for the device, to bound memory
_MAX_READINGS = 8


class Reading(Protocol):
    """The statistics of a step's tensors, on their way from the devices to the host."""

    def ready(self) -> bool:
        """Return whether `records` would not wait."""

    def records(self) -> Sequence[Record]:
        """Return the records in order; waits for the devices, and raises their errors."""


class _Rows(NamedTuple):
    """Consecutive rows of one step, None for rows of no open step."""

    step: Scope | None
    length: int


class Sink:
    """Writes records and scopes to one destination; subclasses override what they need.

    Every method may be called from any thread, but `write` by one thread at a time.
    """

    # True: `close` may be called for a region after its end, from another thread, without `open`.
    # If one sink needs `open` in time, regions take the slow path for all of them.
    accepts_deferred_regions: ClassVar[bool] = False

    @property
    def region_spans(self) -> RegionSpans | None:
        """The object that starts and ends spans of regions for this sink, or None.

        The region closer calls its `start_region` and `end_region` in place of `open`, so that the
        program's thread creates no scope. It is asked when the first region starts.
        """
        return None

    @property
    def has_destination(self) -> bool:
        """Whether records given to this sink have a destination."""
        return True

    def open(self, scope: Scope) -> None:
        """Handle the start of a scope, in its thread: its span may become the current one there."""

    def close(self, scope: Scope) -> None:
        """Handle the end of a scope, whose `end_ns`, `error`, `events` and attributes are final."""

    def write(self, batch: Batch) -> None:
        """Write records in order of completion; their step scope is closed afterwards."""

    def drain(self, deadline: float) -> None:
        """Send everything accepted so far by `deadline` (`time.monotonic`): the process may die."""

    def finish(self, deadline: float) -> None:
        """Send everything accepted by `deadline` (`time.monotonic`), count the rest as lost.

        The last call to the sink.
        """


class Recorder:
    """Collects what the sources of one session observe and distributes it to the sinks.

    Args:
        read: starts to copy the statistics of pending rows to the host.
        connect: makes the sinks. Called at the first scope or record, because some processes learn
            their rank only after they have started.
        losses: counts what the recorder or its sinks drop.
        step_of: returns the step scope of a row; None for that of the flush.
    """

    def __init__(
        self,
        read: Callable[[list[Any]], Reading],
        connect: Callable[[], Sequence[Sink]],
        losses: Losses,
        step_of: Callable[[Any], Scope | None] = lambda row: None,
    ) -> None:
        self._read = read
        self._connect = connect
        self._step_of = step_of
        self._last_flush = time.monotonic()
        # always this list: the compiled observer appends to it
        self.pending: list[Any] = []
        self._begin(losses)

    def _begin(self, losses: Losses) -> None:
        self.losses = losses
        self.written = 0
        self.region_closer = RegionCloser(losses)
        self._sinks: list[Sink] | None = None
        self.pending.clear()
        self._lock = threading.RLock()
        self._is_finished = False
        self._is_flushing = False
        # in order: a reading with the steps of its rows, or a step that ends
        self._queue: deque[tuple[Reading, list[_Rows]] | Scope] = deque()
        # a batch that not all sinks have yet
        self._unwritten: list[tuple[Sink, Batch]] = []
        self._failed_sinks = 0
        self._finish_deadline: float | None = None

    @property
    def lock(self) -> Any:
        """The lock of flushes, held by the thread that flushes or finishes."""
        return self._lock

    @property
    def is_in_use(self) -> bool:
        """Whether anything was observed in this process and is not finished."""
        return not self._is_finished and (self._sinks is not None or bool(self.pending))

    # -- sinks

    def add_sink(self, sink: Sink) -> None:
        """Give everything recorded from now on to `sink` as well."""
        sinks = self.sinks
        self.region_closer.flush()
        sinks.append(sink)
        self.region_closer.connect(sinks)

    @property
    def sinks(self) -> list[Sink]:
        """The sinks; made at the first access."""
        if self._sinks is None:
            with self._lock:
                if self._sinks is None:
                    self._sinks = self._make_sinks()
                    self.region_closer.connect(self._sinks)
        return self._sinks

    def _make_sinks(self) -> list[Sink]:
        try:
            with at_fork.no_fork():  # sinks import what they need
                return list(self._connect())
        except Exception as error:
            say_once(f"nothing is recorded: {type(error).__name__}: {error}")
            return []

    def _call_sinks(self, method: str, argument: Any, *, reverse: bool = False) -> None:
        for sink in self.sinks[::-1] if reverse else self.sinks.copy():
            try:
                getattr(sink, method)(argument)
            except Exception as error:
                self._remove_failed(sink, error)

    def _remove_failed(self, sink: Sink, error: Exception) -> None:
        sinks = self.sinks
        if sink in sinks:
            sinks.remove(sink)
            self._failed_sinks += 1
            self.region_closer.connect(sinks)
        reason = f"{type(error).__name__}: {error}"
        say_once(f"{type(sink).__name__} failed and gets no more records: {reason}")

    # -- sources

    def add(self, row: Any) -> None:
        """Keep one measured tensor until the next flush. Hot path: one append."""
        self.pending.append(row)

    def open(self, scope: Scope) -> None:
        """Open a scope in every sink; it starts now unless its `start_ns` is set."""
        scope.start_ns = scope.start_ns or time.time_ns()
        self._call_sinks("open", scope)

    def close(self, scope: Scope, error: BaseException | None = None) -> None:
        """Close a scope in every sink; it ends now unless its `end_ns` is set.

        A step is closed after its records are written.
        """
        scope.end_ns = scope.end_ns or time.time_ns()
        scope.error = error
        if scope.kind == "step" and self._queue:
            self._queue.append(scope)
        else:
            self._call_sinks("close", scope, reverse=True)

    @property
    def is_flush_due(self) -> bool:
        """Whether a flush is due although the step has not ended."""
        pending = len(self.pending)
        if self._queue and self._is_next_ready():
            return True
        return pending > MAX_PENDING or (
            pending > 0 and time.monotonic() - self._last_flush > FLUSH_INTERVAL_S
        )

    # -- flushing

    def hurry(self) -> None:
        """Have a flush be due now: what is pending matters to somebody."""
        self._last_flush = -math.inf

    def flush(self, step: Scope | None, *, wait: bool = False) -> None:
        """Start to read all pending rows, and write the records that have arrived.

        If the program is interrupted here (by Ctrl-C, for example), nothing is lost: the next flush
        continues.

        Args:
            step: the step scope of pending rows that have none of their own.
            wait: wait for the devices and write all records.
        """
        with self._lock:
            if self._is_flushing:  # a signal handler of the program has interrupted a flush
                return
            self._is_flushing = True
            try:
                self._start_reading(step)
                self._write_queued(wait or len(self._queue) > _MAX_READINGS)
            finally:
                self._is_flushing = False
            deadline, self._finish_deadline = self._finish_deadline, None
            if deadline is not None:
                self.finish(deadline)

    def _start_reading(self, step: Scope | None) -> None:
        rows = self.pending[:]
        self._last_flush = time.monotonic()
        if not rows or self._is_finished:
            return
        try:
            reading = self._read(rows)
        except Exception as error:
            self._count_unreadable(len(rows), error)
        else:
            self._queue.append((reading, self._by_step(rows, step)))
        # drop pending rows only after their reading is queued; other threads append meanwhile
        del self.pending[: len(rows)]

    def _by_step(self, rows: list[Any], default: Scope | None) -> list[_Rows]:
        """Cut rows into runs of one step each. A step that was closed takes no more records."""
        runs = []
        for step, run in itertools.groupby(rows, self._step_of):
            step = default if step is None else step
            is_closed = step is not None and step.end_ns != 0
            runs.append(_Rows(None if is_closed else step, len(list(run))))
        return runs

    def _is_next_ready(self) -> bool:
        queued = self._queue[0]
        try:
            return isinstance(queued, Scope) or queued[0].ready()
        except Exception:
            return True  # `records` raises it again

    def _write_queued(self, wait: bool) -> None:
        while True:
            self._write_batches()
            if not self._queue or not (wait or self._is_next_ready()):
                return
            queued = self._queue[0]
            if isinstance(queued, Scope):
                del self._queue[0]
                self._call_sinks("close", queued, reverse=True)
                continue
            reading, runs = queued
            records = self._read_records(reading, sum(run.length for run in runs))
            ends = itertools.accumulate(run.length for run in runs)
            batches = [
                Batch(records[end - run.length : end], run.step)
                for run, end in zip(runs, ends, strict=True)
            ]
            self._unwritten = [
                (sink, batch) for batch in batches if batch.records for sink in self.sinks
            ]
            del self._queue[0]
            self.written += len(records)
            self.losses.count("record", "sink_failed", self._failed_sinks * len(records))

    def _write_batches(self) -> None:
        while self._unwritten:
            sink, batch = self._unwritten[0]
            try:
                sink.write(batch)
            except Exception as error:
                self._remove_failed(sink, error)
                self.losses.count("record", "sink_failed", len(batch.records))
            del self._unwritten[0]

    def _read_records(self, reading: Reading, count: int) -> Sequence[Record]:
        try:
            return reading.records()
        except Exception as error:
            self._count_unreadable(count, error)
            return []

    def _count_unreadable(self, count: int, error: Exception) -> None:
        self.losses.count("record", "unreadable", count)
        reason = f"{type(error).__name__}: {error}"
        say_once(f"the statistics of {count} tensors could not be read: {reason}")

    # -- end of the process

    def drain(self, seconds: float) -> None:
        """Send what was recorded so far within `seconds`: an error may end the program."""
        with self._lock:
            if self._queue and not self._is_flushing:
                self._is_flushing = True
                try:
                    self._write_queued(wait=True)
                finally:
                    self._is_flushing = False
        self.drain_sinks(seconds)

    def drain_sinks(self, seconds: float) -> None:
        """Do as `drain` does, except for records that are not with the sinks yet. Takes no lock
        that a flush holds.
        """
        deadline = time.monotonic() + seconds
        self.region_closer.drain(deadline)
        self._call_sinks("drain", deadline)

    def finish(self, deadline: float, step: Scope | None = None) -> None:
        """Flush, finish every sink, and report what was lost. A second call does nothing."""
        with self._lock:
            if self._is_finished:
                return
            if self._is_flushing:  # interrupted by a signal handler: `flush` finishes at its end
                self._finish_deadline = deadline
                return
            self.flush(step, wait=True)
            self._is_finished = True
            if self._sinks is not None:
                self.region_closer.finish(deadline)
                # the recording is the first sink and ends last: its metadata has all losses
                self._call_sinks("finish", deadline, reverse=True)
        if lost := self.losses.describe():
            say(f"lost: {lost}")

    def restart(self, losses: Losses) -> None:
        """Start anew in a forked child.

        Pending rows, sinks with their threads, and a flush of another thread belong to the parent.
        """
        self._begin(losses)
