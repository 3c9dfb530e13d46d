"""The scalar columns by torch's operators: any device, any dtype, no compiler.

Used where the compiled kernels cannot read a tensor, and as their reference in tests. The tensor is
widened to fp64 piece by piece, so that no fp64 copy of all of it is made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from otel_torch.statistics.row_layout import SCALARS

# how the columns of several pieces are combined; the others are added
_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {"min": torch.amin, "max": torch.amax}

# elements of a piece. On a CPU its fp64 copy stays in a core's cache, 2 MB per pair of threads; on
# a device it is 64 MB, which keeps the device busy
_PIECE_PER_THREAD, _PIECE_CPU_MIN, _PIECE_CPU_MAX, _PIECE_DEVICE = 2**17, 2**18, 2**21, 2**23

# from this size on, extremes are faster in the tensor's own type, if that has vectorized ones
_NATIVE_EXTREMES_MIN = 2**15
_NATIVE_EXTREMES = frozenset({torch.float32, torch.float16, torch.bfloat16})

_local = threading.local()


def reduce_scalars(values: Tensor, columns: Sequence[str]) -> Tensor:
    """Compute the scalar columns of a row.

    Args:
        values: strided, at least one element.
        columns: those of `SCALARS` to compute.

    Returns:
        shape (7,), float64 (float32 on devices without it), on the device of `values`; NaN for
        columns that were not requested.

    >>> reduce_scalars(torch.tensor([1.0, -2.0]), ["min", "max", "sum"]).tolist()
    [-2.0, 1.0, -1.0, nan, nan, nan, nan]
    """
    if not columns:
        dtype = widest(values.device)
        return torch.full((len(SCALARS),), math.nan, dtype=dtype, device=values.device)
    pieces = [_reduce_piece(piece, columns) for piece in split(values)]
    if len(pieces) == 1:
        return torch.stack(pieces[0])
    by_column = zip(SCALARS, zip(*pieces, strict=True), strict=True)
    return torch.stack(
        [_COMBINE.get(name, torch.sum)(torch.stack(parts)) for name, parts in by_column]
    )


def split(values: Tensor, limit: int | None = None) -> Sequence[Tensor]:
    """Split a tensor into views that together hold each element once.

    Pieces of dense memory are flat, in the order of memory.

    Args:
        limit: elements in a piece at most; by default what suits the device.

    >>> [piece.tolist() for piece in split(torch.tensor([[1, 2], [3, 4]]).t(), 3)]
    [[1, 2, 3], [4]]
    """
    limit = limit or _piece_limit(values)
    if values.numel() <= limit:
        return [values]
    strides = values.stride()
    values = values.permute(sorted(range(values.dim()), key=lambda dim: -strides[dim]))
    if values.is_contiguous():
        return torch.split(values.view(-1), limit)
    row_numel = values[0].numel()
    if row_numel > limit:
        return [piece for row in values.unbind(0) for piece in split(row, limit)]
    return torch.split(values, max(1, limit // row_numel))


def _piece_limit(values: Tensor) -> int:
    if values.is_cpu:
        wanted = max(_PIECE_PER_THREAD * torch.get_num_threads(), _PIECE_CPU_MIN)
        return min(wanted, _PIECE_CPU_MAX)
    return _PIECE_DEVICE


def _reduce_piece(piece: Tensor, columns: Sequence[str]) -> list[Tensor]:
    """Compute a piece's scalar columns, NaN for those not requested."""
    wide = _widen(piece)
    numbers: dict[str, Tensor] = {}
    if "min" in columns or "max" in columns:
        numbers["min"], numbers["max"] = _extremes(piece, wide)
    if "sum" in columns:
        numbers["sum"] = wide.sum()
    numbers |= _reduce_on_cpu(wide, columns) if wide.is_cpu else _reduce_on_device(wide, columns)
    if len(numbers) < len(SCALARS):
        nan = torch.full_like(next(iter(numbers.values())), math.nan)
        return [numbers.get(name, nan) for name in SCALARS]
    return [numbers[name] for name in SCALARS]


def _extremes(piece: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    use_own_type = (
        piece.numel() > _NATIVE_EXTREMES_MIN
        and piece.dtype in _NATIVE_EXTREMES
        and piece.is_contiguous()
    )
    if not use_own_type:
        low, high = torch.aminmax(wide)
        return low, high
    low, high = torch.aminmax(piece)
    return low.to(wide.dtype), high.to(wide.dtype)


def _reduce_on_cpu(wide: Tensor, columns: Sequence[str]) -> dict[str, Tensor]:
    """Compute all columns but extremes and sum. Overwrites `wide`."""
    numbers: dict[str, Tensor] = {}
    if "squares" in columns:
        numbers["squares"] = torch.dot(wide, wide)
    if "zeros" in columns:
        numbers["zeros"] = (wide.numel() - torch.count_nonzero(wide)).to(wide.dtype)
    if "magnitudes" in columns or "nonfinite" in columns:
        numbers["magnitudes"] = wide.abs_().sum()
        # if the sum of magnitudes is finite, so is every element
        total: Any = numbers["magnitudes"].tolist()
        if math.isfinite(total):
            numbers["nonfinite"] = torch.zeros_like(numbers["magnitudes"])
        elif "nonfinite" in columns:
            numbers["nonfinite"] = wide.numel() - wide.lt_(math.inf).sum()
    return numbers


def _reduce_on_device(wide: Tensor, columns: Sequence[str]) -> dict[str, Tensor]:
    """Compute all columns but extremes and sum. Overwrites `wide`.

    Norms take one launch each, and launches are most of the cost of a small tensor. BLAS is avoided
    because it creates a handle and raises in deterministic mode.
    """
    numbers: dict[str, Tensor] = {}
    norm = torch.linalg.vector_norm
    if "squares" in columns:
        numbers["squares"] = norm(wide).square()
    if "zeros" in columns:
        numbers["zeros"] = wide.numel() - norm(wide, 0)
    if "magnitudes" in columns:
        numbers["magnitudes"] = norm(wide, 1)
    if "nonfinite" in columns:
        # x - x is 0 if x is finite, else NaN, which the 0-norm counts
        numbers["nonfinite"] = norm(wide.sub_(wide), 0)
    return numbers


def widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _widen(piece: Tensor) -> Tensor:
    """Copy a piece flat and in fp64 (fp32 on MPS); for complex numbers their magnitudes.

    On a CPU the copy is valid until the thread's next call.
    """
    if piece.is_quantized:
        piece = piece.dequantize()
    if piece.is_complex():
        return piece.to(torch.complex128).abs().flatten()
    if not piece.is_cpu:
        dtype = widest(piece.device)
        return piece.to(dtype, copy=True, memory_format=torch.contiguous_format).view(-1)
    # one buffer per thread: the page faults of a new one cost more than the arithmetic
    scratch = getattr(_local, "scratch", None)
    if scratch is None or scratch.numel() < piece.numel():
        size = max(_PIECE_CPU_MIN, piece.numel())
        scratch = _local.scratch = torch.empty(size, dtype=torch.float64, device="cpu")
    flat: Tensor = scratch.narrow(0, 0, piece.numel())
    (flat if piece.dim() == 1 else flat.view(piece.shape)).copy_(piece)
    return flat
