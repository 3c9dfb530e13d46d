"""A sketch: 64 numbers whose distances estimate the distances of the tensors.

Other statistics ignore order: swapping halves, transposing heads or permuting tokens changes none
of them. A sketch changes with order. It is a random projection (Johnson and Lindenstrauss 1984)
computed like a count sketch (Charikar, Chen and Farach-Colton 2002):

1. Give each element a random sign, by its flat position.
2. Fold: cut the elements into pieces of 1021 x 128, rotate and negate each piece at random, and add
   elements whose positions are equal modulo 1021. That leaves 1021 sums.
3. Project the sums to 64 numbers with a random matrix of signs, divided by 8.

Each step is linear, so that the sketches of shards add up to the sketch of the whole. The result
depends on flat positions only, so that views of the same order agree.

>>> x = torch.arange(1000.0)
>>> y = x.roll(500)
>>> sketch(x).shape
torch.Size([64])
>>> round(float((x - y).norm())), round(float((sketch(x) - sketch(y)).norm()))
(15811, 14169)
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from otel_torch.statistics.reduce import widest
from otel_torch.statistics.sketch_format import FREQUENCIES, SIZE, TURNS
from otel_torch.torch_private import unobserved

# A prime: what repeats with a tensor's rows (a missing bias, one wrong channel) then spreads over
# all sums instead of adding up in one.
FOLD = 1021
_ROWS = 128
PIECE = FOLD * _ROWS
# On a device many pieces go into one operation (64 MB of fp64), because each launch takes the
# host's time. The shifts of the first pieces are in a table there: sending numbers would make the
# program wait.
_PIECES_AT_ONCE, _SHIFT_TABLE_SIZE = 64, 2**14


def sketch(values: Tensor, start: int = 0) -> Tensor:
    """Compute the sketch of a tensor, without waiting for its device.

    Signs are the same on every device. A NaN or Inf makes all 64 numbers NaN or Inf.

    Args:
        values: strided, of any shape and dtype; complex numbers count as pairs.
        start: flat position of the first element in the whole tensor, in logical order.

    Returns:
        shape (64,), float64 (float32 on devices without it), on the device of `values`.
    """
    dtype = widest(values.device)
    folded = torch.zeros(FOLD, dtype=dtype, device=values.device)
    for piece_index, offset, elements in _pieces(values, start):
        signs, wide = _signs(values.device, dtype), elements.to(dtype)
        if elements.numel() > PIECE:
            columns = (wide.view(-1, _ROWS, FOLD) * signs.view(_ROWS, FOLD)).sum(1)
            folded += _shifted_sum(columns, piece_index)
            continue
        signed = wide * signs[offset : offset + elements.numel()]
        # each piece has its own shift and sign, so that equal pieces do not add up either
        places, sign = shift(piece_index)
        _fold(folded, signed, offset + places, sign)
    projection = _projection(values.device, dtype)
    if values.is_cpu:
        return torch.mv(projection, folded)
    # BLAS would create a handle, and raises in deterministic mode
    return (projection * folded).sum(1)


def row_sketch(values: Tensor, start: int = 0) -> Tensor:
    """Compute the row sketch of a parameter: which parts a fused weight has, and in which order.

    For each of 32 frequencies w it is the sum over rows r of w^(start + r) times the signed sum of
    row r. The row sketch of `cat((q, k, v))` follows from those of the parts, each multiplied by
    w^(number of rows before it).

    Args:
        values: strided; a row is one index of the first dimension, and of a 1-D tensor one element.
        start: number of the first row in the whole tensor.

    Returns:
        as `sketch`: 32 real parts, then 32 imaginary parts.
    """
    dtype = widest(values.device)
    rows = as_real(values if values.dim() else values[None])
    rows = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    signs = _signs(values.device, dtype)
    width = rows.shape[1]
    if width > signs.numel():
        signs = signs.repeat(-(-width // signs.numel()))
    turns = _turns(values.device, dtype)
    total = torch.zeros(2, FREQUENCIES, dtype=dtype, device=values.device)
    step = max(1, PIECE * _at_once(values) // max(width, 1))
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step].to(dtype)
        sums = (part * signs[:width]).sum(1)
        begin = start + first
        index = torch.arange(begin, begin + part.shape[0], dtype=dtype, device=values.device)
        # dropping whole turns before taking the angle keeps the phase of a far row exact
        phase = torch.frac(index[:, None] * turns) * math.tau
        real = (phase.cos() * sums[:, None]).sum(0)
        imaginary = (phase.sin() * sums[:, None]).sum(0)
        total += torch.stack((real, imaginary))
    return total.flatten()


@functools.lru_cache
def _turns(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(TURNS, dtype=dtype).to(device)  # which waits for the device


def as_real(values: Tensor) -> Tensor:
    values = values.dequantize() if values.is_quantized else values
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _at_once(values: Tensor) -> int:
    return 1 if values.is_cpu else _PIECES_AT_ONCE


def _pieces(values: Tensor, start: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (index of the piece, offset in it, elements) from flat position `start` on.

    On a device, several whole pieces may come together.
    """
    flat = as_real(values).reshape(-1)  # copies memory of another order
    position = 2 * start if values.is_complex() else start
    end = position + flat.numel()
    while position < end:
        piece_index, offset = divmod(position, PIECE)
        remaining = end - position
        whole = 0
        if not offset:
            in_table = _SHIFT_TABLE_SIZE - piece_index
            whole = min(remaining // PIECE, _at_once(flat), in_table)
        length = whole * PIECE if whole > 1 else min(PIECE - offset, remaining)
        first = flat.numel() - remaining
        yield piece_index, offset, flat[first : first + length]
        position += length


def _fold(folded: Tensor, signed: Tensor, position: int, sign: float) -> None:
    """Add element i of `signed`, times `sign`, to `folded[(position + i) % FOLD]` in place."""
    while signed.numel():
        column = position % FOLD
        if column or signed.numel() < FOLD:  # part of a row
            length = min(FOLD - column, signed.numel())
            folded[column : column + length].add_(signed[:length], alpha=sign)
        else:  # all whole rows
            length = signed.numel() // FOLD * FOLD
            folded.add_(signed[:length].view(-1, FOLD).sum(0), alpha=sign)
        signed, position = signed[length:], position + length


def _shifted_sum(columns: Tensor, first: int) -> Tensor:
    """Shift and negate the folded pieces `first`, `first + 1`, … as `shift` says, and add them up.

    Shape (pieces, FOLD) becomes (FOLD,).
    """
    places, signs = _shift_table(columns.device, columns.dtype)
    end = first + len(columns)
    source = torch.arange(FOLD, device=columns.device) - places[first:end, None]
    return (columns.gather(1, source.remainder_(FOLD)) * signs[first:end, None]).sum(0)


# Signs are bits of SHAKE-256, which is the same on every machine and in every version; torch's
# generators are not.


@functools.cache
def bits(purpose: str, count: int) -> bytes:
    """Return `count` random bits, one per byte. A sign is 1 where the bit is set, else -1."""
    stream = hashlib.shake_256(f"otel_torch {purpose}".encode()).digest(-(-count // 8))
    return b"".join(_BITS_OF_BYTE[byte] for byte in stream)[:count]


_BITS_OF_BYTE = [bytes(byte >> place & 1 for place in range(8)) for byte in range(256)]


@functools.lru_cache(_SHIFT_TABLE_SIZE)
def shift(piece_index: int) -> tuple[int, float]:
    """Return by how many columns a piece is shifted when it is folded, and its sign."""
    name = f"otel_torch piece {piece_index}".encode()
    word = int.from_bytes(hashlib.shake_256(name).digest(8), "little")
    return (word >> 1) % FOLD, 1.0 if word & 1 else -1.0


# A device's tables are computed on the CPU and sent as a whole, so that any stream may read them.


@unobserved
def prepare_tables(device: torch.device) -> None:
    """Send the tables that sketches need to a device, and wait for it."""
    for table in (_signs, _projection, _shift_table):
        table(device, widest(device))


def sign_tensor(purpose: str, count: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.frombuffer(bytearray(bits(purpose, count)), dtype=torch.uint8)
    return numbers.to(dtype).mul_(2).sub_(1)


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return sign_tensor("signs", PIECE, dtype).to(device)


@functools.cache
def _projection(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the projection, shape (64, FOLD), whose columns have length 1."""
    signs = sign_tensor("projection", SIZE * FOLD, dtype).view(SIZE, FOLD)
    return signs.div_(math.sqrt(SIZE)).to(device)


@functools.cache
def _shift_table(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the shifts and the signs of the first pieces."""
    places, signs = zip(*map(shift, range(_SHIFT_TABLE_SIZE)), strict=True)
    place_tensor = torch.tensor(places, device="cpu")
    sign_tensor = torch.tensor(signs, dtype=dtype, device="cpu")
    return place_tensor.to(device), sign_tensor.to(device)
