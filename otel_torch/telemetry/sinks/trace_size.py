"""Estimates the size of the traces that a process writes to.

A backend rejects what makes a trace too large, and reports that only in its own log.
"""

from __future__ import annotations

import threading

# Tempo rejects what makes a trace larger than 5 MB
TRACE_BYTES = 4_000_000
# shares of a rank's part of the run's trace: of the process that started the trace, and of one that
# joined it (a worker process)
FIRST_SHARE, JOINED_SHARE = 0.625, 0.375
# a span without attributes and events
SPAN_BYTES = 400
# with more traces than this, the one that grew least recently is forgotten
_MAX_TRACES = 1000


class TraceSize:
    """Estimated bytes of this process's traces.

    All ranks write to the run's trace, so each of them may fill its part only.

    >>> size = TraceSize(world_size=1000); size.run = 7
    >>> size.grow(7, 2_000); size.is_full(7, 400), size.is_full(7, 600), size.is_full(8, 600)
    (False, True, False)
    """

    def __init__(self, world_size: int) -> None:
        self.share = FIRST_SHARE
        self._run: int | None = None
        self._run_limit = 0.0
        self._world_size = world_size
        self._bytes: dict[int, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, trace_id: int) -> int:
        return self._bytes.get(trace_id, 0)

    @property
    def run(self) -> int | None:
        return self._run

    @run.setter
    def run(self, trace_id: int) -> None:
        self._run, self._run_limit = trace_id, TRACE_BYTES * self.share / self._world_size

    def is_full(self, trace_id: int, size: int) -> bool:
        """Return whether `size` more bytes would make the trace too large."""
        limit = self._run_limit if trace_id == self._run else TRACE_BYTES
        return self._bytes.get(trace_id, 0) + size > limit

    def grow(self, trace_id: int, size: int) -> None:
        with self._lock:
            self._bytes[trace_id] = self._bytes.pop(trace_id, 0) + size
            if len(self._bytes) > _MAX_TRACES:
                del self._bytes[next(each for each in self._bytes if each != self._run)]

    def grow_unlocked(self, trace_id: int, size: int) -> None:
        """Add bytes to a trace without the lock: faster, but a concurrent call may be lost."""
        try:
            self._bytes[trace_id] += size
        except KeyError:
            self.grow(trace_id, size)
