"""A recording as a grid of tensors by steps, in bounded memory: the data of the charts.

A page cannot hold a million records. With too many steps, neighboring columns are merged two by
two; of the values that share a cell, the most telling one remains:

    abs_mean   step 0  step 1  step 2  step 3         steps 0–1  steps 2–3
    blocks.0      0.5     0.9     0.7     0.6   ->          0.9        0.7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.rows import Row
from otel_torch.records import FINGERPRINTS, LoopStep
from otel_torch.settings import STATISTICS
from otel_torch.show.combined import LOCATION

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

MAX_COLUMNS = 256  # a longer recording has between 128 and 256
MAX_CELLS = 1 << 20  # of one statistic; with very many tensors there are fewer columns
MAX_STATISTICS = 24
BINS = 64  # of a histogram
_CHUNK_ROWS = 8192  # rows that become arrays at once

_IDENTITY = ("class", "argument", "value", "storage", "order", "parent", "shard")
_NOT_STATISTICS = {*LOCATION, *_IDENTITY, *FINGERPRINTS, "histogram", "shape", "dtype"}

# Of several values in a cell, counts add up; of other statistics one remains: the smallest `min`,
# the largest `max`, or else the one with the largest magnitude.
COUNTS = frozenset({"nonfinite", "zeros", "numel"})
_PRIORITY: dict[str, Callable[[Floats], Floats]] = {"min": np.negative, "max": np.positive}


class TensorSeries(NamedTuple):
    """What identifies a tensor across steps; None for fields that the recording lacks.

    recording: The position of its recording among those of the grid.
    """

    model: str | None
    module: str
    tensor: str
    phase: str | None
    branch: str | None
    recording: int = 0


class NonfiniteRecords(NamedTuple):
    """The records of a tensor with NaN or Inf: the first one, and how many."""

    first: Row
    records: int


class Grid:
    """The records of a recording by tensor and step; or of several, whose steps share columns.

    Attributes:
        series: The tensors in order of appearance; their indices are the rows.
        steps: The steps in order of appearance; `width` neighbors share a column.
        bad: Row -> its records with NaN or Inf, in the order of first occurrence.
        histograms: Row -> counts of all steps, float64 of shape (64,).
        step_histograms: (recording, kind of tensor, column) -> counts of all such tensors,
            likewise.
        left_out: Names of statistics beyond `MAX_STATISTICS`.
    """

    def __init__(self) -> None:
        self.series: list[TensorSeries] = []
        self.steps: list[LoopStep] = []
        self.width = 1
        self.bad: dict[int, NonfiniteRecords] = {}
        self.histograms: dict[int, Floats] = {}
        self.step_histograms: dict[tuple[int, str, int], Floats] = {}
        self.left_out: dict[str, None] = {}
        self._row_of: dict[TensorSeries, int] = {}
        self._index_of_step: dict[LoopStep, int] = {}
        self._columns = MAX_COLUMNS
        self._arrays: dict[str, Floats] = {}

    @classmethod
    def of(cls, *recordings: Iterator[Row]) -> Grid:
        grid = cls()
        for recording, rows in enumerate(recordings):
            while chunk := list(islice(rows, _CHUNK_ROWS)):
                grid.add(chunk, recording)
        return grid

    @property
    def columns(self) -> list[list[LoopStep]]:
        starts = range(0, len(self.steps), self.width)
        return [self.steps[start : start + self.width] for start in starts]

    @property
    def statistics(self) -> dict[str, Floats]:
        """Name -> array of shape (rows, columns), float64: NaN without a record, inf for NaN or
        Inf. Known statistics come first, in their usual order.
        """
        order = {name: index for index, name in enumerate(STATISTICS)}
        names = sorted(self._arrays, key=lambda name: order.get(name, len(order)))
        return {name: self._arrays[name][: len(self.series), : len(self.columns)] for name in names}

    def add(self, rows: Sequence[Row], recording: int = 0) -> None:
        if not rows:
            return
        positions = [self._position(row, recording) for row in rows]
        self._fit_columns()
        row_indices = np.array([index for index, _ in positions], dtype=np.int64)
        columns = np.array([step for _, step in positions], dtype=np.int64) // self.width
        is_bad = np.zeros(len(rows), dtype=bool)
        for name in _statistic_names(rows):
            values, is_number = _to_numbers([row.get(name) for row in rows])
            if not is_number.any():
                continue
            is_infinite = is_number & ~np.isfinite(values)
            is_bad |= is_infinite
            if name == "nonfinite":
                is_bad |= is_number & (values > 0)
            if name not in self._arrays and len(self._arrays) == MAX_STATISTICS:
                self.left_out.setdefault(name)
                continue
            values[is_infinite] = math.inf
            self._store(name, row_indices[is_number], columns[is_number], values[is_number])
        for index in np.flatnonzero(is_bad).tolist():
            self._add_bad(positions[index][0], rows[index])
        for row, row_index, column in zip(rows, row_indices, columns, strict=True):
            counts = row.get("histogram")
            if isinstance(counts, list) and len(counts) == BINS:
                self._add_histogram(int(row_index), int(column), counts)

    def _position(self, row: Row, recording: int) -> tuple[int, int]:
        """Return the row and the index of the step of a record; new ones are appended."""
        series = TensorSeries(
            row.get("model"),
            row["module"],
            row["tensor"],
            row.get("phase"),
            row.get("branch"),
            recording,
        )
        row_index = self._row_of.get(series)
        if row_index is None:
            row_index = self._row_of[series] = len(self.series)
            self.series.append(series)
        step = LoopStep(row.get("loop"), row["step"])
        step_index = self._index_of_step.get(step)
        if step_index is None:
            step_index = self._index_of_step[step] = len(self.steps)
            self.steps.append(step)
        return row_index, step_index

    def _add_bad(self, row_index: int, row: Row) -> None:
        location = {name: row[name] for name in (*LOCATION, "nonfinite") if name in row}
        first, records = self.bad.get(row_index, NonfiniteRecords(location, 0))
        self.bad[row_index] = NonfiniteRecords(first, records + 1)

    def _store(self, name: str, rows: Indices, columns: Indices, values: Floats) -> None:
        array = self._arrays.get(name)
        if array is None or len(array) < len(self.series):
            grown = np.full((max(2 * len(self.series), 64), self._columns), math.nan)
            if array is not None:
                grown[: len(array)] = array
            array = self._arrays[name] = grown
        flat = array.reshape(-1)
        cells = rows * self._columns + columns
        if name in COUNTS:
            flat[cells] = np.nan_to_num(flat[cells], nan=0.0, posinf=math.inf)
            np.add.at(flat, cells, values)
            return
        # NumPy keeps the last of several values for a cell: sort them by priority.
        order = np.argsort(priority(name, values), kind="stable")
        cells, values = cells[order], values[order]
        previous = flat[cells]
        replaces = priority(name, values) >= priority(name, previous)
        flat[cells] = np.where(replaces, values, previous)

    def _add_histogram(self, row: int, column: int, counts: list[Any]) -> None:
        try:
            numbers = np.array(counts, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            return
        self.histograms[row] = self.histograms.get(row, 0.0) + numbers
        series = self.series[row]
        key = (series.recording, tensor_kind(series.tensor), column)
        self.step_histograms[key] = self.step_histograms.get(key, 0.0) + numbers

    def _fit_columns(self) -> None:
        """Merge columns until all steps have one, and the arrays are within `MAX_CELLS`."""
        while self.width * self._columns < len(self.steps) or self._has_too_many_cells():
            self._merge_columns()

    def _has_too_many_cells(self) -> bool:
        return self._columns > 1 and self._columns * len(self.series) > MAX_CELLS

    def _merge_columns(self) -> None:
        """Merge neighboring columns two by two; with too many cells, also halve their number."""
        columns = self._columns
        if self._has_too_many_cells():
            columns = -(-self._columns // 2)
            if self.width * columns >= len(self.steps):  # half the columns suffice as they are
                self._arrays = {
                    name: array[:, :columns].copy() for name, array in self._arrays.items()
                }
                self._columns = columns
                return
        self.width *= 2
        pairs = -(-self._columns // 2)
        for name, array in self._arrays.items():
            merged = np.full((len(array), columns), math.nan)
            for index in range(min(pairs, columns)):
                merged[:, index] = combine(name, array[:, 2 * index : 2 * index + 2])
            self._arrays[name] = merged
        self._columns = columns
        histograms: dict[tuple[int, str, int], Floats] = {}
        for (recording, kind, column), counts in self.step_histograms.items():
            key = (recording, kind, column // 2)
            histograms[key] = histograms.get(key, 0.0) + counts
        self.step_histograms = histograms


def priority(name: str, values: Floats) -> Floats:
    """Return which of several values of a statistic remains: the one with the highest priority,
    which is Inf if there is one.

    >>> priority("min", np.array([-3.0, 2.0, math.inf, math.nan])).tolist()
    [3.0, -2.0, inf, -inf]
    """
    priorities = np.where(np.isfinite(values), _PRIORITY.get(name, np.abs)(values), math.inf)
    priorities[np.isnan(values)] = -math.inf
    return priorities


def combine(name: str, values: Floats) -> Floats:
    """Return one value of a statistic for each row: shape (rows, n) to (rows,); NaN is no value.

    >>> combine("std", np.array([[1.0, -3.0], [math.nan, 2.0]])).tolist()
    [-3.0, 2.0]
    >>> combine("zeros", np.array([[1.0, 2.0]])).tolist()
    [3.0]
    """
    if name in COUNTS:
        return np.where(np.isnan(values).all(axis=1), math.nan, np.nansum(values, axis=1))
    best = priority(name, values).argmax(axis=1)
    chosen: Floats = values[np.arange(len(values)), best]
    return chosen


def tensor_kind(tensor: str) -> str:
    """Return the kind of a tensor from its label.

    >>> tensor_kind("out[0].sample"), tensor_kind("param_grad.weight"), tensor_kind("grad#2")
    ('out', 'param_grad', 'grad')
    """
    end = next((index for index, char in enumerate(tensor) if char in ".[#"), len(tensor))
    return tensor[:end]


def _statistic_names(rows: Iterable[Row]) -> Iterable[str]:
    return dict.fromkeys(name for row in rows for name in row if name not in _NOT_STATISTICS)


def _to_numbers(values: list[Any]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the values as float64, and which of them are numbers."""
    is_number = np.array([value is not None for value in values])
    try:
        if not {type(value) for value in values} & {bool, str, list, dict}:
            return np.array(values, dtype=np.float64), is_number
    except (ValueError, TypeError, OverflowError):
        pass
    numbers = np.full(len(values), math.nan)
    is_number = np.zeros(len(values), dtype=bool)
    for index, value in enumerate(values):
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                numbers[index] = float(value)
            except OverflowError:
                numbers[index] = math.inf
            is_number[index] = True
    return numbers, is_number
