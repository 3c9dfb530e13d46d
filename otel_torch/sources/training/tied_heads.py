"""Notices an embedding and a head that were one weight, and are two that train apart.

A head is tied if it has the embedding's own parameter, if both begin with the same numbers, or if
the model's configuration says so, as that of transformers does.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.modules.module_names import all_modules
from otel_torch.statistics.samples import sample
from otel_torch.statistics.unwrap_tensor import host_values


class _Holder(NamedTuple):
    """A module with a weight of two dimensions, by its name."""

    name: str
    module: weakref.ref[nn.Module]

    def weight(self) -> Tensor | None:
        weight = getattr(self.module(), "weight", None)
        return weight if isinstance(weight, Tensor) else None


class TiedHeads:
    """The embeddings of a model with the heads that belong to them."""

    def __init__(self, model: Model) -> None:
        root = model.root()
        tied_head = _tied_head(root)
        embeddings: list[tuple[_Holder, Tensor]] = []
        heads: dict[torch.Size, list[tuple[_Holder, Tensor]]] = defaultdict(list)  # by shape
        for module, holder, weight in () if root is None else _holders(root, model):
            is_embedding = isinstance(module, nn.Embedding)
            (embeddings if is_embedding else heads[weight.shape]).append((holder, weight))
        self._pairs = [
            (embedding, head)
            for embedding, weight in embeddings
            for head, own in heads.get(weight.shape, ())
            if head.module() is tied_head or _are_equal(weight, own)
        ]

    def parted(self) -> list[dict[str, str]]:
        """Return the pairs that are two different weights now. Reads nothing from a device."""
        return [
            {"first": f"{embedding.name}.weight", "second": f"{head.name}.weight"}
            for embedding, head in self._pairs
            if _have_parted(embedding.weight(), head.weight())
        ]


def _tied_head(root: nn.Module | None) -> nn.Module | None:
    """Return the head that a model of transformers says is tied to its embedding."""
    if getattr(getattr(root, "config", None), "tie_word_embeddings", None) is not True:
        return None
    try:
        head = root.get_output_embeddings()  # type: ignore[union-attr, operator]
    except Exception:
        return None
    return head if isinstance(head, nn.Module) else None


def _holders(root: nn.Module, model: Model) -> Iterator[tuple[nn.Module, _Holder, Tensor]]:
    names = {id(site.module()): site.names for site in list(model.sites.values())}
    for module in all_modules(root):
        weight, own = module._parameters.get("weight"), names.get(id(module))
        if weight is not None and weight.dim() == 2 and own:
            yield module, _Holder(own[0][0], weakref.ref(module)), weight


@torch_private.unobserved
def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two weights are one, or hold the same numbers, and not one number alone."""
    if first is second:
        return True
    values, others = host_values(first), host_values(second)
    if values is None or others is None or values.shape != others.shape:
        return False
    values = sample(values)
    return torch.equal(values, sample(others)) and bool((values != values[..., :1]).any())


def _have_parted(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None or first is second or first.shape != second.shape:
        return False
    is_one_memory = first.data_ptr() == second.data_ptr()
    are_trained = first.requires_grad and second.requires_grad
    return are_trained and not is_one_memory and not (first.is_cpu and _are_equal(first, second))
