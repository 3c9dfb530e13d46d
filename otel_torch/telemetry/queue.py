"""A bounded queue before each exporter, which counts whatever does not arrive.

For the losses that the SDK's batch processors hide: they drop the oldest at 2,048 items, send messages beyond a receiver's
limit, ignore what it rejects, forget a failed batch, and keep the program waiting half a minute at its end.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from otel_torch.console import say_once
from otel_torch.records import Losses
from otel_torch.telemetry.items import Item
from otel_torch.telemetry.transport import Answer

QUEUE_BYTES = 64 * 2**20
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
        """The item as what `send` takes, and its bytes."""

    def send(self, payload: list[Any]) -> Answer:
        """Send, and wait for the answer."""

    def shutdown(self) -> None:
        """Give up what is under way; may be called from another thread."""


class Patience:
    """How long the program may still be kept waiting: 50 ms at a step's end, or 5 % of the time since the last, whichever
    is more, over all queues together."""

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
# held while an exporter is made: a fork in the middle of its imports would leave the child with ones that never end
_opening = threading.Lock()
_held = False
# a forked child must neither close nor collect its parent's connections
_parents: list[ExportQueue] = []


class ExportQueue:
    """Hands items to a sender, in a daemon thread that starts with the first item. What is lost is counted in `losses`.

    open_sender: makes the sender, in that thread: importing exporters and opening channels costs the program nothing.
    collect: asked every `interval_s`, and at the end, for items that nobody puts (metrics of a reader).
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
        self._in_flight: list[Item] = []
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sender: Sender | None = None
        self._closing = self._abandoned = self._failing = self._worked = self._urgent = False
        self._done = threading.Event()
        self._deadline = 0.0
        _queues.add(self)

    # -- the program's side --------------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], patience: Patience) -> None:
        """Take items. A full queue is waited for as long as `patience` lasts, then the new ones are dropped and counted;
        an endpoint that does not answer is not waited for."""
        with self._condition:
            for item in items:
                if not self._has_room(item) and not self._failing:
                    self._condition.notify_all()
                    patience.wait(self._condition, lambda item=item: self._has_room(item) or self._failing)  # type: ignore[misc]
                if self._closing or self._abandoned:
                    self._lose(item, "shutdown")
                elif not self._has_room(item):
                    self._lose(item, "queue_full")
                else:
                    self._items.append(item)
                    self._bytes += item.size
            if self._bytes >= BATCH_BYTES:
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
                sent = lambda: not (self._items or self._in_flight) or self._failing or self._abandoned  # noqa: E731
                self._condition.wait_for(sent, max(0.0, deadline - time.monotonic()))
                self._urgent = False

    def close(self, deadline: float) -> None:
        """Nothing more will be put: send what is there by `deadline` (`time.monotonic`). Does not wait."""
        with self._condition:
            hopeless = self._failing and not self._worked
            self._deadline = min(deadline, time.monotonic() + _HOPELESS_S) if hopeless else deadline
            self._closing = True
            self._condition.notify_all()

    def wait(self) -> None:
        """Wait until all is sent or the deadline is over; what is then left is given up and counted."""
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
            for item in self._in_flight:
                self._lose(item, "unconfirmed")
            for item in self._items:
                self._lose(item, "refused" if self._failing else "shutdown")
            self._in_flight, self._bytes = [], 0
            self._items.clear()

    # -- the thread's side ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with _opening:
                self._sender = self._open_sender()
        except Exception as error:
            say_once(f"{self.name} are not sent: the exporter cannot be made: {type(error).__name__}: {error}")
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
        while not self._abandoned:
            with self._condition:
                self._condition.wait_for(self._has_work_now, LINGER_S)
                closing = self._closing
            if self._collect is not None and (closing or time.monotonic() - collected >= self._interval_s):
                collected = time.monotonic()
                self._take_in(self._collect())
            while not (self._closing and self._failing) and self._send_some(sender):
                pass
            if closing:
                sender.shutdown()
                return

    def _has_work_now(self) -> bool:
        return self._closing or self._abandoned or self._bytes >= BATCH_BYTES or (self._urgent and bool(self._items))

    def _take_in(self, items: Iterable[Item]) -> None:
        found = list(items)
        with self._condition:
            self._items.extend(found)
            self._bytes += sum(item.size for item in found)

    def _send_some(self, sender: Sender) -> bool:
        """Send one message; False where there was nothing to send."""
        items: list[Item] = []
        payload: list[Any] = []
        size = 0
        while size < BATCH_BYTES // 2:
            item = self._next()
            if item is None:
                break
            try:
                encoded, length = sender.encode(item)
            except Exception as error:
                say_once(f"some {self.name} cannot be encoded: {type(error).__name__}: {error}")
                self._settle([item], "unencodable")
                continue
            if length > ITEM_BYTES:
                self._settle([item], "too_large")
                continue
            if items and size + length > BATCH_BYTES:
                self._deliver(sender, items, payload)
                items, payload, size = [], [], 0
            items.append(item)
            payload.append(encoded)
            size += length
        if items:
            self._deliver(sender, items, payload)
        return bool(items)

    def _next(self) -> Item | None:
        with self._condition:
            if not self._items or self._abandoned:
                return None
            item = self._items.popleft()
            self._bytes -= item.size
            self._in_flight.append(item)
            self._condition.notify_all()
            return item

    def _deliver(self, sender: Sender, items: list[Item], payload: list[list[Any]]) -> None:
        """Send until there is an answer that is final."""
        for attempt in range(1_000_000):
            answer = sender.send([message for messages in payload for message in messages])
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
                # the end has come: another attempt only where there was hope before, and time is left
                if self._abandoned or not self._worked or time.monotonic() + _RETRY_S[0] > self._deadline - _GIVE_UP_S:
                    return False
                return not self._condition.wait_for(lambda: self._abandoned, 0.2)
            self._condition.wait_for(lambda: self._closing or self._abandoned, _RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            return not self._abandoned

    def _settle(self, items: list[Item], reason: str | None, rejected: int = 0) -> None:
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
                # a receiver counts spans, log records and points, and does not say which events they had
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

    def _lose(self, item: Item, reason: str) -> None:
        for what, number in item.counts.items():
            self._losses.count(what, reason, number)

    def _forked(self) -> None:
        _parents.append(self)
        self._items, self._in_flight, self._bytes = deque(), [], 0
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
