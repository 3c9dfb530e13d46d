"""A file that one process appends to, with metadata beside it: recordings and OTLP files are both
written through it.

The file is created at its first write. Each write is appended whole or not at all, the bytes are
charged to the process's disk budget, and the metadata is replaced now and then, so that a killed
process leaves a readable file that says how far it got.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_torch.process.console import say_once
from otel_torch.process.job import Job
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.recording.disk_reserve import DiskReserve
from otel_torch.recording.metadata import encode_metadata, metadata_path
from otel_torch.recording.run_file import claim_path, replace_metadata, resolve_path

_METADATA_INTERVAL_S = 10.0


class AppendFile:
    """One process's file at the path that `template` gives it. The sink that writes it owns it, and
    reports its errors.

    Args:
        describe: returns the metadata. Called with True at the end of the run, and with False while
            it may still be killed.

    Attributes:
        path: the current path, or None before the file was created.
        items: how many records or lines were appended.
        last_batch: the argument of the last complete `append`.
        writing_ended: why nothing more is written, if so: `disk` or `max_bytes`.
    """

    def __init__(
        self,
        template: str,
        job: Job,
        budget: DiskBudget,
        describe: Callable[[bool], dict[str, Any]],
    ) -> None:
        self.path: Path | None = None
        self.budget = budget
        self.items = 0
        self.last_batch: object = None
        self.writing_ended: str | None = None
        self._template, self._job, self._describe = template, job, describe
        self._descriptor = -1
        self._reserve = DiskReserve()
        self._size = 0
        self._started = datetime.datetime.now(datetime.UTC)
        self._metadata_written = time.monotonic()

    @functools.cached_property
    def planned_path(self) -> Path:
        """Where the file goes unless another process of this run has that path."""
        return resolve_path(self._template, self._job)

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def open(self) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created; `writing_ended` is then `disk`.
        """
        try:
            metadata = encode_metadata(self._describe(False))
            self.path, self._descriptor = claim_path(self.planned_path, self._job, metadata)
        except OSError:
            self.writing_ended = "disk"
            raise
        self._reserve.take(self.path.parent, len(metadata))

    def append(self, data: bytes, items: int, batch: object = None) -> None:
        """Write all of `data` or nothing: neither a full disk nor Ctrl-C leaves half a line.

        Raises:
            OSError: the disk is full or failed; `writing_ended` is then `disk`.
        """
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            if isinstance(error, OSError):
                self.writing_ended = "disk"
                self.last_batch = batch
            raise
        # without a call, so no signal handler runs in between: the file and its state agree
        self._size += written
        self.budget.spent += written
        self.items += items
        self.last_batch = batch

    def write_metadata(self, *, ended_cleanly: bool = False) -> None:
        """Replace the metadata; report an error once and continue."""
        assert self.path is not None
        self._metadata_written = time.monotonic()
        metadata = encode_metadata(self._describe(ended_cleanly))
        self._reserve.release()
        try:
            self.path = replace_metadata(self.path, self._descriptor, metadata)
        except OSError as error:
            if self.writing_ended != "disk":  # which was reported
                say_once(f"{metadata_path(self.path)} cannot be written ({error.strerror})")
        if not ended_cleanly:
            self._reserve.take(self.path.parent, len(metadata))

    def write_metadata_if_due(self) -> None:
        """Replace the metadata if the last time is too long ago."""
        if time.monotonic() - self._metadata_written > _METADATA_INTERVAL_S:
            self.write_metadata()

    def close(self) -> None:
        """Write the final metadata and close the file."""
        self.write_metadata(ended_cleanly=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def describe_times(self, ended_cleanly: bool) -> dict[str, str | None]:
        """Return the metadata fields `start` and `end`."""
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return {"start": self._started.isoformat(), "end": now if ended_cleanly else None}

    def describe_end(self, ended_cleanly: bool) -> dict[str, str | bool | None]:
        """Return the metadata fields that tell whether the file is complete. A killed process
        leaves `ended_cleanly` false.
        """
        return {"writing_ended": self.writing_ended, "ended_cleanly": ended_cleanly}
