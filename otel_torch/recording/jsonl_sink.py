"""The recording on disk: one strict JSON object a record, and what there is to know about the run
beside it.

Written at each step's end in the thread that made the step, so that a process killed in the next
one has lost nothing of this one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.console import say, say_once
from otel_torch.job import Job
from otel_torch.recorder import Sink
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.reader import metadata_path
from otel_torch.recording.recording_file import claim, replace_metadata, resolve
from otel_torch.records import RECORDING_SCHEMA, Batch, Losses, Record, Scope, spell

_METADATA_INTERVAL_S = 10.0
# the share of the run's time from which on waiting for the disk is worth a line, once it has taken
# a second
_SLOW_DISK = 0.1


_encoder = msgspec.json.Encoder()
# the fields of a place without a value: an outermost call has no parent
_MAY_BE_NULL = (b'"parent":null', b'"storage":null')


def encode(records: Sequence[Record]) -> bytes:
    """Lines of a recording. Non-finite numbers are the strings `NaN`, `Infinity`, `-Infinity`.

    Raises TypeError or ValueError for a record that cannot be written.
    """
    rows = [_fields(record) for record in records]
    try:
        data = _encoder.encode_lines(rows)
        # what the encoder makes of a number that is not finite, too
        if data.count(b":null") > sum(map(data.count, _MAY_BE_NULL)):
            data = _encoder.encode_lines(
                [{name: spell(value) for name, value in row.items()} for row in rows]
            )
        return data
    except (
        UnicodeEncodeError,
        OverflowError,
    ):  # half a surrogate pair in a name; a whole number beyond 64 bits
        spelled = ({name: spell(value) for name, value in row.items()} for row in rows)
        lines = (
            json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            for row in spelled
        )
        return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def _fields(record: Record) -> dict[str, Any]:
    fields = record.key()
    if record.place is not None:
        fields |= record.place.fields()
    fields |= record.stats
    return fields


class JsonlSink(Sink):
    """Writes the recording of one process. The file is opened at the first record: no record, no
    file.

    facts: what the metadata says of the program (versions, models), asked whenever the metadata is
    written.
    """

    late = True  # of regions: they only make a table (`otel_torch.late`)

    def __init__(
        self,
        template: str,
        job: Job,
        losses: Losses,
        *,
        budget: DiskBudget,
        settings: dict[str, str],
        trace_id: str,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.path: Path | None = None
        self.written = 0
        self._template, self._job, self._losses, self._facts = template, job, losses, facts
        self._budget, self._settings, self._trace_id = budget, settings, trace_id
        self._file = -1
        self._bytes = 0
        self._ended: str | None = None
        self._full = False
        self._done: Batch | None = None
        self._regions: dict[str, dict[str, Any]] = {}
        self._counting = threading.Lock()  # regions are told by a thread of their own
        self._started_at = datetime.datetime.now(datetime.UTC)
        self._started = self._metadata_written = time.monotonic()
        self._waited = 0.0

    def close(self, scope: Scope) -> None:
        if self._full and self._done is not None and self._done.step is scope:
            self._end_full()
        if scope.kind in ("region", "natural", "stage"):
            with self._counting:
                self._count(scope)

    def _count(self, scope: Scope) -> None:
        table = self._regions.setdefault(
            scope.name,
            {
                "count": 0,
                "host_total_s": 0.0,
                "host_longest_s": 0.0,
                "device_total_s": None,
                "device_longest_s": None,
            },
        )
        seconds = (scope.end_ns - scope.start_ns) / 1e9
        table["count"] += 1
        table["host_total_s"] += seconds
        table["host_longest_s"] = max(table["host_longest_s"], seconds)
        if scope.device_s is not None:
            table["device_total_s"] = (table["device_total_s"] or 0.0) + scope.device_s
            table["device_longest_s"] = max(table["device_longest_s"] or 0.0, scope.device_s)

    def write(self, batch: Batch) -> None:
        if batch is self._done:
            return  # it comes again, because a Ctrl-C came between writing it and saying so
        if self._full and (self._done is None or batch.step is not self._done.step):
            self._end_full()
        if self._ended is None and self._file < 0:
            self._open()
        if self._ended is not None:
            self._losses.count("record", self._ended, len(batch.records))
            return
        started = time.monotonic()
        self._append(batch)
        now = time.monotonic()
        self._waited += now - started
        if self._waited > max(1.0, _SLOW_DISK * (now - self._started)):
            say_once(
                f"writing {self.path} takes more than {_SLOW_DISK:.0%} of the run's time; record less or choose a faster disk"
            )
        self._full = self._ended is None and self._budget.exhausted
        if self._full and batch.step is None:
            self._end_full()
        elif now - self._metadata_written > _METADATA_INTERVAL_S:
            self._write_metadata(ended_cleanly=False)

    def finish(self, deadline: float) -> None:
        if self._file >= 0:
            self._write_metadata(ended_cleanly=True)
            os.close(self._file)
            self._file = -1
            say(f"{self.written} records in {self.path}")
        self._ended = self._ended or "after_the_end"

    def _open(self) -> None:
        path = resolve(self._template, self._job)
        try:
            self.path, self._file = claim(path, self._job, self._metadata(ended_cleanly=False))
        except OSError as error:
            self._ended = "disk"
            say(
                f"no recording: {path} cannot be written ({error.strerror}); set OTEL_TORCH_JSONL to a path that can"
            )

    def _append(self, batch: Batch) -> None:
        """Write all of a batch or nothing: neither a full disk nor a Ctrl-C may leave half a line
        behind.
        """
        data, records = self._encode(batch.records)
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, memoryview(data)[done:])
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._bytes)
            if not isinstance(error, OSError):
                raise
            self._ended = "disk"
            self._losses.count("record", "disk", records)
            say(
                f"{self.path} cannot be written any more ({error.strerror}); the recording ends here, the program goes on"
            )
            done = records = 0
        # no call in here, so no signal either: the file and what we know of it change together
        self._bytes += done
        self._budget.spent += done
        self.written += records
        self._done = batch

    def _encode(self, records: Sequence[Record]) -> tuple[bytes, int]:
        """The lines of those records that can be written, and how many these are."""
        try:
            return encode(records), len(records)
        except (TypeError, ValueError):
            pass  # one of them; which?
        lines = []
        for record in records:
            try:
                lines.append(encode([record]))
            except (TypeError, ValueError) as error:
                self._losses.count("record", "unencodable")
                say_once(
                    f"a record of {record.module!r} cannot be written: {type(error).__name__}: {error}"
                )
        return b"".join(lines), len(lines)

    def _end_full(self) -> None:
        """The limit was reached in the step that is over now."""
        self._full = False
        self._ended = "max_bytes"
        say(
            f"{self.path} has reached OTEL_TORCH_MAX_BYTES ({self._budget.limit} bytes); nothing more is written to disk"
        )
        self._write_metadata(ended_cleanly=False)

    def _write_metadata(self, *, ended_cleanly: bool) -> None:
        assert self.path is not None
        self._metadata_written = time.monotonic()
        try:
            self.path = replace_metadata(
                self.path, self._file, self._metadata(ended_cleanly=ended_cleanly)
            )
        except OSError as error:
            if self._ended != "disk":  # which has been said
                say_once(f"{metadata_path(self.path)} cannot be written ({error.strerror})")

    def _metadata(self, *, ended_cleanly: bool) -> dict[str, Any]:
        """`ended_cleanly` is false while the run goes on, which is what a reader finds after a
        kill.
        """
        job = self._job
        try:
            facts = self._facts()
        except Exception as error:
            facts = {}
            say_once(
                f"the metadata of the recording lacks versions and models: {type(error).__name__}: {error}"
            )
        with self._counting:
            regions = {name: dict(table) for name, table in sorted(self._regions.items())}
        lost = [
            {"what": what, "reason": reason, "count": count}
            for what, reason, count in self._losses.items()
        ]
        return {
            "schema": RECORDING_SCHEMA,
            "run_id": job.run_id,
            "rank": job.rank,
            "world_size": job.world_size,
            "host": job.host,
            "pid": job.pid,
            "trace_id": self._trace_id,
            **facts,
            "settings": self._settings,
            "start": self._started_at.isoformat(),
            "end": datetime.datetime.now(datetime.UTC).isoformat() if ended_cleanly else None,
            "records_written": self.written,
            "lost": lost,
            "regions": regions,
            "writing_ended": self._ended,
            "ended_cleanly": ended_cleanly,
        }
