"""The values that the page of a recording draws: of each kind of tensors its lines, and for each
statistic cells and quantiles.

What is more than a screen shows is put together here, and what was put together or left out is
said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_torch.rendering.table import escape
from otel_torch.show.charts import LINES, templates
from otel_torch.show.grid import BINS, Floats, Grid, Indices, Series, Step, combine, kind_of

ROWS = 120  # of a heat map
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)

_KINDS = {
    "out": "outputs",
    "in": "inputs",
    "grad": "gradients of outputs",
    "param": "parameters",
    "param_grad": "gradients of parameters",
    "buffer": "buffers",
}


def values_of(grid: Grid) -> dict[str, Any]:
    """What the page's script draws from."""
    kinds: dict[str, list[int]] = {}
    for at, series in enumerate(grid.series):
        kinds.setdefault(_KINDS.get(kind_of(series.tensor), "other tensors"), []).append(at)
    ordered = [kind for kind in _KINDS.values() if kind in kinds] + [
        kind for kind in kinds if kind not in _KINDS.values()
    ]
    columns = [_label(steps) for steps in grid.columns]
    return {
        "columns": columns,
        "groups": {kind: _group(grid, kinds[kind], kind) for kind in ordered},
        "templates": templates(len(columns)),
        "lines": LINES,
    }


def _label(steps: Sequence[Step]) -> str:
    """What a column is called.

    >>> _label([Step(0, 4)]), _label([Step(1, 0), Step(1, 1)])
    ('4', '0–1 (loop 1)')
    """
    first, last = steps[0], steps[-1]
    words = "none" if first.number is None else str(first.number)
    if last != first:
        words += f"–{last.number}"
    loops = f"{first.loop}" if first.loop == last.loop else f"{first.loop}–{last.loop}"
    return words + (f" (loop {loops})" if first.loop or last.loop else "")


def _group(grid: Grid, members: Sequence[int], kind: str) -> dict[str, Any]:
    """One kind of tensors: its rows, and for each statistic the cells and how they spread."""
    rows, said = _rows(
        [grid.series[at] for at in members],
        {at for at, one in enumerate(members) if one in grid.bad},
    )
    of_row = [np.array([members[at] for at in inside], dtype=np.int64) for inside in rows.values()]
    everything = np.array(members, dtype=np.int64)
    statistics = {}
    for name, array in grid.statistics.items():
        values = array[everything]
        if np.isnan(values).all():
            continue
        statistics[escape(name)] = {
            "cells": [
                [_number(value) for value in combine(name, array[inside].T).tolist()]
                for inside in of_row
            ],
            "over_steps": [_quantiles(column) for column in values.T],
            "over_modules": [_quantiles(array[inside].reshape(-1)) for inside in of_row],
        }
    group = {"rows": list(rows), "said": said, "statistics": statistics}
    if histograms := _histograms(grid, of_row, kind):
        group["histograms"] = histograms
    return group


def _rows(series: Sequence[Series], bad: set[int]) -> tuple[dict[str, list[int]], str]:
    """Lines of a heat map by name, each with the tensors in it, and what had to be put together or
    left out for it.

    >>> _rows([Series("M", "a.0", "out", "forward", None), Series("M", "a.1", "out", "forward", None)], set())
    ({'a.0': [0], 'a.1': [1]}, '')
    """
    several = {
        name: len({getattr(one, name) for one in series}) > 1
        for name in ("model", "phase", "branch")
    }
    tensors: dict[tuple[str | None, str], set[str]] = {}
    for one in series:
        tensors.setdefault((one.model, one.module), set()).add(one.tensor)

    def named(parts: int | None, exact: bool) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for at, one in enumerate(series):
            module = one.module if parts is None else ".".join(one.module.split(".")[:parts])
            words = [f"{one.model}:" if several["model"] else "", module or "(root)"]
            if exact:
                words.append(one.tensor if len(tensors[one.model, one.module]) > 1 else "")
                words += [
                    str(getattr(one, name) or "") for name in ("phase", "branch") if several[name]
                ]
            found.setdefault(escape(" ".join(word for word in words if word)), []).append(at)
        return found

    rows = named(None, True)
    if len(rows) <= ROWS:
        return rows, ""
    found = len(rows)
    rows = named(None, False)
    parts = max(one.module.count(".") + 1 for one in series)
    while (
        len(rows) > ROWS and parts > 1
    ):  # a shorter beginning of the names puts more modules together
        parts -= 1
        rows = named(parts, False)
    said = f"{found:,} tensors are put together under {len(rows):,} names"
    if (
        len(rows) > ROWS
    ):  # nothing in common to shorten: those that are not finite, and the first of the others
        important = sorted(rows, key=lambda name: not bad.intersection(rows[name]))[:ROWS]
        said += f", of which {len(rows) - ROWS:,} are left out"
        rows = {name: rows[name] for name in rows if name in set(important)}
    return rows, f"{said}; `--module` shows some in full.".replace("`", "")


def _number(value: float) -> float | str | None:
    """A value as the page's script takes it: four digits, null for none, "!" for one that is not
    finite.
    """
    if value != value:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else "!"


def _quantiles(values: Floats) -> list[float] | None:
    """Smallest, 10 %, median, 90 % and largest of the finite values; None without any."""
    finite = values[np.isfinite(values)]
    return (
        [float(f"{value:.4g}") for value in np.quantile(finite, QUANTILES)] if len(finite) else None
    )


def _histograms(grid: Grid, of_row: Sequence[Indices], kind: str) -> dict[str, Any] | None:
    """Shares of magnitudes, by row and by column, cut to the bins that are not empty."""
    nothing = np.zeros(BINS)
    rows = np.array(
        [
            sum((grid.histograms.get(int(at), nothing) for at in inside), nothing)
            for inside in of_row
        ]
    )
    steps = np.zeros((len(grid.columns), BINS))
    for (tensor, column), counts in grid.step_histograms.items():
        if _KINDS.get(tensor, "other tensors") == kind:
            steps[column] += counts
    used = np.flatnonzero(rows.sum(axis=0))
    if not len(used):
        return None
    first, last = int(used[0]), int(used[-1]) + 1
    return {
        "first": first,
        "bins": [_bin(at) for at in range(first, last)],
        "rows": [_shares(counts[first:last]) for counts in rows],
        "steps": [_shares(counts[first:last]) for counts in steps],
    }


def _shares(counts: Floats) -> list[float] | None:
    whole = counts.sum()
    return [float(f"{share:.3g}") for share in counts / whole] if whole else None


def _bin(at: int) -> str:
    """What a bin of a histogram is called.

    >>> _bin(0), _bin(1), _bin(42), _bin(62), _bin(63)
    ('0', '< 2^-40', '2^0', '≥ 2^20', 'not finite')
    """
    return {0: "0", 1: "< 2^-40", 62: "≥ 2^20", 63: "not finite"}.get(at, f"2^{at - 42}")
