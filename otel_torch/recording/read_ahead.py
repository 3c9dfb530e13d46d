"""Read a long recording in another process, while this one works on what was read.

The other process decodes the lines into arrays and writes them to its standard output, at most
some batches ahead. Lines stay in the file: the few that are needed again are read from it here.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from otel_torch.recording.reader import RecordingError
from otel_torch.recording.row_batches import (
    RowBatch,
    RowKind,
    RowKinds,
    iterate_batches,
)

# a shorter file is read before another interpreter has started
_WORTH_BYTES = 1 << 25
# batches that wait to be sent: those of a large model's forward
_BATCHES_AHEAD = 16
_READY = "ready"


def iterate_batches_ahead(
    path: str | Path,
    kinds: RowKinds,
    problem: Callable[[str], None] = lambda message: None,
    read: Callable[[int], None] = lambda count: None,
) -> Iterator[RowBatch]:
    """Do what `iterate_batches` does, in another process if that is worth it and possible."""
    reader = _start_reader(path) if _is_worth_it(path) else None
    if reader is None:
        yield from iterate_batches(path, kinds, problem, read)
        return
    with reader:
        assert reader.stdout is not None
        try:
            yield from _receive(path, reader.stdout, kinds, problem, read)
        except EOFError:
            raise RecordingError(
                f"{path}: the process that read it ended with status {reader.wait()}; "
                "is there enough memory?"
            ) from None
        finally:
            reader.kill()


def _is_worth_it(path: str | Path) -> bool:
    try:
        return os.path.isfile(path) and os.path.getsize(path) >= _WORTH_BYTES
    except (OSError, ValueError):
        return False


def _start_reader(path: str | Path) -> subprocess.Popen[bytes] | None:
    """Start the other process; return None if it cannot run here."""
    if not sys.executable:
        return None
    code = f"from {__name__} import send_batches; send_batches()"
    # -P: no module of the working directory takes the place of an installed one
    command = [sys.executable, "-P", "-c", code, str(path)]
    try:
        reader = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    assert reader.stdout is not None
    try:
        if pickle.load(reader.stdout) == _READY:
            return reader
    except (EOFError, pickle.UnpicklingError):
        pass
    with reader:
        reader.kill()
    return None


# -- what is sent
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Message:
    """What was read since the message before; the last one has no batch.

    Attributes:
        size: Bytes.
        new_kinds: Kinds that no earlier batch has. The batch's `kinds` count all kinds in the order
            in which they were sent.
    """

    size: int
    problems: tuple[str, ...]
    new_kinds: tuple[RowKind, ...] = ()
    batch: RowBatch | None = None
    error: Exception | None = None


def _sendable(batch: RowBatch) -> RowBatch:
    """Return the batch without its lines and decoded rows, which are slow to send."""
    table = None if batch.records is None else batch.statistics(range(len(batch.kinds)))
    return replace(batch, lines=batch.lines.without_lines(), records=None, table=table)


# -- this process
# --------------------------------------------------------------------------------------------------


def _receive(
    path: str | Path,
    stream: IO[bytes],
    kinds: RowKinds,
    problem: Callable[[str], None],
    read: Callable[[int], None],
) -> Iterator[RowBatch]:
    """Yield the batches that the other process sends. Raises EOFError if it was killed."""
    numbers = np.empty(0, dtype=np.int64)  # number in `kinds` by number in the other process
    while True:
        message: _Message = pickle.load(stream)
        for text in message.problems:
            problem(text)
        if message.error is not None:
            raise message.error
        batch = message.batch
        if batch is None:
            return
        read(message.size)
        if message.new_kinds:
            numbers = np.append(numbers, [kinds[kind] for kind in message.new_kinds])
        lines = replace(batch.lines, path=path, warn=problem)
        yield replace(batch, kinds=numbers[batch.kinds], lines=lines)


# -- the other process
# --------------------------------------------------------------------------------------------------


def send_batches() -> None:
    """Read the recording that the command line names, and write its batches to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads them
    messages: queue.Queue[_Message | None] = queue.Queue(_BATCHES_AHEAD)
    writer = threading.Thread(target=_write, args=(messages, sys.stdout.buffer))
    writer.start()
    for message in _messages(sys.argv[1]):
        messages.put(message)
    messages.put(None)
    writer.join()


def _write(messages: queue.Queue[_Message | None], stream: IO[bytes]) -> None:
    try:
        stream.write(pickle.dumps(_READY))
        while True:
            stream.flush()
            message = messages.get()
            if message is None:
                return
            stream.write(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
    except Exception:  # nobody reads on; the other thread may wait for room in the queue
        os._exit(1)


def _messages(path: str) -> Iterator[_Message]:
    kinds = RowKinds()
    known = 0
    sizes: list[int] = []
    problems: list[str] = []
    error = None
    try:
        for batch in iterate_batches(path, kinds, problems.append, sizes.append):
            new_kinds = tuple(kinds.kinds[known:])
            yield _Message(sum(sizes), tuple(problems), new_kinds, _sendable(batch))
            known = len(kinds.kinds)
            sizes.clear()
            problems.clear()
    except Exception as exception:
        error = exception
    yield _Message(sum(sizes), tuple(problems), error=error)
