"""Clean pairs and faults in an engine, and what the first finding should say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_torch.parity.finding import Report
from tests.corpora.case import Case, Place, Right
from tests.corpora.engines import attention_faults, code_faults, faults
from tests.corpora.engines.faults import Plant
from tests.corpora.judge import Recordings
from tests.corpora.scores import Corpus, Recorder


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

BY_ROWS = "engine_rows"  # the corpus whose programs are recorded as graphs

# the words that say at which tokens a fault shows
EVERY, ROTATED = "Every token is wrong.", "It begins with token 1 of request 0"
Fault = tuple[str, Plant, Right]


def _fault(
    family: str,
    plant: Plant,
    module: str,
    says: tuple[str, ...] = (),
    side: str = "output",
    near: str = "",
) -> Fault:
    """Return a fault.

    Args:
        plant: changes vLLM's model.
        module: the first module that is wrong, in the engine.
        says: words of the explanation: the token at which it begins, or what the fault is.
        side: of the module: its input if the code that calls it is at fault.
        near: a module before or after that is named instead.
    """
    return family, plant, Right(places=(Place(side, module),), words=says, near=(near,))


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


_TABLE: dict[str, Fault] = {
    "embedding_scaled": _fault(
        "llama", faults.change_output("model.embed_tokens", faults.times(1.01)),
        "model.embed_tokens", (_factor(1.01),),
    ),
    "epsilon_of_all_norms": _fault("llama", faults.set_every_epsilon, "model.layers.0.input_layernorm", (EVERY,)),
    "epsilon_of_one_norm": _fault("llama", faults.set_epsilon(_NORM), _NORM, (EVERY,)),
    "epsilon_of_last_norm": _fault("llama", faults.set_epsilon("model.norm"), "model.norm", (EVERY,)),
    "norm_left_out": _fault("llama", faults.leave_out_norm("model.layers.2.input_layernorm"), "model.layers.2.input_layernorm"),
    "last_norm_left_out": _fault("llama", faults.leave_out_last_norm, "model.norm"),
    "residual_after_norm": _fault("llama", faults.keep_residual_after_norm, _NORM),
    "residual_twice": _fault("llama", faults.add_residual_twice, _NORM, side="input"),
    "residual_stale": _fault("llama", faults.take_stale_residual, _NORM, (EVERY,), side="input"),
    "residual_lost": _fault("llama", faults.lose_residual, _LAYER, (EVERY,)),
    "norm_weight_plus_one": _fault("llama", faults.add_one_to_norm_weight, _NORM, (EVERY,)),
    "query_heads_exchanged": _fault("llama", faults.exchange_query_heads, _QKV, (_ORDER,)),
    "keys_and_values_exchanged": _fault("llama", faults.exchange_keys_and_values, _QKV, (_ORDER,)),
    "low_rank_update": _fault("llama", faults.add_low_rank_update, _QKV, (EVERY,)),
    "theta": _fault("llama", faults.change_rotation(base=9000.0), _FIRST_ROTARY, (ROTATED,)),
    "linear_scaling": _fault("llama", faults.scale_positions, _FIRST_ROTARY, (ROTATED,)),
    "partial_rotation": _fault("llama", faults.change_rotation(rotary_dim=16), _FIRST_ROTARY, (ROTATED,)),
    "interleaved_rotation": _fault("llama", faults.rotate_interleaved, _FIRST_ROTARY, (ROTATED,)),
    "queries_not_rotated": _fault("llama", faults.rotate_keys_only, _ROTARY, (ROTATED,)),
    "rotation_of_one_layer_shifted": _fault("llama", faults.shift_rotation_of_one_layer, _ROTARY, (EVERY,)),
    "positions_shifted_in_decoding": _fault(
        "llama", faults.change_positions(faults.shift_in_decoding), _FIRST_ROTARY, ("token 10",)
    ),
    "positions_restart_at_chunk": _fault(
        "llama", faults.change_positions(faults.restart_at_chunk), _FIRST_ROTARY, ("token 8",)
    ),
    "embedding_of_one_token": _fault("llama", faults.take_another_token, "model.embed_tokens", ("token 3",)),
    "one_token_fed_wrongly": _fault("llama", faults.feed_another_token, "model.embed_tokens", ("token 3",), side="input"),
    "softmax_scale": _fault("llama", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "soft_cap": _fault("llama", attention_faults.set_attention("logits_soft_cap", lambda cap: 2.0), _ATTN, (ROTATED,)),
    "sink": _fault("llama", attention_faults.add_sinks, _ATTN, (EVERY,)),
    "window_in_one_layer": _fault("llama", attention_faults.set_attention("sliding_window", lambda window: 4), _ATTN, ("token 4",)),
    "values_scaled": _fault("llama", attention_faults.change_cache_update(lambda k, v, s: (k, v * 1.02, s)), _ATTN, (_factor(1.02),)),
    "keys_scaled": _fault("llama", attention_faults.change_cache_update(lambda k, v, s: (k * 1.1, v, s)), _ATTN, (ROTATED,)),
    "last_of_chunk_lost": _fault("llama", attention_faults.change_cache_update(attention_faults.lose_last_of_chunk), _ATTN, ("token 7",)),
    "slot_of_one_request": _fault("llama", attention_faults.change_cache_update(attention_faults.shift_slot_of_one_request), _ATTN, ("token 3 of request 1",)),
    "cache_lost_in_decoding": _fault("llama", attention_faults.lose_cache_in_decoding, _ATTN, ("token 11",)),
    "blocks_of_another_request": _fault("llama", attention_faults.change_attention(attention_faults.read_blocks_of_another), _ATTN, ("token 3 of request 1",)),
    "later_tokens_seen": _fault("llama", attention_faults.change_attention(attention_faults.see_later_tokens), _ATTN, ("token 0 of request 0",)),
    "answers_exchanged": _fault("llama", attention_faults.change_attention(attention_faults.exchange_answers), _ATTN, ("token 10 of request 0",)),
    "key_heads_tiled": _fault("llama", attention_faults.change_attention(attention_faults.tile_key_heads), _ATTN, (EVERY,)),
    "o_proj_shifted": _fault("llama", faults.change_output(_O, lambda output: output + 0.01), _O, (EVERY,)),
    "down_proj_scaled": _fault("llama", faults.change_output(f"{_MLP}.down_proj", faults.times(1.01)), f"{_MLP}.down_proj", (_factor(1.01),)),
    "activation_scaled": _fault("llama", faults.change_output(f"{_MLP}.act_fn", faults.times(1.01)), f"{_MLP}.act_fn", (_factor(1.01),)),
    "up_activated": _fault("llama", faults.activate_up, f"{_MLP}.act_fn", (EVERY,)),
    "gate_and_up_exchanged": _fault("llama", faults.exchange_gate_and_up, f"{_MLP}.gate_up_proj", (_ORDER,)),
    "update_of_one_request": _fault("llama", faults.update_one_request, _QKV, ("token 3 of request 1",)),
    "qkv_by_groups": _fault("llama", faults.order_by_groups, _QKV, (_ORDER,)),
    "o_proj_of_another_layer": _fault("llama", faults.borrow_forward(_O, "model.layers.2.self_attn.o_proj"), _O, (EVERY,)),
    "layers_exchanged": _fault("llama", faults.exchange_forwards(_LAYER, "model.layers.2"), "model.layers.2.input_layernorm", ("run in another order",), side="input"),
    "logits_scaled": _fault("llama", faults.change_output("logits_processor", faults.times(1.05)), "logits_processor", (_factor(1.05),)),
    "logits_capped": _fault("llama", faults.change_output("logits_processor", lambda logits: (logits / 5).tanh() * 5), "logits_processor", (EVERY,)),
    "logits_of_another_word": _fault("llama", faults.change_output("logits_processor", lambda logits: logits.roll(1, -1)), "logits_processor"),
    "logits_of_another_row": _fault("llama", faults.take_logits_of_another_row, "logits_processor", side="input"),
    "logits_padded": _fault("llama-tied", faults.change_output("logits_processor", faults.pad_vocabulary), "logits_processor", ("6 channels more than the reference's 250",)),
    "down_proj_without_bias": _fault("llama-biases", faults.drop_bias(f"{_MLP}.down_proj"), f"{_MLP}.down_proj"),
    "gate_up_proj_without_bias": _fault("llama-biases", faults.drop_bias(f"{_MLP}.gate_up_proj"), f"{_MLP}.gate_up_proj"),
    "query_bias_dropped": _fault("qwen2", faults.drop_bias_of("q"), _QKV, (EVERY,)),
    "key_bias_dropped": _fault("qwen2", faults.drop_bias_of("k"), _QKV, (EVERY,)),
    "shared_block_corrupted": _fault("llama-prefix", attention_faults.corrupt_shared_block, _ATTN, ("token 32 of request 1",)),
    "window_off_by_one": _fault("mistral", attention_faults.set_attention("sliding_window", lambda window: window + 1), _ATTN, ("token 4",)),
    "window_too_short": _fault("mistral", attention_faults.set_attention("sliding_window", lambda window: window - 1), _ATTN, ("token 3",)),
    "window_dropped": _fault("mistral", attention_faults.set_attention("sliding_window", lambda window: -1), _ATTN, ("token 4",)),
    "query_norm_missing": _fault("qwen3", faults.remove_query_norm(slice(1, 2)), f"{_ATTENTION}.q_norm", (_LEFT_OUT,)),
    "all_query_norms_missing": _fault("qwen3", faults.remove_query_norm(slice(None)), "model.layers.0.self_attn.q_norm", (_LEFT_OUT,)),
    "query_norm_without_effect": _fault("qwen3", faults.return_input_of_query_norm, f"{_ATTENTION}.q_norm"),
    "router_experts_exchanged": _fault("mixtral", faults.exchange_experts, f"{_LAYER}.block_sparse_moe.gate"),
    "one_expert_scaled": _fault("mixtral", faults.change_routing(faults.scale_one_expert), f"{_LAYER}.block_sparse_moe.experts"),
    "weights_of_experts_not_renormalized": _fault("mixtral", faults.renormalize(False), f"{_LAYER}.block_sparse_moe.experts", (EVERY,)),
    "weights_of_experts_renormalized": _fault("qwen3-moe", faults.renormalize(True), f"{_MLP}.experts", (EVERY,)),
    "softmax_scale_left_padded": _fault("llama-generated", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "window_packed": _fault("llama-packed", attention_faults.set_attention("sliding_window", lambda window: 4), _ATTN, ("token 4",)),
    "o_proj_shifted_with_adapters": _fault("llama-adapters", faults.change_output(_O, lambda output: output + 0.01), _O, (EVERY,)),
    "softmax_scale_of_samples": _fault("llama-samples", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "embedding_of_layers_scaled": _fault("gemma4", faults.change_output("model.embed_tokens_per_layer", faults.times(1.5)), "model.embed_tokens_per_layer", (EVERY,)),
    "attention_after_scaled_embedding": _fault("gemma4", attention_faults.set_attention("scale", lambda scale: scale * 1.1), _ATTN, (ROTATED,)),
    "down_proj_after_scaled_embedding": _fault("gemma4", faults.change_output(f"{_MLP}.down_proj", faults.times(1.01)), f"{_MLP}.down_proj", (_factor(1.01),)),
    # the module that has the bias is never called, or its weight not read
    "router_bias_ignored": ("ernie45-moe", faults.leave_as_it_is, Right(
        places=(Place("output", f"{_MLP}.experts"), Place("missing", f"{_MLP}.gate.moe_statics")),
        near=("",),
    )),
    "experts_exchanged_ernie": _fault("ernie45-moe", faults.exchange_experts, f"{_MLP}.gate"),
    "scores_not_capped": _fault("gemma2", faults.set_every_attention("logits_soft_cap", 0), _FIRST_ATTN, (ROTATED,)),
    "another_query_scale": _fault("gemma2", faults.set_every_attention("scale", 32**-0.5), _FIRST_ATTN, (ROTATED,)),
    "embedding_not_scaled": _fault("gemma2", faults.drop_embedding_scale, "model.embed_tokens", (_factor(0.08839),)),
    "windows_of_other_layers": _fault("gemma2", faults.shift_windows, _FIRST_ATTN, ("token 4",)),
    "window_in_a_full_layer": _fault("gemma2", attention_faults.set_attention("sliding_window", lambda window: 4), _ATTN, ("token 4",)),
    "norm_after_mlp_left_out": _fault("gemma2", faults.leave_out(f"{_LAYER}.post_feedforward_layernorm"), f"{_LAYER}.post_feedforward_layernorm"),
    "logits_not_capped": _fault("gemma2", faults.set_attribute("logits_processor", "soft_cap", None), "logits_processor", (EVERY,)),
    "residual_not_scaled": _fault("granite", faults.set_attribute(_LAYER, "residual_multiplier", 1.0), _NORM, (EVERY,), side="input"),
    "logits_not_divided": _fault("granite", faults.set_attribute("logits_processor", "scale", 1.0), "logits_processor", (_factor(2),)),
    "logits_not_scaled": _fault("cohere", faults.set_attribute("logits_processor", "scale", 1.0), "logits_processor", (_factor(2),)),
    "mlp_after_attention": _fault("cohere", faults.compute_in_sequence, f"{_LAYER}.mlp", (EVERY,), side="input"),
    "c_attn_without_bias": _fault("gpt2", faults.drop_bias("transformer.h.1.attn.c_attn"), "transformer.h.1.attn.c_attn", (EVERY,)),
    "layer_left_out": _fault("gpt2", faults.leave_out("transformer.h.1"), "transformer.h.1"),
    "learned_positions_shifted": _fault("opt", faults.set_attribute("model.decoder.embed_positions", "offset", 0), "model.decoder.embed_positions", (EVERY,)),
    "fc1_without_bias": _fault("opt", faults.drop_bias("model.decoder.layers.1.fc1"), "model.decoder.layers.1.fc1", (EVERY,)),
    "mlp_of_first_layer": _fault("llama", code_faults.change_layer(code_faults.call_mlp_of_first_layer), _MLP, ("in whose place model.layers.0.mlp is called",)),
    "mlp_of_residual": _fault("llama", code_faults.change_layer(code_faults.call_mlp_with_residual), _MLP, (EVERY,), side="input"),
    "attention_left_out": _fault("llama", code_faults.change_layer(code_faults.leave_out_attention), _ATTENTION, (_LEFT_OUT,)),
    "layer_twice": _fault("llama", code_faults.run_layer_twice, _ATTN, ("token 8 of request 0",)),
    "first_norm_twice": _fault("llama", code_faults.change_layer(code_faults.call_first_norm_twice), _NORM, (_LEFT_OUT,)),
    "rotation_left_out": _fault("llama", code_faults.change_attention_code(code_faults.leave_out_rotation), _ATTN, (ROTATED,), side="input"),
    "keys_for_values": _fault("llama", code_faults.change_attention_code(code_faults.take_keys_for_values), _ATTN, (EVERY,), side="input"),
    "stale_row_in_decoding": _fault("llama", code_faults.repeat_last_row(f"{_MLP}.down_proj"), f"{_MLP}.down_proj", ("of request 2",)),
    "words_masked": _fault("llama", faults.change_output("logits_processor", code_faults.mask_words), "logits_processor", ("finite in one program only",)),
    "cache_in_fp8": _fault("llama-fp8-cache", faults.leave_as_it_is, _FIRST_ATTN, (EVERY,)),
    "norm_of_rounded_input": _fault("llama-multi-query", code_faults.round_input(_NORM), _NORM, (EVERY,)),
    "bias_added_twice": _fault("llama-multi-query", code_faults.add_bias_again(_O), _O, (EVERY,)),
    "norms_of_heads_exchanged": _fault("gemma3", code_faults.exchange_norms_of_heads, f"{_ATTENTION}.q_norm", (EVERY,)),
    "embedding_scaled_slightly": _fault("gemma3", code_faults.scale_embedding_in_code(1.0001), "model.layers.0", (_factor(1.0001),), side="input"),
    "exact_gelu": _fault("bloom", faults.leave_as_it_is, "transformer.h.0.mlp.gelu_impl", (EVERY,)),
    "shared_experts_scaled": _fault("glm4-moe", faults.change_output(f"{_MLP}.shared_experts", faults.times(1.05)), f"{_MLP}.shared_experts", (_factor(1.05),)),
    "last_expert_dropped": _fault("qwen2-moe", faults.change_routing(code_faults.drop_last_expert), f"{_MLP}.experts", (EVERY,)),
    "one_expert_scaled_gpt_oss": _fault("gpt-oss", faults.change_routing(faults.scale_one_expert), f"{_MLP}.experts"),
}  # fmt: skip

LAYERS, POSITIONS, ATTENTION, EXPERTS = KINDS = (
    "layers, norms, projections, embeddings, logits", "positions", "attention and its cache", "experts and routers",
)  # fmt: skip


def _kind(module: str) -> str:
    """Return the kind of a fault whose first wrong module is this."""
    last = module.rpartition(".")[2]
    if last in ("rotary_emb", "embed_positions"):
        return POSITIONS
    if last == "attn":
        return ATTENTION
    return EXPERTS if last in ("experts", "shared_experts", "shared_mlp", "gate") else LAYERS


class Engines(Corpus):
    """Engines beside transformers: by modules and tokens, or by operations and rows."""

    def __init__(self, name: str, clean: Sequence[Engine], faulty: Mapping[str, Fault]) -> None:
        self.name = name
        self._clean, self._faulty = clean, faulty
        self.in_whole = name != BY_ROWS  # a graph does not tell paddings from tokens

    def load(self) -> Sequence[Case]:
        clean = [Case(name=str(engine), family=str(engine)) for engine in self._clean]
        faulty = [
            Case(
                name=name, family=str(Engine(family)), edit=name, plant=plant, right=right, kind=_kind(right.places[0].module)
            )
            for name, (family, plant, right) in self._faulty.items()
        ]  # fmt: skip
        return [*clean, *faulty]

    def compared(
        self, cases: Sequence[Case], variant: str, recorder: Recorder
    ) -> Iterator[tuple[Case, Callable[[], tuple[Report, Recordings]]]]:
        """Compare the cases of an engine at once: loading one takes longer than all of its faults."""
        from tests.corpora.engines.recorder import ROWS, TOKENS, compare

        settings = ROWS if self.name == BY_ROWS else TOKENS

        engines = {str(engine): engine for engine in self._clean}
        for family in dict.fromkeys(case.family for case in cases):
            group = [case for case in cases if case.family == family]
            engine = engines.get(family) or Engine(family.partition(" ")[0])
            names = [case.edit for case in group]
            try:
                reports: list[Any] = list(compare(recorder.folder, engine, names, settings))
            except Exception as error:
                reports = [error] * len(group)
            for case, report in zip(group, reports, strict=True):
                yield case, lambda report=report: _returned(report)  # type: ignore[misc]


def _returned(report: Report | Exception) -> tuple[Report, Recordings]:
    if isinstance(report, Exception):
        raise report
    return report, Recordings(Path(), Path())


FAULTS = {name: plant for name, (_, plant, _) in _TABLE.items()}
CORPORA = {name: Engines(name, (*CLEAN, *FURTHER), _TABLE) for name in ("engines", BY_ROWS)}
