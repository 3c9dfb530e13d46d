"""Converts a tensor of the reference to the shape, axes, type and device of the port's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from otel_torch.graph.shapes import have_same_order

# a permutation of axes is accepted if the relative L2 distance to the port's tensor is below this;
# between unrelated tensors it would be larger than 1
_MAX_DISTANCE = 0.5
_MAX_AXES = 5


class CannotConform(Exception):
    """A tensor cannot be converted. The message is a key of `isolation.REASONS`."""


def conform(reference: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return `reference` with the shape, dtype and device of `port`.

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
    reference = reference.to(device=port.device, dtype=port.dtype)
    reference = _in_order_of(reference, port)
    return reference.contiguous() if port.is_contiguous() else reference


def _in_order_of(reference: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return `reference` in the shape of `port`, its axes in the order that is nearest if need be.

    Axes of one size look the same in a shape. They are exchanged if only that is near, unless it
    gives the port's numbers: then their order is what is wrong. If no order is near, one axis may
    be elsewhere in the port, such as that of the channels.
    """
    fits = have_same_order(reference.shape, port.shape)
    if fits and (_is_near(reference.reshape(port.shape), port) or not _has_twin_axes(reference)):
        return reference.reshape(port.shape)
    nearest = min(_orders(reference, port), key=lambda own: _distance(own, port), default=None)
    if nearest is not None and _is_near(nearest, port):
        has_its_numbers = fits and _is_near(nearest, port, math.sqrt(torch.finfo(port.dtype).eps))
        if not has_its_numbers:
            return nearest
    if fits:
        return reference.reshape(port.shape)
    moved = _with_an_axis_moved(reference.squeeze(), port)
    if len(moved) != 1:
        raise CannotConform("shape")
    return moved[0]


def _with_an_axis_moved(reference: torch.Tensor, port: torch.Tensor) -> list[torch.Tensor]:
    """Return `reference` with one axis moved, once for each order that has the shape of `port`."""
    axes = range(reference.dim())
    orders = set()
    for axis, place in itertools.permutations(axes, 2):
        order = [other for other in axes if other != axis]
        order.insert(place, axis)
        orders.add(tuple(order))
    moved = [reference.permute(order) for order in sorted(orders)]
    return [own.reshape(port.shape) for own in moved if have_same_order(own.shape, port.shape)]


def _has_twin_axes(tensor: torch.Tensor) -> bool:
    sizes = [size for size in tensor.shape if size > 1]
    return tensor.is_floating_point() and len(set(sizes)) < len(sizes)


def _orders(reference: torch.Tensor, port: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `reference` with its axes in other orders, in the shape of `port`."""
    if reference.dim() > _MAX_AXES:
        return
    for order in itertools.permutations(range(reference.dim())):
        moved = reference.permute(order)
        if have_same_order(moved.shape, port.shape):
            yield moved.reshape(port.shape)


def _is_near(reference: torch.Tensor, port: torch.Tensor, limit: float = _MAX_DISTANCE) -> bool:
    return _distance(reference, port) <= limit * _distance(torch.zeros_like(port), port)


def _distance(reference: torch.Tensor, port: torch.Tensor) -> float:
    dtype = torch.complex64 if port.is_complex() else torch.float32
    return float((reference.to(dtype) - port.to(dtype)).norm())
