"""Writes a process's recording: one line of strict JSON per record, and metadata beside it.

A step's lines are written at its end, in the thread that ran the step: a process that is killed in
the next step loses nothing of this one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from otel_torch.process.console import say, say_once
from otel_torch.process.job import Job
from otel_torch.recorder import Sink
from otel_torch.recording.append_file import AppendFile
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.metadata import RECORDING_SCHEMA, describe_process
from otel_torch.recording.rows import encode_rows
from otel_torch.recording.run_file import fill_placeholders
from otel_torch.records import Batch, LazyRecords, Losses, Record, Scope

# a disk that takes more than this share of the run's time, and more than a second, is reported
_SLOW_DISK_SHARE = 0.1
_REGION_KINDS = frozenset({"region", "natural", "stage"})


@dataclass(slots=True)
class RegionTotals:
    """The times of one region, as the metadata lists them."""

    count: int = 0
    host_total_s: float = 0.0
    host_longest_s: float = 0.0
    device_total_s: float | None = None
    device_longest_s: float | None = None

    def add(self, scope: Scope) -> None:
        seconds = (scope.end_ns - scope.start_ns) / 1e9
        self.count += 1
        self.host_total_s += seconds
        self.host_longest_s = max(self.host_longest_s, seconds)
        if scope.device_s is not None:
            self.device_total_s = (self.device_total_s or 0.0) + scope.device_s
            self.device_longest_s = max(self.device_longest_s or 0.0, scope.device_s)


class RecordingSink(Sink):
    """Writes the recording of one process. Without a record no file is created.

    Args:
        template: the path, with the placeholders of OTEL_TORCH_JSONL.
        settings: the settings that are not at their defaults, for the metadata.
        otlp_folder: where this process writes OTLP files, with the placeholders of
            OTEL_TORCH_OTLP_FILE; None for nowhere.
        facts: returns what the metadata says about the program: versions and models. Called
            whenever the metadata is written.
    """

    accepts_deferred_regions = True

    def __init__(
        self,
        template: str,
        job: Job,
        losses: Losses,
        *,
        budget: DiskBudget,
        settings: dict[str, str],
        trace_id: str,
        otlp_folder: str | None = None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._file = AppendFile(template, job, budget, self._describe)
        self._job, self._losses, self._facts = job, losses, facts
        self._settings, self._trace_id = settings, trace_id
        self._otlp_folder = otlp_folder and os.path.abspath(fill_placeholders(otlp_folder, job))
        self._is_finished = False
        self._is_last_step = False  # the budget was reached in the current step
        self._regions: dict[str, RegionTotals] = {}
        self._regions_lock = threading.Lock()  # region events arrive on a separate thread
        self._started = time.monotonic()
        self._waited_s = 0.0

    @property
    def path(self) -> Path | None:
        """The recording's current path, None before its first record."""
        return self._file.path

    @property
    def written(self) -> int:
        return self._file.items

    def close(self, scope: Scope) -> None:
        batch = self._file.last_batch
        if self._is_last_step and isinstance(batch, Batch) and batch.step is scope:
            self._end_at_limit()
        if scope.kind in _REGION_KINDS:
            with self._regions_lock:
                self._regions.setdefault(scope.name, RegionTotals()).add(scope)

    def write(self, batch: Batch) -> None:
        previous = self._file.last_batch
        if batch is previous:
            return  # repeated, because Ctrl-C came after it was written
        if self._is_last_step and not (isinstance(previous, Batch) and batch.step is previous.step):
            self._end_at_limit()
        if self._can_write() and not self._file.is_open:
            self._open()
        if not self._can_write():
            reason = self._file.writing_ended or "after_the_end"
            self._losses.count("record", reason, len(batch.records))
            return
        started = time.monotonic()
        self._append(batch)
        self._report_slow_disk(started)
        self._is_last_step = self._can_write() and self._file.budget.is_exhausted
        if self._is_last_step and batch.step is None:
            self._end_at_limit()
        else:
            self._file.write_metadata_if_due()

    def finish(self, deadline: float) -> None:
        if self._file.is_open:
            self._file.close()
            say(f"{self.written} records in {self._deliver()}")
        self._is_finished = True

    def _deliver(self) -> str:
        """Return where the recording is, now that it is whole."""
        return str(self.path)

    def _can_write(self) -> bool:
        return self._file.writing_ended is None and not self._is_finished

    def _open(self) -> None:
        try:
            self._file.open()
        except OSError as error:
            path = self._file.planned_path
            say(
                f"no recording: {path} cannot be written ({error.strerror}); "
                "set OTEL_TORCH_JSONL to another path"
            )

    def _append(self, batch: Batch) -> None:
        data, count = self._encode(batch.records)
        try:
            self._file.append(data, count, batch)
        except OSError as error:
            self._losses.count("record", "disk", count)
            self._file.write_metadata()
            say(
                f"{self.path}: the recording ends here, the disk is full or failed "
                f"({error.strerror}); the program continues"
            )

    def _encode(self, records: Sequence[Record]) -> tuple[bytes, int]:
        """Return the lines of the records that can be encoded, and their number."""
        if isinstance(records, LazyRecords) and (encoded := records.lines()) is not None:
            return encoded, len(records)
        try:
            return encode_rows(records), len(records)
        except (TypeError, ValueError):
            pass  # find the record that is at fault
        lines = []
        for record in records:
            try:
                lines.append(encode_rows([record]))
            except (TypeError, ValueError) as error:
                self._losses.count("record", "unencodable")
                say_once(
                    f"a record of {record.module!r} cannot be written: "
                    f"{type(error).__name__}: {error}"
                )
        return b"".join(lines), len(lines)

    def _report_slow_disk(self, started: float) -> None:
        now = time.monotonic()
        self._waited_s += now - started
        if self._waited_s > max(1.0, _SLOW_DISK_SHARE * (now - self._started)):
            say_once(
                f"writing {self.path} takes more than {_SLOW_DISK_SHARE:.0%} of the run's time; "
                "record less or choose a faster disk"
            )

    def _end_at_limit(self) -> None:
        """End the recording after the step in which the disk budget was reached."""
        self._is_last_step = False
        self._file.writing_ended = "max_bytes"
        say(
            f"{self.path}: OTEL_TORCH_MAX_BYTES ({self._file.budget.limit} bytes) is reached; "
            "nothing more is written to disk"
        )
        self._file.write_metadata()

    def _describe(self, ended_cleanly: bool) -> dict[str, Any]:
        try:
            facts = self._facts()
        except Exception as error:
            facts = {}
            say_once(
                "the metadata of the recording lacks versions and models: "
                f"{type(error).__name__}: {error}"
            )
        with self._regions_lock:
            regions = {name: asdict(totals) for name, totals in sorted(self._regions.items())}
        lost = [
            {"what": kind, "reason": reason, "count": count}
            for kind, reason, count in self._losses.items()
        ]
        if self._otlp_folder is not None:
            own_folder = os.path.abspath(self._file.planned_path.parent)
            facts["otlp_folder"] = os.path.relpath(self._otlp_folder, own_folder)
        return {
            "schema": RECORDING_SCHEMA,
            **describe_process(self._job, self._trace_id),
            **facts,
            "settings": self._settings,
            **self._file.describe_times(ended_cleanly),
            "records_written": self.written,
            "lost": lost,
            "regions": regions,
            **self._file.describe_end(ended_cleanly),
        }
