"""How large the numbers of a tensor are: counts by power of two, which show what underflows and
what outliers there are.

A mean and an extreme do not tell whether half of a tensor has vanished in its type, or whether one
channel is a thousand times larger than the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

# bin 0: zeros; 1: below 2^-40; 2 to 61: from 2^(bin - 42) to below twice that; 62: from 2^20 on;
# 63: not finite
BINS = 64
_SMALLEST, _LARGEST = -40, 20

# of a floating-point number: its bits as a whole number, where the exponent begins in them, and
# what is added to it
_LAYOUT = {torch.float64: (torch.int64, 52, 1023), torch.float32: (torch.int32, 23, 127)}
# a device counts in so many rows at once, for its threads would wait for each other at one
_ROWS = 64


def histogram(values: Tensor) -> Tensor:
    """How many of `values` have a magnitude in each bin: shape (64,), float64 (float32 where a
    device lacks it), on their device, without waiting for it.

    values: strided, of any shape and dtype; complex numbers count by their magnitudes.
    """
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    values = values.dequantize() if values.is_quantized else values
    numbers = (
        values.to(torch.complex128).abs() if values.is_complex() else values.to(wide)
    ).reshape(-1)
    bits, shift, bias = _LAYOUT[wide]
    exponents = (numbers.view(bits) >> shift).bitwise_and_(2 * bias + 1)
    counts = _count(exponents, 2 * bias + 2).to(wide)
    zeros = numbers.numel() - torch.count_nonzero(numbers)
    first, last = bias + _SMALLEST, bias + _LARGEST
    ends = [zeros, counts[:first].sum() - zeros], [counts[last:-1].sum(), counts[-1]]
    return torch.cat(
        (torch.stack([end.to(wide) for end in ends[0]]), counts[first:last], torch.stack(ends[1]))
    )


def _count(numbers: Tensor, size: int) -> Tensor:
    """How often each whole number below `size` comes."""
    if numbers.is_cpu:
        return torch.bincount(numbers, minlength=size)
    rows = torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device).remainder_(
        _ROWS
    )
    counts = torch.zeros(_ROWS * size, dtype=torch.int32, device=numbers.device)
    return (
        counts.index_add_(
            0, rows.mul_(size).add_(numbers), torch.ones_like(numbers, dtype=torch.int32)
        )
        .view(_ROWS, size)
        .sum(0)
    )
