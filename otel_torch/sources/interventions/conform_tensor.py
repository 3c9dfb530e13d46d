"""Converts a tensor of the reference to the shape, axes, type and device of the port's."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from otel_torch.graph.shapes import has_twins, have_same_order

# a permutation of axes is accepted if the relative L2 distance to the port's tensor is below this;
# between unrelated tensors it would be larger than 1
_MAX_DISTANCE = 0.5
_MAX_AXES = 5


class CannotConform(Exception):
    """A tensor cannot be converted. The message is a key of `isolation.REASONS`."""


def conform(
    reference: torch.Tensor, port: torch.Tensor, axes: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return `reference` with the shape, dtype and device of `port`.

    Args:
        axes: An axis of `reference` and the same axis of `port`, beside which all others have one
            order; None where that is not known.

    Raises:
        CannotConform: the tensors are of different kinds.

    >>> conform(torch.ones(2, 6, 8), torch.zeros(1, 2, 48)).shape
    torch.Size([1, 2, 48])
    """
    if (
        reference.is_floating_point() != port.is_floating_point()
        or reference.is_complex() != port.is_complex()
    ):
        raise CannotConform("dtype")
    if reference.numel() != port.numel():
        raise CannotConform("shape")
    reference = reference.to(device=port.device, dtype=port.dtype)
    if axes is None:
        reference = _in_order_of(reference, port)
    else:
        own, other = axes
        moved = port.movedim(other, -1).shape
        reference = reference.movedim(own, -1).reshape(moved).movedim(-1, other)
    return reference.contiguous() if port.is_contiguous() else reference


def _in_order_of(reference: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return `reference` in the shape of `port`, its axes in the order that is nearest if need be.

    Axes of one size look the same in a shape. They are exchanged if only that is near, unless it
    gives the port's numbers: then their order is what is wrong. If no order is near, one axis may
    be elsewhere in the port, such as that of the channels.
    """
    fits = have_same_order(reference.shape, port.shape)
    if fits and (_is_near(reference.reshape(port.shape), port) or not _may_be_turned(reference)):
        return reference.reshape(port.shape)
    nearest = min(
        _in_orders(reference, port, _all_orders),
        key=lambda own: _distance(own, port),
        default=None,
    )
    if nearest is not None and _is_near(nearest, port):
        has_its_numbers = fits and _is_near(nearest, port, math.sqrt(torch.finfo(port.dtype).eps))
        if not has_its_numbers:
            return nearest
    if fits:
        return reference.reshape(port.shape)
    moved = list(_in_orders(reference, port, _with_one_axis_moved))
    if len(moved) != 1:
        raise CannotConform("shape")
    return moved[0]


def _may_be_turned(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and has_twins(tensor.shape)


def _all_orders(count: int) -> Iterable[tuple[int, ...]]:
    return itertools.permutations(range(count)) if count <= _MAX_AXES else ()


def _with_one_axis_moved(count: int) -> Iterable[tuple[int, ...]]:
    """Return the orders in which all axes but one keep theirs.

    >>> _with_one_axis_moved(3)
    [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]
    """
    orders = set()
    for axis, place in itertools.permutations(range(count), 2):
        order = [other for other in range(count) if other != axis]
        order.insert(place, axis)
        orders.add(tuple(order))
    return sorted(orders)


def _in_orders(
    reference: torch.Tensor,
    port: torch.Tensor,
    orders: Callable[[int], Iterable[tuple[int, ...]]],
) -> Iterator[torch.Tensor]:
    """Yield `reference` in the shape of `port`, with its axes in other orders.

    Either of them may have neighboring axes merged.
    """
    reference, shape = reference.squeeze(), [size for size in port.shape if size != 1]
    if reference.dim() >= len(shape):
        for order in orders(reference.dim()):
            if _merges_to(reference.shape, order, shape):
                yield reference.permute(order).reshape(port.shape)
        return
    for order in orders(len(shape)):
        if _merges_to(shape, order, reference.shape):
            own = [shape[axis] for axis in order]
            back = sorted(range(len(order)), key=order.__getitem__)
            yield reference.reshape(own).permute(back).reshape(port.shape)


def _merges_to(shape: Sequence[int], order: Sequence[int], merged: Sequence[int]) -> bool:
    """Return whether axes in another order, neighbors merged, have a shape.

    Axes that are merged keep their order.

    >>> _merges_to((2, 3, 4), (0, 2, 1), (8, 3)), _merges_to((2, 3, 4), (2, 0, 1), (8, 3))
    (True, False)
    """
    if not have_same_order([shape[axis] for axis in order], merged):
        return False
    bounds = set(itertools.accumulate(merged, operator.mul))
    count, last = 1, -1
    for axis in order:
        if axis < last:
            return False
        count *= shape[axis]
        last = -1 if count in bounds else axis
    return True


def _is_near(reference: torch.Tensor, port: torch.Tensor, limit: float = _MAX_DISTANCE) -> bool:
    return _distance(reference, port) <= limit * _distance(torch.zeros_like(port), port)


def _distance(reference: torch.Tensor, port: torch.Tensor) -> float:
    dtype = torch.complex64 if port.is_complex() else torch.float32
    return float((reference.to(dtype) - port.to(dtype)).norm())
