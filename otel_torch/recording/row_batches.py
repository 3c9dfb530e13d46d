"""Read a recording as arrays: what a comparison needs of every row, without a dict per row.

A long recording is read some hundred lines at a time. A batch keeps arrays and the bytes of its
lines; the few rows that are analysed in full are decoded again, as dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.reader import iterate_line_batches
from otel_torch.recording.row_schema import (
    UNREADABLE,
    RowHeader,
    RowRecord,
    decode_record,
    record_of,
)
from otel_torch.recording.rows import Row, parse_line

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

STATISTICS = ("abs_mean", "mean", "std", "rms", "sum", "l2", "min", "max")
# bytes decoded at a time: few enough that everything made from them stays in the CPU's cache
_BLOCK_BYTES = 1 << 18


class RowKind(NamedTuple):
    """The fields of a row that do not change from step to step."""

    module: str
    tensor: str
    model: str
    phase: str
    cls: str
    argument: str | None
    dtype: str


_decode_header = msgspec.json.Decoder(RowHeader).decode
_kind = attrgetter(*RowKind._fields)
_numbers = attrgetter("value", "parent", "nonfinite", "numel", "l2")
_statistics = attrgetter(*STATISTICS)
_order = attrgetter("order")
_sketch = attrgetter("sketch")
_NOWHERE = (-1, -1)


class RowKinds(dict[tuple[Any, ...], int]):
    """Numbers the kinds of rows; looking up a new kind gives it the next number.

    Attributes:
        kinds: By number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[RowKind] = []

    def __missing__(self, kind: tuple[Any, ...]) -> int:
        self.kinds.append(RowKind(*kind))
        number = self[kind] = len(self.kinds) - 1
        return number


class RowBatch:
    """Neighboring rows of a recording, as arrays.

    Attributes:
        kinds: Number of each row's kind.
        numbers: value, parent, nonfinite, numel and l2, shape (5, rows), NaN where absent.
        order: Entry and exit of each row's call, shape (rows, 2), -1 where not recorded.
        sketched: Rows that have a sketch, in order.
        sketches: Their sketches.
    """

    __slots__ = ("_parse", "_records", "_rows", "kinds", "numbers", "order", "sketched", "sketches")

    def __init__(
        self,
        headers: Sequence[RowHeader],
        rows: list[Row] | list[bytes],
        kinds: RowKinds,
        are_whole: bool,
        parse: Callable[[], list[Row]],
    ) -> None:
        """Make the arrays.

        Args:
            rows: The same rows as they were read.
            are_whole: Whether `headers` are `RowRecord`s.
            parse: Parses all rows, and raises an error that names the line of a wrong one.
        """
        self._rows = rows
        self._parse = parse
        self._records: Sequence[Any] | None = headers if are_whole else None
        self.kinds: Indices = np.array(
            list(map(kinds.__getitem__, map(_kind, headers))), dtype=np.int64
        )
        self.numbers = _number_table(list(map(_numbers, headers)))
        self.order: Indices = _order_table(list(map(_order, headers)))
        sketches = list(map(_sketch, headers))
        self.sketched = [row for row, sketch in enumerate(sketches) if sketch is not None]
        self.sketches: list[bytes] = [sketch for sketch in sketches if sketch is not None]

    def record(self, index: int) -> RowRecord:
        """Return a whole row, decoded again if only its header was read.

        Raises:
            RecordingError: A field beyond the header is wrong.
        """
        if self._records is not None:
            record: RowRecord = self._records[index]
            return record
        row = self._rows[index]
        assert isinstance(row, bytes)
        try:
            return decode_record(row)
        except UNREADABLE:
            return record_of(self._parse()[index])

    def statistics(self, indices: Sequence[int]) -> Floats:
        """Return the statistics of some rows, shape (8, rows), NaN where absent."""
        if not len(indices):
            return np.empty((len(STATISTICS), 0))
        return _number_table([_statistics(self.record(index)) for index in indices])

    def rows(self, start: int, stop: int) -> list[Row]:
        """Return some rows as dicts.

        Raises:
            RecordingError: A field beyond the header is wrong.
        """
        parsed = [
            parse_line(row) if isinstance(row, bytes) else row for row in self._rows[start:stop]
        ]
        rows = [row for row in parsed if isinstance(row, dict)]
        return rows if len(rows) == len(parsed) else self._parse()[start:stop]


def iterate_batches(
    path: str | Path,
    kinds: RowKinds,
    problem: Callable[[str], None] = lambda message: None,
    read: Callable[[int], None] = lambda count: None,
) -> Iterator[RowBatch]:
    """Yield the rows of a recording, batch by batch.

    Args:
        problem: Called with each warning.
        read: Called with the number of bytes of each batch.

    Raises:
        RecordingError: The file is not a recording.
    """
    # headers are enough once there are calls and sketches, which decide nearly everything
    are_whole = True
    for texts, parse_tolerantly in iterate_line_batches(path, problem, _BLOCK_BYTES):
        read(sum(map(len, texts)))
        try:
            headers: list[Any] = list(map(decode_record if are_whole else _decode_header, texts))
            batch = RowBatch(headers, texts, kinds, are_whole, parse_tolerantly)
        except UNREADABLE:
            rows = parse_tolerantly()
            headers = [record_of(row) for row in rows]
            batch = RowBatch(headers, rows, kinds, are_whole=True, parse=parse_tolerantly)
        if len(batch.kinds):
            are_whole = not batch.sketches
            yield batch


def _number_table(rows: list[Any]) -> Floats:
    """Return tuples of numbers as an array with one row per number."""
    try:
        return np.array(rows, dtype=np.float64).T
    except (ValueError, TypeError, OverflowError):
        return np.array([list(map(_float_or_nan, row)) for row in rows]).T


def _order_table(orders: list[Any]) -> Indices:
    """Return pairs of entry and exit as an array, -1 where absent."""
    try:
        table = np.fromiter(chain.from_iterable(orders), np.int64, 2 * len(orders))
    except (ValueError, TypeError, OverflowError):
        complete = [order or _NOWHERE for order in orders]
        table = np.array(
            [[-1 if event is None else event for event in order] for order in complete],
            dtype=np.int64,
        )
    return table.reshape(-1, 2)


def _float_or_nan(value: Any) -> float:
    try:
        return float("nan") if value is None else float(value)
    except (ValueError, TypeError, OverflowError):
        return float("nan")
