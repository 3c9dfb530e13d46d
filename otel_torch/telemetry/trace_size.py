"""How large the traces are that a process writes to: a backend refuses what makes one larger than
it takes, and says so to nobody who would look.
"""

from __future__ import annotations

import threading

# Tempo refuses what makes a trace larger than 5 MB
TRACE_BYTES = 4_000_000
# the share of that for the run's trace: of the process that began it, and of one that joined it (a
# worker it started)
FIRST, JOINED = 0.625, 0.375
# a span without attributes and events
SPAN_BYTES = 400
# traces that are remembered; those that grew least recently are forgotten
_REMEMBERED = 1000


class TraceSize:
    """Estimated bytes of this process's traces. The run's trace is shared by all ranks, so each has
    its part of it.

    >>> size = TraceSize(world_size=1000); size.run = 7
    >>> size.grow(7, 2_000); size.is_full(7, 400), size.is_full(7, 600), size.is_full(8, 600)
    (False, True, False)
    """

    def __init__(self, world_size: int) -> None:
        self.share = FIRST
        self._run: int | None = None
        self._run_limit = 0.0
        self._world_size = world_size
        self._bytes: dict[int, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, trace_id: int) -> int:
        return self._bytes.get(trace_id, 0)

    @property
    def run(self) -> int | None:
        """The id of the run's trace."""
        return self._run

    @run.setter
    def run(self, trace_id: int) -> None:
        self._run, self._run_limit = trace_id, TRACE_BYTES * self.share / self._world_size

    def is_full(self, trace_id: int, needed: int) -> bool:
        """Whether so many bytes more are too many."""
        return self._bytes.get(trace_id, 0) + needed > (
            self._run_limit if trace_id == self._run else TRACE_BYTES
        )

    def grow(self, trace_id: int, size: int) -> None:
        """Something was added to a trace."""
        with self._lock:
            self._bytes[trace_id] = self._bytes.pop(trace_id, 0) + size
            if len(self._bytes) > _REMEMBERED:
                del self._bytes[next(trace for trace in self._bytes if trace != self._run)]

    def grow_a_little(self, trace_id: int, size: int) -> None:
        """The same without a lock, for what happens often: of two threads that meet here, one may
        not be counted.
        """
        try:
            self._bytes[trace_id] += size
        except KeyError:
            self.grow(trace_id, size)
