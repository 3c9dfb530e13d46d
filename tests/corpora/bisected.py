"""The same corpora, bisected: each answer is tried, and its proof is graded beside its line."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.callables import CallablePrograms
from otel_torch.bisecting.recorded_programs import RunOptions
from otel_torch.bisecting.runs import (
    NothingRecorded,
    ProgramRun,
    RunFailed,
    SideName,
    find_recordings,
)
from otel_torch.bisecting.search import Options, bisect_programs
from otel_torch.parity.finding import Report
from tests.corpora.case import BISECT, Case, Run
from tests.corpora.judge import Recordings
from tests.corpora.operations import Operations
from tests.corpora.scores import DTYPES, Recorder
from tests.corpora.side import side


class Bisected(Operations):
    """A corpus whose pairs are bisected: single processes in this one, ranks in their own."""

    engine = BISECT

    def compare(self, case: Case, variant: str, recorder: Recorder) -> tuple[Report, Recordings]:
        answer = self.bisect(case, variant, recorder)
        report = answer.report
        if report.verdict == "incomparable":
            raise RuntimeError(report.reason)
        report.warnings = []
        return report, Recordings(Path(), Path(), bisection=answer)

    def bisect(self, case: Case, variant: str, recorder: Recorder) -> Bisection:
        """Return the answer to a case."""
        assert case.reference is not None and case.port is not None
        runs: dict[SideName, Run] = {"reference": case.reference, "port": case.port}
        folder = recorder.folder / "bisected"
        programs: CallablePrograms | RankPrograms
        if any(run.ranks > 1 for run in runs.values()):
            programs = RankPrograms(runs, recorder, folder)
        else:
            calls = {side: _call(run, variant) for side, run in runs.items()}
            programs = CallablePrograms(calls, folder)
        options = Options(RunOptions(steps=case.reference.steps or None))
        try:
            return bisect_programs(programs, options)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _call(run: Run, variant: str) -> Callable[[], object]:
    dtype = variant if variant in DTYPES else DTYPES[0]

    def call() -> object:
        with side(*run.arguments, dtype, 0) as program:
            return program()

    return call


class RankPrograms:
    """Two programs, at least one of them on several ranks, started as the corpus starts them."""

    def __init__(self, programs: Mapping[SideName, Run], recorder: Recorder, folder: Path) -> None:
        self._programs, self._recorder, self.folder = programs, recorder, folder
        self.runs: list[ProgramRun] = []

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        """Run a program. Raises RunFailed if it fails, and NothingRecorded."""
        folder = self.folder / f"{len(self.runs) + 1}-{side}"
        folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            self._recorder.start(
                self._programs[side], folder, {**settings, "jsonl": str(folder / "recording.jsonl")}
            )
        except Exception as error:
            raise RunFailed(f"the {side}: {error}") from None
        recordings = find_recordings(folder)
        if not recordings:
            raise NothingRecorded(f"the {side} recorded no operations")
        run = ProgramRun(side, why, (), time.monotonic() - began, recordings)
        self.runs.append(run)
        return run
