"""Norms of many tensors in a few operations, and rows of single numbers, without waiting for a
device.

A row by `measure` holds seven sums of one tensor. The gradient norm of a model needs one of them,
of every parameter in every step: this takes a quarter of the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from otel_torch.statistics.device_rows import allocate_row
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.statistics.measure import Measurement
from otel_torch.statistics.reduce import split, widest
from otel_torch.statistics.row_layout import SCALARS
from otel_torch.statistics.unwrap_tensor import has_memory, is_part, unwrap
from otel_torch.torch_private import norms_of_each, unobserved

# A CPU adds up the squares of float32 in float32: a sum of so many has an error of about 1e-6, one
# of 40 million of 3e-3.
_PIECE_ON_CPU = 2**16
_ORDINARY_TYPES = (Tensor, torch.nn.Parameter)
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@unobserved
def whole_values(tensor: Tensor) -> Tensor | None:
    """Return the strided values of a tensor of numbers; None if this process cannot read them all.

    That is so for the shard of a distributed tensor, and for tensors without memory.
    """
    if _is_ordinary(tensor):  # a parameter or gradient, of which there are many
        return tensor if has_memory(tensor) else None
    values = None if is_part(tensor) else unwrap(tensor).values
    if values is None or not (values.is_floating_point() or values.is_complex()):
        return None
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but dense values, which no CUDA graph is computing."""
    return (
        type(tensor) in _ORDINARY_TYPES
        and tensor.dtype in _FLOATS
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and (tensor.is_cpu or not is_capturing())
    )


@unobserved
def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor.

    Args:
        tensors: at least one, as `whole_values` returns them, on any devices.

    Returns:
        shape (len(tensors),), float64 (float32 on devices without it), on one of the devices.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.dtype].append(index)
    home = max((device for device, _ in groups), key=lambda device: device.type != "cpu")
    parts = [
        _squared_norms_of_one_kind([tensors[index] for index in indices]).to(
            home, widest(home), non_blocking=True
        )
        for indices in groups.values()
    ]
    return in_order(parts, list(groups.values()))


def in_order(parts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> Tensor:
    """Join vectors of one device, given the index in the result of each of their elements.

    >>> in_order([torch.tensor([1.0, 3.0]), torch.tensor([2.0])], [[0, 2], [1]])
    tensor([1., 2., 3.])
    """
    if len(parts) == 1:
        return parts[0]
    order = list(chain.from_iterable(indices))
    places = sorted(range(len(order)), key=order.__getitem__)
    joined = torch.cat(list(parts))
    return joined[torch.tensor(places, device="cpu").to(joined.device, non_blocking=True)]


def _squared_norms_of_one_kind(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums of squares of tensors of one device and dtype, on that device."""
    dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    by_tensor = [split(tensor, _PIECE_ON_CPU) if tensor.is_cpu else (tensor,) for tensor in tensors]
    norms = norms_of_each([piece for pieces in by_tensor for piece in pieces], dtype)
    squares = torch.stack(norms).to(widest(tensors[0].device)).square()
    return sums_of_parts(squares, [len(pieces) for pieces in by_tensor])


def sums_of_parts(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Cut a vector into parts of the given lengths, and return the sum of each.

    Has the same bits every time, which adding by index has not on every device.

    >>> sums_of_parts(torch.tensor([1.0, 2.0, 4.0]), [2, 1])
    tensor([3., 4.])
    """
    if all(length == 1 for length in lengths):
        return values
    return torch.stack([part.sum() for part in torch.split(values, list(lengths))])


@unobserved
def measure_numbers(numbers: Tensor | Sequence[float]) -> list[Measurement]:
    """Return the measurement of a tensor of one element for each of the numbers.

    Args:
        numbers: floats, or a float tensor of shape (n,), which stays on its device.

    >>> [measurement.row for measurement in measure_numbers([-2.0])]
    [[-2.0, -2.0, -2.0, 4.0, 2.0, 0.0, 0.0]]
    """
    rows: Sequence[Sequence[float] | Tensor]
    if isinstance(numbers, Tensor):
        rows = _rows_of_tensor(numbers)
    else:
        rows = [_row_of_number(number) for number in numbers]
    return [Measurement(row, SCALARS, 1, 1, [], "torch.float64") for row in rows]


def _row_of_number(number: float) -> list[float]:
    is_finite = math.isfinite(number)
    return [
        number,
        number,
        number,
        number * number,
        abs(number),
        float(not is_finite),
        float(number == 0),
    ]


def _rows_of_tensor(numbers: Tensor) -> Sequence[Sequence[float] | Tensor]:
    if numbers.is_cpu:
        return [_row_of_number(number) for number in numbers.tolist()]
    wide = numbers.to(widest(numbers.device))
    flags = [(~wide.isfinite()).to(wide.dtype), (wide == 0).to(wide.dtype)]
    columns = torch.stack([wide, wide, wide, wide.square(), wide.abs(), *flags], 1)
    memory = allocate_row(columns.numel(), columns.dtype, columns.device)
    return memory.copy_(columns.view(-1)).view(columns.shape).unbind()
