"""The same corpora, bisected: each answer is tried, and its proof is graded beside its line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.callables import CallablePrograms
from otel_torch.bisecting.recorded_programs import RunOptions
from otel_torch.bisecting.search import Options, bisect_programs
from otel_torch.parity.finding import Report
from tests.corpora.case import BISECT, Case
from tests.corpora.judge import Recordings
from tests.corpora.operations import Operations
from tests.corpora.scores import DTYPES, Recorder
from tests.corpora.side import side


class Bisected(Operations):
    """A corpus of which each pair is bisected in this process."""

    engine = BISECT

    def load(self) -> Sequence[Case]:
        """Return the cases that run in one process: ranks need processes of their own."""
        return [case for case in super().load() if _is_alone(case)]

    def compare(self, case: Case, variant: str, recorder: Recorder) -> tuple[Report, Recordings]:
        answer = self.bisect(case, variant, recorder.folder)
        report = answer.report
        if report.verdict == "incomparable":
            raise RuntimeError(report.reason)
        report.warnings = []
        return report, Recordings(Path(), Path(), bisection=answer)

    def bisect(self, case: Case, variant: str, folder: Path) -> Bisection:
        """Return the answer to a case."""
        assert case.reference is not None and case.port is not None
        dtype = variant if variant in DTYPES else DTYPES[0]

        def call(arguments: tuple[str, ...]) -> Callable[[], object]:
            def run() -> object:
                with side(*arguments, dtype, 0) as program:
                    return program()

            return run

        calls = {"reference": call(case.reference.arguments), "port": call(case.port.arguments)}
        programs = CallablePrograms(calls, folder / "bisected")
        options = Options(RunOptions(steps=case.reference.steps or None))
        try:
            return bisect_programs(programs, options)
        finally:
            shutil.rmtree(folder / "bisected", ignore_errors=True)


def _is_alone(case: Case) -> bool:
    return all(run is None or run.ranks == 1 for run in (case.reference, case.port))
