"""Score how often `otel-torch diff` says rightly what a fault is, apart from where it is.

    python -m tests.parity.causes.scoreboard [--only WORD] [--seed N] [--kept-back]

Every fault is recorded twice: with whole tensors, and with statistics and sketches alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import otel_torch
from otel_torch import bootstrap
from otel_torch.parity.finding import Finding, Report
from tests.parity.causes.faults import FAULTS, KEPT_BACK, Fault
from tests.parity.causes.models import build
from tests.parity.scoreboard import Summary

# best first; a fault outside of the table is `unknown` or `wrong`, a clean pair `silent` or `wrong`
__all__ = ["Summary"]
OUTCOMES = ("named", "in part", "unknown", "wrong")
# what is right, but less than what is known with whole tensors
COARSER = {
    "transposed": "reordered",
    "rows_permuted": "reordered",
    "columns_permuted": "reordered",
}
FAMILIES = ("llama", "unet", "wan")


@dataclass(frozen=True)
class Score:
    """What was said of one fault; `mode` is `tensors` or `statistics`."""

    fault: str
    mode: str
    outcome: str
    said: str


class Recorder:
    """Records models in this process, each into its own files."""

    def __init__(self, folder: Path, keeps_tensors: bool, seed: int = 0) -> None:
        self._folder, self._keeps_tensors, self._seed = folder, keeps_tensors, seed
        self._references: dict[str, Path] = {}

    def compare(self, family: str, fault: Fault | None) -> Report:
        """Compare the reference of a family with its port; the fault is planted in the port."""
        reference, port, inputs = build(family, self._seed)
        if family not in self._references:
            self._references[family] = self._record(reference, inputs, family)
        with torch.no_grad():
            if fault is not None:
                fault.plant(port)
        name = f"{family}-port" if fault is None else fault.name
        return otel_torch.diff(self._references[family], self._record(port, inputs, name))

    def _record(self, model: nn.Module, inputs: tuple[torch.Tensor, ...], name: str) -> Path:
        recording = self._folder / f"{name}.jsonl"
        tensors = {"tensors": str(self._folder / "tensors")} if self._keeps_tensors else {}
        if not bootstrap.start(jsonl=str(recording), capture="parity", run_id=name, **tensors):
            raise RuntimeError("recording did not start")
        try:
            torch.manual_seed(self._seed + 7)
            with torch.no_grad():
                model(*inputs)
        finally:
            bootstrap.stop()
        return recording


def outcome(fault: Fault | None, first: Finding | None) -> str:
    """Return how right the cause of the first finding is."""
    cause = None if first is None else first.cause
    if fault is None:
        return "silent" if first is None else "wrong"
    if first is None or cause is None:
        return "unknown"
    if cause.kind in fault.kinds and all(word in cause.text for word in fault.words):
        return "named"
    if cause.kind in {COARSER.get(kind) for kind in fault.kinds}:
        return "in part"
    return "wrong"


def score(
    faults: Iterable[Fault],
    folder: Path,
    modes: Sequence[str] = ("tensors", "statistics"),
    seed: int = 0,
) -> list[Score]:
    """Record and compare every fault and every clean pair, in every mode."""
    scores = []
    faults = list(faults)
    for mode in modes:
        place = folder / mode
        place.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(place, mode == "tensors", seed)
        for fault in (*faults, *FAMILIES):
            planted = fault if isinstance(fault, Fault) else None
            family = planted.family if planted else str(fault)
            first = recorder.compare(family, planted).first
            said = "" if first is None else first.cause.sentence if first.cause else "not known"
            name = planted.name if planted else f"{family} (clean)"
            scores.append(Score(name, mode, outcome(planted, first), said))
    return scores


def totals(scores: Sequence[Score], faults: dict[str, Fault]) -> list[str]:
    """Return a line for each mode."""
    lines = []
    for mode in dict.fromkeys(score.mode for score in scores):
        of_mode = [score for score in scores if score.mode == mode]
        table = [score for score in of_mode if score.fault in faults and faults[score.fault].kinds]
        outside = [s for s in of_mode if s.fault in faults and not faults[s.fault].kinds]
        clean = [score for score in of_mode if score.fault not in faults]
        counts = Counter(score.outcome for score in table)
        lines.append(
            f"{mode}: {len(table)} faults: "
            + " · ".join(f"{counts[name]} {name}" for name in OUTCOMES)
            + f"; {len(outside)} outside of the table: "
            + f"{sum(score.outcome == 'unknown' for score in outside)} unknown; "
            + f"{len(clean)} clean: {sum(score.outcome == 'silent' for score in clean)} silent"
        )
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description="Score what the comparison says of faults.")
    arguments.add_argument("--only", default="", help="only faults with this in their name")
    arguments.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    arguments.add_argument("--kept-back", action="store_true", help="those not used for the rules")
    options = arguments.parse_args()
    faults = KEPT_BACK if options.kept_back else FAULTS
    chosen = [fault for name, fault in faults.items() if options.only in name]
    with tempfile.TemporaryDirectory() as folder:
        scores = score(chosen, Path(folder), seed=options.seed)
    width = max(len(score.fault) for score in scores)
    for row in scores:
        print(f"{row.fault:<{width}}  {row.mode:<10}  {row.outcome:<8} {row.said}")
    print(*["", *totals(scores, faults)], sep="\n")


if __name__ == "__main__":
    main()
