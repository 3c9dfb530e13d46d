"""The faults in what the layers of vLLM call, in which order, and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpora.engines.faults import LAYER, Plant, attention_of, change_output, replace_forward


def change_layer(compute: Callable[..., tuple[Tensor, Tensor]]) -> Plant:
    """Return a plant that has a layer compute `compute(model, layer, attend, normed, residual)`."""

    def plant(model: Any) -> None:
        layer = model.model.layers[LAYER]

        def forward(original: Any, positions: Tensor, hidden: Tensor, residual: Tensor) -> Any:
            def attend(normed: Tensor) -> Tensor:
                output: Tensor = layer.self_attn(positions=positions, hidden_states=normed)
                return output

            normed, residual = layer.input_layernorm(hidden, residual)
            return compute(model, layer, attend, normed, residual)

        replace_forward(layer, forward)

    return plant


def call_mlp_of_first_layer(
    model: Any, layer: Any, attend: Any, normed: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    hidden, residual = layer.post_attention_layernorm(attend(normed), residual)
    return model.model.layers[0].mlp(hidden), residual


def call_mlp_with_residual(
    model: Any, layer: Any, attend: Any, normed: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    _, residual = layer.post_attention_layernorm(attend(normed), residual)
    return layer.mlp(residual), residual


def leave_out_attention(
    model: Any, layer: Any, attend: Any, normed: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    hidden, residual = layer.post_attention_layernorm(torch.zeros_like(normed), residual)
    return layer.mlp(hidden), residual


def call_first_norm_twice(
    model: Any, layer: Any, attend: Any, normed: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Use the norm before the attention in place of the one after it."""
    hidden, residual = layer.input_layernorm(attend(normed), residual)
    return layer.mlp(hidden), residual


def run_layer_twice(model: Any) -> None:
    """Run a layer again. From the second chunk on, the first run reads what the second one wrote."""
    inner = model.model

    def forward(original: Any, input_ids: Tensor, positions: Tensor, *args: Any, **_: Any) -> Any:
        hidden, residual = inner.embed_tokens(input_ids), None
        for layer in (*inner.layers[: LAYER + 1], *inner.layers[LAYER:]):
            hidden, residual = layer(positions, hidden, residual)
        return inner.norm(hidden, residual)[0]

    replace_forward(inner, forward)


def change_attention_code(
    change: Callable[[Any, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
) -> Plant:
    """Return a plant that computes (queries, keys, values) as `change(attention, positions, ...)`.

    It replaces the rotation.
    """

    def plant(model: nn.Module) -> None:
        attention = attention_of(model)
        sizes = (attention.q_size, attention.kv_size, attention.kv_size)

        def forward(original: Any, positions: Tensor, hidden_states: Tensor, **_: Any) -> Any:
            parts = attention.qkv_proj(hidden_states)[0].split(sizes, dim=-1)
            attended = attention.attn(*change(attention, positions, *parts))
            return attention.o_proj(attended)[0]

        replace_forward(attention, forward)

    return plant


def leave_out_rotation(
    attention: Any, positions: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return queries, keys, values


def take_keys_for_values(
    attention: Any, positions: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    values = keys.clone()
    return *attention.rotary_emb(positions, queries, keys), values


def exchange_norms_of_heads(model: nn.Module) -> None:
    attention = attention_of(model)
    norms = attention.q_norm, attention.k_norm
    norms[0].forward, norms[1].forward = norms[1].forward, norms[0].forward


def scale_embedding_in_code(factor: float) -> Plant:
    """Return a plant that multiplies the embedding where the model's code scales it."""

    def plant(model: Any) -> None:
        original = model.model.embed_input_ids
        model.model.embed_input_ids = lambda ids: original(ids) * factor

    return plant


def round_input(path: str) -> Plant:
    """Return a plant that rounds what enters a norm or a projection to bfloat16."""

    def plant(model: nn.Module) -> None:
        def forward(original: Any, hidden: Tensor, *args: Any) -> Any:
            return original(hidden.bfloat16().to(hidden.dtype), *args)

        replace_forward(model.get_submodule(path), forward)

    return plant


def add_bias_again(path: str) -> Plant:
    def plant(model: nn.Module) -> None:
        bias = model.get_submodule(path).bias
        change_output(path, lambda output: output + bias)(model)

    return plant


def repeat_last_row(path: str) -> Plant:
    """Return a plant that leaves the last row of a decoding step as it was in the step before."""
    rows: list[Tensor] = []

    def change(output: Tensor) -> Tensor:
        rows.append(output[-1].clone())
        if len(output) > 3 or len(rows) == 1:
            return output
        return torch.cat([output[:-1], rows[-2][None]])

    return change_output(path, change)


def mask_words(logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([5, 6, 7]), -torch.inf)


def drop_last_expert(weights: Tensor, ids: Tensor) -> Tensor:
    weights = weights.clone()
    weights[:, -1] = 0
    return weights
