"""How often a robot that knows nothing but `next` reaches the right place, with real commands.

    python -m tests.corpora.robots [--count 40] [--seed 1] [--only WORD]

It begins with `otel-torch diff` of two recordings by modules, and does what the answers advise. What
counts is the first finding of its last answer: a right line, or the lines of its region around one.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_torch.parity.finding import CodeLine
from tests.corpora import corpus_of
from tests.corpora.case import Case, Right, Run
from tests.corpora.judge_lines import Half
from tests.interpreters import command_of_tests
from tests.reports.robot import Robot
from tests.support import run_python

DRAWN_FROM = ("small", "unseen", "causes")


def follow(case: Case, folder: Path) -> dict[str, Any]:
    """Return the last answer to a case."""
    runs: dict[str, Run | None] = {"REFERENCE": case.reference, "PORT": case.port}
    programs = {
        f"{name}_COMMAND": [command_of_tests("python"), str(run.program), *run.arguments]
        for name, run in runs.items()
        if run is not None
    }

    def start(words: Sequence[str], settings: Mapping[str, str]) -> object:
        return run_python(folder, Path(words[1]), *words[2:], **settings)

    for words, file in zip(programs.values(), ("ref.jsonl", "port.jsonl"), strict=True):
        start(words, {"OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_JSONL": file})
    return Robot(folder, programs, start).follow(["otel-torch", "diff", "ref.jsonl", "port.jsonl"])


def grade(right: Right, answer: Mapping[str, Any]) -> str:
    """Return `line`, `region`, `other` or `nothing` of an answer's first finding."""
    findings = answer.get("faults") or [answer.get("first")]
    first = findings[0]
    if first is None:
        return "nothing"
    sides = (
        (_half(first, "", "reference"), right.lines.reference),
        (_half(first, "port_", "port"), right.lines.port),
    )
    if any(half.names(line) for half, lines in sides for line in lines):
        return "line"
    if any(half.holds(line) for half, lines in sides for line in lines):
        return "region"
    return "other"


def _half(finding: Mapping[str, Any], prefix: str, side: str) -> Half:
    line = finding[f"{prefix}line"]
    region = (finding.get("region") or {}).get(side) or ()
    return Half(
        finding[f"{prefix}side"],
        finding[f"{prefix}module"] or "",
        finding[f"{prefix}tensor"] or "",
        None if line is None else CodeLine(**line),
        tuple(CodeLine(**end) for end in region),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description="Let a robot follow `next`.")
    arguments.add_argument("--count", type=int, default=40, help="of faults")
    arguments.add_argument("--seed", type=int, default=1, help="of the draw")
    arguments.add_argument("--only", default="", help="only cases with this in their name")
    options = arguments.parse_args()
    cases = [
        case
        for name in DRAWN_FROM
        for case in corpus_of(name).cases.values()
        if case.right is not None and case.right.lines and options.only in case.name
    ]
    chosen = random.Random(options.seed).sample(cases, min(options.count, len(cases)))
    grades: Counter[str] = Counter()
    for case in chosen:
        assert case.right is not None
        with tempfile.TemporaryDirectory() as folder:
            answer = follow(case, Path(folder))
        graded = grade(case.right, answer)
        grades[graded] += 1
        print(f"{case.name}: {graded} ({answer['schema']})", flush=True)
    print(dict(grades))


if __name__ == "__main__":
    main()
