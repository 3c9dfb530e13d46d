"""Finds the strided values inside a tensor of any kind, or that it has none to read.

Sparse, ragged, sharded and wrapped tensors each break an ordinary reduction in a different way: by
an error, a collective, or a result that is a wrapper again.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from otel_torch.process.console import say_once
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.torch_private import is_fake, shard_offset


class Shard(NamedTuple):
    """The part of a distributed tensor that this rank holds.

    shape: sizes of the whole tensor. offset: index of the part's first element, per dimension.
    partial: the whole is the sum of the parts of all ranks.
    """

    shape: list[int]
    offset: list[int]
    partial: bool


class Unwrapped(NamedTuple):
    """The values of a tensor.

    values: the stored elements, strided; None if they cannot be read. numel: elements of the
    tensor, including the zeros that a sparse one does not store. shape: see `Measurement.shape`.
    in_order: whether `values` has the tensor's shape, with each element in its place. shard: see
    `Measurement.shard`.
    """

    values: Tensor | None
    numel: int
    shape: list[int] | None
    in_order: bool = False
    shard: Shard | None = None


_ORDINARY_TYPES = (Tensor, torch.nn.Parameter)
_COMPRESSED_LAYOUTS = frozenset(
    {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)
# An expanded tensor may have any number of elements. Up to this many it is read anyway.
_REPEATED_MIN, _MAX_REPETITIONS = 2**27, 16
_PER_TENSOR_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def unwrap(tensor: Tensor) -> Unwrapped:
    """Find the values of `tensor` without waiting for a device or communicating with other ranks.

    May raise.

    >>> unwrap(torch.eye(2).to_sparse())
    Unwrapped(values=tensor([1., 1.]), numel=4, shape=[2, 2], in_order=False, shard=None)
    """
    if type(tensor) not in _ORDINARY_TYPES:
        inner = _inner_tensor(tensor)
        if inner is None:
            return Unwrapped(None, -1, _shape(tensor))
        if inner is not tensor:
            unwrapped = unwrap(inner)
            # keep the outer shape of a ragged tensor, but the local shape of a shard
            if tensor.is_nested:
                return unwrapped._replace(shape=_shape(tensor), in_order=False)
            shard, is_known = _shard(tensor)
            return unwrapped._replace(shard=shard, in_order=unwrapped.in_order and is_known)
        if tensor.layout is not torch.strided or not has_memory(tensor):
            return Unwrapped(None, _numel(tensor), _shape(tensor))
    if tensor.is_nested:
        values = (tensor if tensor.is_contiguous() else tensor.contiguous()).values()
        return Unwrapped(_if_readable(values), values.numel(), _ragged_shape(tensor))
    shape, numel = _shape(tensor), _numel(tensor)
    if tensor.layout is not torch.strided:
        stored = _stored_values(tensor)
        return Unwrapped(None if stored is None else _if_readable(stored), numel, shape)
    if tensor.is_quantized and tensor.qscheme() not in _PER_TENSOR_SCHEMES:
        tensor = tensor.dequantize()  # a tensor with a scale per channel cannot be split
    return Unwrapped(_if_readable(tensor), numel, shape, in_order=True)


def host_values(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor, of a distributed one those of this rank, without a gradient.

    None if they are on a device, or cannot be read. May raise.

    >>> host_values(torch.nn.Parameter(torch.ones(1)))
    tensor([1.])
    """
    if not tensor.is_cpu:
        return None
    values = unwrap(tensor).values
    return values.detach() if values is not None and values.is_cpu else None


def dtype_name(tensor: Tensor) -> str:
    """Return the type of a tensor's numbers: of a wrapper around quantized ones, that of those.

    >>> dtype_name(torch.ones(1))
    'torch.float32'
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in _ORDINARY_TYPES or flatten is None:
        return str(tensor.dtype)
    names, _ = flatten()
    parts = (getattr(tensor, name) for name in names)
    inner = max((part for part in parts if isinstance(part, Tensor)), key=torch.numel)
    is_quantized = inner.itemsize == 1 and tensor.itemsize > 1
    return dtype_name(inner) if is_quantized else str(tensor.dtype)


def is_part(tensor: Tensor) -> bool:
    """Return whether other ranks have parts of a distributed tensor that this one has not."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return False
    return not all(
        placement.is_replicate() or tensor.device_mesh.size(dimension) == 1
        for dimension, placement in enumerate(tensor.placements)
    )


def _shard(tensor: Tensor) -> tuple[Shard | None, bool]:
    """Return the local part of a DTensor, and whether its position is known.

    The part is None for a tensor that is whole on this rank, and if the position is unknown.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor) or not is_part(tensor):
        return None, True
    partial = False
    for placement in tensor.placements:
        if type(placement) is distributed.Partial and placement.reduce_op == "sum":
            partial = True
        elif not placement.is_replicate() and type(placement) is not distributed.Shard:
            return None, False  # strided shards, or a mean or maximum over the ranks
    offset = shard_offset(tensor)
    if offset is None:
        return None, False
    return Shard([int(size) for size in tensor.shape], offset, partial), True


def _stored_values(tensor: Tensor) -> Tensor | None:
    """Return the values that a sparse tensor stores; None if that takes work on a device."""
    if tensor.is_meta:
        return None
    if tensor.layout in _COMPRESSED_LAYOUTS:
        return tensor.values()
    if tensor.layout is not torch.sparse_coo:
        return None
    if tensor.is_coalesced():
        return tensor.values()
    # coalescing waits for an accelerator to learn the number of entries
    return tensor.coalesce().values() if tensor.device.type == "cpu" else None


def _numel(tensor: Tensor) -> int:
    """Return the number of elements; -1 if it is symbolic, because reading it would add a guard."""
    numel = tensor.numel()
    return numel if type(numel) is int else -1


def _shape(tensor: Tensor) -> list[int]:
    """Return the sizes; -1 for ragged and symbolic ones."""
    return [size if type(size) is int else -1 for size in tensor.shape]


def _ragged_shape(tensor: Tensor) -> list[int]:
    parts = [list(part.shape) for part in tensor.unbind()]
    shape = [len(parts)]
    for sizes in zip(*parts, strict=True):
        shape.append(sizes[0] if len(set(sizes)) == 1 else -1)
    return shape


def _inner_tensor(tensor: Tensor) -> Tensor | None:
    """Return the tensor inside a wrapper, the tensor itself if it wraps none, None if unreadable.

    Wrappers are DTensor, the result of an asynchronous collective, and the jagged nested tensor.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        with torch.no_grad():  # with gradients, `to_local` would be an operation of the program
            local: Tensor = tensor.to_local()
            return local
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        # on an accelerator this makes the stream wait, not the program
        result: Tensor = collectives.wait_tensor(tensor.elem)
        return result
    if tensor.is_nested and tensor.layout is torch.jagged:
        has_holes = getattr(tensor, "_lengths", None) is not None
        return None if has_holes else getattr(tensor, "_values", None)
    return tensor


def _if_readable(values: Tensor) -> Tensor | None:
    """Return the values if their memory can be read, else None.

    It cannot for meta, fake, freed and opaque tensors, for a few elements that are repeated very
    often, and while a CUDA graph is captured.
    """
    if not has_memory(values):
        return None
    if values.numel() > _REPEATED_MIN and _repetitions(values) > _MAX_REPETITIONS:
        say_once(
            f"a tensor of shape {tuple(values.shape)} has no statistics: its memory is "
            f"{values.untyped_storage().nbytes()} bytes, expanded {int(_repetitions(values))} times"
        )
        return None
    if values.is_cuda and is_capturing():
        # the row would be filled at replay, when it is no longer read
        say_once(
            "a CUDA graph is captured: records made during the capture have no statistics, "
            "and replays make no records"
        )
        return None
    return values


def has_memory(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor exists and holds all its elements.

    Wrappers have none, and a program may free or shrink that of any tensor. Torch's operators do
    not check this where no dispatcher of the wrapper is asked: they end the process.
    """
    if type(tensor) not in _ORDINARY_TYPES and is_fake(tensor):
        return False  # asking for its address would warn
    if not tensor.numel():
        return True
    try:
        storage = tensor.untyped_storage()
        if not storage.data_ptr():
            return False
    except (RuntimeError, NotImplementedError):
        return False  # opaque, or a wrapper of functorch or of a mode
    if tensor.is_contiguous():
        extent = tensor.numel() - 1
    else:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        extent = sum((size - 1) * stride for size, stride in sizes)
    return bool((tensor.storage_offset() + extent + 1) * tensor.itemsize <= int(storage.nbytes()))


def _repetitions(tensor: Tensor) -> float:
    """Return how many times larger than its memory a tensor is."""
    return tensor.numel() * tensor.itemsize / tensor.untyped_storage().nbytes()
