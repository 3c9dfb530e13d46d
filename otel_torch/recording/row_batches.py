"""Read a recording as arrays: what a comparison needs of every row, without a dict per row.

A long recording is read some hundred lines at a time. A batch keeps arrays and the bytes of its
lines; the few rows that are analysed in full are decoded again, as dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.reader import LineBatch, iterate_line_batches
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


@dataclass(slots=True, eq=False)
class RowBatch:
    """Neighboring rows of a recording, as arrays.

    Attributes:
        kinds: Number of each row's kind.
        numbers: value, parent, nonfinite, numel and l2, shape (5, rows), NaN where absent.
        order: Entry and exit of each row's call, shape (rows, 2), -1 where not recorded.
        sketched: Rows that have a sketch, in order.
        sketches: Their sketches.
        lines: What the rows were read from.
        parsed: The rows, if only the tolerant parser reads the lines.
        records: The rows, if they were decoded in full.
        table: Their statistics, shape (8, rows), if these were decoded.
    """

    kinds: Indices
    numbers: Floats
    order: Indices
    sketched: list[int]
    sketches: list[bytes]
    lines: LineBatch
    parsed: list[Row] | None = None
    records: Sequence[RowRecord] | None = None
    table: Floats | None = None

    @classmethod
    def of_rows(cls, rows: list[Row], kinds: RowKinds, lines: LineBatch) -> RowBatch:
        """Make a batch of parsed rows. Raises one of `UNREADABLE` if a field has another type."""
        records = [record_of(row) for row in rows]
        batch = cls._of_headers(records, kinds, lines)
        batch.parsed, batch.records = rows, records
        return batch

    @classmethod
    def of_lines(cls, lines: LineBatch, kinds: RowKinds, in_full: bool) -> RowBatch:
        """Make a batch of lines.

        Args:
            in_full: Decode all fields, not only the header's.

        Raises:
            RecordingError: A line is not a record.
        """
        decode = decode_record if in_full else _decode_header
        try:
            headers: list[Any] = list(map(decode, lines.lines))
        except UNREADABLE:
            return cls.of_rows(lines.parse(), kinds, lines)
        batch = cls._of_headers(headers, kinds, lines)
        batch.records = headers if in_full else None
        return batch

    @classmethod
    def _of_headers(
        cls, headers: Sequence[RowHeader], kinds: RowKinds, lines: LineBatch
    ) -> RowBatch:
        sketches = list(map(_sketch, headers))
        return cls(
            np.array(list(map(kinds.__getitem__, map(_kind, headers))), dtype=np.int64),
            _number_table(list(map(_numbers, headers))),
            _order_table(list(map(_order, headers))),
            [row for row, sketch in enumerate(sketches) if sketch is not None],
            [sketch for sketch in sketches if sketch is not None],
            lines,
        )

    def record(self, index: int) -> RowRecord:
        """Return a whole row, decoded again if only its header was read.

        Raises:
            RecordingError: A field beyond the header is wrong.
        """
        if self.records is not None:
            return self.records[index]
        if self.parsed is not None:
            return record_of(self.parsed[index])
        try:
            return decode_record(self.lines.lines[index])
        except UNREADABLE:
            return record_of(self.lines.parse()[index])

    def statistics(self, indices: Sequence[int]) -> Floats:
        """Return the statistics of some rows, shape (8, rows), NaN where absent."""
        if self.table is not None:
            return self.table[:, indices]
        if not len(indices):
            return np.empty((len(STATISTICS), 0))
        return _number_table([_statistics(self.record(index)) for index in indices])

    def rows(self, start: int, stop: int) -> list[Row]:
        """Return some rows as dicts.

        Raises:
            RecordingError: A field beyond the header is wrong.
        """
        if self.parsed is not None:
            return self.parsed[start:stop]
        parsed = list(map(parse_line, self.lines.lines[start:stop]))
        rows = [row for row in parsed if isinstance(row, dict)]
        return rows if len(rows) == len(parsed) else self.lines.parse()[start:stop]


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
    in_full = True
    for lines in iterate_line_batches(path, problem, _BLOCK_BYTES):
        read(lines.size)
        batch = RowBatch.of_lines(lines, kinds, in_full)
        if len(batch.kinds):
            in_full = not batch.sketches
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
