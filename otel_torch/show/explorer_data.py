"""The data of the explorer on the HTML page: the names of tensors, and a packed table of tensors by
steps for each statistic. What exceeds the page is left out, and the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_torch.rendering.table import escape
from otel_torch.show.grid import (
    BINS,
    COUNTS,
    Floats,
    Grid,
    TensorSeries,
    tensor_kind,
)
from otel_torch.show.loop_step import LoopStep
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


def explorer_data(grid: Grid, name: str) -> dict[str, Any]:
    """Return the JSON that the page's scripts explore.

    Args:
        grid: The recording.
        name: What the recording is called.
    """
    rows = shown_rows(grid)
    series = [grid.series[row] for row in rows]
    kinds = [_kind_name(tensor_kind(item.tensor)) for item in series]
    data: dict[str, Any] = {
        "recordings": [escape(name)],
        "columns": [column_name(steps) for steps in grid.columns],
        "tensors": _tensor_names(series, kinds),
        "statistics": [
            {"name": escape(name), "rule": _RULES.get(name, "magnitude"), "cells": [pack(table)]}
            for name, values in grid.statistics.items()
            if not np.isnan(table := values[rows]).all()
        ],
        "bad": [position for position, row in enumerate(rows) if row in grid.bad],
    }
    if grid.histograms:
        data["histograms"] = _histograms(grid, rows)
    return data


def shown_rows(grid: Grid) -> list[int]:
    """Return the rows of the grid that the page has: all, or those with NaN or Inf and the first
    of the others.
    """
    rows = range(len(grid.series))
    if len(rows) <= MAX_TENSORS:
        return list(rows)
    return sorted(sorted(rows, key=lambda row: row not in grid.bad)[:MAX_TENSORS])


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


def _tensor_names(series: Sequence[TensorSeries], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the fields of all tensors."""
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


def _histograms(grid: Grid, rows: Sequence[int]) -> dict[str, Any]:
    """Return the shares of magnitudes by tensor, and by step for each kind of tensor, without empty
    bins at the ends.
    """
    tensors = np.zeros((len(rows), BINS))
    for position, row in enumerate(rows):
        tensors[position] = grid.histograms.get(row, 0.0)
    steps: dict[str, Floats] = {}
    for (tensor, column), counts in grid.step_histograms.items():
        kind = _kind_name(tensor)
        table = steps.setdefault(kind, np.zeros((len(grid.columns), BINS)))
        table[column] += counts
    used = np.flatnonzero(tensors.sum(axis=0))
    first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    return {
        "bins": [_bin_name(index) for index in range(first, end)],
        "rows": pack(_shares(tensors)[:, first:end]),
        "steps": {kind: pack(_shares(table)[:, first:end].T) for kind, table in steps.items()},
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
