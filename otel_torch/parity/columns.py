"""The numbers of an episode as arrays, and what does not change from one episode to the next.

A thousand forwards of one model differ in their numbers only. What is the same of two of them (which tensors of which calls,
in which order, which of them are one value) is a `Structure`; all else is `Columns`, which are compared by the array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.lines import Line

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

STATISTICS = ("abs_mean", "mean", "std", "rms", "sum", "l2", "min", "max")
_EXTENTS = ("abs_mean", "sum", "min", "max")  # one of them that is not finite says that the tensor is not
_names = attrgetter("module", "tensor", "model", "phase", "cls", "argument", "dtype")
_numbers = attrgetter("odd", "value", "parent", "nonfinite", "numel", *STATISTICS)
_orders = attrgetter("order")
_sketches = attrgetter("sketch")
_numbered = attrgetter("value", "sketch")
# values of earlier episodes whose sketches are kept
_REMEMBERED = 4096


class Unusual(Exception):
    """Rows that are not of the usual kind: a field that is no number, a call that was never left."""


class Columns:
    """The rows of one episode as arrays of one number a row. Raises Unusual.

    names: what tells a row's place. value, parent: -1 where there is none. order: entering and leaving, shape (rows, 2), None
    where calls were not recorded. statistics: shape (8, rows), NaN where absent. sketched: which rows have a sketch;
    sketches: float32, shape (sketched rows, 64).
    """

    __slots__ = ("lines", "names", "nonfinite", "numel", "order", "parent", "sketched", "sketches", "statistics", "value")

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.names = list(map(_names, lines))
        try:
            table = np.array(list(map(_numbers, lines)), dtype=np.float64).T
            orders = list(map(_orders, lines))
            self.order = None
            if any(orders):
                self.order = np.fromiter(chain.from_iterable(orders), np.int64, 2 * len(orders)).reshape(-1, 2)
        except (TypeError, ValueError, OverflowError):
            raise Unusual from None
        if table[0].any():
            raise Unusual
        self.value, self.parent = (np.where(np.isnan(row), -1, row).astype(np.int64) for row in table[1:3])
        self.nonfinite, self.numel = table[3], table[4]
        self.statistics = table[5:]
        sketches = list(map(_sketches, lines))
        self.sketched = np.array([at for at, sketch in enumerate(sketches) if sketch is not None], dtype=np.int64)
        present = [sketch for sketch in sketches if sketch is not None]
        width = len(present[0]) if present else 0
        if any(len(sketch) != width for sketch in present) or width % 4:
            raise Unusual
        self.sketches = np.frombuffer(b"".join(present), "<f4").reshape(len(present), width // 4)
        self._fill_sizes()

    def _fill_sizes(self) -> None:
        for at in np.flatnonzero(np.isnan(self.numel)):
            shape = self.lines[at].shape
            self.numel[at] = -1 if shape is None else np.prod(shape, dtype=np.float64)

    @property
    def finite(self) -> Flags:
        """Which rows are of tensors without a NaN or an infinity."""
        finite = ~(self.nonfinite > 0)
        for name in _EXTENTS:
            column = self.statistics[STATISTICS.index(name)]
            finite &= ~np.isinf(column)
            if np.isnan(column).any():  # absent, or spelled
                for at in np.flatnonzero(np.isnan(column) & finite):
                    finite[at] = getattr(self.lines[at], name) is None
        return finite


@dataclass(slots=True, eq=False)
class Structure:
    """What episodes of one kind have in common.

    first: for each row the first one of the same value. order, parent: counted from where the episode begins.
    slots: for each row where its value's sketch is in `Columns.sketches`, behind these where it was seen in an earlier
    episode, in the order of `foreign`, the rows whose values were; -1 where there is none.
    """

    names: list[tuple[Any, ...]]
    first: Indices
    values: int
    order: NDArray[np.int64] | None
    parent: Indices
    sketched: Indices
    slots: Indices
    foreign: Indices

    @staticmethod
    def of(columns: Columns) -> Structure:
        """The structure of an episode."""
        seen: dict[int, int] = {}
        numbers = columns.value.tolist()
        first = np.array([at if number < 0 else seen.setdefault(number, at) for at, number in enumerate(numbers)], dtype=np.int64)
        slots = np.full(len(numbers), -1, dtype=np.int64)
        slots[columns.sketched] = np.arange(len(columns.sketched))
        foreign = np.flatnonzero((first == np.arange(len(first))) & (slots < 0) & (columns.value >= 0))
        slots[foreign] = len(columns.sketched) + np.arange(len(foreign))
        order, parent = _from_start(columns)
        return Structure(columns.names, first, len(seen), order, parent, columns.sketched, slots[first], foreign)

    def fits(self, columns: Columns) -> bool:
        """Whether an episode is of this structure."""
        if len(columns.names) != len(self.names) or not np.array_equal(columns.sketched, self.sketched):
            return False
        if not np.array_equal(columns.value, columns.value[self.first]) or (self.order is None) != (columns.order is None):
            return False
        known = columns.value[columns.value >= 0]
        if len(np.unique(known)) != self.values:
            return False
        order, parent = _from_start(columns)
        same_order = self.order is None or (order is not None and np.array_equal(order, self.order))
        return same_order and np.array_equal(parent, self.parent) and columns.names == self.names


def _from_start(columns: Columns) -> tuple[NDArray[np.int64] | None, Indices]:
    if columns.order is None:
        return None, columns.parent
    start = int(columns.order[:, 0].min())
    return columns.order - start, np.where(columns.parent >= start, columns.parent - start, -1)


class Structures:
    """The structures that were seen, a limited number of them: models whose forwards are all different have no use for any."""

    _MOST = 64

    def __init__(self) -> None:
        self._known: defaultdict[Any, list[Structure]] = defaultdict(list)
        self._count = 0

    def of(self, columns: Columns) -> Structure:
        """The structure of an episode: the same object for episodes of the same one."""
        key = len(columns.names), columns.names[0], columns.names[-1]
        for known in self._known[key]:
            if known.fits(columns):
                return known
        if self._count >= self._MOST:
            self._known.clear()
            self._count = 0
        structure = Structure.of(columns)
        self._known[key].append(structure)
        self._count += 1
        return structure


class Sketches(Mapping[int, bytes]):
    """Sketches of values that were seen in earlier episodes, by number: those of parameters, and of what was seen of late.

    A tensor that lives on (a prompt's embedding, given to every step) is sketched at first sight only.
    """

    def __init__(self, lasting: Mapping[int, bytes]) -> None:
        self._lasting = lasting
        self._recent: dict[int, bytes] = {}

    def __getitem__(self, number: int) -> bytes:
        sketch = self._recent.get(number)
        return self._lasting[number] if sketch is None else sketch

    def __iter__(self) -> Any:
        return iter({**self._lasting, **self._recent})

    def __len__(self) -> int:
        return len({**self._lasting, **self._recent})

    def remember(self, lines: Sequence[Line]) -> None:
        """Take in the sketches of an episode. What was used again stays longest."""
        recent = self._recent
        sketched = {number: sketch for number, sketch in map(_numbered, lines) if sketch is not None and number is not None}
        for number in {line.value for line in lines} & recent.keys():
            recent[number] = recent.pop(number)
        recent.update(sketched)
        excess = len(recent) - max(_REMEMBERED, 2 * len(sketched))
        if excess > 0:
            for number in list(islice(recent, excess)):
                del recent[number]
