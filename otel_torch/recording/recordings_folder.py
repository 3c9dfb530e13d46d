"""Finds the recordings in a folder, such as those of a run's ranks, among what else is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from otel_torch.recording.file_kinds import EMPTY, RECORDING, identify
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError

_PATTERNS = ("*.jsonl", "*.jsonl.gz")
# what a recording of an earlier run is renamed to
_EARLIER_RUN = re.compile(r"\.\d+\.jsonl(\.gz)?$")


def recordings_in(folder: Path) -> list[Path]:
    """Return the recordings in a folder by name, without those that a later run has renamed.

    Files that cannot be recognized are among them: reading them says what is wrong.
    """
    paths = [path for pattern in _PATTERNS for path in folder.glob(pattern)]
    return sorted(
        path
        for path in paths
        if not _EARLIER_RUN.search(path.name) and identify(path) in (RECORDING, EMPTY, None)
    )


def holds_none(folder: Path) -> str:
    """Return the line for a folder without recordings, with a folder in it that has some."""
    message = f"{folder}: holds no recording (*.jsonl)"
    inner = (path for path in sorted(folder.iterdir()) if path.is_dir())
    having = next((path for path in inner if recordings_in(path)), None)
    return message if having is None else f"{message}; {having} holds some"


def recordings_of(name: str) -> list[str]:
    """Return a recording, or those in a folder: run by run, as these began, in order of rank.

    Raises:
        RecordingError: The folder holds none.
    """
    folder = Path(name)
    if not folder.is_dir():
        return [name]
    paths = recordings_in(folder)
    if not paths:
        raise RecordingError(holds_none(folder))
    metadata = {path: read_metadata(path) for path in paths}
    started: dict[Any, str] = {}  # run -> when its first rank did
    for fields in metadata.values():
        run_id, start = fields.get("run_id"), fields.get("start") or ""
        started[run_id] = min(start, started.get(run_id, start))

    def place(path: Path) -> tuple[str, int, str]:
        fields = metadata[path]
        return started[fields.get("run_id")], fields.get("rank", 0), path.name

    return [str(path) for path in sorted(paths, key=place)]
