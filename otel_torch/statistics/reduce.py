"""A tensor's sums in plain torch: on every device, of every type, without a compiler and without a
full-size fp64 copy.

Where the compiled kernel can read the tensor this is not used; it is what that kernel must agree
with.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from otel_torch.statistics.row_layout import SUMS

# how the columns of several pieces become one; all others add up
_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {"min": torch.amin, "max": torch.amax}

# a piece whose fp64 copy stays in a core's cache, and one that keeps an accelerator busy: 2 MB a
# thread pair, 64 MB
_PIECE_PER_THREAD, _PIECE_CPU_LEAST, _PIECE_CPU_MOST, _PIECE_DEVICE = 2**17, 2**18, 2**21, 2**23

# from here on the extremes are faster in the tensor's own type, where it has vectorised ones
_EXTREMES_IN_OWN_TYPE = 2**15
_FAST_EXTREMES = frozenset({torch.float32, torch.float16, torch.bfloat16})

_local = threading.local()


def sums(values: Tensor, wanted: Sequence[str]) -> Tensor:
    """The numbers of `SUMS`: float64 (float32 on devices without it), shape (7,), on the device of
    `values`; NaN where one is not in `wanted`. values: strided, at least one element.
    """
    if not wanted:
        dtype = torch.float32 if values.device.type == "mps" else torch.float64
        return torch.full((len(SUMS),), math.nan, dtype=dtype, device=values.device)
    pieces = [_columns_of(piece, wanted) for piece in split(values)]
    if len(pieces) == 1:
        return torch.stack(pieces[0])
    columns = zip(SUMS, zip(*pieces, strict=True), strict=True)
    return torch.stack(
        [_COMBINE.get(name, torch.sum)(torch.stack(parts)) for name, parts in columns]
    )


def split(values: Tensor, limit: int | None = None) -> Sequence[Tensor]:
    """Views of at most `limit` elements (by default as many as suit the device) that hold each
    element once: flat where memory is dense, whatever the order.
    """
    limit = limit or _limit(values)
    if values.numel() <= limit:
        return [values]
    strides = values.stride()
    values = values.permute(sorted(range(values.dim()), key=lambda dim: -strides[dim]))
    if values.is_contiguous():
        return torch.split(values.view(-1), limit)
    inner = values[0].numel()
    if inner > limit:
        return [piece for outer in values.unbind(0) for piece in split(outer, limit)]
    return torch.split(values, max(1, limit // inner))


def _limit(values: Tensor) -> int:
    if values.is_cpu:
        return min(
            max(_PIECE_PER_THREAD * torch.get_num_threads(), _PIECE_CPU_LEAST), _PIECE_CPU_MOST
        )
    return _PIECE_DEVICE


def _columns_of(piece: Tensor, columns: Sequence[str]) -> list[Tensor]:
    wide = _widen(piece)
    found: dict[str, Tensor] = {}
    if "min" in columns or "max" in columns:
        own = (
            piece.numel() > _EXTREMES_IN_OWN_TYPE
            and piece.dtype in _FAST_EXTREMES
            and piece.is_contiguous()
        )
        low, high = torch.aminmax(piece if own else wide)
        found["min"], found["max"] = (
            (low.to(wide.dtype), high.to(wide.dtype)) if own else (low, high)
        )
    if "sum" in columns:
        found["sum"] = wide.sum()
    found |= _columns_of_cpu(wide, columns) if wide.is_cpu else _columns_of_device(wide, columns)
    if len(found) < len(SUMS):
        none = torch.full_like(next(iter(found.values())), math.nan)
        return [found.get(name, none) for name in SUMS]
    return [found[name] for name in SUMS]


def _columns_of_cpu(wide: Tensor, columns: Sequence[str]) -> dict[str, Tensor]:
    """All but the extremes and the sum; overwrites the numbers."""
    found: dict[str, Tensor] = {}
    if "squares" in columns:
        found["squares"] = torch.dot(wide, wide)
    if "zeros" in columns:
        found["zeros"] = (wide.numel() - torch.count_nonzero(wide)).to(wide.dtype)
    if "magnitudes" in columns or "nonfinite" in columns:
        found["magnitudes"] = wide.abs_().sum()
        # the number is there already, and nothing has to be counted where a sum of magnitudes is
        # finite
        total: Any = found["magnitudes"].tolist()
        if math.isfinite(total):
            found["nonfinite"] = torch.zeros_like(found["magnitudes"])
        elif "nonfinite" in columns:
            found["nonfinite"] = wide.numel() - wide.lt_(math.inf).sum()
    return found


def _columns_of_device(wide: Tensor, columns: Sequence[str]) -> dict[str, Tensor]:
    """The same by norms, which are one launch each: for a small tensor launches are all there is to
    pay. And no BLAS: it would make a handle, and refuse to run in deterministic mode.
    """
    found: dict[str, Tensor] = {}
    norm = torch.linalg.vector_norm
    if "squares" in columns:
        found["squares"] = norm(wide).square()
    if "zeros" in columns:
        found["zeros"] = wide.numel() - norm(wide, 0)
    if "magnitudes" in columns:
        found["magnitudes"] = norm(wide, 1)
    if "nonfinite" in columns:
        found["nonfinite"] = norm(wide.sub_(wide), 0)  # 0, and NaN, which counts
    return found


def _widen(piece: Tensor) -> Tensor:
    """A flat copy of the piece, of its own and in fp64; of complex numbers, their magnitudes."""
    if piece.is_quantized:
        piece = piece.dequantize()
    if piece.is_complex():
        return piece.to(torch.complex128).abs().flatten()
    if not piece.is_cpu:
        # MPS has no fp64
        dtype = torch.float32 if piece.is_mps else torch.float64
        return piece.to(dtype, copy=True, memory_format=torch.contiguous_format).view(-1)
    # one warm buffer a thread: a fresh one costs more in page faults than the arithmetic in it
    scratch = getattr(_local, "scratch", None)
    if scratch is None or scratch.numel() < piece.numel():
        size = max(_PIECE_CPU_LEAST, piece.numel())
        scratch = _local.scratch = torch.empty(size, dtype=torch.float64, device="cpu")
    flat: Tensor = scratch.narrow(0, 0, piece.numel())
    (flat if piece.dim() == 1 else flat.view(piece.shape)).copy_(piece)
    return flat
