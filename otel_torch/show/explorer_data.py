"""The data of the explorer on the HTML page: the names of tensors, and a packed table of tensors by
steps for each statistic. What exceeds the page is left out, and the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_torch.records import LoopStep
from otel_torch.rendering.table import escape
from otel_torch.show.grid import (
    BINS,
    COUNTS,
    Floats,
    Grid,
    TensorSeries,
    tensor_kind,
)
from otel_torch.show.packed import pack

MAX_TENSORS = 20_000

_KIND_NAMES = {
    "out": "outputs",
    "in": "inputs",
    "grad": "gradients of outputs",
    "param": "parameters",
    "param_grad": "gradients of parameters",
    "buffer": "buffers",
}
_OTHER_KIND = "other tensors"
_RULES = {**dict.fromkeys(COUNTS, "sum"), "min": "min", "max": "max"}
# Names of the bins of a histogram that are not a power of two.
_BIN_NAMES = {0: "0", 1: "< 2^-40", 62: "≥ 2^20", 63: "NaN or Inf"}


def explorer_data(grid: Grid, names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that the page's scripts explore.

    Args:
        grid: The recordings.
        names: What each recording is called.
    """
    position_of = shown_positions(grid)
    series = {position: grid.series[row] for row, position in reversed(position_of.items())}
    shown = [series[position] for position in sorted(series)]
    order = _column_order(grid)
    data: dict[str, Any] = {
        "recordings": [escape(name) for name in names],
        "columns": [column_name(grid.columns[column]) for column in order],
        "tensors": _tensor_names(shown),
        "statistics": [
            {
                "name": escape(name),
                "rule": _RULES.get(name, "magnitude"),
                "cells": [pack(table[:, order]) for table in tables],
            }
            for name, values in grid.statistics.items()
            if not np.isnan(tables := _by_recording(grid, position_of, values, len(names))).all()
        ],
        "bad": sorted({position_of[row] for row in grid.bad if row in position_of}),
    }
    if grid.histograms:
        data["histograms"] = _histograms(grid, position_of, order, len(names))
    return data


def shown_positions(grid: Grid) -> dict[int, int]:
    """Return row of the grid -> its position on the page: of all, or of those with NaN or Inf and
    the first of the others. Equal tensors of several recordings share a position.
    """
    rows_of: dict[TensorSeries, list[int]] = {}
    for row, series in enumerate(grid.series):
        rows_of.setdefault(series._replace(recording=0), []).append(row)
    bad_first = sorted(rows_of.values(), key=lambda rows: grid.bad.keys().isdisjoint(rows))
    kept = sorted(bad_first[:MAX_TENSORS])
    return {row: position for position, rows in enumerate(kept) for row in rows}


def _by_recording(
    grid: Grid, position_of: dict[int, int], values: Floats, recordings: int
) -> Floats:
    """Return values of shape (rows of the grid, n) as (recordings, positions, n); NaN for none."""
    positions = 1 + max(position_of.values(), default=-1)
    tables = np.full((recordings, positions, values.shape[1]), np.nan)
    rows = list(position_of)
    of = [grid.series[row].recording for row in rows]
    tables[of, list(position_of.values())] = values[rows]
    return tables


def _column_order(grid: Grid) -> list[int]:
    """Return the columns in the order of the page: of several recordings, one may have recorded
    steps between those of another.
    """
    columns = list(range(len(grid.columns)))
    is_one = all(series.recording == 0 for series in grid.series)
    if is_one or grid.width > 1 or any(step.number is None for step in grid.steps):
        return columns
    return sorted(columns, key=lambda column: tuple(part or 0 for part in grid.steps[column]))


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


def _kind_name(kind: str) -> str:
    return _KIND_NAMES.get(kind, _OTHER_KIND)


def _tensor_names(series: Sequence[TensorSeries]) -> dict[str, Any]:
    kinds = [_kind_name(tensor_kind(item.tensor)) for item in series]
    known = [kind for kind in (*_KIND_NAMES.values(), _OTHER_KIND) if kind in kinds]
    return {
        "model": _categories([item.model for item in series]),
        "module": _categories([item.module for item in series]),
        "tensor": _categories([item.tensor for item in series]),
        "phase": _categories([item.phase for item in series]),
        "branch": _categories([item.branch for item in series]),
        "kind": _categories(kinds, known),
    }


def _categories(values: Sequence[str | None], names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the different values, and the index of each.

    >>> _categories(["a", None, "a"])
    {'names': ['a', ''], 'of': [0, 1, 0]}
    """
    texts = [escape(value or "") for value in values]
    index = {name: position for position, name in enumerate(dict.fromkeys([*names, *texts]))}
    return {"names": list(index), "of": [index[text] for text in texts]}


# -- histograms


def _histograms(
    grid: Grid, position_of: dict[int, int], order: Sequence[int], recordings: int
) -> dict[str, Any]:
    """Return the shares of magnitudes of each recording: by tensor, and by step for each kind of
    tensor, without empty bins at the ends.
    """
    counts = np.zeros((len(grid.series), BINS))
    for row, of_row in grid.histograms.items():
        counts[row] = of_row
    used = np.flatnonzero(counts.sum(axis=0))
    first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    tensors = _by_recording(grid, position_of, _shares(counts), recordings)
    steps: list[dict[str, Floats]] = [{} for _ in range(recordings)]
    for (recording, tensor, column), of_column in grid.step_histograms.items():
        empty = np.zeros((len(grid.columns), BINS))
        steps[recording].setdefault(_kind_name(tensor), empty)[column] += of_column
    return {
        "bins": [_bin_name(index) for index in range(first, end)],
        "rows": [pack(table[:, first:end]) for table in tensors],
        "steps": [
            {kind: pack(_shares(table)[order, first:end].T) for kind, table in kinds.items()}
            for kinds in steps
        ],
    }


def _shares(counts: Floats) -> Floats:
    """Return the share of each bin in its row: of shape (rows, bins), NaN for an empty bin."""
    totals = counts.sum(axis=1, keepdims=True)
    return np.where(counts > 0, counts / np.maximum(totals, 1), np.nan)


def _bin_name(index: int) -> str:
    """Return the name of a bin of a histogram.

    >>> _bin_name(0), _bin_name(1), _bin_name(42), _bin_name(62), _bin_name(63)
    ('0', '< 2^-40', '2^0', '≥ 2^20', 'NaN or Inf')
    """
    return _BIN_NAMES.get(index, f"2^{index - 42}")
