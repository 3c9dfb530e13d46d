"""Run bodies as functions in threads, with barriers at which they wait for each other."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator

from otel_torch.capture.interleaving.interleave_error import InterleaveError


class _Thread(threading.local):
    runs_body = False


_thread = _Thread()


class Bodies:
    """The bodies of one interleaver that run as functions, and their barriers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards everything here and in the barriers
        self._barriers: weakref.WeakSet[Barrier] = weakref.WeakSet()
        self._has_started = False
        self._running = 0
        self._waiting = 0  # threads that wait for a body to end

    def start(self) -> None:
        """Count a body that is about to run."""
        with self.changed:
            self._has_started = True
            self._running += 1

    def mark_thread(self) -> None:
        """Mark the current thread as that of a body."""
        _thread.runs_body = True

    def finish(self) -> None:
        """Count a body that has ended."""
        with self.changed:
            self._running -= 1
            self.release_stuck()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the caller as waiting for a body: it starts no other until then."""
        with self.changed:
            self._waiting += 1
            self.release_stuck()
        try:
            yield
        finally:
            with self.changed:
                self._waiting -= 1

    def make_barrier(self, count: int) -> Barrier:
        barrier = Barrier(self, count)
        self._barriers.add(barrier)
        return barrier

    def release_stuck(self) -> None:
        """Break the barriers if no further body can reach them: all bodies wait at barriers, and
        the thread that could start more waits too. The caller holds `changed`.
        """
        waiting_bodies = sum(barrier.count_waiting(bodies=True) for barrier in self._barriers)
        waiting_others = sum(barrier.count_waiting(bodies=False) for barrier in self._barriers)
        all_bodies_wait = self._has_started and waiting_bodies == self._running
        if all_bodies_wait and (self._waiting or waiting_others):
            for barrier in self._barriers:
                barrier.break_off()


class Barrier:
    """A point that `count` bodies pass together; reusable.

    Raises:
        InterleaveError: The other bodies have ended, so that too few can reach it.
    """

    def __init__(self, bodies: Bodies, count: int) -> None:
        self._bodies, self.count = bodies, count
        self._round = _Round()

    def __call__(self) -> None:
        changed = self._bodies.changed
        with changed:
            current = self._round
            current.arrived.append(_thread.runs_body)
            if len(current.arrived) == self.count:
                self._end_round(is_complete=True)
            else:
                self._bodies.release_stuck()
            changed.wait_for(lambda: current.is_complete is not None)
        if not current.is_complete:
            raise InterleaveError(
                f"barrier({self.count}) was reached by {len(current.arrived)} bodies; "
                "the others have ended"
            )

    def count_waiting(self, *, bodies: bool) -> int:
        """Return how many bodies, or how many other threads, wait at this barrier."""
        return self._round.arrived.count(bodies)

    def break_off(self) -> None:
        """Raise InterleaveError in all threads that wait at this barrier."""
        if self._round.arrived:
            self._end_round(is_complete=False)

    def _end_round(self, is_complete: bool) -> None:
        self._round.is_complete, self._round = is_complete, _Round()
        self._bodies.changed.notify_all()


@dataclasses.dataclass
class _Round:
    """One use of a barrier. `arrived` holds one item per thread, True for that of a body;
    `is_complete` is None while the round lasts.
    """

    arrived: list[bool] = dataclasses.field(default_factory=list)
    is_complete: bool | None = None
