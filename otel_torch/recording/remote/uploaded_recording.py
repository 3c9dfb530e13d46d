"""Writes a recording whose place is a URL: locally, and uploaded when the program ends."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
from pathlib import Path
from typing import Any

from otel_torch.process.console import say
from otel_torch.process.job import Job
from otel_torch.recording.recording_sink import RecordingSink
from otel_torch.recording.remote.remote_files import split_url
from otel_torch.recording.remote.upload import check_place, upload_folder
from otel_torch.records import Losses


class UploadedRecording(RecordingSink):
    """Writes into a temporary folder of its own. What cannot be uploaded stays there.

    Args:
        url: with the placeholders of OTEL_TORCH_JSONL.
        options: those of `RecordingSink`.
    """

    def __init__(self, url: str, job: Job, losses: Losses, **options: Any) -> None:
        self._start, rest = split_url(url)
        # made with the first record, under a name that nobody can guess
        name = f"otel_torch.{secrets.token_hex(8)}"
        self._folder = Path(tempfile.gettempdir()) / name
        options["otlp_folder"] = None  # no relative path leads from a store to this machine
        super().__init__(str(self._folder / rest), job, losses, **options)

    def _url(self) -> str:
        path = self.path or self._file.planned_path
        return self._start + path.relative_to(self._folder).as_posix()

    def _open(self) -> None:
        with contextlib.suppress(OSError):  # opening the file will say it
            self._folder.mkdir(mode=0o700)
        super()._open()
        if self._file.is_open:
            say(f"{self._url()}: recorded in {self.path}, and uploaded at the end")
            threading.Thread(target=self._check, name="otel_torch-check", daemon=True).start()

    def _check(self) -> None:
        """Say early what would keep the recording from being uploaded."""
        reason = check_place(self._url())
        if reason is not None and self._file.is_open:
            say(f"{self._url()}: cannot be written ({reason}); tried again at the end")

    def _deliver(self) -> str:
        reason = upload_folder(str(self._folder), self._start)
        if reason is None:
            return self._url()
        self._losses.count("record", "not_uploaded", self.written)
        say(f"{self._url()}: not uploaded ({reason}); it stays on this machine")
        return str(self.path)
