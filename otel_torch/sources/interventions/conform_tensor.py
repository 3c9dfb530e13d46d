"""Converts a tensor of the reference to the shape, axes, type and device of the port's."""

from __future__ import annotations

import itertools

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
    if reference.shape != port.shape:
        if have_same_order(reference.shape, port.shape):
            reference = reference.reshape(port.shape)
        else:
            reference = _permuted(reference, port)
    return reference.contiguous() if port.is_contiguous() else reference


def _permuted(reference: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return `reference` with the order of axes that brings it closest to `port`."""
    if sorted(reference.shape) != sorted(port.shape) or reference.dim() > _MAX_AXES:
        raise CannotConform("shape")
    orders = [
        order
        for order in itertools.permutations(range(reference.dim()))
        if reference.permute(order).shape == port.shape
    ]
    port_fp32, reference_fp32 = port.to(torch.float32), reference.to(torch.float32)
    distances = [float((reference_fp32.permute(order) - port_fp32).norm()) for order in orders]
    best = min(range(len(orders)), key=distances.__getitem__)
    if distances[best] > _MAX_DISTANCE * float(port_fp32.norm()):
        raise CannotConform("shape")
    return reference.permute(orders[best])
