"""Compare the ranks of a folder on several processes, which serves runs of a thousand ranks.

    pairs of files ─▶ a thread for each process ─▶ its standard input
                                                       │ compare
    reports, in the order of the pairs ◀──── its standard output

Each process compares one pair after the other. A pair is begun only if it is among the next few
whose reports are asked for, so that few reports wait in memory.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from otel_torch.parity.finding import Report
from otel_torch.recording.reader import RecordingError

Progress = Callable[[str], None]

# what comparing takes, roughly, and what starting processes takes: fewer ranks are compared here
_RANK_S, _BYTES_PER_S, _START_S = 0.03, 5e7, 1.5
# reports that may wait for an earlier one, per process
_WAITING = 2


class RankPair(NamedTuple):
    """The recordings of one rank. name: How messages call it."""

    name: str
    reference: Path
    port: Path
    noise: Path | None


class CompareRank(Protocol):
    """Compares two recordings. It can be pickled: a function of a module, or `partial` of one."""

    def __call__(
        self, reference: Path, port: Path, *, noise: Path | None, progress: Progress
    ) -> Report: ...


def compare_pairs(
    pairs: Sequence[RankPair],
    compare_rank: CompareRank,
    progress: Progress,
    temporary: Path,
    processes: int | None = None,
) -> Generator[Report]:
    """Yield the report of each pair, in order.

    Args:
        temporary: A folder for temporary files, which the caller removes.
        processes: How many compare; 1 is this one alone. By default, one for each core if starting
            them is worth it.

    Raises:
        RecordingError: A file cannot be read, or a process was killed.
    """
    count = processes or min(len(pairs), len(_cores()) if _is_worth_it(pairs) else 1)
    workers = [_Worker(compare_rank, temporary) for _ in range(count)] if count > 1 else []
    if not workers or not all(worker.is_running for worker in workers):
        for worker in workers:
            worker.close()
        for pair in pairs:
            yield compare_rank(pair.reference, pair.port, noise=pair.noise, progress=progress)
        return
    with closing(_Distribution(pairs, workers).run(progress)) as reports:
        yield from reports


def _cores() -> Sequence[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return range(os.cpu_count() or 1)


def _is_worth_it(pairs: Sequence[RankPair]) -> bool:
    size = sum(path.stat().st_size for pair in pairs for path in (pair.reference, pair.port))
    return len(pairs) * _RANK_S + size / _BYTES_PER_S > 2 * _START_S


class _Distribution:
    """Gives pairs to workers, and collects their reports."""

    def __init__(self, pairs: Sequence[RankPair], workers: Sequence[_Worker]) -> None:
        self._pairs, self._workers = pairs, workers
        self._slots = threading.Semaphore(_WAITING * len(workers))
        self._indices = iter(range(len(pairs)))
        self._lock = threading.Lock()
        self._is_over = False
        # texts of progress, and results by the number of their pair
        self._events: queue.SimpleQueue[str | tuple[int, Report | BaseException]]
        self._events = queue.SimpleQueue()

    def run(self, progress: Progress) -> Generator[Report]:
        """Yield the reports of all pairs, in order."""
        threads = [
            threading.Thread(target=self._use, args=[worker], name="otel_torch-rank", daemon=True)
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        results: dict[int, Report | BaseException] = {}
        text = ""
        try:
            for index in range(len(self._pairs)):
                while index not in results:
                    event = self._events.get()
                    if isinstance(event, str):
                        text = event
                    else:
                        results[event[0]] = event[1]
                    compared = index + len(results)
                    progress(f"{compared} of {len(self._pairs)} ranks compared; {text}")
                result = results.pop(index)
                self._slots.release()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._is_over = True
            self._slots.release(len(threads))
            for worker in self._workers:
                worker.close()
            for thread in threads:
                thread.join()

    def _use(self, worker: _Worker) -> None:
        """Give one pair after the other to a worker."""
        while True:
            self._slots.acquire()
            with self._lock:
                index = next(self._indices, None)
            if index is None or self._is_over:
                return
            self._events.put((index, worker.compare(self._pairs[index], self._events.put)))


class _Worker:
    """A process that compares pairs."""

    def __init__(self, compare_rank: CompareRank, temporary: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not sys.executable:
            return
        code = f"from {__name__} import serve; serve()"
        try:
            # -P: no module of the working directory takes the place of an installed one
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
            _send(self._process.stdin, compare_rank)
        except OSError:
            self.close()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has received its task."""
        return bool(self._receive() == "ready")

    def compare(self, pair: RankPair, note: Progress) -> Report | BaseException:
        """Return the report of a pair, or the error that it ended with."""
        try:
            assert self._process is not None
            _send(self._process.stdin, pair)
        except OSError:
            return self._killed(pair)
        while isinstance(answer := self._receive(), str):
            note(answer)
        return self._killed(pair) if answer is None else answer

    def _receive(self) -> Any:
        """Return what the process sends next, None if it has ended."""
        if self._process is None or self._process.stdout is None:
            return None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return None

    def _killed(self, pair: RankPair) -> RecordingError:
        status = None if self._process is None else self._process.wait()
        return RecordingError(
            f"{pair.reference}: the process that compared {pair.name} ended with status {status}; "
            "is there enough memory?"
        )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _send(stream: IO[bytes] | None, content: object) -> None:
    assert stream is not None
    stream.write(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
    stream.flush()


# -- the other process
# --------------------------------------------------------------------------------------------------


def serve() -> None:
    """Compare the pairs that come from standard input; send progress and reports to the output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that began this one
    tasks, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing that is printed may come between the reports
    send = partial(_send, results)
    try:
        compare_rank: CompareRank = pickle.load(tasks)
        send("ready")
        while True:
            pair: RankPair = pickle.load(tasks)
            send(_result(compare_rank, pair, send))
    except (EOFError, BrokenPipeError):  # nobody asks any more
        os._exit(1)


def _result(compare_rank: CompareRank, pair: RankPair, progress: Progress) -> object:
    try:
        return compare_rank(pair.reference, pair.port, noise=pair.noise, progress=progress)
    except BrokenPipeError:
        raise
    except Exception as error:
        return error
