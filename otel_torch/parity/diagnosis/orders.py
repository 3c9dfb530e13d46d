"""Causes that keep all numbers and change their order: transposed, exchanged, interleaved.

Which order it is shows only in whole tensors. Each axis is searched with random projections: one
number for each index of the axis, equal for equal slices, says which slice went where.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.breakdown import axis_names, plural
from otel_torch.parity.diagnosis.clues import Clues
from otel_torch.parity.finding import Cause
from otel_torch.parity.values import statistics_error

Array = NDArray[Any]
Indices = NDArray[np.int64]

# how far off an element may be and still count as moved (relative to the root mean square); two
# samples of one distribution differ by more, even sorted
_SAME = 1e-5
_MOST_PARTS = 128


def reordered(clues: Clues) -> Cause | None:
    """The port's tensor holds the reference's numbers in another order."""
    if clues.elements is None:
        return _reordered_weight(clues)
    reference, port = clues.elements
    is_loaded = clues.weight is not None and clues.reference.dtype == clues.port.dtype
    limit = (_SAME if is_loaded else max(_SAME, 3 * clues.limit)) * _rms(reference)
    if np.iscomplexobj(reference) or not _has_same_numbers(reference, port, limit):
        return None
    for kind, text in _orders(reference, port, limit, clues.weight is not None):
        return Cause(kind, True, f"{clues.subject} is the reference's {text}")
    # sorted, two tensors of many numbers are always close
    is_exact = _has_same_numbers(reference, port, _SAME * _rms(reference))
    return _in_another_order(clues) if is_exact else None


def _reordered_weight(clues: Clues) -> Cause | None:
    """Say what is known of a weight whose elements were not kept."""
    reference, port = clues.reference, clues.port
    if clues.weight is None or reference.numel != port.numel or not reference.row:
        return None
    error = statistics_error(reference.row, port.row, reference.numel)
    if error is None or error > max(clues.limit, 1e-6) or reference.extremes != port.extremes:
        return None
    return _in_another_order(clues)


def _in_another_order(clues: Clues) -> Cause:
    text = f"{clues.subject} holds the reference's numbers in another order"
    return Cause("reordered", True, text)


def _orders(
    reference: Array, port: Array, limit: float, is_weight: bool
) -> Iterator[tuple[str, str]]:
    """Yield (kind, description) of each order that turns the reference's tensor into the port's."""
    axes = [plural(name) for name in axis_names(reference.ndim, is_weight)]
    for first, second in itertools.combinations(range(reference.ndim), 2):
        moved = np.swapaxes(reference, first, second).reshape(reference.shape)
        if _is_same(moved, port, limit):
            if reference.ndim == 2 and is_weight:
                yield "transposed", "transposed"
            else:
                yield (
                    "transposed",
                    f"with {axes[first]} and {axes[second]} laid out in swapped order",
                )
    for axis, name in enumerate(axes):
        order = axis_order(reference, port, axis, limit)
        if order is not None:
            kind = {"rows": "rows_permuted", "columns": "columns_permuted"}.get(name, "permuted")
            yield kind, f"with its {name} in another order: {describe_order(order)}"
    yield from _split_orders(reference, port, limit, axes)


def _split_orders(
    reference: Array, port: Array, limit: float, names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield orders in which parts of the last axis, such as heads, change places with an axis."""
    if reference.ndim < 2:
        return
    *outer, size = reference.shape
    for parts in (p for p in range(2, min(size, _MOST_PARTS)) if size % p == 0):
        split = reference.reshape(*outer, parts, size // parts)
        for axis in range(len(outer)):
            if outer[axis] > 1 and _is_same(
                np.swapaxes(split, axis, -2).reshape(reference.shape), port, limit
            ):
                yield (
                    "transposed",
                    f"with {names[axis]} and {parts} parts of its {names[-1]} (heads) laid out in "
                    "swapped order",
                )


def axis_order(reference: Array, port: Array, axis: int, limit: float) -> Indices | None:
    """Return which index of the reference each index of the port holds, or None.

    >>> x = np.arange(12.0).reshape(3, 4) ** 2
    >>> axis_order(x, x[:, [1, 0, 2, 3]], 1, 1e-6)
    array([1, 0, 2, 3])
    """
    size = reference.shape[axis]
    if size < 2:
        return None
    slices = np.moveaxis(reference, axis, 0).reshape(size, -1)
    port_slices = np.moveaxis(port, axis, 0).reshape(size, -1)
    weights = np.random.default_rng(0).standard_normal(slices.shape[1])
    order = np.empty(size, dtype=np.int64)
    order[np.argsort(port_slices @ weights, kind="stable")] = np.argsort(
        slices @ weights, kind="stable"
    )
    if (order == np.arange(size)).all() or not _is_same(slices[order], port_slices, limit):
        return None
    return order


def describe_order(order: Indices) -> str:
    """Return an order in words.

    >>> describe_order(np.array([2, 3, 0, 1])), describe_order(np.array([3, 2, 1, 0]))
    ('halves exchanged', 'reversed')
    >>> describe_order(np.array([0, 2, 1, 3]))
    '1 and 2 exchanged'
    >>> describe_order(np.array([0, 2, 4, 1, 3, 5]))
    'interleaved pairs written as halves'
    >>> describe_order(np.array([4, 5, 2, 3, 0, 1]))
    'permuted in 3 parts of 2'
    """
    size = len(order)
    index = np.arange(size)
    moved = np.flatnonzero(order != index)
    if size % 2 == 0 and size > 2 and (order == np.roll(index, size // 2)).all():
        return "halves exchanged"
    if (order == index[::-1]).all() and size > 2:
        return "reversed"
    if len(moved) == 2:
        return f"{moved[0]} and {moved[1]} exchanged"
    shift = int(-order[0]) % size
    if (order == np.roll(index, shift)).all():
        return f"shifted by {shift if shift <= size // 2 else shift - size}"
    for part in (p for p in range(size, 3, -1) if size % p == 0 and p % 2 == 0):
        blocks = index.reshape(-1, part)
        scope = "" if part == size else f" within each {part} (rotary layout)"
        to_halves = np.concatenate([blocks[:, ::2], blocks[:, 1::2]], axis=1).ravel()
        if (order == to_halves).all():
            return f"interleaved pairs written as halves{scope}"
        if (order == np.argsort(to_halves)).all():
            return f"halves written as interleaved pairs{scope}"
    for parts in (p for p in range(2, size) if size % p == 0):
        blocks = order.reshape(parts, -1)
        if (blocks % blocks.shape[1] == index[: blocks.shape[1]]).all():
            return f"permuted in {parts} parts of {size // parts}"
        if (order == index.reshape(parts, -1).T.ravel()).all():
            return f"regrouped: {parts} groups of {size // parts} written index by index"
    return "permuted"


def _has_same_numbers(reference: Array, port: Array, limit: float) -> bool:
    return _is_same(np.sort(reference, axis=None), np.sort(port, axis=None), limit)


def _is_same(reference: Array, port: Array, limit: float) -> bool:
    return bool(np.abs(reference - port).max(initial=0.0) <= limit)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.abs(array) ** 2))) or 1.0
