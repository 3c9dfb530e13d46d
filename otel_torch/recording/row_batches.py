"""Read a recording as arrays: what a comparison needs of every row, without a dict per row.

The compiled scanner reads plain lines, a few thousand at a time. Others are decoded here, some
hundred at a time. A batch keeps arrays; the few rows that are analysed in full are decoded again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from otel_torch.recording import scanner
from otel_torch.recording.input_file import is_compressed
from otel_torch.recording.read_ahead import iterate_ahead
from otel_torch.recording.reader import (
    LineBatch,
    LineReader,
    RecordingError,
    iterate_line_batches,
    reject_metadata,
)
from otel_torch.recording.row_schema import (
    UNREADABLE,
    RowHeader,
    RowRecord,
    decode_record,
    record_of,
)
from otel_torch.recording.rows import Row, parse_lines
from otel_torch.recording.scanner import ScannedLines

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

Place = tuple[int | None, int | None, int | None]  # loop, step, call

STATISTICS = ("abs_mean", "mean", "std", "rms", "sum", "l2", "min", "max")
# bytes decoded at a time: few enough that everything made from them stays in the CPU's cache
_BLOCK_BYTES = 1 << 18
# of what the scanner reads: the shortest file with a thread of its own, and the blocks that wait
_WORTH_THREAD_BYTES, _BLOCKS_AHEAD = 1 << 23, 2


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
_place = attrgetter("loop", "step", "call")
_sketch = attrgetter("sketch")
_NO_ORDER = (-1, -1)
# a loop, step or call that a row does not have
NOWHERE = -(2**63)


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
class PackedBytes(Sequence[bytes]):
    """Bytes objects, one after the other in one array.

    Attributes:
        ends: Where each ends in `content`.

    >>> packed = PackedBytes.of([b"ab", b"c", b"def"])
    >>> len(packed), packed[1], list(packed.part(1, 3)), packed.width
    (3, b'c', [b'c', b'def'], None)
    """

    content: NDArray[np.uint8]
    ends: Indices

    @classmethod
    def of(cls, objects: Sequence[bytes]) -> PackedBytes:
        ends = np.cumsum([len(content) for content in objects], dtype=np.int64)
        return cls(np.frombuffer(b"".join(objects), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        return self.part(index, index + 1).content.tobytes()

    def __iter__(self) -> Iterator[bytes]:
        content, start = self.content.tobytes(), 0
        for end in self.ends.tolist():
            yield content[start:end]
            start = end

    def part(self, start: int, stop: int) -> PackedBytes:
        """Return neighboring objects, without a copy."""
        first = int(self.ends[start - 1]) if start else 0
        ends = self.ends[start:stop]
        last = int(ends[-1]) if len(ends) else first
        return PackedBytes(self.content[first:last], ends - first)

    @property
    def width(self) -> int | None:
        """The length of every object, 0 if there is none, None if they differ."""
        if not len(self.ends):
            return 0
        width = int(self.ends[0])
        return width if (np.diff(self.ends) == width).all() else None


@dataclass(slots=True, eq=False)
class RowBatch:
    """Neighboring rows of a recording, as arrays.

    Attributes:
        kinds: Number of each row's kind.
        numbers: value, parent, nonfinite, numel and l2, shape (5, rows), NaN where absent.
        order: Entry and exit of each row's call, shape (rows, 2), -1 where not recorded.
        places: Loop, step and call, shape (rows, 3), NOWHERE where absent.
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
    places: Indices
    sketched: Indices
    sketches: PackedBytes
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
            _place_table(list(map(_place, headers))),
            np.array([row for row, sketch in enumerate(sketches) if sketch is not None], np.int64),
            PackedBytes.of([sketch for sketch in sketches if sketch is not None]),
            lines,
        )

    @classmethod
    def of_scanned(cls, scanned: ScannedLines, kinds: Indices, lines: LineBatch) -> RowBatch:
        """Make a batch of lines that the scanner read.

        Args:
            kinds: Number of each row's kind.
        """
        return cls(
            kinds,
            scanned.numbers,
            scanned.order,
            scanned.places,
            scanned.sketched,
            PackedBytes(scanned.sketches, scanned.sketch_ends),
            lines,
            table=scanned.statistics,
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
            return decode_record(self.lines.line(index))
        except UNREADABLE:
            return record_of(self.lines.parse(index, index + 1)[0])

    def parent(self, index: int) -> int | None:
        """Return the entry index of the call that encloses a row's call, None if there is none."""
        parent = self.numbers[1, index]
        return None if np.isnan(parent) else int(parent)

    def place(self, index: int) -> Place:
        """Return loop, step and call of a row, None where absent."""
        loop, step, call = self.places[index].tolist()
        return (
            None if loop == NOWHERE else loop,
            None if step == NOWHERE else step,
            None if call == NOWHERE else call,
        )

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
        return parse_lines(self.lines.between(start, stop)) or self.lines.parse(start, stop)


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
    for batch in _batches(path, kinds, problem):
        read(batch.lines.size)
        if len(batch.kinds):
            yield batch


def _batches(
    path: str | Path, kinds: RowKinds, problem: Callable[[str], None]
) -> Iterator[RowBatch]:
    maker = _BatchMaker(kinds)
    # the scanner reads positions of the file itself
    is_plain = os.path.isfile(path) and not is_compressed(path)
    library = scanner.load() if is_plain else None
    if library is None:
        yield from map(maker.decode, iterate_line_batches(path, problem, _BLOCK_BYTES))
        return
    reject_metadata(path)
    reader = LineReader(path, problem)
    try:
        with closing(_scanned_blocks(path, library)) as blocks:
            for block in blocks:
                if block.text is None:
                    yield maker.take(block, reader.skip(block.starts, block.size))
                else:
                    text = io.BytesIO(block.text)
                    yield from map(maker.decode, reader.batches(text, _BLOCK_BYTES))
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from None
    reader.finish()


def _scanned_blocks(path: str | Path, library: Any) -> Generator[ScannedLines]:
    """Return what the scanner reads; of a long file, it reads in a thread of its own."""
    blocks = scanner.iterate_blocks(path, library)
    if os.path.getsize(path) <= _WORTH_THREAD_BYTES:
        return blocks
    return iterate_ahead(blocks, _BLOCKS_AHEAD)


class _BatchMaker:
    """Makes the batches of one recording."""

    def __init__(self, kinds: RowKinds) -> None:
        # headers are enough once there are calls and sketches, which decide nearly everything
        self._in_full = True
        self._kinds = kinds
        # in `kinds`, by the scanner's number; -1 where not known yet
        self._numbers = np.empty(0, dtype=np.int64)

    def decode(self, lines: LineBatch) -> RowBatch:
        """Make a batch of lines of any form. Raises RecordingError if one is not a record."""
        return self._made(RowBatch.of_lines(lines, self._kinds, self._in_full))

    def take(self, scanned: ScannedLines, lines: LineBatch) -> RowBatch:
        kinds = scanned.kinds
        missing = int(kinds.max(initial=-1)) + 1 - len(self._numbers)
        if missing > 0:
            self._numbers = np.append(self._numbers, np.full(missing, -1))
        for row in np.flatnonzero(self._numbers[kinds] < 0).tolist():
            if self._numbers[kinds[row]] < 0:
                header = _decode_header(lines.line(row))
                self._numbers[kinds[row]] = self._kinds[_kind(header)]
        return self._made(RowBatch.of_scanned(scanned, self._numbers[kinds], lines))

    def _made(self, batch: RowBatch) -> RowBatch:
        if len(batch.kinds):
            self._in_full = not len(batch.sketches)
        return batch


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
        complete = [order or _NO_ORDER for order in orders]
        table = np.array(
            [[-1 if event is None else event for event in order] for order in complete],
            dtype=np.int64,
        )
    return table.reshape(-1, 2)


def _place_table(places: list[Any]) -> Indices:
    """Return tuples of loop, step and call as an array, NOWHERE where absent."""
    try:
        table = np.fromiter(chain.from_iterable(places), np.int64, 3 * len(places))
    except TypeError:
        flat = (NOWHERE if number is None else number for place in places for number in place)
        table = np.fromiter(flat, np.int64, 3 * len(places))
    return table.reshape(-1, 3)


def _float_or_nan(value: Any) -> float:
    try:
        return float("nan") if value is None else float(value)
    except (ValueError, TypeError, OverflowError):
        return float("nan")
