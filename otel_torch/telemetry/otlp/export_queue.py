"""A bounded queue for each exporter. Every item is either sent or counted as lost.

The SDK's batch processors lose items silently: they drop the oldest of 2,048 items, send messages
beyond a receiver's limit, ignore what a receiver rejects, forget a failed batch, and keep the
program waiting half a minute at its end.

The life of one item, a step's 300 records as log events of 100 kB:

1. `put` finds 64 MiB - 40 kB queued, so there is no room. It waits for the sending thread, at most
   as long as the `BackpressureBudget` of the step allows. Without room in time, the item is
   dropped: losses get `("log_event", "queue_full", 300)`.
2. The thread wakes, as more than ENCODE_BYTES are queued. It takes the item, encodes it to 90 kB,
   releases its records, and adds the bytes to the batch.
3. At BATCH_BYTES // 2, or after LINGER_S, the batch is sent as one message.
4. The answer decides. `accepted`: `sent` grows by 300. `unavailable` or `broken`: the same message
   again after 0.5, 1, 2 and 5 seconds. `too_large`: each half of the batch by itself. Any other
   answer: losses get `("log_event", <kind of the answer>, 300)`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain
from typing import Any, Protocol

from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder
from otel_torch.process.console import say_once
from otel_torch.records import Losses
from otel_torch.telemetry.otlp.answer import Answer
from otel_torch.telemetry.otlp.patience import Pace, Patience
from otel_torch.telemetry.otlp.queue_items import QueueItem

QUEUE_BYTES = 64 * 2**20
# from this size on, queued records are encoded: as objects they would be scanned by the program's
# garbage collector again and again, as bytes they are not
ENCODE_BYTES = 2**17
# size of a message: receivers take 4 MiB by default
BATCH_BYTES = 2 * 2**20
# a single item beyond this is not sent
ITEM_BYTES = 7 * 2**19
LINGER_S = 0.5
_RETRY_S = (0.5, 1.0, 2.0, 5.0)
# answers after which a message is sent again, and what it counts as without time for that
_WORTH_RETRYING = {"unavailable": "refused", "broken": "unconfirmed"}
# what an exporter needs to cancel a request
_CANCEL_S = 0.15


class Transport(Protocol):
    """Sends batches. Used by one thread, except for `shutdown`.

    connected_at: when the last connection was made, by `time.monotonic`; 0 if that is not known.
    has_connected: whether a connection was ever made; True if that is not known.
    """

    @property
    def connected_at(self) -> float: ...

    @property
    def has_connected(self) -> bool: ...

    def encode(self, item: QueueItem) -> tuple[list[Any], int]:
        """Return the item as a part of what `send` takes, and its size in bytes."""

    def send(self, payload: list[Any]) -> Answer:
        """Send a message and wait for the answer."""

    def report_silence(self) -> None:
        """Tell the user that the program's end did not wait longer for an answer."""

    def cancel(self) -> None:
        """End the current message; called by another thread, and the last call from there."""

    def shutdown(self) -> None:
        """Release what the transport holds."""


class _Countable(Protocol):
    @property
    def counts(self) -> dict[str, int]: ...


class _EncodedCounts:
    """Replaces an item after its encoding: only its counts are still needed."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts


class BackpressureBudget:
    """How long the program may still wait for full queues, over all queues: 50 ms per step, or 5 %
    of the previous step's time if that is more.
    """

    def __init__(self) -> None:
        self._remaining_s = 0.05
        self._renewed = time.monotonic()

    def renew(self) -> None:
        now = time.monotonic()
        self._remaining_s = max(0.05, 0.05 * (now - self._renewed))
        self._renewed = now

    def wait(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Wait on a condition, whose lock is held. Return whether the predicate came true."""
        started = time.monotonic()
        try:
            return condition.wait_for(predicate, max(0.0, self._remaining_s))
        finally:
            self._remaining_s -= time.monotonic() - started


class _Phase(Enum):
    RUNNING = "running"
    DRAINING = "draining"  # like RUNNING, but send at once
    CLOSING = "closing"  # send what is queued by the deadline, accept nothing more
    ABANDONED = "abandoned"  # send nothing more; what remains is lost


_ENDING_PHASES = (_Phase.CLOSING, _Phase.ABANDONED)


class _Health(Enum):
    UNTRIED = "untried"
    WORKING = "working"  # the last message was accepted
    FAILING = "failing"  # the last message was not accepted, an earlier one was
    NEVER_WORKED = "never worked"  # no message was accepted so far

    def after(self, is_accepted: bool) -> _Health:
        if is_accepted:
            return _Health.WORKING
        has_worked = self in (_Health.WORKING, _Health.FAILING)
        return _Health.FAILING if has_worked else _Health.NEVER_WORKED

    @property
    def is_failing(self) -> bool:
        return self in (_Health.FAILING, _Health.NEVER_WORKED)


class _InFlight:
    """Items that have left the queue and are not yet counted as sent or lost. The queue's lock
    guards it.
    """

    def __init__(self, losses: Losses) -> None:
        self.entries: list[_Countable] = []
        self.sent: Counter[str] = Counter()
        self._losses = losses

    def add(self, entry: _Countable) -> None:
        self.entries.append(entry)

    def remove(self, entry: _Countable) -> bool:
        """Remove an entry. Return whether it was there, so not yet counted."""
        before = len(self.entries)
        self.entries = [candidate for candidate in self.entries if candidate is not entry]
        return len(self.entries) < before

    def settle(self, entries: Sequence[_Countable], reason: str | None, rejected: int = 0) -> None:
        """Count entries as sent, or as lost for `reason`; those counted before are skipped."""
        uncounted = {id(entry) for entry in self.entries}
        entries = [entry for entry in entries if id(entry) in uncounted]
        settled = {id(entry) for entry in entries}
        self.entries = [entry for entry in self.entries if id(entry) not in settled]
        total: Counter[str] = Counter()
        for entry in entries:
            total.update(entry.counts)
        lost: Counter[str] = Counter()
        if reason == "rejected":
            # a receiver counts spans, log records and points, not the events on rejected spans
            kind = next(iter(total), "")
            lost = total if rejected >= total[kind] else Counter({kind: rejected})
        elif reason is not None:
            lost = total
        for kind, count in lost.items():
            self._losses.count(kind, reason or "", count)
        self.sent.update(total - lost)

    def lose(self, entry: _Countable, reason: str) -> None:
        for kind, count in entry.counts.items():
            self._losses.count(kind, reason, count)


class ExportQueue:
    """Hands items to a transport in a daemon thread, which starts with the first item.

    Args:
        open_transport: makes the transport, in that thread: importing exporters and opening
            channels costs the program nothing.
        losses: counts what is lost.
        limit: bytes that may be queued.
        is_local: whether the program itself may write what is queued when no thread can be started
            any more.
        collect: returns items that are not put, such as the metrics of a reader. Called every
            `interval_s` seconds and at the end.
        pace: of the endpoint, shared with its other queues.
    """

    def __init__(
        self,
        name: str,
        open_transport: Callable[[], Transport],
        losses: Losses,
        *,
        limit: int = QUEUE_BYTES,
        is_local: bool = False,
        collect: Callable[[], Iterable[QueueItem]] | None = None,
        interval_s: float = 60.0,
        pace: Pace | None = None,
    ) -> None:
        self.name = name
        self._open_transport, self._limit, self._is_local = open_transport, limit, is_local
        self._collect, self._interval_s = collect, interval_s
        self._items: deque[QueueItem] = deque()
        self._bytes = 0  # of the queued items
        self._in_flight = _InFlight(losses)
        self._batch: list[tuple[_EncodedCounts, list[Any]]] = []
        self._batch_bytes = 0
        self._unanswered: list[_EncodedCounts] = []
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._transport: Transport | None = None
        self._phase = _Phase.RUNNING
        self._health = _Health.UNTRIED
        self._done = threading.Event()
        self._deadline = 0.0
        self._patience = Patience(pace, is_local=is_local)
        at_fork.register(ForkOrder.EXPORT_QUEUES, in_child=self._reset_in_child)

    @property
    def sent(self) -> Counter[str]:
        """How many of each kind were accepted by the receiver."""
        return self._in_flight.sent

    # -- called by the program

    def put(self, items: Sequence[QueueItem], backpressure: BackpressureBudget) -> None:
        """Enqueue items. Wait for room as long as `backpressure` allows, unless the endpoint fails;
        then drop the new items and count them.
        """
        with self._condition:
            for item in items:
                if not self._has_room(item) and not self._health.is_failing:
                    self._condition.notify_all()
                    backpressure.wait(
                        self._condition,
                        functools.partial(self._can_stop_waiting, item),
                    )
                if self._phase in _ENDING_PHASES:
                    self._in_flight.lose(item, "shutdown")
                elif not self._has_room(item):
                    self._in_flight.lose(item, "queue_full")
                else:
                    self._items.append(item)
                    self._bytes += item.size
            if self._bytes >= ENCODE_BYTES:
                self._condition.notify_all()
        self.start()

    def start(self) -> None:
        """Start the thread unless it runs, or nothing is accepted any more."""
        if self._thread is not None or self._done.is_set() or self._phase in _ENDING_PHASES:
            return
        thread = threading.Thread(target=self._run, name=f"otel_torch-{self.name}", daemon=True)
        with self._condition:
            is_first = self._thread is None
            self._thread = self._thread or thread
        if is_first:
            try:
                thread.start()
            except RuntimeError:  # the interpreter is exiting, `wait` does what can be done
                pass

    def begin_drain(self) -> None:
        """Send what is queued now at once."""
        with self._condition:
            if self._thread is not None and self._phase is _Phase.RUNNING:
                self._phase = _Phase.DRAINING
                self._condition.notify_all()

    def wait_drained(self, deadline: float) -> None:
        """Wait until what is queued is sent, until `deadline` and unless the endpoint fails."""
        with self._condition:
            if self._thread is None:
                return
            self._condition.wait_for(self._is_drained, max(0.0, deadline - time.monotonic()))
            if self._phase is _Phase.DRAINING:
                self._phase = _Phase.RUNNING

    def close(self, deadline: float) -> None:
        """Accept nothing more, and send what is queued by `deadline` (`time.monotonic`). Does not
        wait.
        """
        with self._condition:
            self._deadline = deadline
            self._patience.close(deadline - _CANCEL_S)
            if self._phase is not _Phase.ABANDONED:
                self._phase = _Phase.CLOSING
            self._condition.notify_all()

    def wait(self) -> None:
        """Wait until everything is sent, the endpoint is silent for too long, or the deadline is
        over; then send nothing more.
        """
        if self._thread is None:
            self._done.set()
        elif self._thread.ident is None:  # the interpreter was exiting
            self._run() if self._is_local else self._done.set()
        while not self._done.is_set() and self._waits_until() > time.monotonic():
            # a message that begins meanwhile is not overdue before this wakes up
            longest_s = self._patience.answer_s
            self._wait_until(min(self._waits_until(), time.monotonic() + longest_s))
        if not self._done.is_set():
            is_silent = self._waits_until() < self._deadline - _CANCEL_S
            with self._condition:
                self._phase = _Phase.ABANDONED
                self._condition.notify_all()
                self._deadline = min(self._deadline, time.monotonic() + _CANCEL_S)
            if self._transport is not None:
                if is_silent and not self._health.is_failing:  # which has been reported
                    self._transport.report_silence()
                self._transport.cancel()

    def finish(self) -> None:
        """Count what was not sent as lost. Call it once all queues have waited."""
        self._wait_until(self._deadline)
        self._lose_remaining()

    def _wait_until(self, deadline: float) -> None:
        self._done.wait(max(0.0, deadline - time.monotonic()))

    def _waits_until(self) -> float:
        transport = self._transport
        return self._patience.waits_until(
            is_hopeless=self._health is _Health.NEVER_WORKED,
            connected=0.0 if transport is None else transport.connected_at,
            has_connected=transport is not None and transport.has_connected,
        )

    def _lose_remaining(self) -> None:
        with self._condition:
            self._phase = _Phase.ABANDONED
            for entry in self._in_flight.entries:
                is_unanswered = any(entry is candidate for candidate in self._unanswered)
                self._in_flight.lose(entry, "unconfirmed" if is_unanswered else self._never_sent)
            for item in self._items:
                self._in_flight.lose(item, self._never_sent)
            self._in_flight.entries, self._bytes = [], 0
            self._items.clear()

    # -- the sending thread

    def _run(self) -> None:
        self._patience.begin()  # opening may wait for a network, too
        try:
            with at_fork.no_fork():
                self._transport = self._open_transport()
        except Exception as error:
            say_once(
                f"{self.name} are not sent: the exporter cannot be created: "
                f"{type(error).__name__}: {error}"
            )
            self._give_up()
            return
        self._patience.end()
        try:
            self._work(self._transport)
        except Exception as error:
            say_once(f"{self.name} are no longer sent: {type(error).__name__}: {error}")
            self._give_up()
        finally:
            self._done.set()

    def _work(self, transport: Transport) -> None:
        collected = time.monotonic()
        due = collected + LINGER_S
        while self._phase is not _Phase.ABANDONED:
            with self._condition:
                self._condition.wait_for(self._has_urgent_work, max(0.0, due - time.monotonic()))
                is_ending, now = self._is_ending(), time.monotonic()
            if self._collect is not None and (is_ending or now - collected >= self._interval_s):
                collected = now
                self._enqueue_collected(self._collect())
            while not self._has_given_up() and self._encode_next(transport):
                pass
            is_due = is_ending or self._phase is _Phase.DRAINING or now >= due
            if is_due and not self._has_given_up():
                self._send_batch(transport)
                due = time.monotonic() + LINGER_S
            if is_ending:
                transport.shutdown()
                return

    def _enqueue_collected(self, items: Iterable[QueueItem]) -> None:
        collected = list(items)
        with self._condition:
            self._items.extend(collected)
            self._bytes += sum(item.size for item in collected)

    def _encode_next(self, transport: Transport) -> bool:
        """Encode one item into the batch, and send the batch when it is large enough. Return False
        if nothing is queued.
        """
        item = self._take_next()
        if item is None:
            return False
        try:
            expanded = item.expand()
            if len(expanded) != 1 or expanded[0] is not item:
                self._replace(item, expanded)
                return True
            encoded, size = transport.encode(item)
            entry = _EncodedCounts(item.counts)
        except Exception as error:
            say_once(f"some {self.name} cannot be encoded: {type(error).__name__}: {error}")
            self._settle([item], "unencodable")
            return True
        if size > ITEM_BYTES:
            halves = item.split()
            if halves:
                self._replace(item, halves)
            else:
                self._settle([item], "too_large")
        elif not self._release_records(item, entry) or not size:
            self._settle([entry], None)
        else:
            if self._batch_bytes + size > BATCH_BYTES:
                self._send_batch(transport)
            self._batch.append((entry, encoded))
            self._batch_bytes += size
            if self._batch_bytes >= BATCH_BYTES // 2:
                self._send_batch(transport)
        return True

    def _take_next(self) -> QueueItem | None:
        with self._condition:
            if not self._items or self._phase is _Phase.ABANDONED:
                return None
            item = self._items.popleft()
            self._bytes -= item.size
            self._in_flight.add(item)
            self._condition.notify_all()
            return item

    def _replace(self, item: QueueItem, items: Sequence[QueueItem]) -> None:
        """Put items at the front of the queue in place of one, unless that was counted as lost."""
        with self._condition:
            if self._in_flight.remove(item):
                self._items.extendleft(reversed(items))
                self._bytes += sum(part.size for part in items)
                self._condition.notify_all()

    def _release_records(self, item: QueueItem, entry: _EncodedCounts) -> bool:
        """Track `entry` instead of the item, so that its records are freed. Return False if the
        item was counted as lost meanwhile.
        """
        with self._condition:
            is_uncounted = self._in_flight.remove(item)
            if is_uncounted:
                self._in_flight.add(entry)
            return is_uncounted

    def _send_batch(self, transport: Transport) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            self._unanswered = [entry for entry, _ in batch]
            self._deliver(transport, self._unanswered, [encoded for _, encoded in batch])
            self._unanswered = []
            self._patience.end()

    def _deliver(
        self, transport: Transport, entries: list[_EncodedCounts], payload: list[list[Any]]
    ) -> None:
        """Send a message until there is a final answer; halve it if it is too large."""
        self._patience.begin()
        for attempt in range(1_000_000):
            sent = time.monotonic()
            answer = transport.send(list(chain.from_iterable(payload)))
            if self._phase is not _Phase.ABANDONED:  # then the message was cancelled
                self._health = self._health.after(answer.kind == "accepted")
            if answer.kind == "accepted":
                self._patience.learn(time.monotonic() - sent)
                self._settle(entries, "rejected" if answer.rejected else None, answer.rejected)
            elif answer.kind == "too_large" and len(entries) > 1:
                middle = len(entries) // 2
                self._deliver(transport, entries[:middle], payload[:middle])
                self._deliver(transport, entries[middle:], payload[middle:])
            elif answer.kind == "shutdown":
                self._settle(entries, self._never_sent)
            elif answer.kind not in _WORTH_RETRYING:
                self._settle(entries, answer.kind)
            elif self._wait_to_retry(attempt):
                continue
            else:
                self._settle(entries, _WORTH_RETRYING[answer.kind])
            return

    def _wait_to_retry(self, attempt: int) -> bool:
        """Wait before the next attempt. Return False if there is no time for one."""
        with self._condition:
            self._condition.notify_all()  # a program that waits for room need not wait any longer
            if not self._is_ending():
                delay_s = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
                self._condition.wait_for(self._is_ending, delay_s)
                return self._phase is not _Phase.ABANDONED
            has_time = time.monotonic() + _RETRY_S[0] <= self._deadline - _CANCEL_S
            if (
                self._phase is _Phase.ABANDONED
                or self._health is _Health.NEVER_WORKED
                or not has_time
            ):
                return False
            return not self._condition.wait_for(lambda: self._phase is _Phase.ABANDONED, 0.2)

    def _settle(self, entries: Sequence[_Countable], reason: str | None, rejected: int = 0) -> None:
        with self._condition:
            self._in_flight.settle(entries, reason, rejected)
            self._condition.notify_all()

    def _give_up(self) -> None:
        with self._condition:
            self._phase = _Phase.ABANDONED
            self._health = self._health.after(is_accepted=False)
            self._condition.notify_all()
        self._done.set()

    # -- conditions

    @property
    def _never_sent(self) -> str:
        """Why what was not sent before the end is lost."""
        return "refused" if self._health.is_failing else "shutdown"

    def _is_ending(self) -> bool:
        return self._phase in _ENDING_PHASES

    def _has_given_up(self) -> bool:
        """Return whether nothing more is sent: the end has come and the last message failed."""
        return self._is_ending() and self._health.is_failing

    def _has_room(self, item: QueueItem) -> bool:
        return self._bytes + item.size <= self._limit or self._is_ending()

    def _can_stop_waiting(self, item: QueueItem) -> bool:
        return self._has_room(item) or self._health.is_failing

    def _has_urgent_work(self) -> bool:
        has_items = bool(self._items or self._in_flight.entries)
        return (
            self._is_ending()
            or self._bytes >= ENCODE_BYTES
            or (self._phase is _Phase.DRAINING and has_items)
        )

    def _is_drained(self) -> bool:
        is_empty = not (self._items or self._in_flight.entries)
        return is_empty or self._health.is_failing or self._phase is _Phase.ABANDONED

    # -- forks

    def _reset_in_child(self) -> None:
        _parents_queues.append(self)
        self._items, self._bytes = deque(), 0
        self._in_flight.entries = []
        self._batch, self._batch_bytes, self._unanswered = [], 0, []
        self._condition = threading.Condition()
        self._thread = None
        self._phase = _Phase.ABANDONED
        self._done = threading.Event()
        self._done.set()


# queues that a forked child inherited: collecting them would close connections of the parent
_parents_queues: list[ExportQueue] = []
