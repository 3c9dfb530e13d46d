"""The lines of each fault that are right to name. Those of the function that plants a fault always are.

All operations of an optimizer have one line, that of its step: which of them is wrong, only the finding's
words say.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.corpora.case import Line, Lines


def lines_of(name: str, phases: Iterable[str]) -> Lines:
    """Return the right lines of a fault; of one of the update without an entry, the optimizer's."""
    port, reference = _TABLE.get(name) or (_both(_STEP) if "update" in phases else _both())
    return Lines((Line(function=f":{name}."), *port), reference)


def _in(module: str, text: str = "") -> Line:
    return Line(text, module=module)


Sides = tuple[tuple[Line, ...], tuple[Line, ...]]


def _both(*lines: Line) -> Sides:
    return lines, lines


def _lost(*reference: Line) -> Sides:
    """Return lines that only the reference has."""
    return (), reference


_STEP = Line("self.scaler.step(self.optimizer)")
_CLIP = Line("clip_grad_norm_(")
_DIVIDED = Line("parameter.grad /= divisor")
_REDUCED = Line("dist.all_reduce(parameter.grad)")
_PASSES = Line("/ self.accumulation")
_LOSS, _TOKEN_LOSSES = Line("F.cross_entropy("), Line(function=":_token_losses")
_PER_TOKEN: Sides = ((_TOKEN_LOSSES,), (_LOSS,))
_ADDED = Line(".backward(")
_ATTENTION = "model.layers.{}.self_attn"

# fmt: off
# name: (lines of the port, lines of the reference)
_TABLE: dict[str, Sides] = {
    "backward_by_a_factor": _both(_in("blocks.1.act")),
    "backward_of_other_sign": _both(_in("blocks.2.act")),
    "backward_transposed": _both(_in("blocks.1.mix")),
    "residual_detached": _both(_in("blocks.1", "self.residual(x)")),
    "hook_scales_a_weights_gradient": _both(_in("blocks.0.down")),
    "hook_scales_a_modules_gradient": _both(_in("blocks.1.norm")),
    "padding_row_learns": _both(Line("self.embed(ids)")),
    "weight_changed_before_backward": _both(_in("head")),
    "recomputed_with_another_random_stream": _both(_in("blocks.2.drop")),
    "parameter_frozen": _both(_in("blocks.0.up")),
    "weight_untied": _both(_in("transformer.wte"), _in("lm_head")),
    "keys_detached": _both(_in(_ATTENTION.format(1), "k_embed ="), _in(_ATTENTION.format(1) + ".k_proj")),
    "hook_scales_an_activations_gradient": _both(
        _in("model.layers.0.mlp", "self.down_proj("), _in("model.layers.0.mlp.down_proj")),
    "norm_frozen": _both(_in("model.norm")),
    "convolutions_gradient_flipped": _both(_in("conv_in")),
    "time_embedding_detached": _both(_in("time_embedding.linear_2"), Line("self.time_emb_proj(temb)")),
    "gradients_never_cleared": ((_ADDED,), ()),
    "all_reduce_missing": _lost(_REDUCED, _DIVIDED),
    "all_reduce_sums": _both(_DIVIDED),
    "all_reduce_averages_twice": _both(_DIVIDED),
    "all_reduce_forgets_a_parameter": _lost(_REDUCED, _DIVIDED),
    "accumulation_not_divided": _lost(_PASSES),
    "accumulation_divided_twice": ((_PASSES,), ()),
    "llama_accumulation_not_divided": _lost(_PASSES),
    "loss_averaged_over_padding": _PER_TOKEN,
    "padding_is_learned": _PER_TOKEN,
    "loss_smoothes_labels": _PER_TOKEN,
    "loss_summed": _PER_TOKEN,
    "unet_predicts_velocity": _lost(Line("F.mse_loss(")),
    "mean_of_the_passes_means": ((_PASSES,), (Line('/ batch["tokens"]'),)),
    "batches_in_another_order": _both(Line("self.embed(ids)"), Line("torch.randint(1, VOCABULARY")),
    "dropout_of_another_rate": _both(_in("blocks.0.drop")),
    "dropout_off": _both(_in("blocks.0.drop")),
    "clip_missing": ((_STEP,), (_CLIP,)),
    "clip_to_another_norm": _both(_CLIP),
    "clip_after_the_step": ((_STEP,), (_CLIP, _STEP)),
    "clip_by_value": _lost(_CLIP),
    "clip_before_unscaling": ((_CLIP,), (_CLIP, Line("self.scaler.unscale_("))),
    "weight_reset_after_an_update": _both(_in("blocks.1.mix")),
    "bias_correction_missing": ((Line(function=":WithoutBiasCorrection"),), (_STEP,)),
    # kept back
    "llama_norm_with_a_careless_backward": (
        (Line(function=":CarelessNorm"),), (_in("model.layers.1.post_attention_layernorm"),)),
    "llama_queries_detached": _both(_in(_ATTENTION.format(0), "q_embed ="), _in(_ATTENTION.format(0) + ".q_proj")),
    "gpt2_head_learns_nothing": _lost(_in("lm_head")),
    "unet_last_gradient_clamped": _both(_in("conv_out")),
    "gradient_scaled_behind_the_head": _both(_in("head")),
    "clipped_and_a_wrong_backward": _both(_in("blocks.2.act")),
    "clipped_and_a_wrong_head": _both(_in("head")),
    "cleared_between_passes": _lost(_ADDED),
    "reduced_in_bf16": _lost(_REDUCED, _DIVIDED),
    "gradients_of_the_first_rank": _lost(_REDUCED, _DIVIDED),
    "gradient_of_a_norm_zeroed": _both(_in("blocks.2.norm")),
    "gradient_wrong_from_the_second_step": _both(_in("embed")),
    "llama_loss_with_a_penalty": _lost(_LOSS),
    "unet_loss_weighted_by_time": _lost(Line("F.mse_loss(")),
    "loss_of_the_wrong_tokens": _lost(_LOSS),
    "evaluation_mode_is_kept": _both(_in("blocks.0.drop")),
    "llama_batch_repeated": _both(Line("self.embed_tokens("), Line("torch.randint(1, VOCABULARY")),
    "clip_of_matrices_alone": _lost(_CLIP),
    "clip_by_the_largest": _lost(_CLIP),
    "decay_without_the_rate": ((Line(function=":AdamW"),), (_STEP,)),
}
# fmt: on
