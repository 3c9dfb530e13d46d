"""A short linear fingerprint of a tensor: the distance of two sketches estimates the distance of
the two tensors.

Statistics do not see order: halves exchanged, heads transposed, tokens permuted leave all of them
as they were. A sketch does, at 64 numbers a tensor and without keeping it. It is a random
projection (Johnson and Lindenstrauss; the folding is Charikar's count sketch), linear and indexed
by flat position, so that shards and sums add up and views agree.
"""

from __future__ import annotations

import functools
import hashlib
import math
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otel_torch.statistics.frequencies import FREQUENCIES, TURNS
from otel_torch.torch_private import unobserved

# numbers in a sketch; the estimate of a distance then has a standard deviation of 9 %
SIZE = 64

# Elements are folded into this many sums, which a dense matrix of signs projects. A prime: what
# repeats with a tensor's rows (a bias that is missing, one wrong channel) then spreads over all
# sums and does not add up in one of them.
FOLD = 1021
_ROWS = 128
PIECE = FOLD * _ROWS
# a device is given many pieces at once (64 MB of fp64), for each operator that it is told to run
# takes the host's time; their turns are read from a table of so many, which lies there: to send it
# numbers would make the program wait
_PIECES_AT_ONCE, _TURNS = 64, 2**14


def sketch(values: Tensor, start: int = 0) -> Tensor:
    """The sketch of `values`: shape (64,), float64 (float32 where a device lacks it), on their
    device.

    values: strided, of any shape and dtype; complex numbers count as pairs. Elements are indexed by
    flat position in logical order, the first one by `start` (in elements), so that sketches of the
    parts of a tensor add up to that of the whole. Signs are the same on every device; a value that
    is not finite makes all numbers non-finite.
    """
    dtype = _dtype(values.device)
    folded = torch.zeros(FOLD, dtype=dtype, device=values.device)
    for number, offset, piece in _pieces(values, start):
        signs, wide = _signs(values.device, dtype), piece.to(dtype)
        if piece.numel() > PIECE:
            columns = (wide.view(-1, _ROWS, FOLD) * signs.view(_ROWS, FOLD)).sum(1)
            folded += _turned(columns, number)
            continue
        product = wide * signs[offset : offset + piece.numel()]
        # each piece is folded with a shift and a sign of its own, so that pieces that are alike do
        # not add up either
        places, sign = shift(number)
        _fold(folded, product, offset + places, sign)
    projection = _projection(values.device, dtype)
    # elsewhere no BLAS: it would make a handle, and refuse to run in deterministic mode
    return torch.mv(projection, folded) if values.is_cpu else (projection * folded).sum(1)


def row_sketch(values: Tensor, start: int = 0) -> Tensor:
    """32 complex sums over the rows r of a parameter, of w_j^(start + r) times the signed sum of
    row r, as 64 numbers.

    values: strided; a row is what one index of its first dimension holds, so that 1-D values have
    rows of one element. The row sketch of `cat((q, k, v))` follows from those of the parts, each
    turned by w_j^(rows before it): it tells which parts a fused weight has, and in which order.
    Shape (64,), real parts before imaginary ones, otherwise as `sketch`.
    """
    dtype = _dtype(values.device)
    rows = _real(values if values.dim() else values[None])
    rows = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    signs = _signs(values.device, dtype)
    width = rows.shape[1]
    if width > signs.numel():
        signs = signs.repeat(-(-width // signs.numel()))
    turns = torch.tensor(TURNS, dtype=dtype, device=values.device)
    total = torch.zeros(2, FREQUENCIES, dtype=dtype, device=values.device)
    step = max(1, PIECE * _at_once(values) // max(width, 1))
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step].to(dtype)
        sums = (part * signs[:width]).sum(1)
        # the phase of a far row, exact: whole turns are taken off before the angle is taken
        index = torch.arange(
            start + first, start + first + part.shape[0], dtype=dtype, device=values.device
        )
        phase = torch.frac(index[:, None] * turns) * math.tau
        total += torch.stack(
            ((phase.cos() * sums[:, None]).sum(0), (phase.sin() * sums[:, None]).sum(0))
        )
    return total.flatten()


def encode(numbers: Sequence[float]) -> str:
    """A sketch as a recording carries it: base64 of little-endian float32.

    >>> encode([1.0, 0.0])
    'AACAPwAAAAA='
    """
    floats = array("f", numbers)
    if array("H", [1]).tobytes() != b"\x01\x00":
        floats.byteswap()
    return b64encode(floats.tobytes()).decode()


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _real(values: Tensor) -> Tensor:
    values = values.dequantize() if values.is_quantized else values
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _at_once(values: Tensor) -> int:
    return 1 if values.is_cpu else _PIECES_AT_ONCE


def _pieces(values: Tensor, start: int) -> Iterator[tuple[int, int, Tensor]]:
    """(number of the piece, offset in it, elements) of flat positions `start` and on; of a device
    also several whole pieces at once.
    """
    flat = _real(values).reshape(-1)  # a copy where memory has another order
    start, done = 2 * start if values.is_complex() else start, 0
    while done < flat.numel():
        number, offset = divmod(start + done, PIECE)
        whole = (
            0 if offset else min((flat.numel() - done) // PIECE, _at_once(flat), _TURNS - number)
        )
        length = whole * PIECE if whole > 1 else min(PIECE - offset, flat.numel() - done)
        yield number, offset, flat[done : done + length]
        done += length


def _fold(folded: Tensor, product: Tensor, position: int, sign: float) -> None:
    """Add element i of `product` to `folded[(position + i) % FOLD]`, in place."""
    while product.numel():
        column = position % FOLD
        if column or product.numel() < FOLD:  # up to the end of a row
            length = min(FOLD - column, product.numel())
            folded[column : column + length].add_(product[:length], alpha=sign)
        else:
            length = product.numel() // FOLD * FOLD
            folded.add_(product[:length].view(-1, FOLD).sum(0), alpha=sign)
        product, position = product[length:], position + length


def _turned(columns: Tensor, number: int) -> Tensor:
    """The sum of the columns of pieces `number` and on, shape (pieces, FOLD), each shifted and with
    its sign: shape (FOLD,).
    """
    places, signs = _turns(columns.device, columns.dtype)
    first, last = number, number + len(columns)
    column = torch.arange(FOLD, device=columns.device) - places[first:last, None]
    return (columns.gather(1, column.remainder_(FOLD)) * signs[first:last, None]).sum(0)


# -- signs: bits of SHAKE-256, which is the same everywhere and for ever; torch's generators are not
# ------------------------


@functools.cache
def bits(purpose: str, count: int) -> bytes:
    """`count` bits, a byte each: a sign is 1 where the bit is set, else -1."""
    stream = hashlib.shake_256(f"otel_torch {purpose}".encode()).digest(-(-count // 8))
    return b"".join(_EIGHT[byte] for byte in stream)[:count]


_EIGHT = [bytes(byte >> place & 1 for place in range(8)) for byte in range(256)]


# what a device has of them is made on the CPU and sent whole: then every stream may read it


@unobserved
def prepare(device: torch.device) -> None:
    """Have all that a device needs lie there, so that no sketch in a forward waits for it; waits
    for the device.
    """
    for table in (_signs, _projection, _turns):
        table(device, _dtype(device))


def _of_bits(purpose: str, count: int, dtype: torch.dtype) -> Tensor:
    return (
        torch.frombuffer(bytearray(bits(purpose, count)), dtype=torch.uint8)
        .to(dtype)
        .mul_(2)
        .sub_(1)
    )


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return _of_bits("signs", PIECE, dtype).to(device)


@functools.cache
def _projection(device: torch.device, dtype: torch.dtype) -> Tensor:
    """(64, FOLD): columns of length 1, so that a sketch is as long as its tensor."""
    return (
        _of_bits("projection", SIZE * FOLD, dtype).view(SIZE, FOLD).div_(math.sqrt(SIZE)).to(device)
    )


@functools.cache
def _turns(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The shifts and the signs of the first pieces."""
    places, signs = zip(*map(shift, range(_TURNS)), strict=True)
    return torch.tensor(places, device="cpu").to(device), torch.tensor(
        signs, dtype=dtype, device="cpu"
    ).to(device)


@functools.lru_cache(_TURNS)
def shift(number: int) -> tuple[int, float]:
    """By how much the positions of a piece are shifted when it is folded, and the sign that it
    takes.
    """
    bits = int.from_bytes(
        hashlib.shake_256(f"otel_torch piece {number}".encode()).digest(8), "little"
    )
    return (bits >> 1) % FOLD, 1.0 if bits & 1 else -1.0
