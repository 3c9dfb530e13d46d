"""Which value a tensor holds now, however the program came to it.

A tensor is a way to look at memory, and an operation in place changes what every view of that
memory shows. So each memory has *layers*: the values that were written to it, with the range of
bytes that each one covers. A *sight* is a tensor's geometry with the value that it showed at a
time. It shows that value still, unless a later layer overlaps it.

>>> values = ProgramValues()
>>> x = torch.zeros(4); values.write(x, Value(0, None))
>>> values.look(x).value.number
0
>>> half = x[:2]; values.write(half, Value(1, None))   # half.add_(1)
>>> look = values.look(x); look.value, [layer.number for layer in look.layers]
(None, [0, 1])
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from otel_torch import torch_private
from otel_torch.sources.operations.graph_rows import PackedRow
from otel_torch.statistics.row_layout import MAGNITUDES, MAX, MIN, NONFINITE, ZEROS

# Two sums of the same numbers in another order differ by less: both are in fp64, with a relative
# error of 1e-16 for each doubling of the number of elements.
_SAME_SUM = 1e-9


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tells the memory of a tensor from all other that lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


class Value:
    """The content of a tensor at one time.

    number: in order of first sight. row: its numbers, if they are on the host.
    """

    __slots__ = ("number", "row")

    def __init__(self, number: int, row: PackedRow | None) -> None:
        self.number, self.row = number, row

    def has(self, scalars: Sequence[float] | None) -> bool:
        """Return whether a tensor with these scalar columns may hold this value."""
        if self.row is None or scalars is None:
            return True
        own = self.row.scalars()
        if own[NONFINITE] != scalars[NONFINITE] or own[ZEROS] != scalars[ZEROS]:
            return False
        if own[NONFINITE]:
            return True  # sums and extremes may be NaN
        if own[MIN] != scalars[MIN] or own[MAX] != scalars[MAX]:
            return False
        return abs(own[MAGNITUDES] - scalars[MAGNITUDES]) <= _SAME_SUM * own[MAGNITUDES]


class Look(NamedTuple):
    """What is known of a tensor's content.

    value: what it is known to show. layers: otherwise the values that it is made of, in the order
    in which they were written. is_unset: whether its memory was made without values. is_known:
    whether its memory is.
    """

    value: Value | None
    layers: list[Value]
    is_unset: bool
    is_known: bool

    @property
    def holds_nothing(self) -> bool:
        """Whether nothing has been written to it yet."""
        return self.is_unset and self.value is None and not self.layers


class _Sight:
    __slots__ = ("time", "value")

    def __init__(self, value: Value, time: int) -> None:
        self.value, self.time = value, time


class _Span(NamedTuple):
    """The bytes that a tensor covers: all from low to high, or the first ones of each period."""

    low: int
    high: int
    period: int = 0
    width: int = 0

    def overlaps(self, other: _Span) -> bool:
        """Return whether both may cover the same byte; columns of a matrix lie side by side.

        >>> queries, values = _Span(0, 60, 20, 8), _Span(12, 80, 20, 8)
        >>> queries.overlaps(values), queries.overlaps(_Span(4, 80, 20, 8))
        (False, True)
        """
        if self.high <= other.low or other.high <= self.low:
            return False
        if not self.period or self.period != other.period:
            return True
        ahead = (other.low - self.low) % self.period
        return ahead < self.width or self.period - ahead < other.width


class _Layer(NamedTuple):
    value: Value
    span: _Span
    time: int


class _Memory:
    """One storage, or one tensor that has none.

    life: a weak reference, whose callback drops this at once. (Kept until later, what is left of a
    storage holds its place between the program's tensors: their memory is then not used again.)
    changes: how often torch has counted a change in place, at the last sight. pending: changes
    that were seen since and that torch counts once they have returned.
    """

    __slots__ = ("changes", "is_unset", "layers", "life", "pending", "sights", "written")

    def __init__(self, life: Any) -> None:
        self.life = life
        self.layers: list[_Layer] = []
        self.sights: dict[Any, _Sight] = {}
        self.written = 0  # time of the last layer
        self.is_unset = False
        self.changes: int | None = None
        self.pending = 0


class _Place(NamedTuple):
    memory: _Memory
    geometry: Any
    span: _Span
    is_dense: bool


class ProgramValues:
    """The values of a process. Keeps no tensor and no memory alive."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._time = 0

    def forget(self) -> None:
        """Forget all values: operations ran that were not seen."""
        self._memories.clear()

    def look(self, tensor: torch.Tensor) -> Look:
        """Return what a tensor shows now, as far as operations have shown it."""
        memory, geometry, span, _ = self._place(tensor)
        sight = memory.sights.get(geometry)
        since = -1 if sight is None else sight.time
        if sight is not None and memory.written <= since:
            return Look(sight.value, [], False, True)
        newer = [
            layer.value
            for layer in memory.layers
            if layer.time > since and layer.span.overlaps(span)
        ]
        if sight is not None:
            if not newer:
                return Look(sight.value, [], False, True)
            newer.insert(0, sight.value)
        is_known = bool(memory.layers or memory.sights or memory.is_unset)
        return Look(None, newer, memory.is_unset, is_known)

    def see(self, tensor: torch.Tensor, value: Value) -> None:
        """Note that a tensor shows a value that others have written."""
        memory, geometry, *_ = self._place(tensor)
        memory.sights[geometry] = _Sight(value, self._time)

    def write(self, tensor: torch.Tensor, value: Value) -> None:
        """Note that a tensor's memory has got a new value."""
        memory, geometry, span, is_dense = self._place(tensor)
        self._time += 1
        memory.written = self._time
        memory.pending += 1
        if is_dense:  # what is covered shows nowhere any more
            memory.layers = [
                layer
                for layer in memory.layers
                if layer.span.low < span.low or span.high < layer.span.high
            ]
        memory.layers.append(_Layer(value, span, self._time))
        memory.sights[geometry] = _Sight(value, self._time)

    def leave_unset(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's memory is new and has no values."""
        memory = self._place(tensor).memory
        memory.layers, memory.sights, memory.is_unset = [], {}, True

    def was_changed_unseen(self, tensor: torch.Tensor) -> bool:
        """Return whether torch counts more changes of a tensor than were seen, and take them over.

        A program's `.data` has a counter of its own, which begins at 0.
        """
        memory = self._place(tensor).memory
        try:
            count = torch_private.version_of(tensor)
        except RuntimeError:
            count = None
        if count is None:
            return False
        before, memory.changes = memory.changes, max(count, memory.changes or 0)
        pending, memory.pending = memory.pending, 0
        return before is not None and count > before + pending

    def _place(self, tensor: torch.Tensor) -> _Place:
        try:
            storage = tensor.untyped_storage()
            key, offset, size = storage._cdata, int(tensor.storage_offset()), tensor.itemsize
            numel, stride = int(tensor.numel()), tensor.stride()
            shape = tensor.shape
            geometry = (
                offset, tuple(shape), stride, tensor.dtype, tensor.is_conj(), tensor.is_neg(),
            )  # fmt: skip
        except (RuntimeError, NotImplementedError):  # sparse, nested, opaque
            return _Place(self._of_object(tensor), None, _Span(0, 1), True)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._add(key, storage)
        low = offset * size
        if tensor.is_contiguous():
            return _Place(memory, geometry, _Span(low, low + numel * size), numel > 0)
        if not numel:
            return _Place(memory, geometry, _Span(low, low), False)
        last = sum((int(count) - 1) * int(step) for count, step in zip(shape, stride, strict=True))
        high = low + (last + 1) * size
        period, width = (length * size for length in _columns(shape, stride))
        span = _Span(low, high, period, width)
        return _Place(memory, geometry, span, high - low == numel * size)

    def _of_object(self, tensor: torch.Tensor) -> _Memory:
        memory = self._memories.get(id(tensor))
        return self._add(id(tensor), tensor) if memory is None else memory

    def _add(self, key: int, owner: Any) -> _Memory:
        memories = self._memories
        life = weakref.ref(owner, lambda life: memories.pop(key, None))
        memory = memories[key] = _Memory(life)
        return memory


def _columns(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int]:
    """Return after how many elements a tensor's next row begins, and how many of these it has; 0, 0
    for one that is laid out otherwise.

    >>> _columns((3, 2, 4), (20, 4, 1)), _columns((4, 3), (1, 20)), _columns((2, 3, 4), (99, 20, 1))
    ((20, 8), (0, 0), (0, 0))
    """
    width, dims = 1, list(zip(shape, stride, strict=True))
    while dims and dims[-1][1] == width:
        width *= dims.pop()[0]
    if not dims or width == 1:
        return 0, 0
    period = dims[-1][1]
    step = period
    for count, own in reversed(dims):
        if own != step:
            return 0, 0
        step *= count
    return (period, width) if width < period else (0, 0)
