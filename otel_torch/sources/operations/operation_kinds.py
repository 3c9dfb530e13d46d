"""What an ATen operation does to its tensors.

Torch's schemas and tags say most of it, the tables here the rest.

>>> kind_of(torch.ops.aten.transpose.int).moves, kind_of(torch.ops.aten.add_.Tensor).written
(True, (0,))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from otel_torch import torch_private

# operations that make memory without values
_UNINITIALIZED = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
        "_empty_affine_quantized", "resize_", "resize_as_",
    }
)  # fmt: skip
# operations after which a tensor shows memory that operations did not write
SHARES_MEMORY = frozenset({"aten.set_.source_Storage", "aten.set_.source_Storage_storage_offset"})
# operations that copy, join or select elements and compute none; views are those that torch says
_MOVES = frozenset(
    {
        "cat", "stack", "hstack", "vstack", "repeat", "repeat_interleave",
        "roll", "flip", "index", "index_select", "gather", "take", "take_along_dim", "embedding",
        "masked_select", "slice_scatter", "select_scatter", "diagonal_scatter", "_reshape_copy",
        "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col",
        "tril", "triu", "view_copy", "expand_copy", "permute_copy", "as_strided_copy",
        "_unsafe_view", "unsafe_split", "split_with_sizes_copy", "unfold_copy",
    }
)  # fmt: skip
# views that show other numbers than their base
_CHANGING_VIEWS = frozenset({"_conj", "_neg_view", "aten.view.dtype"})
# operations that convert or copy, which move or cast depending on the types
_COPIES = frozenset({"_to_copy", "copy_", "copy", "clone", "contiguous", "to", "_to_cpu"})
# operations in place that do not read what they write to
_OVERWRITES = frozenset(
    {
        "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
        "log_normal_", "geometric_", "cauchy_", "set_", "_foreach_copy_", "_foreach_zero_",
    }
)  # fmt: skip
# arguments that are written although the schema does not say so: running mean and variance
_HIDDEN_WRITES = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "symm_mem"})


@dataclass(frozen=True, slots=True)
class OperationKind:
    """What is the same in all calls of an operation.

    Attributes:
        name: as `str` has it, "aten.mul.Tensor".
        written: positions of the arguments that it writes to.
        unread: which of these it does not read.
        written_names, unread_names: likewise of keyword arguments.
        moves: whether it computes nothing.
        copies: whether it moves or casts, depending on its tensors.
        draws: whether it may draw random numbers.
        leaves_unset: whether what it makes has no values yet.
        is_collective: whether it exchanges tensors with other ranks, perhaps after it has returned.
        reads_shapes: whether it reads the sizes and types of tensors only (`zeros_like`).
        is_of_torch: whether it is one of ATen, and no other library's.
    """

    name: str
    written: tuple[int, ...] = ()
    unread: frozenset[int] = frozenset()
    written_names: tuple[str, ...] = ()
    unread_names: frozenset[str] = frozenset()
    moves: bool = False
    copies: bool = False
    draws: bool = False
    leaves_unset: bool = False
    is_collective: bool = False
    reads_shapes: bool = False
    is_of_torch: bool = False

    @property
    def rounds(self) -> bool:
        """Whether it rounds: it computes numbers, and not in place."""
        writes = self.written or self.written_names
        return not (writes or self.moves or self.copies or self.draws or self.leaves_unset)


@functools.cache
def kind_of(operation: Any) -> OperationKind:
    name = str(operation)
    namespace, _, rest = name.partition(".")
    base = rest.partition(".")[0]
    marked = torch_private.written_arguments(operation)
    schema = getattr(operation, "_schema", None)
    arguments = () if schema is None else schema.arguments
    keywords = frozenset(argument.name for argument in arguments if argument.kwarg_only)
    written = tuple(
        sorted({place for place in marked if type(place) is int} | {*_HIDDEN_WRITES.get(base, ())})
    )
    is_collective = namespace in _COLLECTIVES
    unread: tuple[int, ...] = ()
    if namespace == "c10d":
        written, unread = _written_by_collective(base, arguments)
    is_aten = namespace in ("aten", "prims")
    overwrites = is_aten and base in _OVERWRITES
    names = tuple(sorted(place for place in marked if type(place) is str))
    return OperationKind(
        name=name,
        written=written,
        unread=frozenset(written if overwrites else unread),
        written_names=names,
        unread_names=frozenset(names) & keywords,
        moves=(torch_private.returns_view(operation) and not _CHANGING_VIEWS & {base, name})
        or (is_aten and base in _MOVES),
        copies=is_aten and base in _COPIES,
        draws=torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()),
        leaves_unset=is_aten and base in _UNINITIALIZED,
        is_collective=is_collective,
        reads_shapes=is_aten and (base.endswith("_like") or base.startswith("new_")),
        is_of_torch=is_aten,
    )


def _written_by_collective(
    base: str, arguments: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which arguments c10d's operations write, and which of these they do not read.

    Their schemas do not say it, but name them alike.
    """
    tensors = [
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if "Tensor" in str(argument.type)
    ]
    outputs = tuple(place for place, name in tensors if name.startswith("output"))
    in_place = tuple(place for place, name in tensors if name == "tensors" and base != "send")
    return outputs + in_place, in_place if base.startswith("recv") else outputs


def draws_now(kind: OperationKind, operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this call draws random numbers. Attention without dropout draws none."""
    if not kind.draws:
        return False
    return bool(torch_private.argument(operation, "dropout_p", args, kwargs) != 0.0)
