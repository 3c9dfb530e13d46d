"""A recording of any length as a grid of tensors by steps, in bounded memory: what pictures are
drawn from.

A million records are more than a page can hold and more than a person can see. So steps are put
together in twos as soon as there are too many, and of what falls into one cell the most telling
value stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.rows import Row
from otel_torch.records import FINGERPRINTS
from otel_torch.settings import STATISTICS

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

COLUMNS = 80  # groups of steps at most, and from 40 on where there are more steps
CELLS = 1 << 20  # of one statistic in memory: with very many tensors there are fewer columns
MOST = 24  # statistics
BINS = 64  # of a histogram
_CHUNK = 8192  # rows that are put into arrays at once

_PLACE = ("module", "tensor", "step", "call", "loop", "model", "phase", "branch")
_ALIGNMENT = ("class", "argument", "value", "storage", "order", "parent", "shard")
_NO_STATISTIC = {*_PLACE, *_ALIGNMENT, *FINGERPRINTS, "histogram", "shape", "dtype"}
# of several values in a cell counts add up; of all else one stays: the smallest, the largest, or
# the one largest in magnitude
COUNTS = frozenset({"nonfinite", "zeros", "numel"})
_RANK: dict[str, Callable[[Floats], Floats]] = {"min": np.negative, "max": np.positive}


class Series(NamedTuple):
    """What names a tensor beyond step and call; None for a field that the recording does not have."""

    model: str | None
    module: str
    tensor: str
    phase: str | None
    branch: str | None


class Step(NamedTuple):
    """A step of a loop, as recorded."""

    loop: int | None
    number: int | None


class Bad(NamedTuple):
    """A tensor that was not finite: the first of its records that was not, and how many were."""

    first: Row
    records: int


class Grid:
    """The records of a recording by tensor and step.

    series: the tensors, in order of first sight; they number the rows. steps: in order of first
    sight; `width` neighbours of them are one column. statistics: by name an array, shape (rows,
    columns), NaN where nothing was recorded and inf where what was recorded is not finite.
    histograms: by row, shape (64,); step_histograms: by (kind of tensor, column) likewise. bad: by
    row, in the order in which the tensors ceased to be finite. left_out: names of statistics beyond
    24.
    """

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.steps: list[Step] = []
        self.width = 1
        self.bad: dict[int, Bad] = {}
        self.histograms: dict[int, Floats] = {}
        self.step_histograms: dict[tuple[str, int], Floats] = {}
        self.left_out: dict[str, None] = {}
        self._row_of: dict[Series, int] = {}
        self._step_of: dict[Step, int] = {}
        self._columns = COLUMNS
        self._arrays: dict[str, Floats] = {}

    @classmethod
    def of(cls, rows: Iterator[Row]) -> Grid:
        """The grid of all rows."""
        grid = cls()
        chunk: list[Row] = []
        for row in rows:
            chunk.append(row)
            if len(chunk) == _CHUNK:
                grid.add(chunk)
                chunk = []
        grid.add(chunk)
        return grid

    @property
    def columns(self) -> list[list[Step]]:
        """The steps of each column."""
        return [
            self.steps[start : start + self.width]
            for start in range(0, len(self.steps), self.width)
        ]

    @property
    def statistics(self) -> dict[str, Floats]:
        """By name, those of the settings' table first, in its order."""
        order = {name: at for at, name in enumerate(STATISTICS)}
        names = sorted(self._arrays, key=lambda name: order.get(name, len(order)))
        return {name: self._arrays[name][: len(self.series), : len(self.columns)] for name in names}

    def add(self, rows: Sequence[Row]) -> None:
        """Take some records in."""
        if not rows:
            return
        places = [self._place(row) for row in rows]
        while self.width * self._columns < len(self.steps) or (
            self._columns > 1 and self._columns * len(self.series) > CELLS
        ):
            self._widen()
        in_row = np.array([row for row, _ in places], dtype=np.int64)
        column = np.array([step for _, step in places], dtype=np.int64) // self.width
        bad = np.zeros(len(rows), dtype=bool)
        for name in dict.fromkeys(
            name for row in rows for name in row if name not in _NO_STATISTIC
        ):
            values, known = _numbers([row.get(name) for row in rows])
            if not known.any():
                continue
            infinite = known & ~np.isfinite(values)
            bad |= infinite | (known & (values > 0)) if name == "nonfinite" else infinite
            if name not in self._arrays and len(self._arrays) == MOST:
                self.left_out.setdefault(name)
                continue
            values[infinite] = math.inf
            self._store(name, in_row[known], column[known], values[known])
        for at in np.flatnonzero(bad).tolist():
            place = {name: rows[at][name] for name in (*_PLACE, "nonfinite") if name in rows[at]}
            earlier = self.bad.get(places[at][0], Bad(place, 0))
            self.bad[places[at][0]] = Bad(earlier.first, earlier.records + 1)
        for row, (number, step) in zip(rows, places, strict=True):
            counts = row.get("histogram")
            if isinstance(counts, list) and len(counts) == BINS:
                self._count(number, step // self.width, counts)

    def _place(self, row: Row) -> tuple[int, int]:
        series = Series(
            row.get("model"), row["module"], row["tensor"], row.get("phase"), row.get("branch")
        )
        in_row = self._row_of.get(series)
        if in_row is None:
            in_row = self._row_of[series] = len(self.series)
            self.series.append(series)
        step = Step(row.get("loop"), row["step"])
        at = self._step_of.get(step)
        if at is None:
            at = self._step_of[step] = len(self.steps)
            self.steps.append(step)
        return in_row, at

    def _store(self, name: str, row: Indices, column: Indices, values: Floats) -> None:
        array = self._arrays.get(name)
        if array is None or len(array) < len(self.series):
            grown = np.full((max(2 * len(self.series), 64), self._columns), math.nan)
            if array is not None:
                grown[: len(array)] = array
            array = self._arrays[name] = grown
        flat = array.reshape(-1)
        where = row * self._columns + column
        if name in COUNTS:
            flat[where] = np.nan_to_num(flat[where], nan=0.0, posinf=math.inf)
            np.add.at(flat, where, values)
            return
        order = np.argsort(rank(name, values), kind="stable")
        where, values = where[order], values[order]
        kept = flat[where]
        # of several values for one cell numpy keeps the last, which is the one of the highest rank
        flat[where] = np.where(rank(name, values) >= rank(name, kept), values, kept)

    def _count(self, row: int, column: int, counts: list[Any]) -> None:
        try:
            numbers = np.array(counts, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            return
        self.histograms[row] = self.histograms.get(row, 0.0) + numbers
        place = (kind_of(self.series[row].tensor), column)
        self.step_histograms[place] = self.step_histograms.get(place, 0.0) + numbers

    def _widen(self) -> None:
        """Put neighbouring columns together in twos; or have fewer, where there are many tensors."""
        crowded = self._columns > 1 and self._columns * len(self.series) > CELLS
        columns = -(-self._columns // 2) if crowded else self._columns
        if crowded and self.width * columns >= len(self.steps):
            self._arrays = {name: array[:, :columns].copy() for name, array in self._arrays.items()}
            self._columns = columns
            return
        self.width *= 2
        for name, array in self._arrays.items():
            merged = np.full((len(array), columns), math.nan)
            pairs = -(-self._columns // 2)
            for at in range(min(pairs, columns)):
                merged[:, at] = combine(name, array[:, 2 * at : 2 * at + 2])
            self._arrays[name] = merged
        self._columns = columns
        histograms: dict[tuple[str, int], Floats] = {}
        for (kind, column), numbers in self.step_histograms.items():
            histograms[kind, column // 2] = histograms.get((kind, column // 2), 0.0) + numbers
        self.step_histograms = histograms


def rank(name: str, values: Floats) -> Floats:
    """Of several values of a statistic the one of the highest rank stays: a non-finite one, if
    there is one.

    >>> rank("min", np.array([-3.0, 2.0, math.inf, math.nan])).tolist()
    [3.0, -2.0, inf, -inf]
    """
    ranked = np.where(np.isfinite(values), _RANK.get(name, np.abs)(values), math.inf)
    ranked[np.isnan(values)] = -math.inf
    return ranked


def combine(name: str, values: Floats) -> Floats:
    """Values of a statistic as one: shape (rows, n) to (rows,), NaN where there is none.

    >>> combine("std", np.array([[1.0, -3.0], [math.nan, 2.0]])).tolist(), combine("zeros", np.array([[1.0, 2.0]])).tolist()
    ([-3.0, 2.0], [3.0])
    """
    if name in COUNTS:
        return np.where(np.isnan(values).all(axis=1), math.nan, np.nansum(values, axis=1))
    chosen: Floats = values[np.arange(len(values)), rank(name, values).argmax(axis=1)]
    return chosen


def kind_of(tensor: str) -> str:
    """What a tensor is to its module, by its label.

    >>> kind_of("out[0].sample"), kind_of("param_grad.weight"), kind_of("grad#2")
    ('out', 'param_grad', 'grad')
    """
    end = next((at for at, one in enumerate(tensor) if one in ".[#"), len(tensor))
    return tensor[:end]


def _numbers(values: list[Any]) -> tuple[Floats, NDArray[np.bool_]]:
    """Values as numbers, and which of them are some."""
    known = np.array([value is not None for value in values])
    try:
        if not {type(value) for value in values} & {bool, str, list, dict}:
            return np.array(values, dtype=np.float64), known
    except (ValueError, TypeError, OverflowError):
        pass
    numbers = np.full(len(values), math.nan)
    known = np.zeros(len(values), dtype=bool)
    for at, value in enumerate(values):
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                numbers[at], known[at] = float(value), True
            except OverflowError:
                numbers[at], known[at] = math.inf, True
    return numbers, known
