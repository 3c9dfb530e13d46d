"""The numbers of a forward as arrays, and the structure that it shares with other forwards.

A thousand forwards of one model differ only in their numbers. A `Structure` holds what two of them
share (which tensors of which calls, in which order, and which of them are one value); `Columns`
hold the rest, which is compared as arrays.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.rules import Flags
from otel_torch.recording.row_batches import STATISTICS, Floats, Indices, PackedBytes

# if one of these is NaN or Inf, the tensor has NaN or Inf values
_EXTENTS = ("abs_mean", "sum", "min", "max")
_EXTENT_ROWS = [STATISTICS.index(name) for name in _EXTENTS]
# how many sketches of earlier forwards stay cached after a use, and of how many recent forwards all
# sketches stay
_CACHED_SKETCHES, _RECENT_FORWARDS = 4096, 8
_NO_ROWS, _NO_BYTES = np.empty(0, np.int64), np.empty(0, np.uint8)


class IrregularRows(Exception):
    """Raised for rows that arrays cannot hold: sketches of different lengths."""


class Columns:
    """The rows of one forward as arrays with one entry per row.

    Attributes:
        value, parent: -1 where absent.
        order: Entry and exit, shape (rows, 2), -1 where calls were not recorded.
        nonfinite, l2: NaN where absent.
        numel: -1 where unknown.
        sketched: Rows that have a sketch.
        sketches: float32, shape (sketched rows, 64).

    Raises:
        IrregularRows: The rows do not fit into arrays.
    """

    __slots__ = (
        "_statistics",
        "forward",
        "kinds",
        "l2",
        "nonfinite",
        "numel",
        "order",
        "parent",
        "sketched",
        "sketches",
        "value",
    )

    def __init__(self, forward: ForwardRows) -> None:
        self.forward = forward
        parts = forward.parts
        self.kinds: Indices = np.concatenate(
            [batch.kinds[start:stop] for batch, start, stop in parts]
        )
        numbers: Floats = np.concatenate(
            [batch.numbers[:, start:stop] for batch, start, stop in parts], axis=1
        )
        self.order: Indices = np.concatenate(
            [batch.order[start:stop] for batch, start, stop in parts]
        )
        value, parent, self.nonfinite, self.numel, self.l2 = numbers
        self.value, self.parent = (
            np.where(np.isnan(row), -1, row).astype(np.int64) for row in (value, parent)
        )
        self._statistics: Floats | None = None
        for row in np.flatnonzero(np.isnan(self.numel)).tolist():
            shape = forward.record(row).shape
            numel = np.prod(shape, dtype=np.float64) if isinstance(shape, tuple) else -1
            self.numel[row] = numel
        self._collect_sketches()

    def _collect_sketches(self) -> None:
        rows: list[Indices] = []
        sketches: list[PackedBytes] = []
        part_start = 0
        for batch, start, stop in self.forward.parts:
            first, last = np.searchsorted(batch.sketched, (start, stop)).tolist()
            if last > first:
                rows.append(batch.sketched[first:last] + (part_start - start))
                sketches.append(batch.sketches.part(first, last))
            part_start += stop - start
        widths = {part.width for part in sketches} or {0}
        width = widths.pop()
        if widths or width is None or width % 4:
            raise IrregularRows
        self.sketched: Indices = np.concatenate([_NO_ROWS, *rows])
        content = np.concatenate([_NO_BYTES, *(part.content for part in sketches)])
        self.sketches = content.view("<f4").reshape(len(self.sketched), width // 4)

    def statistics(self, rows: Indices) -> Floats:
        """Return the statistics of some rows, shape (8, rows), NaN where absent."""
        if self._statistics is None and len(rows) < len(self.kinds) / 4:
            return self._decode_statistics(rows)
        if self._statistics is None:
            parts = self.forward.parts
            tables = [batch.statistics(range(start, stop)) for batch, start, stop in parts]
            self._statistics = np.concatenate(tables, axis=1)
        return self._statistics[:, rows]

    def _decode_statistics(self, rows: Indices) -> Floats:
        ends = self.forward.part_ends
        statistics = np.empty((len(STATISTICS), len(rows)))
        parts = np.searchsorted(ends, rows, side="right")
        for part in np.unique(parts).tolist():
            batch, _, stop = self.forward.parts[part]
            in_part = np.flatnonzero(parts == part)
            batch_rows = rows[in_part] - ends[part] + stop
            statistics[:, in_part] = batch.statistics(batch_rows.tolist())
        return statistics

    @property
    def finite(self) -> Flags:
        """Which rows are of tensors without NaN or Inf."""
        finite: Flags = ~(self.nonfinite > 0)
        unknown = np.flatnonzero(np.isnan(self.nonfinite))
        if len(unknown):
            extents = self.statistics(unknown)[_EXTENT_ROWS]
            finite[unknown] &= ~np.isinf(extents).any(axis=0)
            for row in unknown[np.isnan(extents).any(axis=0)].tolist():  # absent, or text
                record = self.forward.record(row)
                finite[row] &= not any(isinstance(getattr(record, name), str) for name in _EXTENTS)
        return finite


@dataclass(slots=True, eq=False)
class Structure:
    """What forwards of one kind have in common.

    Attributes:
        first: For each row, the first row with the same value.
        values: How many values there are.
        order, parent: Counted from the start of the forward.
        slots: For each row, the index of its value's sketch: in `Columns.sketches`, or after
            these, in the order of `foreign`, for values of earlier forwards; -1 without one.
        foreign: Rows whose values were sketched in an earlier forward.
    """

    kinds: Indices
    first: Indices
    values: int
    order: Indices
    parent: Indices
    sketched: Indices
    slots: Indices
    foreign: Indices

    @staticmethod
    def of(columns: Columns) -> Structure:
        """Return the structure of a forward."""
        seen: dict[int, int] = {}
        first = np.array(
            [
                row if number < 0 else seen.setdefault(number, row)
                for row, number in enumerate(columns.value.tolist())
            ],
            dtype=np.int64,
        )
        count = len(columns.sketched)
        slots = np.full(len(first), -1, dtype=np.int64)
        slots[columns.sketched] = np.arange(count)
        is_first = first == np.arange(len(first))
        foreign = np.flatnonzero(is_first & (slots < 0) & (columns.value >= 0))
        slots[foreign] = count + np.arange(len(foreign))
        order, parent = _from_start(columns)
        return Structure(
            kinds=columns.kinds,
            first=first,
            values=len(seen),
            order=order,
            parent=parent,
            sketched=columns.sketched,
            slots=slots[first],
            foreign=foreign,
        )

    def fits(self, columns: Columns) -> bool:
        """Return whether a forward has this structure."""
        if not np.array_equal(columns.kinds, self.kinds):
            return False
        if not np.array_equal(columns.sketched, self.sketched):
            return False
        if not np.array_equal(columns.value, columns.value[self.first]):
            return False
        if len(np.unique(columns.value[columns.value >= 0])) != self.values:
            return False
        order, parent = _from_start(columns)
        return np.array_equal(order, self.order) and np.array_equal(parent, self.parent)


def _from_start(columns: Columns) -> tuple[Indices, Indices]:
    start = int(columns.order[:, 0].min())
    parent = np.where(columns.parent >= start, columns.parent - start, -1)
    return columns.order - max(start, 0), parent


class Structures:
    """The structures seen so far.

    Their number is limited, because a model whose forwards all differ never reuses one.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._structures: defaultdict[Any, list[Structure]] = defaultdict(list)
        self._count = 0

    def of(self, columns: Columns) -> Structure:
        """Return the structure of a forward: the same object for forwards that share it."""
        key = len(columns.kinds), int(columns.kinds[0]), int(columns.kinds[-1])
        for structure in self._structures[key]:
            if structure.fits(columns):
                return structure
        if self._count >= self._MOST:
            self._structures.clear()
            self._count = 0
        structure = Structure.of(columns)
        self._structures[key].append(structure)
        self._count += 1
        return structure


class Sketches(Mapping[int, bytes]):
    """Sketches of values that were recorded earlier, by the value's number.

    A tensor that is passed to every step, such as a prompt embedding, is sketched only the first
    time. Sketches of parameters are always kept, other sketches only while they are recent.
    """

    def __init__(self, of_parameters: Mapping[int, bytes]) -> None:
        self._of_parameters = of_parameters
        self._used: OrderedDict[int, bytes] = OrderedDict()
        # of each recent forward, the arrays as they were read, or a dict after the first lookup
        self._recent: deque[list[tuple[Floats, PackedBytes]] | dict[int, bytes]] = deque(
            maxlen=_RECENT_FORWARDS
        )

    def __getitem__(self, number: int) -> bytes:
        sketch = self._used.get(number)
        if sketch is not None:
            self._used.move_to_end(number)
            return sketch
        if number in self._of_parameters:
            return self._of_parameters[number]
        for index in range(len(self._recent) - 1, -1, -1):
            forward = self._recent[index]
            if not isinstance(forward, dict):
                pairs = (
                    zip(values.tolist(), sketches, strict=True) for values, sketches in forward
                )
                forward = self._recent[index] = dict(chain.from_iterable(pairs))
            if number in forward:
                self._used[number] = forward[number]
                if len(self._used) > _CACHED_SKETCHES:
                    self._used.popitem(last=False)
                return forward[number]
        raise KeyError(number)

    def __iter__(self) -> Any:
        raise TypeError("sketches can be looked up, not listed")

    def __len__(self) -> int:
        raise TypeError("sketches can be looked up, not counted")

    def remember(self, forward: ForwardRows) -> None:
        """Add the sketches of a forward."""
        parts = []
        for batch, start, stop in forward.parts:
            first, last = np.searchsorted(batch.sketched, (start, stop)).tolist()
            values = batch.numbers[0, batch.sketched[first:last]]
            parts.append((values, batch.sketches.part(first, last)))
        self._recent.append(parts)
