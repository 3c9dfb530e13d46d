"""Other models and other faults of an engine, written without sight of the comparison.

As in `families` and `cases`, whose tables it extends. A plant here names its module by its path, so
that the layer in which a fault is varies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.corpora.case import Place, Right, into, missing, out_of
from tests.corpora.engines import faults
from tests.corpora.engines.cases import EVERY, FAULTS, ROTATED, Engine, Engines, Fault
from tests.corpora.engines.families import (
    BLOCK,
    CHUNK,
    FAMILIES,
    LONG_PROMPTS,
    PROMPTS_OF_ONE_PREFIX,
    Family,
    forward_packed,
    generate,
)
from tests.corpora.engines.faults import Plant, replace_forward

# ---- families


def _rope(**settings: Any) -> Mapping[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **settings}}


_EVERY_OTHER = ["sliding_attention", "full_attention", "sliding_attention"]
_PHI3 = {**_rope(partial_rotary_factor=0.5), "pad_token_id": 0}
_STABLELM = {**_rope(partial_rotary_factor=0.25), "use_qkv_bias": True}
_GLM4 = {**_rope(partial_rotary_factor=0.5), "pad_token_id": 0, "attention_bias": True}
_FALCON = {"tie_word_embeddings": True}
_OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 64}
_EXAONE4 = {"sliding_window": 4, "sliding_window_pattern": 2, "layer_types": _EVERY_OTHER}
_COHERE2 = {"layer_types": _EVERY_OTHER, "logit_scale": 0.5, "tie_word_embeddings": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GRANITE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}

LATER_FAMILIES = {
    "phi3": Family("Phi3", {**_PHI3, "sliding_window": 6}),
    "stablelm": Family("StableLm", _STABLELM),
    "falcon": Family("Falcon", {**_FALCON, "bias": True}, without=("head_dim",)),
    # two norms beside each other; queries, keys and values of a group follow each other
    "falcon-groups": Family(
        "Falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        without=("head_dim",),
    ),
    "falcon-alibi": Family(
        "Falcon",
        {**_FALCON, "bias": True, "multi_query": False, "parallel_attn": False, "alibi": True},
        without=("head_dim",),
    ),
    "nemotron": Family("Nemotron", _rope(partial_rotary_factor=0.5)),
    # no rotation in its full layer; norms after attention and MLP only
    "exaone4": Family("Exaone4", _EXAONE4),
    "glm4": Family("Glm4", _GLM4),
    # no rotation in its full layer; a window longer than any request, because vLLM's is longer by one
    "cohere2": Family("Cohere2", {**_COHERE2, "sliding_window": 64}),
    "cohere2-window": Family("Cohere2", {**_COHERE2, "sliding_window": 4}),
    "ernie45": Family("Ernie4_5", {"tie_word_embeddings": True}),
    # vLLM keeps the slopes of its activation in bfloat16
    "apertus": Family("Apertus", _rope(**_LLAMA3)),
    "gemma": Family("Gemma", {"tie_word_embeddings": True}),
    "gptj": Family(
        "GPTJ",
        {
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "n_inner": 192,
            "rotary_dim": 16,
        },
    ),
    "granitemoe": Family("GraniteMoe", _GRANITE),
    "granitemoe-shared": Family("GraniteMoeShared", {**_GRANITE, "shared_intermediate_size": 96}),
    "olmoe": Family("Olmoe", _OLMOE),
    "phi3-prefix": Family(
        "Phi3",
        _PHI3,
        engine={"enable_prefix_caching": True, "block_size": BLOCK},
        prompts=PROMPTS_OF_ONE_PREFIX,
        in_turn=True,
    ),
    "stablelm-generated": Family("StableLm", _STABLELM, reference=generate),
    "exaone4-generated": Family("Exaone4", _EXAONE4, reference=generate),
    "glm4-packed": Family("Glm4", _GLM4, reference=forward_packed),
    "gemma-preempted": Family(
        "Gemma",
        {"tie_word_embeddings": True},
        engine={"num_gpu_blocks_override": 5, "block_size": BLOCK},
        prompts=LONG_PROMPTS,
        chunk=16,
    ),
    "olmoe-samples": Family("Olmoe", _OLMOE, samples=3),
}

# in float32, by vLLM's own code
_DIFFERENT = ("cohere2-window", "apertus")
LATER_CLEAN = (
    *(Engine(family) for family in LATER_FAMILIES if family not in _DIFFERENT),
    *(Engine(family, "bfloat16") for family in ("phi3", "falcon", "glm4")),
    *(Engine(family, "bfloat16") for family in ("granitemoe", "apertus")),
    *(Engine(family, compiled=True) for family in ("stablelm", "cohere2", "olmoe")),
)


# ---- plants: what a module computes


def compute_in(path: str, compute: Callable[..., Any]) -> Plant:
    """Return a plant that has a module compute `compute(module, original, *arguments)`."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            return compute(module, original, *args, **kwargs)

        replace_forward(module, forward)

    return plant


def forget_plus_one_of_layer_norm(
    norm: Any, original: Any, hidden: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    hidden = hidden + residual
    return functional.layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias), hidden


def forget_plus_one(norm: Any, original: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
    normed, residual = original(*args)
    return normed / (1 + norm.weight) * norm.weight, residual


def keep_the_mean(norm: Any, original: Any, hidden: Tensor) -> Tensor:
    """Divide by the root of the mean square where the mean should be subtracted first."""
    scale = (hidden.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return hidden * scale * norm.weight + norm.bias


def norm_each_head(norm: Any, original: Any, hidden: Tensor) -> Tensor:
    """Norm each head where all heads should be normed at once."""
    heads = hidden.unflatten(-1, (-1, 32))
    scale = (heads.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return (heads * scale).flatten(-2) * norm.weight


def exchange_slopes(activation: Any, original: Any, hidden: Tensor) -> Tensor:
    """Exchange the two learned slopes of xIELU."""
    positive = functional.softplus(activation.alpha_n)
    negative = activation.beta + functional.softplus(activation.alpha_p)
    above, below = positive * hidden.square(), negative * (hidden.expm1() - hidden)
    return torch.where(hidden > 0, above, below) + activation.beta * hidden


def gate_by_silu(activation: Any, original: Any, hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return functional.silu(gate) * up


def transpose_weight(projection: Any, original: Any, hidden: Tensor) -> Any:
    """Multiply by the transpose of a square weight."""
    weight, bias = original(torch.eye(hidden.shape[-1], dtype=hidden.dtype))
    return hidden @ weight.T, bias


def drop_bias_of_values(projection: Any, original: Any, hidden: Tensor) -> Any:
    output, bias = original(hidden)
    output[..., -64:] -= projection.bias[-64:]
    return output, bias


def take_bias_of(path: str, other: str) -> Plant:
    """Return a plant that gives one projection the bias of another."""

    def plant(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        lender: Any = model.get_submodule(other)
        faults.change_output(path, lambda output: output - module.bias + lender.bias)(model)

    return plant


def follow_by_groups(qkv: Tensor) -> Tensor:
    """Leave queries, keys and values of a group of heads beside each other, as they are saved."""
    queries, keys, values = (part.chunk(2, -1) for part in qkv.split((128, 64, 64), -1))
    groups = zip(queries, keys, values, strict=True)
    return torch.cat([part for group in groups for part in group], -1)


def exchange_halves(output: Tensor) -> Tensor:
    return torch.cat(output.chunk(2, -1)[::-1], -1)


def look_up_only_small_ids(embedding: Any, original: Any, ids: Tensor) -> Tensor:
    """Look up the words below 90, as if another rank held the rest."""
    output: Tensor = original(ids)
    return output * (ids < 90)[:, None]


# ---- plants: the code of a layer


def forget_attention_in_residual(layer: Any, _: Any, positions: Tensor, hidden: Tensor) -> Any:
    normed = layer.input_layernorm(hidden)
    attended = hidden + layer.self_attn(positions=positions, hidden_states=normed)
    return hidden + layer.mlp(layer.post_attention_layernorm(attended)), hidden


def compute_mlp_after_attention(layer: Any, _: Any, positions: Tensor, hidden: Tensor) -> Any:
    """Add the attention to what the MLP of a parallel layer reads."""
    normed = layer.input_layernorm(hidden)
    attended, bias = layer.self_attention(positions=positions, hidden_states=normed)
    attended = attended + bias
    output, bias = layer.mlp(normed + attended)
    return output + bias + attended + hidden


def add_to_normed(layer: Any, _: Any, positions: Tensor, hidden: Tensor) -> Tensor:
    """Take the residual of a parallel layer after its norm."""
    normed: Tensor = layer.ln_1(hidden)
    attended = layer.attn(position_ids=positions, hidden_states=normed)
    return attended + layer.mlp(normed) + normed


def norm_the_sum(layer: Any, _: Any, positions: Tensor, hidden: Tensor, residual: Any) -> Any:
    """Norm the sum of residual and attention where the attention should be normed."""
    attended = layer.self_attn(positions=positions, hidden_states=hidden)
    hidden = layer.post_attention_layernorm(hidden + attended)
    return hidden + layer.post_feedforward_layernorm(layer.mlp(hidden)), hidden


def leave_out_norm_of_attention(
    layer: Any, _: Any, positions: Tensor, hidden: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    hidden, residual = layer.input_layernorm(hidden, residual)
    attended = layer.self_attn(positions=positions, hidden_states=hidden)
    hidden, residual = layer.post_attention_layernorm(attended, residual)
    return layer.post_mlp_layernorm(layer.mlp(hidden)), residual


def _attend(layer: Any, positions: Tensor, hidden: Tensor) -> Tensor:
    """Return a layer's hidden states after its attention."""
    normed = layer.input_layernorm(hidden)
    attended: Tensor = layer.self_attn(positions=positions, hidden_states=normed)
    return hidden + attended * layer.residual_multiplier


def add_experts_unscaled(layer: Any, _: Any, positions: Tensor, hidden: Tensor) -> Tensor:
    hidden = _attend(layer, positions, hidden)
    experts: Tensor = layer.block_sparse_moe(layer.post_attention_layernorm(hidden))
    return hidden + experts


def leave_out_shared_expert(layer: Any, _: Any, positions: Tensor, hidden: Tensor) -> Tensor:
    hidden = _attend(layer, positions, hidden)
    experts: Tensor = layer.block_sparse_moe(layer.post_attention_layernorm(hidden).clone())
    return hidden + experts * layer.residual_multiplier


def give_shared_expert_the_residual(
    layer: Any, _: Any, positions: Tensor, hidden: Tensor
) -> Tensor:
    hidden = _attend(layer, positions, hidden)
    experts: Tensor = layer.block_sparse_moe(layer.post_attention_layernorm(hidden).clone())
    return hidden + (experts + layer.shared_mlp(hidden)) * layer.residual_multiplier


def scale_embedding(name: str, value: float) -> Plant:
    """Return a plant that scales the embedding by another number in the model's code."""

    def plant(model: Any) -> None:
        scale = getattr(model.model, name)
        setattr(model.model, name, scale * 0 + value)  # of a tensor, too

    return plant


# ---- plants: positions


def change_table(path: str, change: Callable[[Any], None]) -> Plant:
    """Return a plant that changes the rotation of all layers that share it, and its table."""

    def plant(model: nn.Module) -> None:
        rotary: Any = model.get_submodule(path)
        change(rotary)
        rotary.cos_sin_cache = rotary._compute_cos_sin_cache()

    return plant


def change_rotation_of(path: str, **settings: Any) -> Plant:
    """Return a plant that gives the attention of one layer a rotation with other settings."""

    def plant(model: nn.Module) -> None:
        attention: Any = model.get_submodule(path)
        rotary = attention.rotary_emb = copy.deepcopy(attention.rotary_emb)
        for name, value in settings.items():
            setattr(rotary, name, value)
        rotary.cos_sin_cache = rotary._compute_cos_sin_cache()

    return plant


def forget_scaling(rotary: Any) -> None:
    """Compute frequencies from the base alone."""
    exponents = torch.arange(0, rotary.rotary_dim, 2) / rotary.rotary_dim
    rotary._compute_inv_freq = lambda base: base**-exponents


def take_theta_of_llama(rotary: Any) -> None:
    rotary.base = 10000.0


def set_attributes(path: str, **settings: Any) -> Plant:
    def plant(model: nn.Module) -> None:
        for name, value in settings.items():
            setattr(model.get_submodule(path), name, value)

    return plant


def shift_second_request(positions: Tensor) -> Tensor:
    """Shift the second of three requests while decoding."""
    if len(positions) != 3:
        return positions
    return positions + torch.tensor([0, 1, 0])


def forget_cached_prefix(positions: Tensor) -> Tensor:
    """Count positions from the first token that the cache does not have."""
    return positions - BLOCK if len(positions) == 2 else positions


def _parts(attention: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    sizes = (attention.q_size, attention.kv_size, attention.kv_size)
    parts: tuple[Tensor, ...] = attention.qkv_proj(hidden)[0].split(sizes, dim=-1)
    return parts


def norm_after_rotation(
    attention: Any, original: Any, positions: Tensor, hidden_states: Tensor
) -> Any:
    queries, keys, values = _parts(attention, hidden_states)
    queries, keys = attention.rotary_emb(positions, queries.clone(), keys.clone())
    queries = attention.q_norm(queries.unflatten(-1, (-1, attention.head_dim))).flatten(-2)
    keys = attention.k_norm(keys.unflatten(-1, (-1, attention.head_dim))).flatten(-2)
    return attention.o_proj(attention.attn(queries, keys, values))[0]


def rotate_queries_only(
    attention: Any, original: Any, positions: Tensor, hidden_states: Tensor
) -> Any:
    queries, keys, values = _parts(attention, hidden_states)
    queries, _ = attention.rotary_emb(positions, queries.clone(), keys.clone())
    return attention.o_proj(attention.attn(queries, keys, values))[0]


def rotate_values_too(
    attention: Any, original: Any, positions: Tensor, hidden_states: Tensor
) -> Any:
    queries, keys, values = _parts(attention, hidden_states)
    queries, keys = attention.rotary_emb(positions, queries.clone(), keys.clone())
    values, _ = attention.rotary_emb.forward_native(positions, values)
    return attention.o_proj(attention.attn(queries, keys, values))[0]


# ---- plants: what attention computes with, and its cache


def set_in_attention(path: str, name: str, change: Callable[[Any], Any]) -> Plant:
    """Return a plant that changes a setting of one layer's attention."""

    def plant(model: nn.Module) -> None:
        implementation: Any = model.get_submodule(path).impl
        setattr(implementation, name, change(getattr(implementation, name)))

    return plant


def set_in_all_attention(name: str, change: Callable[[Any], Any]) -> Plant:
    def plant(model: nn.Module) -> None:
        for path, module in model.named_modules():
            if hasattr(module, "impl"):
                set_in_attention(path, name, change)(model)

    return plant


def write(path: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Return a plant that writes other (keys, values) into the cache of one layer."""

    def plant(model: nn.Module) -> None:
        implementation: Any = model.get_submodule(path).impl
        original = implementation.do_kv_cache_update

        def update(layer: Any, keys: Tensor, values: Tensor, *rest: Any) -> None:
            original(layer, *change(keys.clone(), values.clone()), *rest)

        implementation.do_kv_cache_update = update

    return plant


def repeat_key_at_end_of_chunk(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if len(keys) == CHUNK:
        keys[-1] = keys[-2]
    return keys, values


def lose_value_of_second_request(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if len(keys) == 3:
        values[1] = 0
    return keys, values


def scale_values_in_decoding(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values * 1.2 if len(keys) <= 3 else values


def read_other_key_heads(path: str, order: Sequence[int]) -> Plant:
    """Return a plant that has query head `order[i]` of a layer read what head i should."""

    def plant(model: nn.Module) -> None:
        implementation: Any = model.get_submodule(path).impl
        original, inverse = implementation.forward, torch.tensor(order).argsort()

        def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor,
                    metadata: Any, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # fmt: skip
            other, result = query[:, list(order)].contiguous(), torch.empty_like(output)
            original(layer, other, key, value, cache, metadata, result, *args, **kwargs)
            return output.copy_(result.view(query.shape)[:, inverse].view(output.shape))

        implementation.forward = forward

    return plant


# ---- plants: routers and logits


def route(path: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Return a plant that has experts use what `change` makes of their (weights, ids)."""

    def plant(model: nn.Module) -> None:
        router: Any = model.get_submodule(path).router
        original = router.select_experts

        def select(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return change(*original(*args, **kwargs))

        router.select_experts = select

    return plant


def set_in_router(path: str, name: str, value: Any) -> Plant:
    def plant(model: nn.Module) -> None:
        setattr(model.get_submodule(path).router, name, value)

    return plant


def forget_bias_of_head(model: Any) -> None:
    model.compute_logits = lambda hidden: model.logits_processor(model.lm_head, hidden)


def change_hidden(change: Callable[[Tensor], Tensor]) -> Plant:
    """Return a plant that computes the logits of other hidden states."""

    def plant(model: Any) -> None:
        original = model.compute_logits
        model.compute_logits = lambda hidden: original(change(hidden))

    return plant


# ---- faults


def _fault(family: str, plant: Plant, *places: Place, says: tuple[str, ...] = ()) -> Fault:
    return family, plant, Right(places=places, words=says, near=("",))


_ORDER = "the right numbers in another order"
_L0, _L1, _L2 = _LAYERS = tuple(f"model.layers.{index}" for index in range(3))
_A0, _A1, _A2 = (f"{layer}.self_attn" for layer in _LAYERS)
_M0, _M1, _M2 = (f"{layer}.mlp" for layer in _LAYERS)
_E0, _E1, _E2 = (f"{layer}.block_sparse_moe" for layer in _LAYERS)
_H0, _H1, _H2 = (f"transformer.h.{index}" for index in range(3))
_ROTARY = f"{_A0}.rotary_emb"  # of all layers
_LOGITS = "logits_processor"

_TABLE: dict[str, Fault] = {
    # positions
    "whole_heads_rotated": _fault("phi3", change_rotation_of(_A2, rotary_dim=32), out_of(f"{_A2}.rotary_emb"), says=(ROTATED,)),
    "positions_of_one_request": _fault("phi3", faults.change_positions(shift_second_request), out_of(_ROTARY), into(_ROTARY), says=("token 3 of request 1",)),
    "cached_prefix_not_counted": _fault("phi3-prefix", faults.change_positions(forget_cached_prefix), out_of(_ROTARY), into(_ROTARY), says=("token 32 of request 1",)),
    "halves_rotated": _fault("glm4", faults.set_attribute(_ROTARY, "is_neox_style", True), out_of(_ROTARY), says=(ROTATED,)),
    "halves_rotated_in_last_layer": _fault("gptj", change_rotation_of(f"{_H2}.attn", is_neox_style=True), out_of(f"{_H2}.attn.rotary_emb"), says=(ROTATED,)),
    "theta_of_llama": _fault("ernie45", change_table(_ROTARY, take_theta_of_llama), out_of(_ROTARY), says=(ROTATED,)),
    "frequencies_not_scaled": _fault("apertus", change_table(_ROTARY, forget_scaling), out_of(_ROTARY), says=(ROTATED,)),
    "full_layer_rotated": _fault("exaone4", set_attributes(_A1, apply_rope_all_layers=True), into(f"{_A1}.attn"), says=(ROTATED,)),
    "sliding_layer_not_rotated": _fault("cohere2", set_attributes(_A2, v1=False, sliding_window=None), into(f"{_A2}.attn"), says=(ROTATED,)),
    "keys_not_rotated": _fault("ernie45", compute_in(_A2, rotate_queries_only), into(f"{_A2}.attn"), says=(ROTATED,)),
    "values_rotated": _fault("stablelm", compute_in(_A1, rotate_values_too), into(f"{_A1}.attn"), says=(ROTATED,)),
    "quarter_of_heads_rotated": _fault("nemotron", change_rotation_of(_A0, rotary_dim=8), out_of(f"{_A0}.rotary_emb"), says=(ROTATED,)),
    # norms
    "weight_not_plus_one": _fault("nemotron", compute_in(f"{_L2}.post_attention_layernorm", forget_plus_one_of_layer_norm), out_of(f"{_L2}.post_attention_layernorm"), says=(EVERY,)),
    "last_weight_not_plus_one": _fault("gemma", compute_in("model.norm", forget_plus_one), out_of("model.norm"), says=(EVERY,)),
    "epsilon_of_layer_norm": _fault("stablelm", faults.set_attribute(f"{_L0}.post_attention_layernorm", "eps", 0.05), out_of(f"{_L0}.post_attention_layernorm"), says=(EVERY,)),
    "mean_not_subtracted": _fault("stablelm", compute_in("model.norm", keep_the_mean), out_of("model.norm"), says=(EVERY,)),
    "queries_normed_by_head": _fault("olmoe", compute_in(f"{_A1}.q_norm", norm_each_head), out_of(f"{_A1}.q_norm"), says=(EVERY,)),
    "normed_after_rotation": _fault("apertus", compute_in(_A0, norm_after_rotation), into(_ROTARY), into(f"{_A0}.q_norm"), says=(EVERY,)),
    "sum_normed": _fault("exaone4", compute_in(_L2, norm_the_sum), into(f"{_L2}.post_attention_layernorm"), says=(EVERY,)),
    "norm_of_attention_left_out": _fault("glm4", compute_in(_L1, leave_out_norm_of_attention), out_of(f"{_L1}.post_self_attn_layernorm"), missing(f"{_L1}.post_self_attn_layernorm"), into(f"{_L1}.post_attention_layernorm")),
    "norms_of_sublayers_exchanged": _fault("glm4", faults.exchange_forwards(f"{_L2}.post_self_attn_layernorm", f"{_L2}.post_mlp_layernorm"), out_of(f"{_L2}.post_self_attn_layernorm"), says=(EVERY,)),
    "parallel_norms_exchanged": _fault("falcon-groups", faults.exchange_forwards(f"{_H1}.ln_attn", f"{_H1}.ln_mlp"), out_of(f"{_H1}.ln_attn"), says=(EVERY,)),
    # attention and its cache
    "key_heads_exchanged": _fault("phi3", read_other_key_heads(f"{_A0}.attn", (2, 3, 0, 1)), out_of(f"{_A0}.attn"), says=(EVERY,)),
    "window_longer_by_one": _fault("cohere2-window", faults.leave_as_it_is, out_of(f"{_A0}.attn"), says=("token 4",)),
    "window_in_full_layer": _fault("exaone4-generated", set_in_attention(f"{_A1}.attn", "sliding_window", lambda window: 4), out_of(f"{_A1}.attn"), says=("token 4",)),
    "window_forgotten": _fault("phi3", set_in_all_attention("sliding_window", lambda window: -1), out_of(f"{_A0}.attn"), says=("token 6",)),
    "scale_of_other_models": _fault("granitemoe", set_in_all_attention("scale", lambda scale: 32**-0.5), out_of(f"{_A0}.attn"), says=(ROTATED,)),
    "scale_squared": _fault("glm4-packed", set_in_attention(f"{_A2}.attn", "scale", lambda scale: scale**2), out_of(f"{_A2}.attn"), says=(ROTATED,)),
    "slopes_not_scaled": _fault("falcon-alibi", set_in_all_attention("alibi_slopes", lambda slopes: slopes * 32**0.5), out_of(f"{_H0}.self_attention.attn"), says=(ROTATED,)),
    "key_repeated_at_chunk": _fault("stablelm", write(f"{_A2}.attn", repeat_key_at_end_of_chunk), out_of(f"{_A2}.attn"), says=("token 7",)),
    "value_lost_in_decoding": _fault("ernie45", write(f"{_A0}.attn", lose_value_of_second_request), out_of(f"{_A0}.attn"), says=("token 3 of request 1",)),
    "values_scaled_in_decoding": _fault("stablelm-generated", write(f"{_A1}.attn", scale_values_in_decoding), out_of(f"{_A1}.attn"), says=("token 10",)),
    # projections and activations
    "bias_of_values_dropped": _fault("stablelm", compute_in(f"{_A0}.qkv_proj", drop_bias_of_values), out_of(f"{_A0}.qkv_proj"), says=(EVERY,)),
    "bias_of_another_layer": _fault("glm4", take_bias_of(f"{_A1}.qkv_proj", f"{_A0}.qkv_proj"), out_of(f"{_A1}.qkv_proj"), says=(EVERY,)),
    "o_proj_transposed": _fault("ernie45", compute_in(f"{_A1}.o_proj", transpose_weight), out_of(f"{_A1}.o_proj"), says=(EVERY,)),
    "o_proj_of_first_layer": _fault("nemotron", faults.borrow_forward(f"{_A2}.o_proj", f"{_A0}.o_proj"), out_of(f"{_A2}.o_proj"), says=(EVERY,)),
    "heads_left_in_groups": _fault("falcon-groups", faults.change_output(f"{_H2}.self_attention.query_key_value", follow_by_groups), out_of(f"{_H2}.self_attention.query_key_value"), says=(_ORDER,)),
    "up_before_gate": _fault("phi3", faults.change_output(f"{_M2}.gate_up_proj", exchange_halves), out_of(f"{_M2}.gate_up_proj"), says=(_ORDER,)),
    "down_proj_scaled_when_preempted": _fault("gemma-preempted", faults.change_output(f"{_M2}.down_proj", faults.times(1.02)), out_of(f"{_M2}.down_proj"), says=("the reference's times 1.02",)),
    "quick_gelu": _fault("falcon", compute_in(f"{_H0}.mlp.act", lambda act, original, hidden: hidden * (1.702 * hidden).sigmoid()), out_of(f"{_H0}.mlp.act"), says=(EVERY,)),
    "relu_not_squared": _fault("nemotron", compute_in(f"{_M0}.act_fn", lambda act, original, hidden: hidden.relu()), out_of(f"{_M0}.act_fn"), says=(EVERY,)),
    "slopes_of_xielu_exchanged": _fault("apertus", compute_in(f"{_M0}.act_fn", exchange_slopes), out_of(f"{_M0}.act_fn"), says=(EVERY,)),
    "silu_for_gelu": _fault("gemma", compute_in(f"{_M0}.act_fn", gate_by_silu), out_of(f"{_M0}.act_fn"), says=(EVERY,)),
    # residuals
    "attention_lost_in_residual": _fault("stablelm", compute_in(_L1, forget_attention_in_residual), out_of(_L1), says=(EVERY,)),
    "mlp_reads_attention": _fault("falcon", compute_in(_H1, compute_mlp_after_attention), into(f"{_H1}.mlp"), says=(EVERY,)),
    "residual_is_normed": _fault("gptj", compute_in(_H1, add_to_normed), out_of(_H1), says=(EVERY,)),
    "experts_not_scaled": _fault("granitemoe", compute_in(_L2, add_experts_unscaled), out_of(_L2), says=(EVERY,)),
    # experts and routers
    "shared_expert_left_out": _fault("granitemoe-shared", compute_in(_L1, leave_out_shared_expert), out_of(f"{_L1}.shared_mlp"), missing(f"{_L1}.shared_mlp"), out_of(_L1)),
    "shared_expert_of_residual": _fault("granitemoe-shared", compute_in(_L2, give_shared_expert_the_residual), into(f"{_L2}.shared_mlp"), says=(EVERY,)),
    "experts_reversed": _fault("granitemoe-shared", faults.change_output(f"{_E0}.gate", lambda scores: scores.flip(-1)), out_of(f"{_E0}.gate"), says=(_ORDER,)),
    "softmax_before_choice": _fault("granitemoe", set_in_router(f"{_E1}.experts", "renormalize", False), out_of(f"{_E1}.experts"), says=(EVERY,)),
    "one_expert_fewer": _fault("olmoe", route(f"{_M0}.experts", lambda weights, ids: (weights[:, :2].contiguous(), ids[:, :2].contiguous())), out_of(f"{_M0}.experts"), says=(EVERY,)),
    "weights_add_up_to_one": _fault("olmoe-samples", set_in_router(f"{_M2}.experts", "renormalize", True), out_of(f"{_M2}.experts"), says=(EVERY,)),
    "weights_of_other_experts": _fault("olmoe", route(f"{_M1}.experts", lambda weights, ids: (weights.flip(-1).contiguous(), ids)), out_of(f"{_M1}.experts"), says=(EVERY,)),
    # embeddings and logits
    "embedding_scaled_by_mlp_width": _fault("gemma", scale_embedding("normalizer", 192**0.5), into(_L0), out_of("model.embed_tokens"), says=("the reference's times 1.225",)),
    "embedding_not_multiplied": _fault("granitemoe", scale_embedding("embedding_multiplier", 1.0), into(_L0), says=("the reference's times 0.3333",)),
    "words_of_another_rank": _fault("cohere2", compute_in("model.embed_tokens", look_up_only_small_ids), out_of("model.embed_tokens"), says=("token 3",)),
    "head_without_bias": _fault("gptj", forget_bias_of_head, out_of(_LOGITS), into(_LOGITS), says=(EVERY,)),
    "logits_multiplied": _fault("granitemoe", faults.set_attribute(_LOGITS, "scale", 2.0), out_of(_LOGITS), says=("the reference's times 4",)),
    "logits_of_rounded_states": _fault("ernie45", change_hidden(lambda hidden: hidden.bfloat16().to(hidden.dtype)), into(_LOGITS), says=(EVERY,)),
    "logits_in_reverse": _fault("exaone4", change_hidden(partial(torch.flip, dims=(0,))), into(_LOGITS)),
}  # fmt: skip

FAMILIES.update(LATER_FAMILIES)
FAULTS.update({name: plant for name, (_, plant, _) in _TABLE.items()})
CORPORA = {"later_engines": Engines("later_engines", LATER_CLEAN, _TABLE)}
