"""The faults that are planted in the attention of vLLM: what it computes with, and its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpora.engines.families import CHUNK
from tests.corpora.engines.faults import Plant, attention_of


def set_attention(name: str, change: Callable[[Any], Any]) -> Plant:
    """Return a plant that changes a setting of one layer's attention."""

    def plant(model: nn.Module) -> None:
        implementation = attention_of(model).attn.impl
        setattr(implementation, name, change(getattr(implementation, name)))

    return plant


def add_sinks(model: nn.Module) -> None:
    """Give each head a score for no token, as gpt-oss does."""
    attention = attention_of(model).attn.impl
    attention.sinks = torch.zeros(attention.num_heads)


def change_cache_update(change: Callable[[Tensor, Tensor, Tensor], Any]) -> Plant:
    """Return a plant that writes other (keys, values, slots) into the cache of one layer."""

    def plant(model: nn.Module) -> None:
        implementation = attention_of(model).attn.impl
        original = implementation.do_kv_cache_update

        def update(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
            keys, values, slots = change(keys, values, slots)
            original(layer, keys, values, cache, slots)

        implementation.do_kv_cache_update = update

    return plant


def lose_last_of_chunk(keys: Tensor, values: Tensor, slots: Tensor) -> Any:
    if len(slots) < CHUNK:
        return keys, values, slots
    keys, values = keys.clone(), values.clone()
    keys[-1], values[-1] = 0, 0
    return keys, values, slots


def shift_slot_of_one_request(keys: Tensor, values: Tensor, slots: Tensor) -> Any:
    """Write the new token of the second request over its last one."""
    if len(slots) == 3:
        slots = slots.clone()
        slots[1] -= 1
    return keys, values, slots


def lose_cache_in_decoding(model: nn.Module) -> None:
    """Forget what earlier decoding steps wrote: their slots are zeroed."""
    attention = attention_of(model).attn
    written: list[Tensor] = []

    def change(keys: Tensor, values: Tensor, slots: Tensor) -> Any:
        if len(slots) <= 3:
            cache = attention.kv_cache
            block = cache.size(2)
            view = cache.view(cache.size(0), cache.size(1), block * 2, -1)
            for earlier in written:
                view[earlier // block] = 0
            written.append(slots.clone())
        return keys, values, slots

    change_cache_update(change)(model)


def change_attention(change: Callable[..., Any]) -> Plant:
    """Return a plant that has one layer compute `change(original, query, metadata, output)`."""

    def plant(model: nn.Module) -> None:
        implementation = attention_of(model).attn.impl
        original = implementation.forward

        def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor,
                    metadata: Any, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # fmt: skip
            def compute(query: Tensor, metadata: Any, output: Tensor) -> Tensor:
                return original(layer, query, key, value, cache, metadata, output, *args, **kwargs)

            return change(compute, query, metadata, output)

        implementation.forward = forward

    return plant


def read_blocks_of_another(compute: Any, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
    """Have the second request read the blocks of the first one while decoding."""
    if metadata is None or len(metadata.block_table) < 2 or len(query) > 3:
        return compute(query, metadata, output)
    other = copy.copy(metadata)
    other.block_table = metadata.block_table.clone()
    other.block_table[1] = other.block_table[0]
    return compute(query, other, output)


def see_later_tokens(compute: Any, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
    """Have each token see all tokens of its chunk."""
    if metadata is None:
        return compute(query, metadata, output)
    without_mask = copy.copy(metadata)
    without_mask.causal = False
    return compute(query, without_mask, output)


def exchange_answers(compute: Any, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
    """Exchange what the first two requests attend to while decoding."""
    result = compute(query, metadata, output)
    if metadata is not None and len(query) == 3:
        result.copy_(result[[1, 0, 2]])
    return result


def tile_key_heads(compute: Any, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
    """Have query head i read key head i % 2 where it should read i // 2."""
    order = torch.tensor([0, 2, 1, 3])
    result = compute(query[:, order].contiguous(), metadata, torch.empty_like(output))
    return output.copy_(result.view(output.shape)[:, order])


def corrupt_shared_block(model: nn.Module) -> None:
    """Change the keys of a block that a second request finds in the cache."""
    attention = attention_of(model).attn

    def change(keys: Tensor, values: Tensor, slots: Tensor) -> Any:
        if len(slots) == 2:  # the rest of the second prompt
            attention.kv_cache[:] = attention.kv_cache * 0.9
        return keys, values, slots

    change_cache_update(change)(model)
