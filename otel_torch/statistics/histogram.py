"""Counts of a tensor's magnitudes by power of two. They show underflow and outliers.

Means and extremes do not show that half of a tensor underflowed to zero, or that one channel is a
thousand times larger than the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otel_torch.statistics.reduce import widest

# bin 0: zeros; 1: below 2^-40; 2 to 61: from 2^(bin - 42) to below twice that; 62: from 2^20 on;
# 63: NaN and Inf
_SMALLEST, _LARGEST = -40, 20

# by floating-point type: the integer type of its bits, the lowest bit of its exponent, the
# exponent's bias
_LAYOUT = {torch.float64: (torch.int64, 52, 1023), torch.float32: (torch.int32, 23, 127)}
# on a device each bin has this many counters; with one, threads would wait for each other
_COUNTERS = 64


def histogram(values: Tensor) -> Tensor:
    """Count the magnitudes in each bin, without waiting for the device.

    Args:
        values: strided, of any shape and dtype; complex numbers count by their magnitudes.

    Returns:
        shape (64,), float64 (float32 on devices without it), on the device of `values`.

    >>> counts = histogram(torch.tensor([0.0, 1.0, 1.5, -2.0]))
    >>> counts[0].item(), counts[42].item(), counts[43].item()
    (1.0, 2.0, 1.0)
    """
    wide = widest(values.device)
    if values.is_quantized:
        values = values.dequantize()
    numbers = values.to(torch.complex128).abs() if values.is_complex() else values.to(wide)
    numbers = numbers.reshape(-1)
    bits, shift, bias = _LAYOUT[wide]
    exponents = (numbers.view(bits) >> shift).bitwise_and_(2 * bias + 1)
    counts = _count(exponents, 2 * bias + 2).to(wide)
    first, last = bias + _SMALLEST, bias + _LARGEST
    zeros = (numbers.numel() - torch.count_nonzero(numbers)).to(wide)
    tiny = counts[:first].sum() - zeros
    large, nonfinite = counts[last:-1].sum(), counts[-1]
    return torch.cat(
        (torch.stack([zeros, tiny]), counts[first:last], torch.stack([large, nonfinite]))
    )


def _count(numbers: Tensor, size: int) -> Tensor:
    """Count how often each integer below `size` occurs."""
    if numbers.is_cpu:
        return torch.bincount(numbers, minlength=size)
    index = torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device)
    counter = index.remainder_(_COUNTERS).mul_(size).add_(numbers)
    counts = torch.zeros(_COUNTERS * size, dtype=torch.int32, device=numbers.device)
    counts.index_add_(0, counter, torch.ones_like(numbers, dtype=torch.int32))
    return counts.view(_COUNTERS, size).sum(0)
