"""The numbers of an episode as arrays, and what does not change from one episode to the next.

A thousand forwards of one model differ in their numbers only. What is the same of two of them
(which tensors of which calls, in which order, which of them are one value) is a `Structure`; all
else is `Columns`, which are compared by the array.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.row_batches import STATISTICS, Floats, Indices

Flags = NDArray[np.bool_]

_EXTENTS = (
    "abs_mean",
    "sum",
    "min",
    "max",
)  # one of them that is not finite says that the tensor is not
# values of earlier episodes whose sketches are kept because they are used again, and episodes whose
# sketches are all kept
_REMEMBERED, _EPISODES = 4096, 8


class IrregularRows(Exception):
    """Rows that are not of the usual kind: a field that is no number, sketches of several lengths."""


class Columns:
    """The rows of one episode as arrays of one number a row. Raises IrregularRows.

    value, parent: -1 where there is none. order: entering and leaving, shape (rows, 2), -1 where
    calls were not recorded. nonfinite, l2: NaN where there is none. sketched: which rows have a
    sketch; sketches: float32, shape (sketched rows, 64).
    """

    __slots__ = (
        "_whole",
        "episode",
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

    def __init__(self, episode: ForwardRows) -> None:
        self.episode = episode
        parts = episode.parts
        if any(batch.odd for batch, _, _ in parts):
            raise IrregularRows
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
        self._whole: Floats | None = None
        for at in np.flatnonzero(np.isnan(self.numel)).tolist():
            shape = episode.line(at).shape
            self.numel[at] = -1 if shape is None else np.prod(shape, dtype=np.float64)
        self._take_sketches()

    def _take_sketches(self) -> None:
        at: list[int] = []
        found: list[bytes] = []
        before = 0
        for batch, start, stop in self.episode.parts:
            first, last = np.searchsorted(batch.sketched, (start, stop)).tolist()
            at += [before - start + one for one in batch.sketched[first:last]]
            found += batch.sketches[first:last]
            before += stop - start
        width = len(found[0]) if found else 0
        if width % 4 or any(len(sketch) != width for sketch in found):
            raise IrregularRows
        self.sketched = np.array(at, dtype=np.int64)
        self.sketches = np.frombuffer(b"".join(found), "<f4").reshape(len(found), width // 4)

    def statistics(self, rows: Indices) -> Floats:
        """The statistics of some rows, shape (8, rows), NaN where absent."""
        if self._whole is None and len(rows) < len(self.kinds) / 4:
            ends = self.episode.ends
            found = np.empty((len(STATISTICS), len(rows)))
            places = np.searchsorted(ends, rows, side="right")
            for place in np.unique(places).tolist():
                batch, _, stop = self.episode.parts[place]
                here = np.flatnonzero(places == place)
                found[:, here] = batch.statistics((rows[here] - ends[place] + stop).tolist())
            return found
        if self._whole is None:
            parts = [
                batch.statistics(range(start, stop)) for batch, start, stop in self.episode.parts
            ]
            self._whole = np.concatenate(parts, axis=1)
        return self._whole[:, rows]

    @property
    def finite(self) -> Flags:
        """Which rows are of tensors without a NaN or an infinity."""
        finite: Flags = ~(self.nonfinite > 0)
        unknown = np.flatnonzero(np.isnan(self.nonfinite))
        if len(unknown):
            extents = self.statistics(unknown)[[STATISTICS.index(name) for name in _EXTENTS]]
            finite[unknown] &= ~np.isinf(extents).any(axis=0)
            for at in unknown[np.isnan(extents).any(axis=0)].tolist():  # absent, or spelled
                line = self.episode.line(at)
                finite[at] &= not any(isinstance(getattr(line, name), str) for name in _EXTENTS)
        return finite


@dataclass(slots=True, eq=False)
class Structure:
    """What episodes of one kind have in common.

    first: for each row the first one of the same value. order, parent: counted from where the
    episode begins. slots: for each row where its value's sketch is in `Columns.sketches`, behind
    these where it was seen in an earlier episode, in the order of `foreign`, the rows whose values
    were; -1 where there is none.
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
        """The structure of an episode."""
        seen: dict[int, int] = {}
        numbers = columns.value.tolist()
        first = np.array(
            [
                at if number < 0 else seen.setdefault(number, at)
                for at, number in enumerate(numbers)
            ],
            dtype=np.int64,
        )
        slots = np.full(len(numbers), -1, dtype=np.int64)
        slots[columns.sketched] = np.arange(len(columns.sketched))
        foreign = np.flatnonzero(
            (first == np.arange(len(first))) & (slots < 0) & (columns.value >= 0)
        )
        slots[foreign] = len(columns.sketched) + np.arange(len(foreign))
        order, parent = _from_start(columns)
        return Structure(
            columns.kinds, first, len(seen), order, parent, columns.sketched, slots[first], foreign
        )

    def fits(self, columns: Columns) -> bool:
        """Whether an episode is of this structure."""
        if not np.array_equal(columns.kinds, self.kinds) or not np.array_equal(
            columns.sketched, self.sketched
        ):
            return False
        if not np.array_equal(columns.value, columns.value[self.first]):
            return False
        if len(np.unique(columns.value[columns.value >= 0])) != self.values:
            return False
        order, parent = _from_start(columns)
        return np.array_equal(order, self.order) and np.array_equal(parent, self.parent)


def _from_start(columns: Columns) -> tuple[Indices, Indices]:
    start = int(columns.order[:, 0].min())
    return columns.order - max(start, 0), np.where(
        columns.parent >= start, columns.parent - start, -1
    )


class Structures:
    """The structures that were seen, a limited number of them: models whose forwards are all
    different have no use for any.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._known: defaultdict[Any, list[Structure]] = defaultdict(list)
        self._count = 0

    def of(self, columns: Columns) -> Structure:
        """The structure of an episode: the same object for episodes of the same one."""
        key = len(columns.kinds), int(columns.kinds[0]), int(columns.kinds[-1])
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
    """Sketches of values that were seen in earlier episodes, by number: those of parameters, and of
    what was seen of late.

    A tensor that lives on (a prompt's embedding, given to every step) is sketched at first sight
    only.
    """

    def __init__(self, lasting: Mapping[int, bytes]) -> None:
        self._lasting = lasting
        self._used: OrderedDict[int, bytes] = OrderedDict()
        self._recent: deque[list[tuple[Floats, list[bytes]]] | dict[int, bytes]] = deque(
            maxlen=_EPISODES
        )

    def __getitem__(self, number: int) -> bytes:
        sketch = self._used.get(number)
        if sketch is not None:
            self._used.move_to_end(number)
            return sketch
        if number in self._lasting:
            return self._lasting[number]
        for at in range(len(self._recent) - 1, -1, -1):
            episode = self._recent[at]
            if not isinstance(episode, dict):
                pairs = (
                    zip(values.tolist(), sketches, strict=True) for values, sketches in episode
                )
                episode = self._recent[at] = dict(chain.from_iterable(pairs))
            if number in episode:
                self._used[number] = episode[number]
                if len(self._used) > _REMEMBERED:
                    self._used.popitem(last=False)
                return episode[number]
        raise KeyError(number)

    def __iter__(self) -> Any:
        raise TypeError("nobody needs them all")

    def __len__(self) -> int:
        raise TypeError("nobody needs them all")

    def remember(self, episode: ForwardRows) -> None:
        """Take in the sketches of an episode."""
        found = []
        for batch, start, stop in episode.parts:
            first, last = np.searchsorted(batch.sketched, (start, stop)).tolist()
            found.append((batch.numbers[0, batch.sketched[first:last]], batch.sketches[first:last]))
        self._recent.append(found)
