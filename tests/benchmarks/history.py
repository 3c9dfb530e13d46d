"""Keeps the figures of every complete run of the benchmarks, so that a loss of speed is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import ROOT, number

HISTORY = ROOT / "docs" / "performance-history.jsonl"
# by how much a figure may grow before it counts as worse: machines and days differ by less
_ALLOWED = 1.1

Figures = Sequence[Mapping[str, Any]]


def append_run(path: Path, machine: str, figures: Figures) -> None:
    """Add a run as a line."""
    kept = [
        {"name": figure["name"], "ours": figure["ours"], "spread": figure.get("spread")}
        for figure in figures
        if figure["ours"] is not None
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"machine": machine, "figures": kept}) + "\n")


def last_run(path: Path) -> dict[str, Any] | None:
    """Return the newest run; None without any."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else None


def worse_figures(earlier: Figures, figures: Figures) -> Iterator[str]:
    """Describe each figure that is worse than in the earlier run by more than a tenth.

    One whose range reaches down to what is allowed is not reported.

    >>> before = [{"name": "diff", "ours": 1.4}, {"name": "records lost", "ours": 0}]
    >>> list(worse_figures(before, [{"name": "diff", "ours": 1.6, "spread": [1.55, 1.7]}]))
    ['diff: 1.4 → 1.6 (1.55 to 1.7)', 'records lost: 0 → not measured']
    >>> list(worse_figures(before[:1], [{"name": "diff", "ours": 1.6, "spread": [1.5, 1.8]}]))
    []
    """
    now = {figure["name"]: figure for figure in figures}
    for before in earlier:
        figure = now.get(before["name"], {})
        ours, spread = figure.get("ours"), figure.get("spread")
        if ours is None:
            yield f"{before['name']}: {number(before['ours'])} → not measured"
            continue
        if (spread[0] if spread else ours) > _ALLOWED * before["ours"]:
            shown = f" ({number(spread[0])} to {number(spread[1])})" if spread else ""
            yield f"{before['name']}: {number(before['ours'])} → {number(ours)}{shown}"
