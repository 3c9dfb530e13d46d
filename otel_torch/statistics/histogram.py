"""How large the numbers of a tensor are: counts by power of two, which show what underflows and what outliers there are.

A mean and an extreme do not tell whether half of a tensor has vanished in its type, or whether one channel is a thousand
times larger than the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 64
# bin 0: zeros; 1: below 2^-40; 2 to 61: from 2^(bin - 42) to below twice that; 62: from 2^20 on; 63: not finite
_SMALLEST = -40
_FIRST, _LAST, _NOT_FINITE = 1, 62, 63
# a device counts in so many rows at once, for its threads would wait for each other at 64 places
_ROWS = 1024


def histogram(values: Tensor) -> Tensor:
    """How many of `values` have a magnitude in each bin: shape (64,), float64 (float32 where a device lacks it), on their
    device, without waiting for it.

    values: strided, of any shape and dtype; complex numbers count by their magnitudes.
    """
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    values = values.dequantize() if values.is_quantized else values
    magnitudes = (values.to(torch.complex128) if values.is_complex() else values.to(wide)).abs().reshape(-1)
    # a magnitude is m * 2^e with m from 1/2 to below 1
    index = torch.frexp(magnitudes).exponent.add_(_FIRST - _SMALLEST).clamp_(_FIRST, _LAST)
    index = index.masked_fill_(magnitudes == 0, 0).masked_fill_(~magnitudes.isfinite(), _NOT_FINITE).to(torch.int64)
    if values.is_cpu:
        return torch.bincount(index, minlength=BINS).to(wide)
    rows = torch.arange(index.numel(), device=index.device).remainder_(_ROWS)
    counts = torch.zeros(_ROWS * BINS, dtype=wide, device=index.device)
    return counts.index_add_(0, rows.mul_(BINS).add_(index), torch.ones_like(index, dtype=wide)).view(_ROWS, BINS).sum(0)
