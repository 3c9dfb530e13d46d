"""Lines of a recording as arrays: what a comparison looks at in every row, without a dict or a list
for each.

A long recording is read some hundred lines at a time, and of each time nothing is kept but arrays
and the bytes of the lines, from which the few rows that are analysed in full are read once more, as
dicts.
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
from otel_torch.recording.rows import Row, parse_line

Number = float | str | None  # as text where it is not finite
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

STATISTICS = ("abs_mean", "mean", "std", "rms", "sum", "l2", "min", "max")
# bytes that are decoded before they are put in arrays: few, so that all that is made of them stays
# in the cache
_PIECE = 1 << 18


class RowHeader(msgspec.Struct, gc=False, rename={"cls": "class"}):
    """What names a record, and the numbers that are looked at where sketches decide. The fields
    mean what they mean in a row; `sketch` is decoded: little-endian float32.
    """

    module: str
    tensor: str
    step: int | None
    model: str = ""
    phase: str = "forward"
    cls: str = ""
    argument: str | None = None
    value: int | None = None
    order: tuple[int | None, int | None] | None = None
    parent: int | None = None
    l2: Number = None
    nonfinite: int | None = None
    numel: int | None = None
    dtype: str = ""
    sketch: bytes | None = None


class RowRecord(RowHeader, gc=False, rename={"cls": "class"}):
    """A whole record. odd: a field was not of its type, and is left out here; the row as a dict has
    it.
    """

    call: int | None = None
    loop: int | None = None
    abs_mean: Number = None
    sum: Number = None
    min: Number = None
    max: Number = None
    mean: Number = None
    std: Number = None
    rms: Number = None
    shape: tuple[int, ...] | None = None
    odd: bool = False


class RowKind(NamedTuple):
    """What names a row's place, and does not change from step to step."""

    module: str
    tensor: str
    model: str
    phase: str
    cls: str
    argument: str | None
    dtype: str


_decode = msgspec.json.Decoder(RowRecord).decode
_decode_named = msgspec.json.Decoder(RowHeader).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
_kind = attrgetter(*RowKind._fields)
_numbers = attrgetter("value", "parent", "nonfinite", "numel", "l2")
_statistics = attrgetter(*STATISTICS)
_order = attrgetter("order")
_sketch = attrgetter("sketch")
_odd = attrgetter("odd")
_NOWHERE = (-1, -1)


class RowKinds(dict[tuple[Any, ...], int]):
    """The kinds of rows that were seen, numbered; asked for a new one it gives it a number. known:
    by number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: list[RowKind] = []

    def __missing__(self, kind: tuple[Any, ...]) -> int:
        self.known.append(RowKind(*kind))
        number = self[kind] = len(self.known) - 1
        return number


class RowBatch:
    """Some neighbouring lines.

    kinds: the number of each line's kind. value, parent, nonfinite, numel, l2: NaN where there is
    none. order: entering and leaving, shape (lines, 2), -1 where not recorded. sketches: the lines
    that have one, and these. odd: whether a line has a field that is of another type. whole: the
    lines, where they were read whole.
    """

    __slots__ = ("_rows", "_whole", "kinds", "numbers", "odd", "order", "sketched", "sketches")

    def __init__(
        self,
        lines: Sequence[RowHeader],
        rows: list[Row] | list[bytes],
        kinds: RowKinds,
        whole: bool,
    ) -> None:
        self._rows = rows  # as they were read, where that is enough
        self._whole: Sequence[Any] | None = lines if whole else None
        self.kinds: Indices = np.array(
            list(map(kinds.__getitem__, map(_kind, lines))), dtype=np.int64
        )
        self.odd = whole and any(map(_odd, lines))
        self.numbers = _table(list(map(_numbers, lines)))
        orders = list(map(_order, lines))
        try:
            order = np.fromiter(chain.from_iterable(orders), np.int64, 2 * len(lines))
        except (ValueError, TypeError, OverflowError):
            order = np.array(
                [[-1 if at is None else at for at in one or _NOWHERE] for one in orders],
                dtype=np.int64,
            )
        self.order: Indices = order.reshape(-1, 2)
        sketches = list(map(_sketch, lines))
        self.sketched = [at for at, sketch in enumerate(sketches) if sketch is not None]
        self.sketches: list[bytes] = [sketch for sketch in sketches if sketch is not None]

    def line(self, at: int) -> RowRecord:
        """A whole line."""
        if self._whole is not None:
            line: RowRecord = self._whole[at]
            return line
        row = self._rows[at]
        return _decode(row) if isinstance(row, bytes) else line_of(row)

    def statistics(self, at: Sequence[int]) -> Floats:
        """The statistics of some lines, shape (8, lines), NaN where absent."""
        return (
            _table([_statistics(self.line(one)) for one in at])
            if len(at)
            else np.empty((len(STATISTICS), 0))
        )

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows of some lines, as dicts."""
        found = [
            parse_line(row) if isinstance(row, bytes) else row for row in self._rows[start:stop]
        ]
        return [row for row in found if isinstance(row, dict)]


def iterate_batches(
    path: str | Path,
    kinds: RowKinds,
    problem: Callable[[str], None] = lambda message: None,
    read: Callable[[int], None] = lambda count: None,
) -> Iterator[RowBatch]:
    """The lines of a recording, batch by batch. read: is told how many bytes each has. Raises
    RecordingError.
    """
    whole = True  # unless there are calls and sketches, by which nearly all is decided
    for texts, tolerant in iterate_line_batches(path, problem, _PIECE):
        read(sum(map(len, texts)))
        try:
            lines: list[Any] = list(map(_decode if whole else _decode_named, texts))
            batch = RowBatch(lines, texts, kinds, whole)
        except _UNREADABLE:
            rows = tolerant()
            batch = RowBatch([line_of(row) for row in rows], rows, kinds, True)
        if len(batch.kinds):
            whole = not batch.sketches
            yield batch


def _table(rows: list[Any]) -> Floats:
    """Tuples of numbers as an array with a row for each number."""
    try:
        return np.array(rows, dtype=np.float64).T
    except (ValueError, TypeError, OverflowError):
        return np.array([list(map(_float, row)) for row in rows]).T


def line_of(row: Row) -> RowRecord:
    """A row as a whole line.

    >>> line_of({"module": "a", "tensor": "out", "step": 0, "sum": "<error>", "order": "?"}).odd
    True
    """
    try:
        return msgspec.convert(row, RowRecord)
    except _UNREADABLE:
        kept: dict[str, Any] = {name: row[name] for name in ("module", "tensor", "step")}
        for name, value in row.items():
            try:
                msgspec.convert({**kept, name: value}, RowRecord)
            except _UNREADABLE:
                continue
            kept[name] = value
        return msgspec.convert({**kept, "odd": True}, RowRecord)


def _float(value: Any) -> float:
    """A number; NaN for none, and for what a program wrote in its place."""
    try:
        return float("nan") if value is None else float(value)
    except (ValueError, TypeError, OverflowError):
        return float("nan")
