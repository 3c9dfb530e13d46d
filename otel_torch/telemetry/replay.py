"""Sends files of OTLP JSON lines to an endpoint: those of OTEL_TORCH_OTLP_FILE, or of any file
exporter.

May be cut off at any time and started again: what was acknowledged is stored beside each file
(`send_progress`).
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from otel_torch.recording.input_file import NotReadable, require_regular_file
from otel_torch.telemetry.replay_endpoint import Endpoint, ReplayError
from otel_torch.telemetry.send_progress import SendProgress

# bytes of a message, uncompressed: receivers take 4 MiB by default
MESSAGE_BYTES = 2 * 2**20
# a single line beyond this is sent in parts
LINE_BYTES = 7 * 2**19
_SUFFIXES = (".jsonl", ".json")
_ITEM_NAMES = {"traces": "spans", "metrics": "data_points", "logs": "log_records"}

Report = Callable[[str], None]


@dataclass(slots=True)
class RequestPart:
    """The items [first, last) of the line at bytes [start, end), as a request. The line holds
    `items` of them.
    """

    signal: str
    start: int
    end: int
    first: int
    last: int
    items: int
    request: Any
    encoded: bytes

    @property
    def length(self) -> int:
        """The number of items in this part."""
        return self.last - self.first

    def split(self) -> Sequence[RequestPart]:
        """Return two smaller parts; nothing for a single item."""
        if self.length < 2:
            return ()
        middle = (self.first + self.last) // 2
        return [self._cut(self.first, middle), self._cut(middle, self.last)]

    def _cut(self, first: int, last: int) -> RequestPart:
        from otel_torch.telemetry.otlp_requests import take_items

        request = take_items(self.signal, self.request, first - self.first, last - self.first)
        encoded = request.SerializeToString()
        return RequestPart(
            self.signal, self.start, self.end, first, last, self.items, request, encoded
        )


@dataclass(slots=True)
class ReplayOutcome:
    """The result for one file. The counters count `spans`, `data_points` and `log_records`.

    Attributes:
        already_lines: lines that were acknowledged before.
        undelivered_lines: lines that were not accepted, in whole or in part; the next replay sends
            them again.
        cut_off: the last line is incomplete and was skipped.
        replaced: another file had this name when it was last sent.
        sent_again: messages that were repeated although an earlier attempt, which got no answer,
            may have arrived.
    """

    file: str
    bytes: int = 0
    lines: int = 0
    requests: int = 0
    already_lines: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    undelivered_lines: int = 0
    unreadable_lines: int = 0
    cut_off: bool = False
    replaced: bool = False
    sent_again: int = 0


def find_files(names: Sequence[str], report: Report) -> list[tuple[Path, str | None]]:
    """Return the OTLP files among `names` and in folders, each with the signal of its first line;
    None for an empty file. Reports files in folders that hold no OTLP, and skips them.

    Raises:
        ReplayError: a file is missing or holds no OTLP, or a folder has no OTLP file.
    """
    files: dict[Path, str | None] = {}
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            files |= _find_in_folder(path, name, report)
        else:
            files[path] = _read_signal(path)
    return list(files.items())


def _find_in_folder(folder: Path, name: str, report: Report) -> dict[Path, str | None]:
    files: dict[Path, str | None] = {}
    skipped: list[Path] = []
    for path in sorted(folder.rglob("*")):
        is_candidate = path.suffix in _SUFFIXES and not path.name.endswith(".meta.json")
        if not is_candidate or path.name.startswith(".") or not path.is_file():
            continue
        try:
            files[path] = _read_signal(path)
        except ReplayError:
            skipped.append(path)
    if not files:
        raise ReplayError(f"{name}: holds no files of OTLP JSON lines")
    if skipped:
        count = f"{len(skipped):,} file{'s' * (len(skipped) != 1)}"
        report(f"{name}: {count} without OTLP skipped, such as {skipped[0].name}")
    return files


def _read_signal(path: Path) -> str | None:
    """Return the signal of a file's first line; None if the file is empty or cut off there."""
    from otel_torch.telemetry.otlp_json import NotOtlp, read_line

    try:
        require_regular_file(path)
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}") from None
    except NotReadable as error:
        raise ReplayError(str(error)) from None
    may_be_cut_off = not line.endswith(b"\n") and line.lstrip().startswith(b'{"')
    try:
        return read_line(line)[0]
    except NotOtlp as error:
        if not line or may_be_cut_off:
            return None
        raise ReplayError(f"{path}: no lines of OTLP JSON: {error}") from None


def replay_file(
    path: Path, endpoint: Endpoint, report: Report, show_progress: Report, *, again: bool
) -> ReplayOutcome:
    """Send one file.

    Args:
        again: send what was acknowledged before as well.

    Raises:
        ReplayError: another process is sending it.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReplayError(f"{path} is being sent by another process") from None
        except OSError:
            pass  # a file system without locks
        return _FileReplay(path, file, endpoint, report, show_progress).run(again=again)


class _FileReplay:
    """Sends one file: joins lines into messages in their order, and stores each acknowledgement at
    once.
    """

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        endpoint: Endpoint,
        report: Report,
        show_progress: Report,
    ) -> None:
        self.outcome = ReplayOutcome(str(path))
        self._path, self._file, self._endpoint = path, file, endpoint
        self._report, self._show_progress = report, show_progress
        self._progress = SendProgress(path, endpoint.name, file)
        self._batch: list[RequestPart] = []
        self._batch_bytes = 0
        self._undelivered: set[int] = set()  # starts of lines that were not accepted in whole
        self._size = max(1, os.fstat(file.fileno()).st_size)

    def run(self, *, again: bool) -> ReplayOutcome:
        """Send the lines that were not acknowledged, or all of them."""
        self.outcome.replaced = self._progress.is_replaced
        if self._progress.is_replaced:
            self._report(
                f"{self._path} is not the file that was sent before; sent from its beginning"
            )
        if again:
            self._progress.clear()
        for number, start, end, line in self._read_lines():
            percent = 100 * start // self._size
            self._show_progress(f"{self._path.name}: {percent} %, {self.outcome.requests} messages")
            if not line.strip():
                continue
            if self._progress.lines.covers(start, end):
                self.outcome.already_lines += 1
            elif self._endpoint.is_unreachable:
                self._undelivered.add(start)
            else:
                self._add_line(number, start, end, line)
        self._flush()
        self.outcome.undelivered_lines += len(self._undelivered)
        return self.outcome

    def _read_lines(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield number, start, end and bytes of each line. A last line without a newline gets its
        end counted, as the file may still grow by it.
        """
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            start, end = end, end + len(line) + (not line.endswith(b"\n"))
            self.outcome.bytes += len(line)
            yield number, start, end, line

    def _add_line(self, number: int, start: int, end: int, line: bytes) -> None:
        from otel_torch.telemetry.otlp_json import NotOtlp, read_line
        from otel_torch.telemetry.otlp_requests import count_items, take_items

        try:
            signal, request = read_line(line)
        except NotOtlp as error:
            if not line.endswith(b"\n"):
                self.outcome.cut_off = True
                return
            self.outcome.unreadable_lines += 1
            if self.outcome.unreadable_lines == 1:
                self._report(f"{self._path}, line {number}: {error}; unreadable lines are skipped")
            return
        self.outcome.lines += 1
        if not self._endpoint.can_send(signal):
            self._undelivered.add(start)
            return
        items = count_items(signal, request)
        if not items:
            return
        for first, last in list(self._progress.acknowledged_items(start).missing(0, items)):
            is_whole = (first, last) == (0, items)
            part = request if is_whole else take_items(signal, request, first, last)
            encoded = part.SerializeToString()
            self._enqueue(RequestPart(signal, start, end, first, last, items, part, encoded))

    def _enqueue(self, part: RequestPart) -> None:
        """Add a part to the next message; split it if it is too large for any message."""
        halves = part.split() if len(part.encoded) > LINE_BYTES else ()
        if halves:
            for half in halves:
                self._enqueue(half)
            return
        size = self._batch_bytes + len(part.encoded)
        if self._batch and (self._batch[0].signal != part.signal or size > MESSAGE_BYTES):
            self._flush()
        self._batch.append(part)
        self._batch_bytes += len(part.encoded)

    def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            self._deliver(batch)

    def _deliver(self, batch: Sequence[RequestPart]) -> None:
        """Send parts of one signal as one message; protobuf messages are joined by concatenation.

        A message that is refused is halved, until the part that is at fault is alone.
        """
        signal = batch[0].signal
        if not self._endpoint.can_send(signal):
            self._undelivered.update(part.start for part in batch)
            return
        message = b"".join(part.encoded for part in batch)
        answer = self._endpoint.send(signal, message, self.outcome)
        items, item_name = sum(part.length for part in batch), _ITEM_NAMES[signal]
        if answer.kind == "accepted":
            rejected = min(max(answer.rejected, 0), items)
            self.outcome.accepted += Counter({item_name: items - rejected})
            self.outcome.rejected += Counter({item_name: rejected})
            self._acknowledge(batch)
        elif not self._endpoint.can_send(signal):
            self._undelivered.update(part.start for part in batch)
        elif len(batch) > 1:
            middle = len(batch) // 2
            self._deliver(batch[:middle])
            self._deliver(batch[middle:])
        elif answer.kind == "too_large" and (halves := batch[0].split()):
            for half in halves:
                self._deliver([half])
        else:
            self.outcome.refused[item_name] += items

    def _acknowledge(self, batch: Sequence[RequestPart]) -> None:
        for part in batch:
            self._progress.acknowledge(part.start, part.end, part.first, part.last, part.items)
        if error := self._progress.save():
            self._report(
                f"progress cannot be stored beside {self._path} ({error}); "
                "a replay that is cut off would send everything again"
            )
