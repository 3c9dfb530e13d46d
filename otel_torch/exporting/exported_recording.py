"""The recordings that are exported, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import iterate_rows
from otel_torch.recording.recordings_folder import recordings_of
from otel_torch.recording.rows import Row

Report = Callable[[str], None]
_PROGRESS_INTERVAL = 4096  # records


class ExportError(ValueError):
    """Something cannot be exported; the message is the one line to print."""


@dataclass(frozen=True, slots=True)
class ExportedRecording:
    """A recording to export.

    Attributes:
        name: That of its file, which no other recording of its folder has.
        rank: That of its process, 0 if nothing tells it.
        warn: Called with a line for each problem.
        progress: Called now and then with a short text.
    """

    path: str
    name: str
    rank: int
    metadata: dict[str, Any]
    warn: Report
    progress: Report

    def rows(self) -> Iterator[Row]:
        """Yield the rows one by one; only a few are in memory at a time.

        Raises:
            RecordingError: The file is not a recording.
        """
        for count, row in enumerate(iterate_rows(self.path, self.warn)):
            if not count % _PROGRESS_INTERVAL:
                self.progress(f"{count:,} records read of {self.path}")
            yield row


def exported_recordings(name: str, warn: Report, progress: Report) -> list[ExportedRecording]:
    """Return a recording, or all of a folder.

    Raises:
        RecordingError: The folder holds none, or the first line of one is no record.
    """
    recordings = []
    for path in recordings_of(name):
        next(iterate_rows(path))  # before anything is written
        metadata = read_metadata(path)
        short = Path(path).name.replace(".jsonl", "")
        rank = metadata.get("rank", 0)
        recordings.append(ExportedRecording(path, short, rank, metadata, warn, progress))
    return recordings
