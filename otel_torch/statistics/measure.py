"""Reduces a tensor to a row of numbers, without waiting for its device.

The next module may change a tensor in place, so it is measured as soon as it exists. Reading each
statistic with `.item()` would wait for the device every time; here the row of a tensor on an
accelerator stays there, and all rows of a step are read together (`read_rows.py`).

A tensor goes to the first of these that can read it:

- on a CPU the compiled kernel (`cpu_kernel.py`): one pass over its memory,
- on a GPU the Triton kernel (`gpu_kernel.py`), if it works there: one pass over its memory,
- elsewhere torch's operators (`reduce.py`, `histogram.py`, `sketch.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otel_torch.process.console import say_once
from otel_torch.statistics import cpu_kernel, gpu_kernel
from otel_torch.statistics.bit_hash import bit_hash
from otel_torch.statistics.cpu_kernel import CpuKernel
from otel_torch.statistics.device_rows import allocate_row
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.statistics.histogram import histogram
from otel_torch.statistics.part_sketches import part_sketches
from otel_torch.statistics.reduce import reduce_scalars, split
from otel_torch.statistics.row_layout import COLUMNS, MAX, MIN, SCALARS, VECTORS
from otel_torch.statistics.sketch import prepare_tables, row_sketch, sketch
from otel_torch.statistics.token_sketch import row_sketches
from otel_torch.statistics.unwrap_tensor import Shard, Unwrapped, dtype_name, unwrap
from otel_torch.torch_private import unobserved, unseen_by_function_modes

# columns that depend on the position of each element
_POSITIONAL = frozenset({"sketch", "part_sketches", "row_sketch", "hash", "rows"})
_KERNEL_FLAGS = {"histogram": cpu_kernel.HISTOGRAM, "sketch": cpu_kernel.SKETCH}


@dataclass(slots=True)
class Measurement:
    """One tensor's row, and what statistics need to know about the tensor besides.

    row: the numbers that `row_layout.py` describes: floats, or for a tensor on a device a 1-D
    float64 tensor there (float32 on devices without float64). None for an empty tensor and for one
    whose numbers cannot be read (meta, fake, inside vmap). columns: the requested columns that the
    row holds. stored_numel: how many elements the row covers; less than `numel` for a sparse
    tensor, whose other elements are zero. shape: ragged or symbolic sizes are -1; None for a tensor
    without a shape. dtype: `str(tensor.dtype)`. shard: the part of a distributed tensor that the
    row covers; None if it covers all of it.
    """

    row: Tensor | Sequence[float] | None
    columns: tuple[str, ...]
    stored_numel: int
    numel: int
    shape: list[int] | None
    dtype: str
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """How a choice of columns is measured.

    columns: in the order of a row. scalars: the requested scalar columns. wanted: the flags of what
    a kernel computes of it. kernel_suffices: whether a kernel computes every requested column.
    """

    columns: tuple[str, ...]
    scalars: tuple[str, ...]
    wanted: int
    kernel_suffices: bool


@functools.lru_cache
def _plan(requested: tuple[str, ...]) -> _RowPlan:
    columns = tuple(name for name in COLUMNS if name in requested)
    scalars = tuple(name for name in columns if name not in VECTORS)
    vectors = [name for name in columns if name in VECTORS]
    # every row begins with the scalars, requested or not
    wanted = cpu_kernel.SUMS + sum(_KERNEL_FLAGS.get(name, 0) for name in vectors)
    kernel_suffices = bool(columns) and all(name in _KERNEL_FLAGS for name in vectors)
    return _RowPlan(columns, scalars, wanted, kernel_suffices)


def flags_for(columns: tuple[str, ...]) -> int | None:
    """Return the flags of what a kernel computes for these columns; None if it lacks one."""
    plan = _plan(columns)
    return plan.wanted if plan.kernel_suffices else None


@functools.lru_cache
def columns_of(flags: int) -> tuple[str, ...]:
    """Return the columns of a row that a kernel computed with these flags."""
    return *SCALARS, *(name for name, flag in _KERNEL_FLAGS.items() if flags & flag)


@functools.lru_cache
def _without_positional(plan: _RowPlan) -> _RowPlan:
    return _plan(tuple(name for name in plan.columns if name not in _POSITIONAL))


@functools.lru_cache
def _without_parts(plan: _RowPlan) -> _RowPlan:
    return _plan(tuple(name for name in plan.columns if name != "part_sketches"))


@unseen_by_function_modes
@unseen_by_function_modes  # autocast must stay visible
def prepare_devices(tensors: Iterable[Tensor], columns: Sequence[str]) -> None:
    """Send the sketch's tables to the GPUs of `tensors`, and compile the Triton kernel there.

    Waits for those GPUs, so that `measure` never has to during a forward pass. The current GPU is
    included. Does nothing where no GPU is in use.
    """
    needs_tables = "sketch" in columns
    if not (needs_tables or gpu_kernel.is_chosen()):
        return
    if not torch.cuda.is_initialized() or is_capturing():  # type: ignore[no-untyped-call]
        return
    # parameters show neither the GPU of an offloaded model nor the types of mixed precision
    devices = {torch.device("cuda", torch.cuda.current_device())}
    dtypes = {torch.float32, torch.bfloat16}
    for tensor in tensors:
        if tensor.is_cuda:
            dtypes.add(tensor.dtype)
            devices.add(tensor.device)
    if torch.is_autocast_enabled("cuda"):
        dtypes.add(torch.get_autocast_dtype("cuda"))
    for device in devices:
        if needs_tables:
            prepare_tables(device)
        gpu_kernel.prepare(device, dtypes, [_plan(tuple(columns)).wanted])


def measure(tensor: Tensor, columns: Sequence[str] = SCALARS) -> Measurement:
    """Reduce `tensor` to a row now, without waiting for its device.

    Never raises, and no mode, tracer or gradient of the program sees it. A DTensor is measured by
    its local shard, without a collective.

    Args:
        columns: the columns that the row must have, in any order; by default the scalar ones.
    """
    plan = _plan(columns if type(columns) is tuple else tuple(columns))
    if plan.kernel_suffices and (kernel := cpu_kernel.load()) is not None:
        # nearly every tensor of a CPU; no operator of torch runs, so nothing can observe one
        result = kernel.measure_tensor(tensor, plan.wanted) or kernel.measure_by_pointer(
            tensor, plan.wanted
        )
        if result is not None:
            row, numel, shape, dtype = result
            return Measurement(row, plan.columns, numel, numel, shape, dtype)
    return _measure_any(tensor, plan)


@unobserved
def _measure_any(tensor: Tensor, plan: _RowPlan) -> Measurement:
    unwrapped = Unwrapped(None, -1, None)
    try:
        unwrapped = unwrap(tensor)
        values, numel, shape, in_order, shard = unwrapped
        row = None
        stored_numel = numel
        if values is not None and plan.columns:
            stored_numel = values.numel()
            if not in_order:
                plan = _without_positional(plan)
            elif shard is not None or not values.dim():
                plan = _without_parts(plan)  # its place is known, or there is only one
            if stored_numel and plan.columns:
                row = _row(values, plan, shard)
        dtype = dtype_name(tensor) if values is None else str(tensor.dtype)
        return Measurement(row, plan.columns, stored_numel, numel, shape, dtype, shard)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        say_once(f"a tensor of type {tensor.dtype} on {tensor.device} has no statistics: {reason}")
        numel = unwrapped.numel
        return Measurement(None, plan.columns, numel, numel, unwrapped.shape, str(tensor.dtype))


def _row(values: Tensor, plan: _RowPlan, shard: Shard | None) -> Tensor | list[float]:
    if values.is_cpu and values.dtype in cpu_kernel.CODES:
        kernel = cpu_kernel.load()
        if kernel is not None:
            return _row_by_cpu_kernel(kernel, values, plan, shard)
    if values.is_cuda and plan.kernel_suffices:
        row_on_gpu = _row_by_gpu_kernel(values, plan, shard)
        if row_on_gpu is not None:
            return row_on_gpu
    row = _row_by_torch(values, plan, shard)
    return row.tolist() if row.is_cpu else row


def _row_by_cpu_kernel(
    kernel: CpuKernel, values: Tensor, plan: _RowPlan, shard: Shard | None
) -> list[float]:
    # the kernel reads memory, which holds the other sign for a view of an imaginary part
    values = values.resolve_neg()
    code, threads = cpu_kernel.CODES[values.dtype], torch.get_num_threads()
    if plan.wanted & cpu_kernel.SKETCH:
        positioned, start = _positioned(values, shard)
        positioned = positioned.contiguous()
        row = kernel.measure_memory(
            positioned.data_ptr(), positioned.numel(), code, plan.wanted, start, threads
        )
        if positioned.numel() != values.numel():
            # the zeros around a shard count for its sketch only
            row[: -VECTORS["sketch"]] = _row_by_cpu_kernel(
                kernel, values, _without_positional(plan), None
            )
    else:
        # dense memory is read as one piece in any order; other memory is copied piece by piece
        pieces = [values]
        if not values.is_contiguous():
            pieces = [piece.contiguous() for piece in split(values)]
        rows = [
            kernel.measure_memory(piece.data_ptr(), piece.numel(), code, plan.wanted, 0, threads)
            for piece in pieces
        ]
        row = rows[0] if len(rows) == 1 else _combine(rows)
    for part in _parts_by_torch(values, plan, shard):
        row += part.tolist()
    return row


def _combine(rows: Sequence[Sequence[float]]) -> list[float]:
    """Combine the rows of several pieces into one. A NaN makes both extremes NaN, as in torch.

    >>> _combine([[-1.0, 2.0, 3.0], [0.0, 4.0, 5.0]])
    [-1.0, 4.0, 8.0]
    """
    columns = list(zip(*rows, strict=True))
    combined = [sum(column) for column in columns]
    for index, extreme in ((MIN, min), (MAX, max)):
        has_nan = any(number != number for number in columns[index])
        combined[index] = math.nan if has_nan else extreme(columns[index])
    return combined


def _row_by_gpu_kernel(values: Tensor, plan: _RowPlan, shard: Shard | None) -> Tensor | None:
    """Return the row by the Triton kernel; None if there is none or it cannot read the tensor."""
    if not plan.wanted & cpu_kernel.SKETCH:
        return gpu_kernel.measure(values, plan.wanted)
    if shard is not None and not _has_contiguous_positions(values, shard):
        return None
    return gpu_kernel.measure(values, plan.wanted, _positioned(values, shard)[1])


def _row_by_torch(values: Tensor, plan: _RowPlan, shard: Shard | None) -> Tensor:
    parts = [reduce_scalars(values, plan.scalars)]
    if "histogram" in plan.columns:
        parts.append(torch.stack([histogram(piece) for piece in split(values)]).sum(0))
    if "sketch" in plan.columns:
        parts.append(sketch(*_positioned(values, shard)))
    parts += _parts_by_torch(values, plan, shard)
    if values.is_cpu:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    size = sum(map(torch.numel, parts))
    return torch.cat(parts, out=allocate_row(size, parts[0].dtype, values.device))


def _parts_by_torch(values: Tensor, plan: _RowPlan, shard: Shard | None) -> Iterator[Tensor]:
    """Yield the columns that no kernel computes, in the order of a row."""
    if "part_sketches" in plan.columns:
        yield part_sketches(values)
    if "row_sketch" in plan.columns:
        yield row_sketch(*_positioned(values, shard, rows=True))
    if "hash" in plan.columns:
        yield bit_hash(values)
    if "rows" in plan.columns:
        yield row_sketches(values).flatten()


def _has_contiguous_positions(values: Tensor, shard: Shard) -> bool:
    """Return whether the shard is cut along the first dimension only."""
    return list(shard.shape[1:]) == list(values.shape[1:])


def _positioned(values: Tensor, shard: Shard | None, rows: bool = False) -> tuple[Tensor, int]:
    """Return the values and the position of the first one in the whole tensor.

    The sketches of all shards then add up to the sketch of the whole. A shard that is not
    contiguous in the whole tensor is returned at its place in a tensor of zeros.

    Args:
        rows: count positions in rows instead of elements.
    """
    if shard is None or not shard.shape:
        return values, 0
    if _has_contiguous_positions(values, shard):
        first_row = shard.offset[0]
        return values, first_row if rows else first_row * math.prod(shard.shape[1:])
    whole = torch.zeros(shard.shape, dtype=values.dtype, device=values.device)
    bounds = zip(shard.offset, values.shape, strict=True)
    whole[tuple(slice(start, start + size) for start, size in bounds)] = values
    return whole, 0
