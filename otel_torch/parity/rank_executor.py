"""Compare the ranks of a folder at the same time: runs have a thousand of them.

    pairs of files ─▶ an executor: processes of this machine, or a cluster of Ray
                          │ compare_rank
    reports, in the order of the pairs

A pair is begun only if it is among the next few whose reports are asked for, so that few reports
wait in memory. Where it is not worth it, or no executor can be had, this process compares.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor
from itertools import islice
from typing import Any, NamedTuple, Protocol

from otel_torch.parity.finding import Report
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.recording.reader import RecordingError

Progress = Callable[[str], None]

# what comparing takes, roughly, and what starting processes takes: fewer ranks are compared here
_RANK_S, _BYTES_PER_S, _START_S = 0.03, 5e7, 1.5
# reports that may wait for an earlier one, per process
WAITING = 2


class RankPair(NamedTuple):
    """The recordings of one rank. name: How messages call it."""

    name: str
    reference: RecordingSource
    port: RecordingSource
    noise: RecordingSource | None


class CompareRank(Protocol):
    """Compares two recordings. It can be pickled: a function of a module, or `partial` of one."""

    def __call__(
        self,
        reference: RecordingSource,
        port: RecordingSource,
        *,
        noise: RecordingSource | None,
        progress: Progress,
    ) -> Report: ...


class RankExecutor(Protocol):
    """Runs calls elsewhere. workers: How many at the same time."""

    workers: int

    def submit(self, function: Callable[..., Report], *arguments: object) -> Any:
        """Begin a call; `result()` of what it returns waits for it."""

    def close(self) -> None:
        """End what still runs."""


def compare_pairs(
    pairs: Sequence[RankPair],
    compare_rank: CompareRank,
    progress: Progress,
    on: str | None = None,
    workers: int | None = None,
) -> Generator[Report]:
    """Yield the report of each pair, in order.

    Args:
        on: `ray`, or the address of a Ray cluster; by default processes of this machine.
        workers: How many processes; 1 is this one alone. By default, one for each core if starting
            them is worth it.

    Raises:
        RecordingError: A file cannot be read, or a process was killed.
        ValueError: There is no such cluster.
    """
    executor = _executor(pairs, on, workers)
    if executor is None:
        for pair in pairs:
            yield compare_rank(pair.reference, pair.port, noise=pair.noise, progress=progress)
        return
    begun: deque[tuple[RankPair, Any]] = deque()
    waiting = iter(pairs)
    try:
        for index in range(len(pairs)):
            for pair in islice(waiting, executor.workers * WAITING - len(begun)):
                begun.append((pair, executor.submit(_compare, compare_rank, pair)))
            progress(f"{index} of {len(pairs)} ranks compared")
            pair, future = begun.popleft()
            try:
                report: Report = future.result()
            except BrokenExecutor:
                raise RecordingError(
                    f"{pair.reference}: the process that compared {pair.name} or a rank beside it "
                    "was killed; is there enough memory?"
                ) from None
            progress(f"{index + 1} of {len(pairs)} ranks compared")
            yield report
    finally:
        executor.close()


def _compare(compare_rank: CompareRank, pair: RankPair) -> Report:
    return compare_rank(pair.reference, pair.port, noise=pair.noise, progress=lambda text: None)


def _executor(
    pairs: Sequence[RankPair], on: str | None, workers: int | None
) -> RankExecutor | None:
    """Return what compares the pairs; None for this process, which alone has what it made."""
    if len(pairs) < 2:
        return None
    if on is not None and workers is None:
        from otel_torch.parity.ray_executor import RayExecutor

        return RayExecutor(on)
    count = workers or min(len(pairs), len(_cores()) if _is_worth_it(pairs) else 1)
    if count < 2:
        return None
    try:
        return ProcessExecutor(count)
    except (ImportError, OSError):
        return None


def _cores() -> Sequence[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return range(os.cpu_count() or 1)


def _is_worth_it(pairs: Sequence[RankPair]) -> bool:
    size = sum(source.size for pair in pairs for source in (pair.reference, pair.port))
    return len(pairs) * _RANK_S + size / _BYTES_PER_S > 2 * _START_S


class ProcessExecutor:
    """Worker processes on this machine. `multiprocessing` would run the user's script again."""

    def __init__(self, workers: int) -> None:
        from loky import ProcessPoolExecutor

        self.workers = workers
        self._pool = ProcessPoolExecutor(workers, initializer=_prepare_process)

    def submit(self, function: Callable[..., Report], *arguments: object) -> Any:
        """Begin a call."""
        return self._pool.submit(function, *arguments)

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, kill_workers=True)


def _prepare_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that began this one
    sys.stdout = sys.stderr  # the report is what is printed
