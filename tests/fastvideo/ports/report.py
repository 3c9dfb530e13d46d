"""What the corpus is worth, measured, as JSON: how well the clean pairs agree, and whether bugs and
faults begin where they say. `test_corpus.py` reads it.

One process for all of it, because importing FastVideo takes ten times longer than any of its
checks.
"""

from __future__ import annotations

import json
from typing import Any

from tests.fastvideo.ports.quiet import quietly

quietly()

from tests.corpora.case import Place, missing  # noqa: E402
from tests.corpora.truth import (  # noqa: E402
    Event,
    confirms,
    first_difference,
    never_called,
    relative_error,
    trace,
)
from tests.fastvideo.ports.bugs import BUGS  # noqa: E402
from tests.fastvideo.ports.corpus import FAULTY, PAIRS, build  # noqa: E402
from tests.fastvideo.ports.faults import Fault, draw  # noqa: E402
from tests.sampling import sample  # noqa: E402


def compare(pair: str) -> dict[str, Any]:
    """Relative L2 error of the clean port's output, and of the reference's own bf16 against its
    fp32.
    """
    reference, port = (
        {dtype: build(pair, side, dtype=dtype).run() for dtype in ("fp32", "bf16")}
        for side in ("reference", "port")
    )
    return {
        "fp32": relative_error(port["fp32"], reference["fp32"]),
        "bf16": relative_error(port["bf16"], reference["bf16"]),
        "reference's bf16": relative_error(reference["bf16"], reference["fp32"]),
        "limit": (PAIRS | FAULTY)[pair]().limit,
    }


def check_bug(name: str, traces: dict[str, Any]) -> dict[str, Any]:
    """Where the broken port first differs from the clean one, and whether that is what the bug
    claims, in both programs.
    """
    bug = BUGS[name]
    output, clean = traces["port"]
    _, reference = traces["reference"]
    with build(bug.pair, "port", bug=name) as program:
        broken_output, broken = trace(program.model, program.run)
    tolerance = max(1e-5, 5 * PAIRS[bug.pair]().limit)
    return {
        "pair": bug.pair,
        "error": relative_error(broken_output, output),
        "first": [str(place) for place in _first(clean, broken)],
        "port": any(place in bug.port for place in _first(clean, broken)),
        "reference": confirms(bug.reference, bug.port, reference, clean, broken, tolerance),
    }


def check_fault(pair: str, spec: str, clean: list[Event]) -> dict[str, Any]:
    """Likewise for a fault planted by a machine."""
    with build(pair, "port", fault=spec) as program:
        truth = Fault.parse(spec).truth(program.model)
        _, broken = trace(program.model, program.run)
    first = _first(clean, broken)
    return {
        "pair": pair,
        "first": [str(place) for place in first],
        "port": any(place in truth for place in first),
    }


def _first(clean: list[Event], broken: list[Event]) -> list[Place]:
    different = first_difference(clean, broken)
    places = [] if different is None else [different.place]
    return places + [missing(module) for module in never_called(clean, broken)[:1]]


def measure() -> dict[str, dict[str, Any]]:
    report: dict[str, dict[str, Any]] = {"pairs": {}, "bugs": {}, "faults": {}}
    report["faulty"] = {pair: compare(pair) for pair in FAULTY}
    for pair in sample(PAIRS):
        report["pairs"][pair] = compare(pair)
        built = {side: build(pair, side) for side in ("reference", "port")}
        traces = {side: trace(program.model, program.run) for side, program in built.items()}
        for name in (name for name, bug in BUGS.items() if bug.pair == pair):
            report["bugs"][name] = check_bug(name, traces)
        for spec in draw(pair, 2):
            report["faults"][f"{pair} {spec}"] = check_fault(pair, spec, traces["port"][1])
    return report


if __name__ == "__main__":
    print(json.dumps(measure()))
