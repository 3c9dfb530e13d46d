"""Writes every signal as lines of OTLP JSON, for clusters that reach no collector. `otel-torch
send` delivers them later.

A file comes before the exporters: an item is encoded once, written, and then passed on. File and
endpoint hold the same, and a slow or dead endpoint costs the file nothing. Lines are written by the
queue's thread, each in one piece and at least twice a second, so a killed process leaves all but
possibly its last line.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torch.process.console import say, say_once
from otel_torch.process.job import Job
from otel_torch.recording.append_file import AppendFile
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.metadata import describe_process
from otel_torch.records import Losses
from otel_torch.telemetry.otlp import otlp_protobuf
from otel_torch.telemetry.otlp.answer import Answer
from otel_torch.telemetry.otlp.export_queue import BackpressureBudget, ExportQueue
from otel_torch.telemetry.otlp.otlp_json import write_line
from otel_torch.telemetry.otlp.otlp_requests import request_class
from otel_torch.telemetry.otlp.otlp_transport import encode_head
from otel_torch.telemetry.otlp.queue_items import QueueItem
from otel_torch.telemetry.run_trace import run_trace_id

SCHEMA = "otel_torch.otlp_file/1"
# encoded bytes of a line, which are about two and a half times as many as JSON: the Collector's
# receiver reads lines up to 1 MiB by default. A span stays in one line with all its events,
# whatever its size
LINE_BYTES = 384 * 2**10


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item with its OTLP bytes. `source` is the item, for exporters that take objects, or None
    if there are only exporters of bytes.
    """

    pieces: list[bytes]
    size: int
    counts: dict[str, int]
    source: QueueItem | None

    def expand(self) -> Sequence[QueueItem]:
        return (self,)

    def split(self) -> Sequence[QueueItem]:
        return ()

    def encode(self) -> list[bytes]:
        return self.pieces

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return self.source.to_sdk_objects(resource, scope) if self.source is not None else []


@dataclass(frozen=True)
class OtlpFiles:
    """The files of one process in the folder that OTEL_TORCH_OTLP_FILE names."""

    folder: str
    job: Job
    losses: Losses
    budget: DiskBudget

    def open(
        self,
        signal: str,
        resource: Resource,
        scope: InstrumentationScope,
        downstream: Sequence[ExportQueue],
        *,
        keep_items: bool,
    ) -> FileTransport:
        """Return the transport that writes a signal and then enqueues it for `downstream`.

        Args:
            keep_items: whether a downstream exporter takes objects and not bytes.
        """
        request_class(signal)  # import it now, while a fork waits for this thread
        head = encode_head(resource, scope)
        return FileTransport(self, signal, head, downstream, keep_items=keep_items)


class FileTransport:
    """Writes one signal to its file, created with the first message. What cannot be written is
    counted as lost and still passed on.
    """

    def __init__(
        self,
        files: OtlpFiles,
        signal: str,
        head: tuple[bytes, bytes],
        downstream: Sequence[ExportQueue],
        *,
        keep_items: bool,
    ) -> None:
        self.signal = signal
        self._files, self._head = files, head
        self._downstream, self._keep_items = downstream, keep_items
        template = os.path.join(files.folder, f"{signal}.jsonl")
        self._file = AppendFile(template, files.job, files.budget, self._describe)
        self._written: Counter[str] = Counter()
        self._is_closed = False
        self._lock = threading.Lock()

    def encode(self, item: QueueItem) -> tuple[list[Any], int]:
        pieces = item.encode()
        size = sum(map(len, pieces))
        source = item if self._keep_items else None
        return [EncodedItem(pieces, size, item.counts, source)], size

    def send(self, payload: list[EncodedItem]) -> Answer:
        """Write the items, then enqueue them downstream. Always accepts: what could not be written
        is counted here, as it may still arrive at an endpoint.
        """
        for line_items in _split_into_lines(payload):
            with self._lock:
                if self._is_closed:
                    return Answer("shutdown")  # the queue has counted these as lost
                self._write(line_items)
        for queue in self._downstream:
            queue.put(payload, BackpressureBudget())
        return Answer("accepted")

    @property
    def connected_at(self) -> float:
        """0: there is no connection."""
        return 0.0

    @property
    def has_connected(self) -> bool:
        """False: likewise."""
        return False

    def report_silence(self) -> None:
        """Say nothing: a disk is waited for."""

    def cancel(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        with self._lock:
            if self._file.is_open:
                self._file.close()
                lines = self._file.items
                say(f"{lines} line{'s' * (lines != 1)} of OTLP in {self._file.path}")
            self._is_closed = True

    def _write(self, line_items: Sequence[EncodedItem]) -> None:
        if self._file.writing_ended is None:
            self._append(line_items)
        if self._file.writing_ended is not None:
            for item in line_items:
                for kind, count in item.counts.items():
                    self._files.losses.count(kind, self._file.writing_ended, count)
            return
        for item in line_items:
            self._written.update(item.counts)
        self._file.write_metadata_if_due()

    def _append(self, line_items: Sequence[EncodedItem]) -> None:
        budget, folder = self._files.budget, self._file.planned_path.parent
        if budget.is_exhausted:
            self._file.writing_ended = "max_bytes"
            self._report_end(
                f"OTEL_TORCH_MAX_BYTES ({budget.limit} bytes) is reached; "
                f"nothing more is written to {folder}"
            )
            return
        if not self._file.is_open:
            try:
                self._file.open()
            except OSError as error:
                self._report_end(
                    f"no OTLP files: {folder} cannot be written ({error.strerror}); "
                    "set OTEL_TORCH_OTLP_FILE to another folder"
                )
                return
        pieces = [piece for item in line_items for piece in item.pieces]
        line = write_line(self.signal, otlp_protobuf.request(*self._head, pieces))
        try:
            self._file.append(line, 1)
        except OSError as error:
            self._report_end(
                f"OTLP files in {folder} end here: the disk is full or failed ({error.strerror})"
            )

    def _report_end(self, text: str) -> None:
        say_once(f"{text}. Items that are not written are counted as lost; the program continues")
        if self._file.is_open:
            self._file.write_metadata()

    def _describe(self, ended_cleanly: bool) -> dict[str, Any]:
        job = self._files.job
        return {
            "schema": SCHEMA,
            "signal": self.signal,
            **describe_process(job, run_trace_id(job)),
            **self._file.describe_times(ended_cleanly),
            "lines": self._file.items,
            "written": dict(sorted(self._written.items())),
            **self._file.describe_end(ended_cleanly),
        }


def _split_into_lines(payload: Sequence[EncodedItem]) -> list[list[EncodedItem]]:
    """Return the items in order, in groups of at most LINE_BYTES or of one larger item."""
    lines: list[list[EncodedItem]] = []
    size = LINE_BYTES
    for item in payload:
        if size + item.size > LINE_BYTES:
            lines.append([])
            size = 0
        lines[-1].append(item)
        size += item.size
    return lines
