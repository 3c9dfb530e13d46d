"""A hash of all bits of a tensor: two runs are compared bit by bit without keeping the tensors.

    hash(x) = sum over blocks of multiplier(block) * sum over i of bits(x[i]) * multiplier(i)

modulo 2^64. `bits` is the element's memory as an integer, `i` its position in a block of 2^18
elements, and each multiplier is odd. A sum of integers is the same in any order, so every device
and thread count gets the same hash, and one changed element always changes it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from otel_torch.statistics.reduce import widest
from otel_torch.statistics.row_layout import HASH_BITS, HASH_PARTS

_BLOCK = 2**18  # elements, so that the temporary integers stay in a cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# of splitmix64, as signed integers: https://prng.di.unimi.it/splitmix64.c
STRIDE = 0x9E3779B97F4A7C15 - 2**64
MIX = 0xBF58476D1CE4E5B9 - 2**64


def bit_hash(values: Tensor) -> Tensor:
    """Return the hash of a strided tensor of any dtype, without waiting for its device.

    Returns:
        shape (3,), float64 (float32 on devices without it): 22 bits each, the lowest first.

    >>> bool((bit_hash(torch.tensor([0.0])) == bit_hash(torch.tensor([-0.0]))).all())
    False
    """
    if values.is_quantized:
        values = values.int_repr()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.resolve_neg().reshape(-1)
    multipliers = _multipliers(values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for block, start in enumerate(range(0, values.numel(), _BLOCK)):
        part = values[start : start + _BLOCK].contiguous()
        bits = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
        total = total + (bits * multipliers[: len(bits)]).sum() * (2 * block + 1)
    return torch.stack(split_into_parts(total)).to(widest(values.device))


def split_into_parts(numbers: Tensor) -> list[Tensor]:
    """Split integers of 64 bits into 3 parts of 22 bits, the lowest first."""
    mask = 2**HASH_BITS - 1
    return [(numbers >> HASH_BITS * index) & mask for index in range(HASH_PARTS)]


@functools.lru_cache
def _multipliers(device: torch.device) -> Tensor:
    """Return an odd multiplier for each position of a block."""
    mixed = torch.arange(1, _BLOCK + 1, device=device) * STRIDE
    mixed = (mixed ^ (mixed >> 30)) * MIX
    return (mixed ^ (mixed >> 27)) | 1
