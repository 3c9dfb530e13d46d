"""Clean pairs and faults in an engine, and what the first finding should say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tests.parity.engines import attention_faults, code_faults, faults
from tests.parity.engines.faults import Plant


class Engine(NamedTuple):
    """A family as one engine computes it."""

    family: str
    dtype: str = "float32"
    compiled: bool = False

    def __str__(self) -> str:
        return " ".join([self.family, self.dtype, *(["compiled"] if self.compiled else [])])


CLEAN = (
    *(Engine(family) for family in ("llama", "llama-tied", "llama-biases", "llama-prefix")),
    *(Engine(family) for family in ("mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe")),
    *(Engine(family) for family in ("gemma2", "granite", "cohere", "gpt2", "opt", "gpt-oss")),
    *(Engine(f"llama-{name}") for name in ("generated", "packed", "samples", "adapters")),
    *(Engine(family) for family in ("llama-multi-query", "gemma4", "glm4-moe")),
    *(Engine(family, "bfloat16") for family in ("llama", "qwen3", "mixtral")),
    *(Engine(family, "bfloat16") for family in ("llama-preempted", "bloom")),
    *(Engine(family, compiled=True) for family in ("llama", "qwen3", "mixtral")),
)
# clean, too, and run by the scoreboard only
FURTHER = (
    *(Engine(family) for family in ("llama-static", "gemma3", "qwen2-moe")),
    Engine("llama-multi-query", "bfloat16"),
    Engine("qwen2-moe", compiled=True),
)

# the words that say at which tokens a fault shows
EVERY, ROTATED = "Every token is wrong.", "It begins with token 1 of request 0"


@dataclass(frozen=True)
class Fault:
    """A fault in an engine, and what is right to say of it.

    Attributes:
        plant: Changes vLLM's model.
        module: The first module that is wrong, in the engine.
        says: Words of the explanation: the token at which it begins, or what the fault is.
        side: Of the module: its input if the code that calls it is at fault.
        near: A module before or after that is named instead.
    """

    family: str
    plant: Plant
    module: str
    says: tuple[str, ...] = ()
    side: str = "output"
    near: str = ""


_LAYER = "model.layers.1"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_QKV, _ATTN, _O = (f"{_ATTENTION}.{name}" for name in ("qkv_proj", "attn", "o_proj"))
_FIRST_ATTN = "model.layers.0.self_attn.attn"
_ROTARY, _FIRST_ROTARY = f"{_ATTENTION}.rotary_emb", "model.layers.0.self_attn.rotary_emb"
_NORM = f"{_LAYER}.post_attention_layernorm"
_ORDER = "the right numbers in another order"
_LEFT_OUT = "he port leaves out"


def _factor(value: float) -> str:
    return f"the reference's times {value}"


FAULTS: Mapping[str, Fault] = {
    "embedding_scaled": Fault(
        "llama", faults.change_output("model.embed_tokens", faults.times(1.01)),
        "model.embed_tokens", (_factor(1.01),),
    ),
    "epsilon_of_all_norms": Fault("llama", faults.set_every_epsilon, "model.layers.0.input_layernorm", (EVERY,)),
    "epsilon_of_one_norm": Fault("llama", faults.set_epsilon(_NORM), _NORM, (EVERY,)),
    "epsilon_of_last_norm": Fault("llama", faults.set_epsilon("model.norm"), "model.norm", (EVERY,)),
    "norm_left_out": Fault("llama", faults.leave_out_norm("model.layers.2.input_layernorm"), "model.layers.2.input_layernorm"),
    "last_norm_left_out": Fault("llama", faults.leave_out_last_norm, "model.norm"),
    "residual_after_norm": Fault("llama", faults.keep_residual_after_norm, _NORM),
    "residual_twice": Fault("llama", faults.add_residual_twice, _NORM, side="input"),
    "residual_stale": Fault("llama", faults.take_stale_residual, _NORM, (EVERY,), side="input"),
    "residual_lost": Fault("llama", faults.lose_residual, _LAYER, (EVERY,)),
    "norm_weight_plus_one": Fault("llama", faults.add_one_to_norm_weight, _NORM, (EVERY,)),
    "query_heads_exchanged": Fault("llama", faults.exchange_query_heads, _QKV, (_ORDER,)),
    "keys_and_values_exchanged": Fault("llama", faults.exchange_keys_and_values, _QKV, (_ORDER,)),
    "low_rank_update": Fault("llama", faults.add_low_rank_update, _QKV, (EVERY,)),
    "theta": Fault("llama", faults.change_rotation(base=9000.0), _FIRST_ROTARY, (ROTATED,)),
    "linear_scaling": Fault("llama", faults.scale_positions, _FIRST_ROTARY, (ROTATED,)),
    "partial_rotation": Fault("llama", faults.change_rotation(rotary_dim=16), _FIRST_ROTARY, (ROTATED,)),
    "interleaved_rotation": Fault("llama", faults.rotate_interleaved, _FIRST_ROTARY, (ROTATED,)),
    "queries_not_rotated": Fault("llama", faults.rotate_keys_only, _ROTARY, (ROTATED,)),
    "rotation_of_one_layer_shifted": Fault("llama", faults.shift_rotation_of_one_layer, _ROTARY, (EVERY,)),
    "positions_shifted_in_decoding": Fault(
        "llama", faults.change_positions(faults.shift_in_decoding), _FIRST_ROTARY, ("token 10",)
    ),
    "positions_restart_at_chunk": Fault(
        "llama", faults.change_positions(faults.restart_at_chunk), _FIRST_ROTARY, ("token 8",)
    ),
    "embedding_of_one_token": Fault("llama", faults.take_another_token, "model.embed_tokens", ("token 3",)),
    "one_token_fed_wrongly": Fault("llama", faults.feed_another_token, "model.embed_tokens", ("token 3",), side="input"),
    "softmax_scale": Fault("llama", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "soft_cap": Fault("llama", attention_faults.set_attention("logits_soft_cap", lambda cap: 2.0), _ATTN, (ROTATED,)),
    "sink": Fault("llama", attention_faults.add_sinks, _ATTN, (EVERY,)),
    "window_in_one_layer": Fault("llama", attention_faults.set_attention("sliding_window", lambda window: 4), _ATTN, ("token 4",)),
    "values_scaled": Fault("llama", attention_faults.change_cache_update(lambda k, v, s: (k, v * 1.02, s)), _ATTN, (_factor(1.02),)),
    "keys_scaled": Fault("llama", attention_faults.change_cache_update(lambda k, v, s: (k * 1.1, v, s)), _ATTN, (ROTATED,)),
    "last_of_chunk_lost": Fault("llama", attention_faults.change_cache_update(attention_faults.lose_last_of_chunk), _ATTN, ("token 7",)),
    "slot_of_one_request": Fault("llama", attention_faults.change_cache_update(attention_faults.shift_slot_of_one_request), _ATTN, ("token 3 of request 1",)),
    "cache_lost_in_decoding": Fault("llama", attention_faults.lose_cache_in_decoding, _ATTN, ("token 11",)),
    "blocks_of_another_request": Fault("llama", attention_faults.change_attention(attention_faults.read_blocks_of_another), _ATTN, ("token 3 of request 1",)),
    "later_tokens_seen": Fault("llama", attention_faults.change_attention(attention_faults.see_later_tokens), _ATTN, ("token 0 of request 0",)),
    "answers_exchanged": Fault("llama", attention_faults.change_attention(attention_faults.exchange_answers), _ATTN, ("token 10 of request 0",)),
    "key_heads_tiled": Fault("llama", attention_faults.change_attention(attention_faults.tile_key_heads), _ATTN, (EVERY,)),
    "o_proj_shifted": Fault("llama", faults.change_output(_O, lambda output: output + 0.01), _O, (EVERY,)),
    "down_proj_scaled": Fault("llama", faults.change_output(f"{_MLP}.down_proj", faults.times(1.01)), f"{_MLP}.down_proj", (_factor(1.01),)),
    "activation_scaled": Fault("llama", faults.change_output(f"{_MLP}.act_fn", faults.times(1.01)), f"{_MLP}.act_fn", (_factor(1.01),)),
    "up_activated": Fault("llama", faults.activate_up, f"{_MLP}.act_fn", (EVERY,)),
    "gate_and_up_exchanged": Fault("llama", faults.exchange_gate_and_up, f"{_MLP}.gate_up_proj", (_ORDER,)),
    "update_of_one_request": Fault("llama", faults.update_one_request, _QKV, ("token 3 of request 1",)),
    "qkv_by_groups": Fault("llama", faults.order_by_groups, _QKV, (_ORDER,)),
    "o_proj_of_another_layer": Fault("llama", faults.borrow_forward(_O, "model.layers.2.self_attn.o_proj"), _O, (EVERY,)),
    "layers_exchanged": Fault("llama", faults.exchange_forwards(_LAYER, "model.layers.2"), "model.layers.2.input_layernorm", ("run in another order",), side="input"),
    "logits_scaled": Fault("llama", faults.change_output("logits_processor", faults.times(1.05)), "logits_processor", (_factor(1.05),)),
    "logits_capped": Fault("llama", faults.change_output("logits_processor", lambda logits: (logits / 5).tanh() * 5), "logits_processor", (EVERY,)),
    "logits_of_another_word": Fault("llama", faults.change_output("logits_processor", lambda logits: logits.roll(1, -1)), "logits_processor"),
    "logits_of_another_row": Fault("llama", faults.take_logits_of_another_row, "logits_processor", side="input"),
    "logits_padded": Fault("llama-tied", faults.change_output("logits_processor", faults.pad_vocabulary), "logits_processor", ("6 channels more than the reference's 250",)),
    "down_proj_without_bias": Fault("llama-biases", faults.drop_bias(f"{_MLP}.down_proj"), f"{_MLP}.down_proj"),
    "gate_up_proj_without_bias": Fault("llama-biases", faults.drop_bias(f"{_MLP}.gate_up_proj"), f"{_MLP}.gate_up_proj"),
    "query_bias_dropped": Fault("qwen2", faults.drop_bias_of("q"), _QKV, (EVERY,)),
    "key_bias_dropped": Fault("qwen2", faults.drop_bias_of("k"), _QKV, (EVERY,)),
    "shared_block_corrupted": Fault("llama-prefix", attention_faults.corrupt_shared_block, _ATTN, ("token 32 of request 1",)),
    "window_off_by_one": Fault("mistral", attention_faults.set_attention("sliding_window", lambda window: window + 1), _ATTN, ("token 4",)),
    "window_too_short": Fault("mistral", attention_faults.set_attention("sliding_window", lambda window: window - 1), _ATTN, ("token 3",)),
    "window_dropped": Fault("mistral", attention_faults.set_attention("sliding_window", lambda window: -1), _ATTN, ("token 4",)),
    "query_norm_missing": Fault("qwen3", faults.remove_query_norm(slice(1, 2)), f"{_ATTENTION}.q_norm", (_LEFT_OUT,)),
    "all_query_norms_missing": Fault("qwen3", faults.remove_query_norm(slice(None)), "model.layers.0.self_attn.q_norm", (_LEFT_OUT,)),
    "query_norm_without_effect": Fault("qwen3", faults.return_input_of_query_norm, f"{_ATTENTION}.q_norm"),
    "router_experts_exchanged": Fault("mixtral", faults.exchange_experts, f"{_LAYER}.block_sparse_moe.gate"),
    "one_expert_scaled": Fault("mixtral", faults.change_routing(faults.scale_one_expert), f"{_LAYER}.block_sparse_moe.experts"),
    "weights_of_experts_not_renormalized": Fault("mixtral", faults.renormalize(False), f"{_LAYER}.block_sparse_moe.experts", (EVERY,)),
    "weights_of_experts_renormalized": Fault("qwen3-moe", faults.renormalize(True), f"{_MLP}.experts", (EVERY,)),
    "softmax_scale_left_padded": Fault("llama-generated", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "window_packed": Fault("llama-packed", attention_faults.set_attention("sliding_window", lambda window: 4), _ATTN, ("token 4",)),
    "o_proj_shifted_with_adapters": Fault("llama-adapters", faults.change_output(_O, lambda output: output + 0.01), _O, (EVERY,)),
    "softmax_scale_of_samples": Fault("llama-samples", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "embedding_of_layers_scaled": Fault("gemma4", faults.change_output("model.embed_tokens_per_layer", faults.times(1.5)), "model.embed_tokens_per_layer", (EVERY,)),
    "attention_after_scaled_embedding": Fault("gemma4", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "down_proj_after_scaled_embedding": Fault("gemma4", faults.change_output(f"{_MLP}.down_proj", faults.times(1.01)), f"{_MLP}.down_proj", (_factor(1.01),)),
    "router_bias_ignored": Fault("ernie45-moe", faults.leave_as_it_is, f"{_MLP}.experts", ("its input is right",)),
    "experts_exchanged_ernie": Fault("ernie45-moe", faults.exchange_experts, f"{_MLP}.gate"),
    "scores_not_capped": Fault("gemma2", faults.set_every_attention("logits_soft_cap", 0), _FIRST_ATTN, (ROTATED,)),
    "another_query_scale": Fault("gemma2", faults.set_every_attention("scale", 32**-0.5), _FIRST_ATTN, (ROTATED,)),
    "embedding_not_scaled": Fault("gemma2", faults.drop_embedding_scale, "model.embed_tokens", (_factor(0.08839),)),
    "windows_of_other_layers": Fault("gemma2", faults.shift_windows, _FIRST_ATTN, ("token 4",)),
    "window_in_a_full_layer": Fault("gemma2", attention_faults.set_attention("sliding_window", lambda window: 4), _ATTN, ("token 4",)),
    "norm_after_mlp_left_out": Fault("gemma2", faults.leave_out(f"{_LAYER}.post_feedforward_layernorm"), f"{_LAYER}.post_feedforward_layernorm"),
    "logits_not_capped": Fault("gemma2", faults.set_attribute("logits_processor", "soft_cap", None), "logits_processor", (EVERY,)),
    "residual_not_scaled": Fault("granite", faults.set_attribute(_LAYER, "residual_multiplier", 1.0), _NORM, (EVERY,), side="input"),
    "logits_not_divided": Fault("granite", faults.set_attribute("logits_processor", "scale", 1.0), "logits_processor", (_factor(2),)),
    "logits_not_scaled": Fault("cohere", faults.set_attribute("logits_processor", "scale", 1.0), "logits_processor", (_factor(2),)),
    "mlp_after_attention": Fault("cohere", faults.compute_in_sequence, f"{_LAYER}.mlp", (EVERY,), side="input"),
    "c_attn_without_bias": Fault("gpt2", faults.drop_bias("transformer.h.1.attn.c_attn"), "transformer.h.1.attn.c_attn", (EVERY,)),
    "layer_left_out": Fault("gpt2", faults.leave_out("transformer.h.1"), "transformer.h.1"),
    "learned_positions_shifted": Fault("opt", faults.set_attribute("model.decoder.embed_positions", "offset", 0), "model.decoder.embed_positions", (EVERY,)),
    "fc1_without_bias": Fault("opt", faults.drop_bias("model.decoder.layers.1.fc1"), "model.decoder.layers.1.fc1", (EVERY,)),
    "mlp_of_first_layer": Fault("llama", code_faults.change_layer(code_faults.call_mlp_of_first_layer), _MLP, ("in whose place model.layers.0.mlp is called",)),
    "mlp_of_residual": Fault("llama", code_faults.change_layer(code_faults.call_mlp_with_residual), _MLP, (EVERY,), side="input"),
    "attention_left_out": Fault("llama", code_faults.change_layer(code_faults.leave_out_attention), _ATTENTION, (_LEFT_OUT,)),
    "layer_twice": Fault("llama", code_faults.run_layer_twice, _ATTN, ("token 8 of request 0",)),
    "first_norm_twice": Fault("llama", code_faults.change_layer(code_faults.call_first_norm_twice), _NORM, (_LEFT_OUT,)),
    "rotation_left_out": Fault("llama", code_faults.change_attention_code(code_faults.leave_out_rotation), _ATTN, (ROTATED,), side="input"),
    "keys_for_values": Fault("llama", code_faults.change_attention_code(code_faults.take_keys_for_values), _ATTN, (EVERY,), side="input"),
    "stale_row_in_decoding": Fault("llama", code_faults.repeat_last_row(f"{_MLP}.down_proj"), f"{_MLP}.down_proj", ("of request 2",)),
    "words_masked": Fault("llama", faults.change_output("logits_processor", code_faults.mask_words), "logits_processor", ("finite in one program only",)),
    "cache_in_fp8": Fault("llama-fp8-cache", faults.leave_as_it_is, _FIRST_ATTN, (EVERY,)),
    "norm_of_rounded_input": Fault("llama-multi-query", code_faults.round_input(_NORM), _NORM, (EVERY,)),
    "bias_added_twice": Fault("llama-multi-query", code_faults.add_bias_again(_O), _O, (EVERY,)),
    "norms_of_heads_exchanged": Fault("gemma3", code_faults.exchange_norms_of_heads, f"{_ATTENTION}.q_norm", (EVERY,)),
    "embedding_scaled_slightly": Fault("gemma3", code_faults.scale_embedding_in_code(1.0001), "model.layers.0", (_factor(1.0001),), side="input"),
    "exact_gelu": Fault("bloom", faults.leave_as_it_is, "transformer.h.0.mlp.gelu_impl", (EVERY,)),
    "shared_experts_scaled": Fault("glm4-moe", faults.change_output(f"{_MLP}.shared_experts", faults.times(1.05)), f"{_MLP}.shared_experts", (_factor(1.05),)),
    "last_expert_dropped": Fault("qwen2-moe", faults.change_routing(code_faults.drop_last_expert), f"{_MLP}.experts", (EVERY,)),
    "one_expert_scaled_gpt_oss": Fault("gpt-oss", faults.change_routing(faults.scale_one_expert), f"{_MLP}.experts"),
}  # fmt: skip
