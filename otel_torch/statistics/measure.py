"""The numbers of one tensor, taken while it exists and left on its device: nothing here waits, copies it whole or is seen.

FastVideo reads every statistic by its own `.item()`, in fp32: hundreds of synchronisations a forward, and a wrong standard
deviation where the mean is large. Here a tensor becomes one fp64 row of sums, which is read with all others of its step.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otel_torch.console import say_once
from otel_torch.statistics.frequencies import FREQUENCIES
from otel_torch.statistics.histogram import BINS, histogram
from otel_torch.statistics.plain import Plain, Shard, plain
from otel_torch.statistics.sketch import SIZE, row_sketch, sketch
from otel_torch.torch_private import unobserved

# the row's columns; of a complex tensor min, max and sum are those of the magnitudes and mean nothing
_SUMS = ("min", "max", "sum", "squares", "magnitudes", "nonfinite", "zeros")
# ... and behind them what takes several numbers, and how many
WIDE = {"histogram": BINS, "sketch": SIZE, "row_sketch": 2 * FREQUENCIES}
PRIMITIVES = (*_SUMS, *WIDE)
# what numbers without their positions do not have
_POSITIONED = frozenset({"sketch", "row_sketch"})

# how the columns of several pieces become one; all others add up
_COMBINE = {"min": torch.amin, "max": torch.amax}

# a piece whose fp64 copy stays in a core's cache, and one that keeps an accelerator busy: 2 MB a thread pair, 64 MB
_PIECE_PER_THREAD, _PIECE_CPU_LEAST, _PIECE_CPU_MOST, _PIECE_DEVICE = 2**17, 2**18, 2**21, 2**23

# from here on the extremes are faster in the tensor's own type, where it has vectorised ones
_EXTREMES_IN_OWN_TYPE = 2**15
_FAST_EXTREMES = frozenset({torch.float32, torch.float16, torch.bfloat16})

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Measured:
    """One tensor's numbers on their way to the host.

    row: float64 (float32 on devices without it), 1-D, one value for each of `primitives` (as many as `WIDE` says for
    those in it), on the tensor's device; None where the tensor holds no numbers that could be read (meta, fake, inside
    vmap) or none at all (empty).
    stored: how many elements the row is of; numel: how many the tensor has (more, if it is sparse: the rest are zeros).
    shape: ragged or symbolic sizes are -1; None for a tensor without one. dtype: as `str(tensor.dtype)`.
    shard: which part of a distributed tensor the numbers are of, None for all of it.
    """

    row: Tensor | None
    primitives: tuple[str, ...]
    stored: int
    numel: int
    shape: list[int] | None
    dtype: str
    shard: Shard | None = None


@unobserved
def measure(tensor: Tensor, primitives: Sequence[str] = _SUMS) -> Measured:
    """Measure `tensor` now, without waiting for its device; never raises and leaves no trace in the program.

    primitives: which columns the row has, by default those of one number, always in the table's order. A DTensor is
    measured by its local shard, without a collective. `statistics.read.read_rows` brings rows to the host.
    """
    columns = _in_order(primitives if isinstance(primitives, tuple) else tuple(primitives))
    facts = Plain(None, -1, None)
    try:
        facts = plain(tensor)
        row = None
        if facts.values is not None and columns:
            stored = facts.values.numel()
            if not facts.in_order:
                columns = tuple(name for name in columns if name not in _POSITIONED)
            row = _row(facts.values, columns, facts.shard) if stored and columns else None
        else:
            stored = facts.numel
        return Measured(row, columns, stored, facts.numel, facts.shape, str(tensor.dtype), facts.shard)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        say_once(f"a tensor of type {tensor.dtype} on {tensor.device} has no statistics: {reason}")
        return Measured(None, columns, facts.numel, facts.numel, facts.shape, str(tensor.dtype))


@functools.lru_cache
def _in_order(primitives: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in PRIMITIVES if name in primitives)


def _row(values: Tensor, columns: tuple[str, ...], shard: Shard | None) -> Tensor:
    parts = []
    if sums := tuple(name for name in columns if name not in WIDE):
        parts.append(_row_of_sums(values, sums))
    if "histogram" in columns:
        parts.append(torch.stack([histogram(piece) for piece in _split(values, _limit(values))]).sum(0))
    if "sketch" in columns:
        parts.append(sketch(*_positioned(values, shard)))
    if "row_sketch" in columns:
        parts.append(row_sketch(*_positioned(values, shard, rows=True)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _positioned(values: Tensor, shard: Shard | None, rows: bool = False) -> tuple[Tensor, int]:
    """The values with the position of the first one, so that the sketches of all shards add up to the whole's."""
    if shard is None or not shard.shape:
        return values, 0
    if list(shard.shape[1:]) == list(values.shape[1:]):  # cut along the first dimension: one stretch of positions
        return values, shard.offset[0] if rows else shard.offset[0] * math.prod(shard.shape[1:])
    whole = torch.zeros(shard.shape, dtype=values.dtype, device=values.device)
    whole[tuple(slice(start, start + size) for start, size in zip(shard.offset, values.shape, strict=True))] = values
    return whole, 0


def _row_of_sums(values: Tensor, columns: tuple[str, ...]) -> Tensor:
    limit = _limit(values)
    if values.numel() <= limit:
        return torch.stack(_columns_of(values, columns))
    pieces = [_columns_of(piece, columns) for piece in _split(values, limit)]
    return torch.stack(
        [
            _COMBINE.get(name, torch.sum)(torch.stack(parts))
            for name, parts in zip(columns, zip(*pieces, strict=True), strict=True)
        ]
    )


def _limit(values: Tensor) -> int:
    if values.is_cpu:
        return min(max(_PIECE_PER_THREAD * torch.get_num_threads(), _PIECE_CPU_LEAST), _PIECE_CPU_MOST)
    return _PIECE_DEVICE


def _split(values: Tensor, limit: int) -> Sequence[Tensor]:
    """Views of at most `limit` elements that hold each element once: flat where memory is dense, whatever the order."""
    if values.numel() <= limit:
        return [values]
    strides = values.stride()
    values = values.permute(sorted(range(values.dim()), key=lambda dim: -strides[dim]))
    if values.is_contiguous():
        return torch.split(values.view(-1), limit)
    inner = values[0].numel()
    if inner > limit:
        return [piece for outer in values.unbind(0) for piece in _split(outer, limit)]
    return torch.split(values, max(1, limit // inner))


def _columns_of(piece: Tensor, columns: tuple[str, ...]) -> list[Tensor]:
    wide = _widen(piece)
    on_cpu = wide.is_cpu
    found: dict[str, Tensor] = {}
    if "min" in columns or "max" in columns:
        own = piece.numel() > _EXTREMES_IN_OWN_TYPE and piece.dtype in _FAST_EXTREMES and piece.is_contiguous()
        low, high = torch.aminmax(piece if own else wide)
        found["min"], found["max"] = (low.to(wide.dtype), high.to(wide.dtype)) if own else (low, high)
    if "sum" in columns:
        found["sum"] = wide.sum()
    if "squares" in columns:
        # elsewhere no BLAS: it would make a handle, and refuse to run in deterministic mode
        found["squares"] = torch.dot(wide, wide) if on_cpu else torch.linalg.vector_norm(wide).square()
    if "zeros" in columns:
        found["zeros"] = (wide.numel() - torch.count_nonzero(wide)).to(wide.dtype)
    if "magnitudes" in columns or "nonfinite" in columns:
        found["magnitudes"] = wide.abs_().sum()
        # on a CPU the number is there already, and nothing has to be counted where a sum of magnitudes is finite
        total: Any = found["magnitudes"].tolist() if on_cpu else math.nan
        if math.isfinite(total):
            found["nonfinite"] = _zero()
        elif "nonfinite" in columns:
            found["nonfinite"] = wide.numel() - wide.lt_(math.inf).sum()
    return [found[name] for name in columns]


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


def _zero() -> Tensor:
    zero: Tensor | None = getattr(_local, "zero", None)
    if zero is None:
        zero = _local.zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return zero
