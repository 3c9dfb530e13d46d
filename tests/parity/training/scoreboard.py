"""Score how often `otel-torch diff` names a planted fault of a training, and is silent about legal
changes.

    python -m tests.parity.training.scoreboard [--only WORD] [--keep FOLDER] [--kept-back]

Each side is an unmodified program in a child process that environment variables switch on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import otel_torch
from otel_torch.parity.finding import Finding, Report
from tests.parity.training.clean import CLEAN, Clean
from tests.parity.training.faults import FAULTS, Fault
from tests.parity.training.kept_back import CLEAN_KEPT_BACK, KEPT_BACK
from tests.parity.training.setups import SETUPS
from tests.support import run_python, run_ranks

PROGRAM = Path(__file__).with_name("program.py")
# Best first. `unexplained`: the right place without the reason. `near`: the right phase and step.
OUTCOMES = ("exact", "unexplained", "near", "missed", "wrong")
Case = Fault | Clean
TUNED: dict[str, Case] = {**FAULTS, **CLEAN}
AFTERWARDS: dict[str, Case] = {**KEPT_BACK, **CLEAN_KEPT_BACK}
CASES = TUNED | AFTERWARDS
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Score:
    """What was said of one case: `said` is empty where nothing was."""

    name: str
    outcome: str
    said: str

    @property
    def is_clean(self) -> bool:
        return isinstance(CASES[self.name], Clean)


class Recorder:
    """Records trainings, each once: many cases share a reference."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def compare(self, case: Case) -> Report:
        """Compare the training of a case with that of its setup."""
        setup = SETUPS[case.setup]
        reference = self._record(setup.ranks, {}, case.setup)
        ranks = max(setup.ranks, case.ranks)
        environment = case.environment if isinstance(case, Clean) else {}
        return otel_torch.diff(reference, self._record(ranks, environment, case.setup, case.name))

    def _record(self, ranks: int, environment: Mapping[str, str], *arguments: str) -> Path:
        folder = self._folder / "-".join(arguments)
        recording = folder / "run.jsonl" if ranks == 1 else folder
        if (folder / "done").exists():
            return recording
        folder.mkdir(parents=True, exist_ok=True)
        variables = {"OTEL_TORCH_CAPTURE": "training", **QUIET, **environment}
        if ranks == 1:
            run_python(folder, PROGRAM, *arguments, **variables)
        else:
            run_ranks(folder, PROGRAM, *arguments, ranks=ranks, **variables)
        (folder / "done").touch()
        return recording


def outcome(case: Case, first: Finding | None) -> str:
    """Return how right the first finding is; nothing is right for a legal change."""
    if isinstance(case, Clean):
        return "exact" if first is None else "wrong"
    if first is None:
        return "missed"
    if _phase(first) not in case.phases or first.step != case.step:
        return "wrong"
    if first.module not in case.modules and first.port_module not in case.modules:
        return "near"
    explanation = first.explanation.lower()
    explained = all(
        any(word.lower() in explanation for word in words.split("|")) for words in case.words
    )
    return "exact" if explained else "unexplained"


def _phase(finding: Finding) -> str | None:
    """Return the phase of a finding; that of a wrong loss, or of its gradient, is `loss`."""
    if finding.phase == "train" and (finding.tensor or finding.port_tensor) == "loss":
        return "loss"
    is_of_root = "" in (finding.module, finding.port_module)
    is_gradient = str(finding.tensor or finding.port_tensor).startswith("grad")
    return "loss" if finding.phase == "backward" and is_of_root and is_gradient else finding.phase


def score(case: Case, recorder: Recorder) -> Score:
    """Record a case and compare its two sides. An error of the comparison is an outcome, too."""
    report = recorder.compare(case)
    first = report.first
    if report.verdict == "incomparable":
        return Score(case.name, "wrong", f"incomparable: {report.reason}")
    return Score(case.name, outcome(case, first), "" if first is None else describe(first))


def describe(finding: Finding) -> str:
    """Return a finding as a line."""
    place = f"{finding.phase} {finding.module!r} {finding.tensor} at step {finding.step}"
    if finding.module != finding.port_module:
        place += f" (port: {finding.port_module!r})"
    return f"{place}: {' '.join(finding.explanation.split())[:160]}"


def expected(case: Case) -> str:
    """Return what has to be said, as a line."""
    if isinstance(case, Clean):
        return "nothing"
    place = f"{case.phases[0]} {case.modules[0] or '(root)'} at step {case.step}"
    return f"{place}: {' '.join(case.words)}" if case.words else place


def table(scores: Sequence[Score]) -> list[str]:
    """Return a line for each case."""
    name_width = max(len(score.name) for score in scores)
    return [
        f"{score.name:<{name_width}}  {score.outcome:<11}  {expected(CASES[score.name])}"
        + (f"\n{'':<{name_width}}               said: {score.said}" if score.said else "")
        for score in scores
    ]


def totals(scores: Sequence[Score]) -> list[str]:
    """Return a line for the faults and one for the legal changes."""
    faults = [score for score in scores if not score.is_clean]
    counts = Counter(score.outcome for score in faults)
    clean = [score for score in scores if score.is_clean]
    silent = sum(score.outcome == "exact" for score in clean)
    return [
        f"{len(faults)} faults: " + " · ".join(f"{counts[name]} {name}" for name in OUTCOMES),
        f"{len(clean)} legal changes: {silent} silent",
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description="Score comparisons of trainings.")
    arguments.add_argument("--only", default="", help="only cases with this in their name")
    arguments.add_argument("--keep", type=Path, help="keep the recordings in this folder")
    arguments.add_argument("--kept-back", action="store_true", help="those not used for the rules")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        recorder = Recorder(options.keep or Path(temporary))
        cases = AFTERWARDS if options.kept_back else TUNED
        scores = [score(case, recorder) for name, case in cases.items() if options.only in name]
    print(*table(scores), "", *totals(scores), sep="\n")


if __name__ == "__main__":
    main()
