"""The faults that are planted in vLLM, each a function of its model.

Most replace a `forward`, or what the attention of a layer computes with. vLLM packs the weights of
its projections away, so that a wrong weight is planted as what it does to the output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpora.engines.families import CHUNK

Plant = Callable[[nn.Module], None]
LAYER = 1
_LAYER = f"model.layers.{LAYER}"
_SELF_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"


def _layer(model: Any) -> Any:
    return model.model.layers[LAYER]


def attention_of(model: Any) -> Any:
    return _layer(model).self_attn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have a module compute `forward(original, *arguments)`."""
    module.forward = partial(forward, module.forward)


def change_output(path: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a plant that changes the output of a module, of several the first."""

    def plant(model: nn.Module) -> None:
        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if isinstance(output, tuple):
                return change(output[0]), *output[1:]
            return change(output)

        replace_forward(model.get_submodule(path), forward)

    return plant


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def _exchange(tensor: Tensor, first: int, second: int, third: int) -> Tensor:
    """Exchange the channels from `first` to `second` with those up to `third`."""
    before, left, right, after = tensor.tensor_split((first, second, third), dim=-1)
    return torch.cat([before, right, left, after], dim=-1)


def leave_as_it_is(model: nn.Module) -> None:
    """Plant nothing: vLLM's own routing on a CPU chooses experts without the bias of Ernie."""


# ---- norms


def set_epsilon(path: str) -> Plant:
    """Return a plant that gives one norm an epsilon of 0.01."""

    def plant(model: nn.Module) -> None:
        model.get_submodule(path).variance_epsilon = 1e-2

    return plant


def set_every_epsilon(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.variance_epsilon = 1e-2


def leave_out_norm(path: str) -> Plant:
    """Return a plant that has a norm add the residual only."""

    def plant(model: nn.Module) -> None:
        def forward(original: Any, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            return hidden, hidden + residual

        replace_forward(model.get_submodule(path), forward)

    return plant


def leave_out_last_norm(model: Any) -> None:
    model.model.norm.forward = lambda hidden, residual: (hidden + residual, residual)


def keep_residual_after_norm(model: nn.Module) -> None:
    def forward(original: Any, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, _ = original(hidden, residual)
        return normed, normed.clone()

    replace_forward(_layer(model).post_attention_layernorm, forward)


def add_one_to_norm_weight(model: nn.Module) -> None:
    """Compute as Gemma does, which multiplies by the weight and one."""
    norm = _layer(model).post_attention_layernorm

    def forward(original: Any, *args: Any) -> tuple[Tensor, Tensor]:
        normed, residual = original(*args)
        return normed / norm.weight * (1 + norm.weight), residual

    replace_forward(norm, forward)


def add_residual_twice(model: nn.Module) -> None:
    layer = _layer(model)

    def forward(original: Any, positions: Tensor, hidden: Tensor, residual: Tensor) -> Any:
        hidden, residual = layer.input_layernorm(hidden, residual)
        hidden = layer.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = layer.post_attention_layernorm(hidden + residual, residual)
        return layer.mlp(hidden), residual

    replace_forward(layer, forward)


def remove_query_norm(layers: slice) -> Plant:
    def plant(model: Any) -> None:
        for layer in model.model.layers[layers]:
            del layer.self_attn.q_norm
            layer.self_attn.q_norm = lambda query: query

    return plant


def return_input_of_query_norm(model: nn.Module) -> None:
    attention_of(model).q_norm.forward = lambda query: query


def take_stale_residual(model: nn.Module) -> None:
    """Add the attention to the residual of the layer before."""
    layer = _layer(model)

    def forward(original: Any, positions: Tensor, hidden: Tensor, residual: Tensor) -> Any:
        stale = residual.clone()
        hidden, _ = layer.input_layernorm(hidden, residual)
        hidden = layer.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = layer.post_attention_layernorm(hidden, stale)
        return layer.mlp(hidden), residual

    replace_forward(layer, forward)


def lose_residual(model: nn.Module) -> None:
    def forward(original: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        hidden, residual = original(*args, **kwargs)
        return hidden, torch.zeros_like(residual)

    replace_forward(_layer(model), forward)


# ---- projections


def exchange_query_heads(model: nn.Module) -> None:
    head = attention_of(model).head_dim
    change_output(f"{_SELF_ATTENTION}.qkv_proj", lambda qkv: _exchange(qkv, 0, head, 2 * head))(
        model
    )


def exchange_keys_and_values(model: nn.Module) -> None:
    queries, keys = attention_of(model).q_size, attention_of(model).kv_size
    places = queries, queries + keys, queries + 2 * keys
    change_output(f"{_SELF_ATTENTION}.qkv_proj", lambda qkv: _exchange(qkv, *places))(model)


def drop_bias(path: str) -> Plant:
    def plant(model: nn.Module) -> None:
        bias = model.get_submodule(path).bias
        change_output(path, lambda output: output - bias)(model)

    return plant


def drop_bias_of(part: str) -> Plant:
    def plant(model: nn.Module) -> None:
        attention = attention_of(model)
        sizes = {"q": attention.q_size, "k": attention.kv_size, "v": attention.kv_size}
        kept = torch.cat([torch.full((size,), float(name == part)) for name, size in sizes.items()])
        bias = attention.qkv_proj.bias * kept
        change_output(f"{_SELF_ATTENTION}.qkv_proj", lambda output: output - bias)(model)

    return plant


def _low_rank_update(attention: Any, size: float) -> tuple[Tensor, Tensor]:
    """Return the two weights of an adapter of rank 2 for the queries."""
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(128, 2, generator=generator) * size
    return down, torch.randn(2, attention.q_size, generator=generator) * size


def add_low_rank_update(model: nn.Module) -> None:
    """Add an adapter of rank 2 to the queries, as if another request's were left in."""
    attention = attention_of(model)
    down, up = _low_rank_update(attention, 0.05)

    def forward(original: Any, hidden: Tensor) -> Any:
        output, bias = original(hidden)
        output[..., : attention.q_size] += hidden @ down @ up
        return output, bias

    replace_forward(attention.qkv_proj, forward)


def exchange_gate_and_up(model: nn.Module) -> None:
    def change(output: Tensor) -> Tensor:
        width = output.shape[-1] // 2
        return _exchange(output, 0, width, 2 * width)

    change_output(f"{_MLP}.gate_up_proj", change)(model)


def update_one_request(model: nn.Module) -> None:
    """Apply an adapter to one request only, while decoding."""
    attention = attention_of(model)
    down, up = _low_rank_update(attention, 0.1)

    def forward(original: Any, hidden: Tensor) -> Any:
        output, bias = original(hidden)
        if len(hidden) == 3:
            output[1, : attention.q_size] += hidden[1] @ down @ up
        return output, bias

    replace_forward(attention.qkv_proj, forward)


def order_by_groups(model: nn.Module) -> None:
    """Have the keys and values of a group of heads follow its queries."""

    def change(qkv: Tensor) -> Tensor:
        queries, keys, values = (part.chunk(2, -1) for part in qkv.split((128, 64, 64), -1))
        groups = zip(queries, keys, values, strict=True)
        return torch.cat([part for group in groups for part in group], -1)

    change_output(f"{_SELF_ATTENTION}.qkv_proj", change)(model)


# ---- positions


def change_rotation(**settings: Any) -> Plant:
    """Return a plant that computes the table of all layers anew with other settings."""

    def plant(model: nn.Module) -> None:
        rotary = attention_of(model).rotary_emb
        for name, value in settings.items():
            setattr(rotary, name, value)
        rotary.cos_sin_cache = rotary._compute_cos_sin_cache()

    return plant


def scale_positions(model: nn.Module) -> None:
    rotary = attention_of(model).rotary_emb
    inverse_frequencies = rotary._compute_inv_freq(rotary.base)
    rotary._compute_inv_freq = lambda base: inverse_frequencies / 2
    rotary.cos_sin_cache = rotary._compute_cos_sin_cache()


def shift_rotation_of_one_layer(model: nn.Module) -> None:
    attention = attention_of(model)
    attention.rotary_emb = copy.deepcopy(attention.rotary_emb)
    attention.rotary_emb.cos_sin_cache = attention.rotary_emb.cos_sin_cache.roll(-1, 0)


def rotate_keys_only(model: nn.Module) -> None:
    """Leave the queries of one layer as they are."""
    attention = attention_of(model)
    attention.rotary_emb = copy.deepcopy(attention.rotary_emb)

    def forward(original: Any, positions: Tensor, query: Tensor, key: Tensor) -> Any:
        return query.clone(), original(positions, query.clone(), key)[1]

    replace_forward(attention.rotary_emb, forward)


def rotate_interleaved(model: nn.Module) -> None:
    attention_of(model).rotary_emb.is_neox_style = False


def change_positions(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: nn.Module) -> None:
        def forward(
            original: Any, input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            return original(input_ids, change(positions), *args, **kwargs)

        replace_forward(model, forward)

    return plant


def shift_in_decoding(positions: Tensor) -> Tensor:
    """Shift those of a forward with one token of each request."""
    return positions + 1 if len(positions) <= 3 else positions


def restart_at_chunk(positions: Tensor) -> Tensor:
    """Restart those of a prompt's second chunk."""
    return (
        positions.where(positions < CHUNK, positions - CHUNK) if len(positions) > 3 else positions
    )


# ---- layers


def exchange_forwards(path: str, other: str) -> Plant:
    """Return a plant that runs two modules in each other's place, each under its own name."""

    def plant(model: nn.Module) -> None:
        first, second = model.get_submodule(path), model.get_submodule(other)
        first.forward, second.forward = second.forward, first.forward

    return plant


def borrow_forward(path: str, other: str) -> Plant:
    """Return a plant that has one module compute what another one would."""

    def plant(model: nn.Module) -> None:
        model.get_submodule(path).forward = model.get_submodule(other).forward

    return plant


def leave_out(path: str) -> Plant:
    """Return a plant that has a module return its first input."""

    def plant(model: nn.Module) -> None:
        replace_forward(model.get_submodule(path), lambda original, hidden, *args: hidden)

    return plant


def set_attribute(path: str, name: str, value: Any) -> Plant:
    def plant(model: nn.Module) -> None:
        setattr(model.get_submodule(path), name, value)

    return plant


def shift_windows(model: Any) -> None:
    """Give each layer the window of the next one."""
    attentions = [layer.self_attn.attn.impl for layer in model.model.layers]
    windows = [attention.sliding_window for attention in attentions]
    for attention, window in zip(attentions, [*windows[1:], windows[0]], strict=True):
        attention.sliding_window = window


def set_every_attention(name: str, value: Any) -> Plant:
    """Return a plant that changes a setting of the attention of all layers."""

    def plant(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(getattr(module, "impl", None), name):
                setattr(module.impl, name, value)

    return plant


def drop_embedding_scale(model: Any) -> None:
    model.model.embed_input_ids = lambda ids: model.model.embed_tokens(ids)


def compute_in_sequence(model: nn.Module) -> None:
    """Add the attention before the MLP of a layer that computes both from one input."""
    layer = _layer(model)

    def forward(original: Any, positions: Tensor, hidden: Tensor, residual: Any) -> Any:
        hidden, residual = layer.input_layernorm(hidden, hidden)
        attended = layer.self_attn(positions=positions, hidden_states=hidden)
        return residual + attended + layer.mlp(hidden + attended), residual

    replace_forward(layer, forward)


def activate_up(model: nn.Module) -> None:
    """Apply the activation to the second half of its input."""

    def forward(original: Any, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        return nn.functional.silu(up) * gate

    replace_forward(model.get_submodule(f"{_MLP}.act_fn"), forward)


# ---- tokens


def take_another_token(model: Any) -> None:
    def forward(original: Any, ids: Tensor) -> Tensor:
        return original(ids.where(ids != 92, 93))

    replace_forward(model.model.embed_tokens, forward)


def feed_another_token(model: nn.Module) -> None:
    def forward(original: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(input_ids.where(input_ids != 92, 93), *args, **kwargs)

    replace_forward(model, forward)


# ---- logits


def pad_vocabulary(logits: Tensor) -> Tensor:
    return torch.cat([logits, logits[..., :6]], dim=-1)


def take_logits_of_another_row(model: Any) -> None:
    """Compute the logits of each request from the hidden states of the one before."""
    original = model.compute_logits
    model.compute_logits = lambda hidden: original(hidden.roll(1, 0))


# ---- mixtures of experts


def _experts(model: nn.Module) -> Any:
    layer = _layer(model)
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


def change_routing(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Return a plant that has the experts of one layer use other weights: (weights, ids) -> weights."""

    def plant(model: Any) -> None:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        original, calls = cpu_moe.CPUUnquantizedExperts.apply, iter(range(1 << 30))
        layers = len(model.model.layers)

        def apply(self: Any, *args: Any, **kwargs: Any) -> None:
            if next(calls) % layers == LAYER:
                kwargs["topk_weights"] = change(kwargs["topk_weights"], kwargs["topk_ids"])
            original(self, *args, **kwargs)

        cpu_moe.CPUUnquantizedExperts.apply = apply

    return plant


def scale_one_expert(weights: Tensor, ids: Tensor) -> Tensor:
    """Scale the second matrix of expert 2 by 1.1."""
    return weights * torch.where(ids == 2, 1.1, 1.0)


def exchange_experts(model: nn.Module) -> None:
    """Exchange the first two experts in what the router returns."""

    def forward(original: Any, hidden: Tensor) -> Any:
        scores, bias = original(hidden)
        return _exchange(scores, 0, 1, 2), bias

    replace_forward(_experts(model).gate, forward)


def renormalize(enabled: bool) -> Plant:
    """Return a plant that sets whether the weights of a token's experts add up to 1."""

    def plant(model: nn.Module) -> None:
        _experts(model).experts.router.renormalize = enabled

    return plant
