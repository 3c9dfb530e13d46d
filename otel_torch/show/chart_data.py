"""The data of the charts on the HTML page: rows by kind of tensor, and cells and quantiles by
statistic. What exceeds a screen is grouped, and the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_torch.rendering.table import escape
from otel_torch.show.charts import ROW_FIELDS, templates
from otel_torch.show.grid import (
    BINS,
    Floats,
    Grid,
    Indices,
    TensorSeries,
    combine,
    tensor_kind,
)
from otel_torch.show.loop_step import LoopStep

MAX_ROWS = 120  # of a heat map
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)

_KIND_NAMES = {
    "out": "outputs",
    "in": "inputs",
    "grad": "gradients of outputs",
    "param": "parameters",
    "param_grad": "gradients of parameters",
    "buffer": "buffers",
}
_OTHER_KIND = "other tensors"
# Names of the bins of a histogram that are not a power of two.
_BIN_NAMES = {0: "0", 1: "< 2^-40", 62: "≥ 2^20", 63: "NaN or Inf"}

RowMembers = dict[str, list[int]]  # name of a row -> indices of the tensors in it


def chart_data(grid: Grid) -> dict[str, Any]:
    """Return the JSON from which the page's script draws the charts."""
    members_of: dict[str, list[int]] = {}
    for index, series in enumerate(grid.series):
        members_of.setdefault(_kind_name(tensor_kind(series.tensor)), []).append(index)
    kinds = [kind for kind in (*_KIND_NAMES.values(), _OTHER_KIND) if kind in members_of]
    columns = [column_name(steps) for steps in grid.columns]
    return {
        "columns": columns,
        "groups": {kind: _group(grid, members_of[kind], kind) for kind in kinds},
        "templates": templates(len(columns)),
        "lines": ROW_FIELDS,
    }


def _kind_name(kind: str) -> str:
    return _KIND_NAMES.get(kind, _OTHER_KIND)


def column_name(steps: Sequence[LoopStep]) -> str:
    """Return the name of a column.

    >>> column_name([LoopStep(0, 4)]), column_name([LoopStep(1, 0), LoopStep(1, 1)])
    ('4', '0–1 (loop 1)')
    """
    first, last = steps[0], steps[-1]
    name = "none" if first.number is None else str(first.number)
    if last != first:
        name += f"–{last.number}"
    if not first.loop and not last.loop:
        return name
    loops = f"{first.loop}" if first.loop == last.loop else f"{first.loop}–{last.loop}"
    return f"{name} (loop {loops})"


def _group(grid: Grid, members: Sequence[int], kind: str) -> dict[str, Any]:
    """Return the rows of one kind of tensor, and the cells and quantiles of each statistic."""
    series = [grid.series[index] for index in members]
    bad = {position for position, index in enumerate(members) if index in grid.bad}
    rows, note = map_rows(series, bad)
    tensors_of_row = [
        np.array([members[position] for position in positions], dtype=np.int64)
        for positions in rows.values()
    ]
    everything = np.array(members, dtype=np.int64)
    statistics = {}
    for name, array in grid.statistics.items():
        values = array[everything]
        if np.isnan(values).all():
            continue
        statistics[escape(name)] = {
            "cells": [_cells(name, array[tensors]) for tensors in tensors_of_row],
            "over_steps": [_quantiles(column) for column in values.T],
            "over_modules": [_quantiles(array[tensors].reshape(-1)) for tensors in tensors_of_row],
        }
    group = {"rows": list(rows), "note": note, "statistics": statistics}
    if histograms := _histograms(grid, tensors_of_row, kind):
        group["histograms"] = histograms
    return group


# -- rows


def map_rows(series: Sequence[TensorSeries], bad: set[int]) -> tuple[RowMembers, str]:
    """Return the rows of a heat map, and a note about what was grouped or left out.

    Rows are grouped under shorter prefixes of their names. If the names share none, those with NaN
    or Inf are kept, then the first of the others.

    >>> series = [TensorSeries("M", name, "out", "forward", None) for name in ("a.0", "a.1")]
    >>> map_rows(series, set())
    ({'a.0': [0], 'a.1': [1]}, '')
    """
    rows = _exact_rows(series)
    if len(rows) <= MAX_ROWS:
        return rows, ""
    tensors = len(rows)
    parts = max(item.module.count(".") + 1 for item in series)
    rows = _module_rows(series, parts)
    while len(rows) > MAX_ROWS and parts > 1:
        parts -= 1
        rows = _module_rows(series, parts)
    note = f"{tensors:,} tensors are grouped under {len(rows):,} names"
    if len(rows) > MAX_ROWS:
        note += f", {len(rows) - MAX_ROWS:,} of which are left out"
        bad_first = sorted(rows, key=lambda name: not bad.intersection(rows[name]))
        shown = set(bad_first[:MAX_ROWS])
        rows = {name: members for name, members in rows.items() if name in shown}
    return rows, f"{note}; --module selects some."


def _exact_rows(series: Sequence[TensorSeries]) -> RowMembers:
    """Return a row for each tensor; its name has only the fields that differ."""
    varying = _varying_fields(series)
    tensors: dict[tuple[str | None, str], set[str]] = {}
    for item in series:
        tensors.setdefault((item.model, item.module), set()).add(item.tensor)
    rows: RowMembers = {}
    for index, item in enumerate(series):
        parts = [f"{item.model}:" if "model" in varying else "", item.module or "(root)"]
        if len(tensors[item.model, item.module]) > 1:
            parts.append(item.tensor)
        if "phase" in varying:
            parts.append(str(item.phase or ""))
        if "branch" in varying:
            parts.append(str(item.branch or ""))
        rows.setdefault(_join(parts), []).append(index)
    return rows


def _module_rows(series: Sequence[TensorSeries], depth: int) -> RowMembers:
    """Return a row for each prefix of module names with at most `depth` components."""
    has_models = "model" in _varying_fields(series)
    rows: RowMembers = {}
    for index, item in enumerate(series):
        prefix = ".".join(item.module.split(".")[:depth])
        model = f"{item.model}:" if has_models else ""
        rows.setdefault(_join([model, prefix or "(root)"]), []).append(index)
    return rows


def _varying_fields(series: Sequence[TensorSeries]) -> set[str]:
    return {
        name
        for name in ("model", "phase", "branch")
        if len({getattr(item, name) for item in series}) > 1
    }


def _join(parts: Sequence[str]) -> str:
    return escape(" ".join(part for part in parts if part))


# -- values


def map_cells(name: str, values: Floats, rows: RowMembers) -> list[list[float | str | None]]:
    """Return the cells of a heat map. values: of shape (tensors, columns)."""
    return [_cells(name, values[np.array(members)]) for members in rows.values()]


def _cells(name: str, values: Floats) -> list[float | str | None]:
    return [_to_json(value) for value in combine(name, values.T).tolist()]


def _to_json(value: float) -> float | str | None:
    """Return a value for the page's script: four digits, None for no value, "!" for NaN or Inf."""
    if math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else "!"


def _quantiles(values: Floats) -> list[float] | None:
    """Return minimum, 10 %, median, 90 % and maximum of the finite values, or None if empty."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return [float(f"{value:.4g}") for value in np.quantile(finite, QUANTILES)]


# -- histograms


def _histograms(grid: Grid, tensors_of_row: Sequence[Indices], kind: str) -> dict[str, Any] | None:
    """Return the shares of magnitudes by row and by column, without empty bins at the ends."""
    rows = np.zeros((len(tensors_of_row), BINS))
    for row, tensors in enumerate(tensors_of_row):
        for index in tensors.tolist():
            rows[row] += grid.histograms.get(index, 0.0)
    steps = np.zeros((len(grid.columns), BINS))
    for (tensor, column), counts in grid.step_histograms.items():
        if _kind_name(tensor) == kind:
            steps[column] += counts
    used = np.flatnonzero(rows.sum(axis=0))
    if not len(used):
        return None
    first, end = int(used[0]), int(used[-1]) + 1
    return {
        "first": first,
        "bins": [_bin_name(index) for index in range(first, end)],
        "rows": [_shares(counts[first:end]) for counts in rows],
        "steps": [_shares(counts[first:end]) for counts in steps],
    }


def _shares(counts: Floats) -> list[float] | None:
    total = counts.sum()
    return [float(f"{share:.3g}") for share in counts / total] if total else None


def _bin_name(index: int) -> str:
    """Return the name of a bin of a histogram.

    >>> _bin_name(0), _bin_name(1), _bin_name(42), _bin_name(62), _bin_name(63)
    ('0', '< 2^-40', '2^0', '≥ 2^20', 'NaN or Inf')
    """
    return _BIN_NAMES.get(index, f"2^{index - 42}")
