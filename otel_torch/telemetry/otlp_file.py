"""Every signal as lines of OTLP JSON in a folder, for clusters that reach no collector: `otel-torch
send` delivers them later.

A file stands in front of the exporters and not beside them: what is encoded is written first and
then handed on, so that both hold the same, an endpoint that is slow or gone costs the file nothing,
and encoding is paid once. It is written by the queue's thread, a line in one piece, twice a second
at the latest: a process that is killed leaves its lines, of which only the last can be cut off.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torch.console import say, say_once
from otel_torch.job import Job
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.run_file import claim_path, replace_metadata, resolve_path
from otel_torch.records import Losses
from otel_torch.telemetry import otlp_protobuf, trace_id
from otel_torch.telemetry.otlp_json import request_class, write_line
from otel_torch.telemetry.queue import ExportQueue, Patience
from otel_torch.telemetry.queue_items import Item
from otel_torch.telemetry.transport import Answer, encode_head

SCHEMA = "otel_torch.otlp_file/1"
# encoded bytes of a line, which become about two and a half times as many: the Collector's receiver
# reads lines of 1 MiB where nobody has changed it. A span with all its events stays in one line,
# whatever its size
LINE_BYTES = 384 * 2**10
_METADATA_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """An item whose bytes are made. item: itself, for exporters that take objects; None where there
    are none.
    """

    pieces: list[bytes]
    size: int
    counts: dict[str, int]
    item: Item | None

    def parts(self) -> Sequence[Item]:
        return (self,)

    def halves(self) -> Sequence[Item]:
        return ()

    def encode(self) -> list[bytes]:
        return self.pieces

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return self.item.readable(resource, scope) if self.item is not None else []


@dataclass(frozen=True)
class OtlpFiles:
    """The files of one process in the folder that OTEL_TORCH_OTLP_FILE names, opened when first
    used.
    """

    folder: str
    job: Job
    losses: Losses
    budget: DiskBudget

    def open(
        self,
        signal: str,
        resource: Resource,
        scope: InstrumentationScope,
        behind: Sequence[ExportQueue],
        *,
        keep_items: bool,
    ) -> FileTransport:
        """What writes a signal, and then puts it into the queues `behind`. keep_items: whether
        these need more than bytes.
        """
        request_class(signal)  # imported where a fork is waited for
        return FileTransport(
            self, signal, encode_head(resource, scope), behind, keep_items=keep_items
        )


class FileTransport:
    """A sender that writes a file. The file is made with the first message; what cannot be written
    is counted, and handed on all the same.
    """

    def __init__(
        self,
        files: OtlpFiles,
        signal: str,
        head: tuple[bytes, bytes],
        behind: Sequence[ExportQueue],
        *,
        keep_items: bool,
    ) -> None:
        self.signal = signal
        self.path = resolve_path(os.path.join(files.folder, f"{signal}.jsonl"), files.job)
        self.lines = 0
        self._files, self._head, self._behind, self._keep_items = files, head, behind, keep_items
        self._descriptor = -1
        self._bytes = 0
        self._written: Counter[str] = Counter()
        self._ended: str | None = None
        self._closed = False
        self._started = datetime.datetime.now(datetime.UTC)
        self._metadata_written = time.monotonic()
        self._lock = threading.Lock()

    def encode(self, item: Item) -> tuple[list[Any], int]:
        pieces = item.encode()
        size = sum(map(len, pieces))
        return [Encoded(pieces, size, item.counts, item if self._keep_items else None)], size

    def send(self, payload: list[Encoded]) -> Answer:
        """Write, and hand on. `accepted` even so: what could not be written is counted here, as it
        may yet arrive elsewhere.
        """
        for line in _lines(payload):
            with self._lock:
                if self._closed:
                    return Answer("shutdown")  # given up, and counted by the queue
                self._write(line)
        for queue in self._behind:
            queue.put(payload, Patience())
        return Answer("accepted")

    def shutdown(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                self._write_metadata(ended_cleanly=True)
                os.close(self._descriptor)
                self._descriptor = -1
                say(f"{self.lines} line{'s' * (self.lines != 1)} of OTLP in {self.path}")
            self._closed = True

    def _write(self, line: Sequence[Encoded]) -> None:
        if self._ended is None and self._files.budget.is_exhausted:
            self._end(
                "max_bytes",
                f"OTEL_TORCH_MAX_BYTES ({self._files.budget.limit} bytes) is reached; nothing more is written to "
                f"{self.path.parent}",
            )
        if self._ended is None and self._descriptor < 0:
            self._open()
        if self._ended is None:
            pieces = [piece for item in line for piece in item.pieces]
            self._append(write_line(self.signal, otlp_protobuf.request(*self._head, pieces)))
        if self._ended is not None:
            for item in line:
                for what, number in item.counts.items():
                    self._files.losses.count(what, self._ended, number)
            return
        self.lines += 1
        for item in line:
            self._written.update(item.counts)
        if time.monotonic() - self._metadata_written > _METADATA_INTERVAL_S:
            self._write_metadata(ended_cleanly=False)

    def _open(self) -> None:
        try:
            self.path, self._descriptor = claim_path(
                self.path, self._files.job, self._metadata(ended_cleanly=False)
            )
        except OSError as error:
            folder = self.path.parent
            self._end(
                "disk",
                f"no OTLP files: {folder} cannot be written ({error.strerror}); name another in OTEL_TORCH_OTLP_FILE",
            )

    def _append(self, data: bytes) -> None:
        """Write a whole line or nothing."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, memoryview(data)[done:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._bytes)
            self._end(
                "disk",
                f"OTLP files in {self.path.parent} end here: the disk takes no more ({error.strerror})",
            )
        else:
            self._bytes += done
            self._files.budget.spend(done)

    def _end(self, reason: str, text: str) -> None:
        self._ended = reason
        say_once(f"{text}. What is not written is counted; the program goes on")
        if self._descriptor >= 0:
            self._write_metadata(ended_cleanly=False)

    def _write_metadata(self, *, ended_cleanly: bool) -> None:
        self._metadata_written = time.monotonic()
        try:
            self.path = replace_metadata(
                self.path, self._descriptor, self._metadata(ended_cleanly=ended_cleanly)
            )
        except OSError as error:
            if self._ended is None:
                say_once(f"the metadata of {self.path} cannot be written ({error.strerror})")

    def _metadata(self, *, ended_cleanly: bool) -> dict[str, Any]:
        job = self._files.job
        return {
            "schema": SCHEMA,
            "signal": self.signal,
            "run_id": job.run_id,
            "rank": job.rank,
            "world_size": job.world_size,
            "host": job.host,
            "pid": job.pid,
            "trace_id": trace_id(job),
            "start": self._started.isoformat(),
            "end": datetime.datetime.now(datetime.UTC).isoformat() if ended_cleanly else None,
            "lines": self.lines,
            "written": dict(sorted(self._written.items())),
            "writing_ended": self._ended,
            "ended_cleanly": ended_cleanly,
        }


def _lines(payload: Sequence[Encoded]) -> list[list[Encoded]]:
    """Items in order, in lines of no more than LINE_BYTES where they are small enough."""
    lines: list[list[Encoded]] = []
    size = LINE_BYTES
    for item in payload:
        if size + item.size > LINE_BYTES:
            lines.append([])
            size = 0
        lines[-1].append(item)
        size += item.size
    return lines
