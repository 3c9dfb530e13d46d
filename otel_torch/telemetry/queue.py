"""A bounded queue before each exporter, which counts whatever does not arrive.

For the losses that the SDK's batch processors hide: they drop the oldest at 2,048 items, send
messages beyond a receiver's limit, ignore what it rejects, forget a failed batch, and keep the
program waiting half a minute at its end.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

from otel_torch import at_fork
from otel_torch.at_fork import ForkOrder
from otel_torch.console import say_once
from otel_torch.records import Losses
from otel_torch.telemetry.queue_items import Item
from otel_torch.telemetry.transport import Answer

QUEUE_BYTES = 64 * 2**20
# records that wait are encoded from here on: as objects they would make the program's cycle
# collector go through the whole heap again and again, as bytes they are nothing to it
ENCODE_BYTES = 2**17
# a message: a receiver's limit is 4 MiB where nobody has changed it
BATCH_BYTES = 2 * 2**20
# a single item beyond this is not sent at all
ITEM_BYTES = 7 * 2**19
LINGER_S = 0.5
_RETRY_S = (0.5, 1.0, 2.0, 5.0)
# how long the end of the program waits for an endpoint that has refused everything so far
_HOPELESS_S = 0.5
# what an exporter needs to give up a request once it is told to
_GIVE_UP_S = 0.15


class Sender(Protocol):
    """What takes batches away. Used by one thread, but for `shutdown`."""

    def encode(self, item: Item) -> tuple[list[Any], int]:
        """The item as a part of what `send` takes, and its bytes."""

    def send(self, payload: list[Any]) -> Answer:
        """Send, and wait for the answer."""

    def shutdown(self) -> None:
        """Give up what is under way; may be called from another thread."""


class _Counts(Protocol):
    """How much of what is lost with something."""

    @property
    def counts(self) -> dict[str, int]: ...


class _Counted:
    """An item that is encoded: all that is still needed of it."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts


class Patience:
    """How long the program may still be kept waiting: 50 ms at a step's end, or 5 % of the time
    since the last, whichever is more, over all queues together.
    """

    def __init__(self) -> None:
        self._left = 0.05
        self._renewed = time.monotonic()

    def renew(self) -> None:
        """A step ends."""
        now = time.monotonic()
        self._left = max(0.05, 0.05 * (now - self._renewed))
        self._renewed = now

    def wait(self, condition: threading.Condition, until: Callable[[], bool]) -> bool:
        """Wait on a condition whose lock is held; True where `until` came true in time."""
        started = time.monotonic()
        try:
            return condition.wait_for(until, max(0.0, self._left))
        finally:
            self._left -= time.monotonic() - started


_queues: weakref.WeakSet[ExportQueue] = weakref.WeakSet()
# held while an exporter is made: a fork in the middle of its imports would leave the child with
# ones that never end
_opening = threading.Lock()
_held = False
# a forked child must neither close nor collect its parent's connections
_parents: list[ExportQueue] = []


class ExportQueue:
    """Hands items to a sender, in a daemon thread that starts with the first item. What is lost is
    counted in `losses`.

    open_sender: makes the sender, in that thread: importing exporters and opening channels costs
    the program nothing. collect: asked every `interval_s`, and at the end, for items that nobody
    puts (metrics of a reader).
    """

    def __init__(
        self,
        name: str,
        open_sender: Callable[[], Sender],
        losses: Losses,
        *,
        limit: int = QUEUE_BYTES,
        collect: Callable[[], Iterable[Item]] | None = None,
        interval_s: float = 60.0,
    ) -> None:
        self.name = name
        self.sent: Counter[str] = Counter()
        self._open_sender, self._losses, self._limit = open_sender, losses, limit
        self._collect, self._interval_s = collect, interval_s
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._in_flight: list[_Counts] = []
        self._prepared: list[tuple[_Counted, list[Any]]] = []  # encoded, and waiting for others
        self._prepared_bytes = 0
        self._sending: list[_Counted] = []
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sender: Sender | None = None
        self._closing = self._abandoned = self._failing = self._worked = self._urgent = False
        self._done = threading.Event()
        self._deadline = 0.0
        _queues.add(self)

    # -- the program's side
    # --------------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], patience: Patience) -> None:
        """Take items. A full queue is waited for as long as `patience` lasts, then the new ones are
        dropped and counted; an endpoint that does not answer is not waited for.
        """
        with self._condition:
            for item in items:
                if not self._has_room(item) and not self._failing:
                    self._condition.notify_all()
                    patience.wait(
                        self._condition,
                        functools.partial(self._may_stop_waiting, item),
                    )
                if self._closing or self._abandoned:
                    self._lose(item, "shutdown")
                elif not self._has_room(item):
                    self._lose(item, "queue_full")
                else:
                    self._items.append(item)
                    self._bytes += item.size
            if self._bytes >= ENCODE_BYTES:
                self._condition.notify_all()
        self.start()

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is not None or self._done.is_set():
            return
        thread = threading.Thread(target=self._run, name=f"otel_torch-{self.name}", daemon=True)
        with self._condition:
            first = self._thread is None
            self._thread = self._thread or thread
        if first:
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending: `wait` does the work
                pass

    def drain(self, deadline: float) -> None:
        """Send now rather than soon, and wait for it until `deadline`, unless the endpoint fails."""
        with self._condition:
            if self._thread is not None:
                self._urgent = True
                self._condition.notify_all()
                self._condition.wait_for(self._is_drained, max(0.0, deadline - time.monotonic()))
                self._urgent = False

    def close(self, deadline: float) -> None:
        """Nothing more will be put: send what is there by `deadline` (`time.monotonic`). Does not
        wait.
        """
        with self._condition:
            hopeless = self._failing and not self._worked
            self._deadline = min(deadline, time.monotonic() + _HOPELESS_S) if hopeless else deadline
            self._closing = True
            self._condition.notify_all()

    def wait(self) -> None:
        """Wait until all is sent or the deadline is over; what is then left is given up and
        counted.
        """
        if self._thread is None:
            self._done.set()
        elif self._thread.ident is None:
            self._run()
        self._done.wait(max(0.0, self._deadline - _GIVE_UP_S - time.monotonic()))
        if not self._done.is_set():
            with self._condition:
                self._abandoned = True
                self._condition.notify_all()
            if self._sender is not None:
                self._sender.shutdown()
            self._done.wait(_GIVE_UP_S)
        with self._condition:
            self._abandoned = True
            never_sent = "refused" if self._failing else "shutdown"
            for item in self._in_flight:
                self._lose(
                    item, "unconfirmed" if any(item is one for one in self._sending) else never_sent
                )
            for item in self._items:
                self._lose(item, never_sent)
            self._in_flight, self._bytes = [], 0
            self._items.clear()

    # -- the thread's side
    # ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with _opening:
                self._sender = self._open_sender()
        except Exception as error:
            say_once(
                f"{self.name} are not sent: the exporter cannot be made: {type(error).__name__}: {error}"
            )
            self._give_up()
            return
        try:
            self._work(self._sender)
        except Exception as error:
            say_once(f"{self.name} are not sent any more: {type(error).__name__}: {error}")
            self._give_up()
        finally:
            self._done.set()

    def _work(self, sender: Sender) -> None:
        collected = time.monotonic()
        due = collected + LINGER_S
        while not self._abandoned:
            with self._condition:
                self._condition.wait_for(self._has_work_now, max(0.0, due - time.monotonic()))
                closing, now = self._closing, time.monotonic()
            if self._collect is not None and (closing or now - collected >= self._interval_s):
                collected = now
                self._take_in(self._collect())
            while not self._gives_up() and self._prepare(sender):
                pass
            if (closing or self._urgent or now >= due) and not self._gives_up():
                self._send_prepared(sender)
                due = time.monotonic() + LINGER_S
            if closing:
                sender.shutdown()
                return

    def _has_work_now(self) -> bool:
        waiting = self._items or self._in_flight
        return (
            self._closing
            or self._abandoned
            or self._bytes >= ENCODE_BYTES
            or (self._urgent and bool(waiting))
        )

    def _gives_up(self) -> bool:
        """Whether nothing more is sent, as the end has come and the last message was not taken."""
        return self._closing and self._failing

    def _take_in(self, items: Iterable[Item]) -> None:
        found = list(items)
        with self._condition:
            self._items.extend(found)
            self._bytes += sum(item.size for item in found)

    def _prepare(self, sender: Sender) -> bool:
        """Encode one item, and send what is prepared when it makes a message; False where there was
        nothing to encode.
        """
        item = self._next()
        if item is None:
            return False
        try:
            parts = item.parts()
            if len(parts) != 1 or parts[0] is not item:
                self._replace(item, parts)
                return True
            encoded, length = sender.encode(item)
            counted = _Counted(item.counts)
        except Exception as error:
            say_once(f"some {self.name} cannot be encoded: {type(error).__name__}: {error}")
            self._settle([item], "unencodable")
            return True
        if length > ITEM_BYTES:
            halves = item.halves()
            if halves:
                self._replace(item, halves)
            else:
                self._settle([item], "too_large")
        elif not self._keep_counts(item, counted) or not length:
            self._settle([counted], None)
        else:
            if self._prepared_bytes + length > BATCH_BYTES:
                self._send_prepared(sender)
            self._prepared.append((counted, encoded))
            self._prepared_bytes += length
            if self._prepared_bytes >= BATCH_BYTES // 2:
                self._send_prepared(sender)
        return True

    def _send_prepared(self, sender: Sender) -> None:
        prepared, self._prepared, self._prepared_bytes = self._prepared, [], 0
        if prepared:
            self._sending = [counted for counted, _ in prepared]
            self._deliver(sender, self._sending, [payload for _, payload in prepared])
            self._sending = []

    def _next(self) -> Item | None:
        with self._condition:
            if not self._items or self._abandoned:
                return None
            item = self._items.popleft()
            self._bytes -= item.size
            self._in_flight.append(item)
            self._condition.notify_all()
            return item

    def _replace(self, item: Item, parts: Sequence[Item]) -> None:
        """Send others in an item's place, unless it was given up meanwhile."""
        with self._condition:
            if self._forget(item):
                self._items.extendleft(reversed(parts))
                self._bytes += sum(part.size for part in parts)
                self._condition.notify_all()

    def _keep_counts(self, item: Item, counted: _Counted) -> bool:
        """Let an item's records go, and remember how many they were; False where it was given up
        meanwhile.
        """
        with self._condition:
            known = self._forget(item)
            if known:
                self._in_flight.append(counted)
            return known

    def _forget(self, item: Item) -> bool:
        before = len(self._in_flight)
        self._in_flight = [one for one in self._in_flight if one is not item]
        return len(self._in_flight) < before

    def _deliver(self, sender: Sender, items: list[_Counted], payload: list[list[Any]]) -> None:
        """Send until there is an answer that is final."""
        for attempt in range(1_000_000):
            answer = sender.send(list(chain.from_iterable(payload)))
            self._failing = answer.kind != "accepted"
            if answer.kind == "accepted":
                self._worked = True
                self._settle(items, "rejected" if answer.rejected else None, answer.rejected)
            elif answer.kind == "too_large" and len(items) > 1:
                half = len(items) // 2
                self._deliver(sender, items[:half], payload[:half])
                self._deliver(sender, items[half:], payload[half:])
            elif answer.kind != "unavailable":
                self._settle(items, answer.kind)
            elif self._wait_to_retry(attempt):
                continue
            else:
                self._settle(items, "refused")
            return

    def _wait_to_retry(self, attempt: int) -> bool:
        """Wait before trying again; False when there is no time left for that."""
        with self._condition:
            self._condition.notify_all()  # whoever waits for room need not wait any longer
            if self._closing or self._abandoned:
                # the end has come: another attempt only where there was hope before, and time is
                # left
                if (
                    self._abandoned
                    or not self._worked
                    or time.monotonic() + _RETRY_S[0] > self._deadline - _GIVE_UP_S
                ):
                    return False
                return not self._condition.wait_for(lambda: self._abandoned, 0.2)
            self._condition.wait_for(
                lambda: self._closing or self._abandoned, _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
            )
            return not self._abandoned

    def _settle(self, items: Sequence[_Counts], reason: str | None, rejected: int = 0) -> None:
        """Count items as sent or lost; those that `wait` has counted already are left alone."""
        with self._condition:
            known = {id(item) for item in self._in_flight}
            items = [item for item in items if id(item) in known]
            gone = {id(item) for item in items}
            self._in_flight = [item for item in self._in_flight if id(item) not in gone]
            total: Counter[str] = Counter()
            for item in items:
                total.update(item.counts)
            lost = Counter[str]()
            if reason == "rejected":
                # a receiver counts spans, log records and points, and does not say which events
                # they had
                first = next(iter(total), "")
                lost = total if rejected >= total[first] else Counter({first: rejected})
            elif reason is not None:
                lost = total
            for what, number in lost.items():
                self._losses.count(what, reason or "", number)
            self.sent.update(total - lost)
            self._condition.notify_all()

    def _give_up(self) -> None:
        with self._condition:
            self._abandoned = self._failing = True
            self._condition.notify_all()
        self._done.set()

    def _has_room(self, item: Item) -> bool:
        return self._bytes + item.size <= self._limit or self._closing or self._abandoned

    def _may_stop_waiting(self, item: Item) -> bool:
        return self._has_room(item) or self._failing

    def _is_drained(self) -> bool:
        return not (self._items or self._in_flight) or self._failing or self._abandoned

    def _lose(self, item: _Counts, reason: str) -> None:
        for what, number in item.counts.items():
            self._losses.count(what, reason, number)

    def _forked(self) -> None:
        _parents.append(self)
        self._items, self._in_flight, self._bytes = deque(), [], 0
        self._prepared, self._prepared_bytes, self._sending = [], 0, []
        self._condition = threading.Condition()
        self._thread = None
        self._abandoned = True
        self._done = threading.Event()
        self._done.set()


def _before_fork() -> None:
    global _held
    _held = _opening.acquire(timeout=2)


def _after_fork_in_parent() -> None:
    if _held:
        _opening.release()


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()
    for queue in list(_queues):
        queue._forked()


at_fork.register(
    ForkOrder.EXPORT_QUEUES,
    before=_before_fork,
    in_parent=_after_fork_in_parent,
    in_child=_after_fork_in_child,
)
