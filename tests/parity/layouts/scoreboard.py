"""Score how often `otel-torch diff` names the fault of a layout with its module, rank and cause.

python -m tests.parity.layouts.scoreboard [--only WORD] [--frameworks]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from otel_torch.parity.finding import Report
from tests.parity.layouts import corpus, trainings
from tests.parity.layouts.corpus import Expected, Recorder

# best first (`Expected.rightness`); a clean layout is `silent` or `false`
OUTCOMES = ("exact", "place", "near", "wrong", "missed", "silent", "false")


def outcome(report: Report, expected: Expected | None) -> str:
    """Return how right the first finding is; `expected` is None for a clean layout."""
    if expected is None:
        is_silent = report.verdict == "match" and not (report.introduced or report.warnings)
        return "silent" if is_silent else "false"
    if report.first is None:
        return "missed"
    return expected.rightness if Expected.of(report.first) == expected else "wrong"


def _said(report: Report) -> str:
    """Return the place, the rank and the cause of the first finding, "" without one."""
    if report.first is None:
        return ""
    said = Expected.of(report.first)
    words = [said.phase, said.module, said.tensor, said.cause]
    if said.rank is not None:
        words.append(f"rank {said.rank}")
    return " ".join(filter(None, words))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--only", default="", help="only layouts and faults with this word")
    arguments.add_argument(
        "--frameworks", action="store_true", help="those of Megatron-core and DeepSpeed instead"
    )
    options = arguments.parse_args()
    clean: dict[tuple[str, ...], Expected | None] = dict.fromkeys(
        trainings.FRAMEWORK_CLEAN if options.frameworks else corpus.CLEAN + trainings.CLEAN
    )
    faults = trainings.FRAMEWORK_FAULTS if options.frameworks else corpus.FAULTS | trainings.FAULTS
    chosen = {
        words: expected
        for words, expected in (clean | faults).items()
        if options.only in " ".join(words)
    }
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder))
        for words, expected in chosen.items():
            report = recorder.compare(*words)
            result = outcome(report, expected)
            counts[result] += 1
            name = " ".join(filter(None, words))
            print(f"{name:<60} {result:<7} {_said(report)}", flush=True)
    print(" · ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name]))


if __name__ == "__main__":
    main()
