"""A tensor of one program in the form that another has it in: another shape of the same numbers, or
other axes.
"""

from __future__ import annotations

import itertools
import math

import torch

# a permutation of axes is believed where it brings a tensor this much closer (relative L2) than any
# other thing would be
_LIKE = 0.5
_MOST_AXES = 5


class Stays(Exception):
    """A tensor cannot be put right; the message is one of the reasons."""


def fitted(right: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`right` with the shape, type and device of `own`. Raises Stays where it is another thing."""
    if (
        right.is_floating_point() != own.is_floating_point()
        or right.is_complex() != own.is_complex()
    ):
        raise Stays("dtype")
    right = right.to(device=own.device, dtype=own.dtype)
    if right.shape != own.shape:
        if _flattens_alike(right.shape, own.shape):
            right = right.reshape(own.shape)
        else:
            right = _permuted(right, own)
    return right.contiguous() if own.is_contiguous() else right


def _flattens_alike(one: torch.Size, other: torch.Size) -> bool:
    """Whether one shape is the other with neighbouring axes put together, so that the order of the
    numbers is the same.

    >>> _flattens_alike(torch.Size([2, 6, 8]), torch.Size([1, 2, 48]))
    True
    >>> _flattens_alike(torch.Size([2, 6, 8]), torch.Size([6, 2, 8]))
    False
    """
    borders = [
        set(itertools.accumulate((size for size in shape if size != 1), lambda a, b: a * b))
        for shape in (one, other)
    ]
    return math.prod(one) == math.prod(other) and (
        borders[0] <= borders[1] or borders[1] <= borders[0]
    )


def _permuted(right: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The reference's tensor with its axes in the port's order, which the port's own numbers tell."""
    if sorted(right.shape) != sorted(own.shape) or right.dim() > _MOST_AXES:
        raise Stays("shape")
    orders = [
        order
        for order in itertools.permutations(range(right.dim()))
        if right.permute(order).shape == own.shape
    ]
    wide = own.to(torch.float32)
    errors = [float((right.permute(order).to(torch.float32) - wide).norm()) for order in orders]
    best = min(range(len(orders)), key=errors.__getitem__)
    if errors[best] > _LIKE * float(wide.norm()):
        raise Stays("shape")
    return right.permute(orders[best])
