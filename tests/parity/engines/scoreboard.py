"""Score how often `otel-torch diff` names the fault of an engine with its module and tokens.

python -m tests.parity.engines.scoreboard [--only WORD]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from otel_torch.parity.finding import Report
from tests.parity.engines.environment import ENVIRONMENT

if TYPE_CHECKING:
    from tests.parity.engines.corpus import Fault

# best first: the right module and words, the right module, that before or after; a clean pair is
# `silent` or `false`
OUTCOMES = ("exact", "place", "near", "wrong", "missed", "silent", "false")


def outcome(report: Report, fault: Fault | None) -> str:
    """Return how right the first finding is; None as the fault is a clean engine."""
    first = report.first
    if fault is None:
        return "silent" if report.verdict == "match" and not report.introduced else "false"
    if first is None:
        return "missed"
    if first.port_module != fault.module:
        return "near" if first.port_module == fault.near else "wrong"
    is_exact = first.port_side == fault.side and all(
        words in first.explanation for words in fault.says
    )
    return "exact" if is_exact else "place"


def _said(report: Report) -> str:
    """Return the place of the first finding, and what is said of it; of none, what was compared."""
    if report.first is None:
        return f"{report.verdict}, {report.pairs} pairs"
    first = report.first
    return f"{first.port_module} {first.port_tensor}: {first.explanation}"


def main() -> None:
    # before torch is imported, which starts threads that no fork would have
    os.environ.update(ENVIRONMENT)
    from tests.parity.engines.corpus import CLEAN, FAULTS, FURTHER, Engine
    from tests.parity.engines.recorder import compare

    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--only", default="", help="only engines and faults with this word")
    only = arguments.parse_args().only
    cases = [(engine, "") for engine in (*CLEAN, *FURTHER)] + [
        (Engine(fault.family), name) for name, fault in FAULTS.items()
    ]
    chosen = sorted((case for case in cases if only in f"{case[0]} {case[1]}"), key=str)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for engine, group in groupby(chosen, key=lambda case: case[0]):
            names = [name for _, name in group]
            for name, report in zip(names, compare(Path(folder), engine, names), strict=True):
                result = outcome(report, FAULTS.get(name))
                counts[result] += 1
                print(f"{f'{engine} {name}':<50} {result:<7} {_said(report)[:200]}", flush=True)
    print(" · ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name]))


if __name__ == "__main__":
    main()
