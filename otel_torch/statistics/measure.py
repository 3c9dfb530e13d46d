"""The numbers of one tensor, taken while it exists: nothing here waits for a device, copies it
whole or is seen.

FastVideo reads every statistic by its own `.item()`, in fp32: hundreds of synchronisations a
forward, and a wrong standard deviation where the mean is large. Here a tensor becomes one row of
numbers. On a CPU a compiled kernel reads its memory once; on a GPU a Triton kernel does, and
elsewhere torch's operators; the row stays on the device and is read with all others of its step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otel_torch.console import say_once
from otel_torch.statistics import gpu, native
from otel_torch.statistics.device_rows import take
from otel_torch.statistics.graph_capture import capturing
from otel_torch.statistics.histogram import histogram
from otel_torch.statistics.reduce import split, sums
from otel_torch.statistics.row_layout import MAX, MIN, PRIMITIVES, SUMS, WIDE
from otel_torch.statistics.sketch import prepare as prepare_sketches
from otel_torch.statistics.sketch import row_sketch, sketch
from otel_torch.statistics.unwrap_tensor import Plain, Shard, plain
from otel_torch.torch_private import unobserved, unseen_by_function_modes

# what numbers without their positions do not have
_POSITIONED = frozenset({"sketch", "row_sketch"})


@dataclass(slots=True)
class Measured:
    """One tensor's numbers, on the host or on their way to it.

    row: as `columns.py` lays it out: the numbers, or, of a tensor on a device, a float64 tensor
    there (float32 on devices without it), 1-D; None where the tensor holds no numbers that could be
    read (meta, fake, inside vmap) or none at all (empty). primitives: which of the columns were
    asked for and are there. stored: how many elements the row is of; numel: how many the tensor has
    (more, if it is sparse: the rest are zeros). shape: ragged or symbolic sizes are -1; None for a
    tensor without one. dtype: as `str(tensor.dtype)`. shard: which part of a distributed tensor the
    numbers are of, None for all of it.
    """

    row: Tensor | Sequence[float] | None
    primitives: tuple[str, ...]
    stored: int
    numel: int
    shape: list[int] | None
    dtype: str
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a set of primitives asks for. columns: in the row's order. sums: those that are one
    number. wanted: what of them the compiled kernel takes; whole: whether that is all.
    """

    columns: tuple[str, ...]
    sums: tuple[str, ...]
    wanted: int
    whole: bool


_KERNEL_TAKES = {"histogram": native.HISTOGRAM, "sketch": native.SKETCH}


@functools.lru_cache
def _plan(primitives: tuple[str, ...]) -> _Plan:
    columns = tuple(name for name in PRIMITIVES if name in primitives)
    wide = [name for name in columns if name in WIDE]
    # a row begins with the sums whatever was asked for
    wanted = native.SUMS + sum(_KERNEL_TAKES.get(name, 0) for name in wide)
    whole = bool(columns) and all(name in _KERNEL_TAKES for name in wide)
    return _Plan(columns, tuple(name for name in columns if name not in WIDE), wanted, whole)


@unseen_by_function_modes
def prepare(tensors: Iterable[Tensor], primitives: Sequence[str]) -> None:
    """Have all that is needed for tensors like these lie on their GPUs, and on the current one, so
    that `measure` never waits for one in a forward: the sketch's tables, and the compiled and
    tested kernel, if it was chosen. Waits for those devices; where there are none this costs
    nothing.
    """
    sketches = "sketch" in primitives
    if not (sketches or gpu.chosen()) or not torch.cuda.is_initialized() or capturing():  # type: ignore[no-untyped-call]
        return
    # the current one too: of a model that is kept on the host no parameter shows it, nor does any
    # show mixed precision
    dtypes, devices = (
        {torch.float32, torch.bfloat16},
        {torch.device("cuda", torch.cuda.current_device())},
    )
    for tensor in tensors:
        if tensor.is_cuda:
            dtypes.add(tensor.dtype)
            devices.add(tensor.device)
    if torch.is_autocast_enabled("cuda"):
        dtypes.add(torch.get_autocast_dtype("cuda"))
    for device in devices:
        if sketches:
            prepare_sketches(device)
        gpu.prepare(device, dtypes, [_plan(tuple(primitives)).wanted])


def measure(tensor: Tensor, primitives: Sequence[str] = SUMS) -> Measured:
    """Measure `tensor` now, without waiting for its device; never raises and leaves no trace in the
    program.

    primitives: which columns the row has, by default those of one number, always in the table's
    order. A DTensor is measured by its local shard, without a collective.
    `statistics.read.read_rows` brings rows to the host.
    """
    plan = _plan(primitives if type(primitives) is tuple else tuple(primitives))
    if plan.whole and (kernel := native.load()) is not None:
        # the way of nearly every tensor of a CPU: no operator of torch runs, so nothing can see one
        found = kernel.direct(tensor, plan.wanted) or kernel.indirect(tensor, plan.wanted)
        if found is not None:
            row, numel, shape, dtype = found
            return Measured(row, plan.columns, numel, numel, shape, dtype)
    return _measure(tensor, plan)


@unobserved
def _measure(tensor: Tensor, plan: _Plan) -> Measured:
    """Any tensor, with torch's operators where the kernel cannot read it."""
    facts = Plain(None, -1, None)
    try:
        facts = plain(tensor)
        row = None
        if facts.values is not None and plan.columns:
            stored = facts.values.numel()
            if not facts.in_order:
                plan = _plan(tuple(name for name in plan.columns if name not in _POSITIONED))
            row = _row(facts.values, plan, facts.shard) if stored and plan.columns else None
        else:
            stored = facts.numel
        return Measured(
            row, plan.columns, stored, facts.numel, facts.shape, str(tensor.dtype), facts.shard
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        say_once(f"a tensor of type {tensor.dtype} on {tensor.device} has no statistics: {reason}")
        return Measured(
            None, plan.columns, facts.numel, facts.numel, facts.shape, str(tensor.dtype)
        )


def _row(values: Tensor, plan: _Plan, shard: Shard | None) -> Tensor | list[float]:
    if values.is_cpu and values.dtype in native.CODES and (kernel := native.load()) is not None:
        return _row_of_kernel(kernel, values, plan, shard)
    if values.is_cuda and plan.whole and (of_gpu := _row_of_gpu(values, plan, shard)) is not None:
        return of_gpu
    row = _row_of_torch(values, plan, shard)
    return row.tolist() if row.is_cpu else row


def _row_of_kernel(
    kernel: native.Kernel, values: Tensor, plan: _Plan, shard: Shard | None
) -> list[float]:
    values = (
        values.resolve_neg()
    )  # the kernel reads memory, where a view of an imaginary part has another sign
    code, threads = native.CODES[values.dtype], torch.get_num_threads()
    if plan.wanted & native.SKETCH:
        placed, start = _positioned(values, shard)
        placed = placed.contiguous()
        row: list[float] = kernel.measure(
            placed.data_ptr(), placed.numel(), code, plan.wanted, start, threads
        )
        if placed.numel() != values.numel():  # the zeros around a shard are the sketch's only
            row[: -WIDE["sketch"]] = _row_of_kernel(kernel, values, _without_sketch(plan), None)
    else:
        # dense memory is one piece, whatever its order; any other is copied, a bit at a time
        pieces = (
            [values] if values.is_contiguous() else [piece.contiguous() for piece in split(values)]
        )
        rows = [
            kernel.measure(piece.data_ptr(), piece.numel(), code, plan.wanted, 0, threads)
            for piece in pieces
        ]
        row = rows[0] if len(rows) == 1 else _combine(rows)
    if "row_sketch" in plan.columns:
        row += row_sketch(*_positioned(values, shard, rows=True)).tolist()
    return row


@functools.lru_cache
def _without_sketch(plan: _Plan) -> _Plan:
    return _plan(tuple(name for name in plan.columns if name not in _POSITIONED))


def _combine(rows: Sequence[Sequence[float]]) -> list[float]:
    """One row of the rows of several pieces. NaN is an extreme, as in torch."""
    columns = list(zip(*rows, strict=True))
    combined = [sum(column) for column in columns]
    for index, extreme in ((MIN, min), (MAX, max)):
        column = columns[index]
        combined[index] = (
            math.nan if any(number != number for number in column) else extreme(column)
        )
    return combined


def _row_of_gpu(values: Tensor, plan: _Plan, shard: Shard | None) -> Tensor | None:
    """None where the device's kernel, if it has one, cannot read the tensor."""
    if not plan.wanted & native.SKETCH:
        return gpu.measure(values, plan.wanted)
    if shard is not None and list(shard.shape[1:]) != list(values.shape[1:]):
        return None  # its sketch is that of the whole, with zeros around it
    return gpu.measure(values, plan.wanted, _positioned(values, shard)[1])


def _row_of_torch(values: Tensor, plan: _Plan, shard: Shard | None) -> Tensor:
    parts = [sums(values, plan.sums)]
    if "histogram" in plan.columns:
        parts.append(torch.stack([histogram(piece) for piece in split(values)]).sum(0))
    if "sketch" in plan.columns:
        parts.append(sketch(*_positioned(values, shard)))
    if "row_sketch" in plan.columns:
        parts.append(row_sketch(*_positioned(values, shard, rows=True)))
    if values.is_cpu:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return torch.cat(parts, out=take(sum(map(torch.numel, parts)), parts[0].dtype, values.device))


def _positioned(values: Tensor, shard: Shard | None, rows: bool = False) -> tuple[Tensor, int]:
    """The values with the position of the first one, so that the sketches of all shards add up to
    the whole's.
    """
    if shard is None or not shard.shape:
        return values, 0
    if list(shard.shape[1:]) == list(
        values.shape[1:]
    ):  # cut along the first dimension: one stretch of positions
        return values, shard.offset[0] if rows else shard.offset[0] * math.prod(shard.shape[1:])
    whole = torch.zeros(shard.shape, dtype=values.dtype, device=values.device)
    whole[
        tuple(
            slice(start, start + size)
            for start, size in zip(shard.offset, values.shape, strict=True)
        )
    ] = values
    return whole, 0
