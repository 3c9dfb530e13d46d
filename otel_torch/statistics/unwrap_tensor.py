"""From any kind of tensor to the plain strided numbers that it consists of, or to the knowledge
that it has none.

Sparse, ragged, sharded and wrapped tensors each fail an ordinary reduction in their own way, some
by a collective, some by returning another wrapper: each gets a defined result here, or a defined
absence.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from otel_torch.console import say_once
from otel_torch.statistics.graph_capture import capturing
from otel_torch.torch_private import is_fake, shard_offset


class Shard(NamedTuple):
    """Which part of a distributed tensor this rank holds.

    shape: of the whole tensor. offset: of the part's first element, a number a dimension. partial:
    the whole is the sum of the ranks' parts, which lie at the same place.
    """

    shape: list[int]
    offset: list[int]
    partial: bool


class Plain(NamedTuple):
    """values: the numbers that are stored, strided; None where there are none to read.

    numel: elements of the tensor, zeros that a sparse one does not store included. shape: as
    `Measured.shape`. in_order: whether the values have the tensor's own shape, each at its place.
    shard: as `Measured.shard`.
    """

    values: Tensor | None
    numel: int
    shape: list[int] | None
    in_order: bool = False
    shard: Shard | None = None


_ORDINARY = (Tensor, torch.nn.Parameter)
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def plain(tensor: Tensor) -> Plain:
    """Find the numbers of `tensor` without computing, waiting for a device, or asking another rank.
    May raise.
    """
    if type(tensor) not in _ORDINARY:
        inner = _unwrap(tensor)
        if inner is None:
            return Plain(None, -1, _shape(tensor))
        if inner is not tensor:
            found = plain(inner)
            # a ragged tensor is known by its own shape, a shard by that of the shard
            if tensor.is_nested:
                return found._replace(shape=_shape(tensor), in_order=False)
            shard, known = _shard(tensor)
            return found._replace(shard=shard, in_order=found.in_order and known)
    if tensor.is_nested:
        values = (tensor if tensor.is_contiguous() else tensor.contiguous()).values()
        return Plain(_readable(values), values.numel(), _ragged_shape(tensor))
    if tensor.layout is not torch.strided:
        stored = _stored(tensor)
        return Plain(None if stored is None else _readable(stored), _numel(tensor), _shape(tensor))
    shape, numel = _shape(tensor), _numel(tensor)
    if tensor.is_quantized and tensor.qscheme() not in (
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
    ):
        tensor = tensor.dequantize()  # one scale a channel: cannot be taken to pieces
    return Plain(_readable(tensor), numel, shape, in_order=True)


def _shard(tensor: Tensor) -> tuple[Shard | None, bool]:
    """(the part of a DTensor that is local, None where that is all of it; whether it is known which
    part it is).
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return None, True
    partial = False
    for one in tensor.placements:
        if type(one) is distributed.Partial and one.reduce_op == "sum":
            partial = True
        elif (
            not one.is_replicate() and type(one) is not distributed.Shard
        ):  # cut in strides; a mean, a maximum
            return None, False
    if all(one.is_replicate() for one in tensor.placements):
        return None, True
    offset = shard_offset(tensor)
    return (
        (None, False)
        if offset is None
        else (Shard([int(size) for size in tensor.shape], offset, partial), True)
    )


def _stored(tensor: Tensor) -> Tensor | None:
    """What a sparse tensor stores, None where that takes more than a look."""
    if tensor.is_meta:
        return None
    if tensor.layout in _COMPRESSED:
        return tensor.values()
    if tensor.layout is not torch.sparse_coo:
        return None
    if tensor.is_coalesced():
        return tensor.values()
    # adding up the entries of one place is work, and on an accelerator a wait for their number
    return tensor.coalesce().values() if tensor.device.type == "cpu" else None


def _numel(tensor: Tensor) -> int:
    """The number of elements; a symbolic one is -1, because asking for its value would bind it."""
    numel = tensor.numel()
    return numel if type(numel) is int else -1


def _shape(tensor: Tensor) -> list[int]:
    """The sizes; a ragged or symbolic one is -1."""
    return [size if type(size) is int else -1 for size in tensor.shape]


def _ragged_shape(tensor: Tensor) -> list[int]:
    sizes = [list(part.shape) for part in tensor.unbind()]
    return [
        len(sizes),
        *(same.pop() if len(same := set(each)) == 1 else -1 for each in zip(*sizes, strict=True)),
    ]


def _unwrap(tensor: Tensor) -> Tensor | None:
    """The tensor inside a wrapper: a shard, a collective's result, a ragged tensor's buffer; else
    the tensor itself.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        with torch.no_grad():  # with gradients, `to_local` is an operation
            local: Tensor = tensor.to_local()
            return local
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        result: Tensor = collectives.wait_tensor(
            tensor.elem
        )  # on an accelerator its stream waits, not the program
        return result
    if tensor.is_nested and tensor.layout is torch.jagged:
        buffer = getattr(tensor, "_values", None)
        return (
            buffer if getattr(tensor, "_lengths", None) is None else None
        )  # with lengths the buffer has holes
    return tensor


def _readable(values: Tensor) -> Tensor | None:
    """The values if they lie in memory; None for meta, fake, freed and opaque ones, and while a
    CUDA graph is captured.
    """
    if type(values) not in _ORDINARY and is_fake(values):
        return None  # its address may be asked for, but only under a warning
    try:
        if not values.data_ptr() and values.numel():
            return None
    except RuntimeError:
        return None  # a wrapper of functorch or of a mode
    if values.is_cuda and capturing():
        say_once(
            "a CUDA graph is captured: records from in it have no statistics, and its replays make none"
        )
        return None  # the row would hold its numbers at the graph's replay, when nobody reads it
    return values
