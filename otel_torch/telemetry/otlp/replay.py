"""Sends files of OTLP JSON to an endpoint: those of OTEL_TORCH_OTLP_FILE, or of any file exporter.

May be cut off at any time and started again: what was acknowledged is stored beside each file
(`send_progress`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from otel_torch.recording.file_kinds import OTLP, identify, recognize, refusal
from otel_torch.recording.input_file import (
    NotReadable,
    is_compressed,
    open_once,
    require_regular_file,
)
from otel_torch.recording.json_documents import Document, iterate_documents
from otel_torch.recording.metadata import METADATA_SUFFIX
from otel_torch.telemetry.otlp.replay_endpoint import Endpoint, ReplayError
from otel_torch.telemetry.otlp.send_progress import SendProgress

# bytes of a message, uncompressed: receivers take 4 MiB by default
MESSAGE_BYTES = 2 * 2**20
# a single line beyond this is sent in parts
LINE_BYTES = 7 * 2**19
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
        return self.last - self.first

    def split(self) -> Sequence[RequestPart]:
        """Return two smaller parts; nothing for a single item."""
        if self.length < 2:
            return ()
        middle = (self.first + self.last) // 2
        return [self._cut(self.first, middle), self._cut(middle, self.last)]

    def _cut(self, first: int, last: int) -> RequestPart:
        from otel_torch.telemetry.otlp.otlp_requests import take_items

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
        if path.name.startswith(".") or path.name.endswith(METADATA_SUFFIX) or not path.is_file():
            continue
        try:
            files[path] = _read_signal(path)
        except ReplayError:
            kind = identify(path)
            if kind is not None and kind.may_hold_otlp:
                files[path] = None  # sending it says what is wrong, and counts it
            else:
                skipped.append(path)
    if not files:
        raise ReplayError(f"{name}: holds no files of OTLP JSON")
    if skipped:
        count = f"{len(skipped):,} file{'s' * (len(skipped) != 1)}"
        report(f"{name}: {count} without OTLP skipped, such as {skipped[0].name}")
    return files


def _read_signal(path: Path) -> str | None:
    """Return the signal of a file's first document; None if the file is empty or cut off there."""
    from otel_torch.telemetry.otlp.otlp_json import NotOtlp

    try:
        require_regular_file(path)
        with open_once(path) as file:
            first = next(iterate_documents(file), None)
        return None if first is None or first.is_cut_off else _read_request(first)[0]
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}") from None
    except NotReadable as error:
        raise ReplayError(str(error)) from None
    except NotOtlp as error:
        raise ReplayError(_describe(path, error)) from None


def _read_request(document: Document) -> tuple[str, Any]:
    """Return signal and request of a document. Raises NotOtlp."""
    from otel_torch.telemetry.otlp.otlp_json import NotOtlp, read_line

    if not document.is_whole:
        raise NotOtlp("not JSON: it has no end")
    return read_line(document.text)


def _describe(path: Path, error: Exception) -> str:
    """Return why a file cannot be sent: what it is, or what is wrong with it."""
    return refusal(path, OTLP) or f"{path}: no OTLP JSON: {error}"


def replay_file(
    path: Path, endpoint: Endpoint, report: Report, show_progress: Report, *, again: bool
) -> ReplayOutcome:
    """Send one file.

    Args:
        again: send what was acknowledged before as well.

    Raises:
        ReplayError: another process is sending it, or it is no plain file any more.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReplayError(f"{path} is being sent by another process") from None
        except OSError:
            pass  # a file system without locks
        if not is_compressed(path):
            return _FileReplay(path, file, endpoint, report, show_progress).run(again=again)
        with tempfile.TemporaryFile(prefix="otel-torch-") as content:
            try:
                with open_once(path) as compressed:
                    shutil.copyfileobj(compressed, content)
            except NotReadable as error:
                report(str(error))
                return ReplayOutcome(str(path), unreadable_lines=1)
            return _FileReplay(path, content, endpoint, report, show_progress).run(again=again)


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
        file.seek(0)
        first = next(iterate_documents(file), None)
        beginning = (0, 0) if first is None else (first.start, first.end)
        self._progress = SendProgress(path, endpoint.name, file, beginning)
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
        self._file.seek(0)
        for document in iterate_documents(self._file):
            percent = 100 * document.start // self._size
            self._show_progress(f"{self._path.name}: {percent} %, {self.outcome.requests} messages")
            self.outcome.bytes += len(document.text)
            if self._progress.lines.covers(document.start, document.end):
                self.outcome.already_lines += 1
            elif self._endpoint.is_unreachable:
                self._undelivered.add(document.start)
            else:
                self._add(document)
        self._flush()
        self.outcome.undelivered_lines += len(self._undelivered)
        return self.outcome

    def _add(self, document: Document) -> None:
        from otel_torch.telemetry.otlp.otlp_json import NotOtlp
        from otel_torch.telemetry.otlp.otlp_requests import count_items, take_items

        if document.is_cut_off:
            self.outcome.cut_off = True
            return
        try:
            signal, request = _read_request(document)
        except NotOtlp as error:
            self.outcome.unreadable_lines += 1
            if self.outcome.unreadable_lines == 1:
                self._report_unreadable(document, error)
            return
        self.outcome.lines += 1
        start, end = document.start, document.end
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

    def _report_unreadable(self, document: Document, error: Exception) -> None:
        kind = recognize(document.text)
        reason = str(error) if kind is None or kind is OTLP else f"is {kind.what}; {kind.advice}"
        line = refusal(self._path, OTLP) or f"{self._path}, line {document.line}: {reason}"
        self._report(f"{line}; unreadable lines are skipped")

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
