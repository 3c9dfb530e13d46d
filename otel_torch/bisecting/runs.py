"""Runs of the two programs, and where each one's recordings lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from otel_torch.recording.metadata import read_metadata

SideName = Literal["reference", "port"]


class RunFailed(Exception):
    """A program could not be run to its end or recorded nothing; the message is one line."""


class RunsDiffer(RunFailed):
    """The reference computes other values in each run, so that nothing can be compared."""


class EndedEarly(KeyboardInterrupt):
    """The search is to end with what is known by now; the message says what ended it."""


class NothingRecorded(RunFailed):
    """A program ran to its end, and recorded no operation."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A run of one of the programs.

    Attributes:
        side: Which program.
        why: What the run is for.
        command: As it was run; empty for a function.
        seconds: How long it took.
        recordings: By rank.
        output: What it printed; None for a function.
    """

    side: SideName
    why: str
    command: tuple[str, ...]
    seconds: float
    recordings: Mapping[int, Path]
    output: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the run as it stands in the answer."""
        return {
            "side": self.side,
            "why": self.why,
            "command": list(self.command),
            "seconds": round(self.seconds, 2),
            "recordings": [str(path) for path in self.recordings.values()],
        }


class Programs(Protocol):
    """Two programs that can be run as often as needed.

    Attributes:
        runs: What was run so far.
        folder: Where recordings and values lie.
    """

    runs: list[ProgramRun]
    folder: Path

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        """Run a program recorded with some settings.

        Raises:
            RunFailed: It did not end well.
            NothingRecorded: It recorded nothing.
        """


def find_recordings(folder: Path) -> dict[int, Path]:
    """Return the recordings of operations in a folder by rank; of several the largest."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_size):
        metadata = read_metadata(path, lambda text: None)
        if metadata.get("lines"):
            found[int(metadata.get("rank") or 0)] = path
    return dict(sorted(found.items()))
