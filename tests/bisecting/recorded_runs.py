"""Programs as text that `bisect_programs` may run as often as it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from otel_torch.bisecting.recorded_programs import SETTINGS
from otel_torch.bisecting.runs import NothingRecorded, ProgramRun, SideName, find_recordings
from tests.support import run_python


class RecordedRuns:
    """Two programs, each run in forked processes.

    Args:
        run_port, run_reference: Run a program, in one process by default.
    """

    def __init__(
        self,
        folder: Path,
        reference: str,
        port: str,
        run_port: Callable[..., object] = run_python,
        run_reference: Callable[..., object] = run_python,
    ) -> None:
        self.folder, self._programs = folder, {"reference": reference, "port": port}
        self._run = {"reference": run_reference, "port": run_port}
        self.runs: list[ProgramRun] = []

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        folder = self.folder / f"{len(self.runs) + 1}-{side}"
        folder.mkdir(parents=True, exist_ok=True)
        variables = {
            f"OTEL_TORCH_{name.upper()}": value for name, value in (SETTINGS | settings).items()
        }
        done = self._run[side](folder, self._programs[side], **variables)
        output = folder / "output.txt"
        output.write_text(getattr(done, "stdout", ""))
        recordings = find_recordings(folder)
        if not recordings:
            raise NothingRecorded(f"the {side} recorded no operations")
        self.runs.append(ProgramRun(side, why, (), 0.0, recordings, output))
        return self.runs[-1]
