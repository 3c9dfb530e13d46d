"""The lines of each fault that are right to name. Where a fault replaces a function, those of the new
one are, and it needs no entry here.
"""

from __future__ import annotations

from tests.corpora.case import Line, Lines, in_both


def lines_of(name: str) -> Lines:
    """Return the right lines of a fault."""
    return LINES.get(name) or Lines((Line(function=f"faults.py:{name}."),))


def _weights(port: str, *reference: str) -> Lines:
    """Return weights of the port, and what they are called in the reference: by default the same."""
    return Lines(
        tuple(Line(leaf=leaf) for leaf in port.split()),
        tuple(Line(leaf=leaf) for leaf in reference or port.split()),
    )


def _beside(name: str, *reference: Line) -> Lines:
    """Return the lines of a function that replaces what the reference has."""
    return Lines((Line(function=f"faults.py:{name}."),), reference)


_Q, _K, _V = (f"layers.{{}}.self_attn.{name}_proj." for name in "qkv")
_PORT_ATTENTION = Line("F.scaled_dot_product_attention(", module="h.0.attn")
_WAN_ATTENTION = Line("F.scaled_dot_product_attention(", module="blocks.0.attn")
_SCALE = Line("/ math.sqrt(HEAD)", module="layers.0.self_attn")
_HALVES, _PAIRS = Line(function="rotate_halves"), Line(function="rotate_pairs")
_RESIDUAL = Lines(
    (Line("x * self.residual + self.attn", module="h.1"),),
    (Line("x + self.self_attn(", module="layers.1"),),
)
_ACTIVATION = Lines((Line("self.act(gate) * up"),), (Line("self.act_fn(self.gate_proj(x))"),))
_GROUP_NORM = in_both(Line("self.norm1(x)", module="down.norm1"))
_QUERIES = "blocks.1.attn.to_q. blocks.1.attn.to_k. blocks.1.attn.norm_q. blocks.1.attn.norm_k."

# fmt: off
LINES: dict[str, Lines] = {
    "llama_bias_not_loaded": _weights("h.1.attn.qkv.bias", *(part.format(1) + "bias" for part in (_Q, _K, _V))),
    "llama_bias_left_out": _weights("h.1.attn.qkv.bias", *(part.format(1) + "bias" for part in (_Q, _K, _V))),
    "llama_norm_not_loaded": _weights("h.1.ln2.weight", "layers.1.post_attention_layernorm.weight"),
    "llama_norm_minus_one": _weights("h.0.ln1.weight", "layers.0.input_layernorm.weight"),
    "llama_output_transposed": _weights("h.1.attn.out.weight", "layers.1.self_attn.o_proj.weight"),
    "llama_output_of_another_layer": _weights("h.1.attn.out.weight", "layers.1.self_attn.o_proj.weight"),
    "llama_norms_exchanged": _weights(
        "h.1.ln1.weight h.1.ln2.weight", "layers.1.input_layernorm.weight", "layers.1.post_attention_layernorm.weight"),
    "llama_down_scaled": _weights("h.2.ff.down.weight", "layers.2.mlp.down_proj.weight"),
    "llama_norm_negated": _weights("ln_f.weight", "norm.weight"),
    "llama_head_rounded": _weights("head.weight", "lm_head.weight"),
    "llama_embedding_rounded": _weights("wte.weight", "embed_tokens.weight"),
    "llama_rotary_base": _weights("rope.inv_freq", "rotary_emb.inv_freq"),
    "llama_output_rows_permuted": _weights("h.1.attn.out.weight", "layers.1.self_attn.o_proj.weight"),
    "llama_head_columns_permuted": _weights("head.weight", "lm_head.weight"),
    "llama_rotary_pairs": Lines((_PAIRS,), (_HALVES,)),
    "llama_rotary_missing": Lines((_PORT_ATTENTION,), (_HALVES,)),
    "llama_rotary_backwards": Lines((Line(function="llama_rotary_backwards."), _HALVES), (_HALVES,)),
    "llama_scale_of_the_width": Lines((_PORT_ATTENTION,), (_SCALE,)),
    "llama_scale_missing": Lines((_PORT_ATTENTION,), (_SCALE,)),
    "llama_mask_missing": Lines((_PORT_ATTENTION, Line("seen = torch.ones(")), (Line("logits.masked_fill("), Line("hidden = torch.ones("))),
    "llama_window": Lines((_PORT_ATTENTION, Line("seen.triu(1 - self.window)")), (Line("logits.masked_fill("),)),
    "llama_heads_tiled": Lines((Line("t.repeat(1, times, 1, 1)"),), (Line("t.repeat_interleave("),)),
    "llama_one_head_scaled": _beside("llama_one_head_scaled", Line("self.o_proj(mixed", module="layers.0.self_attn.o_proj")),
    "llama_residual_scaled": _RESIDUAL,
    "llama_residual_missing": _RESIDUAL,
    "llama_branch_twice": _RESIDUAL,
    "llama_gate_and_up_exchanged": _ACTIVATION,
    "llama_gelu_for_silu": _ACTIVATION,
    "llama_norm_epsilon": Lines((Line("self.eps", module="h.0.ln1"),), (Line("self.eps", module="layers.0.input_layernorm"),)),
    "llama_positions_of_the_input_lost": _weights("h.1.ln1.", "layers.0."),
    "unet_bias_left_out": _weights("down.conv1.bias"),
    "unet_norms_exchanged": _weights("mid.norm1.weight mid.norm2.weight"),
    "unet_norm_epsilon": _GROUP_NORM,
    "unet_norm_groups": _GROUP_NORM,
    "unet_relu": in_both(Line(module="mid.act")),
    "unet_training_mode": in_both(Line(module="down.dropout")),
    "unet_sine_before_cosine": in_both(Line("torch.cat(parts, -1)"), Line("(angles.sin(), angles.cos())")),
    "unet_skip_first": in_both(Line("torch.cat((skip, y)")),
    "unet_kernel_transposed": _weights("conv_in.weight"),
    "wan_gate_missing": in_both(Line("y * gate if self.gated", module="blocks.1")),
    "wan_scale_without_one": in_both(Line("(self.plus_one + scale)", module="blocks.0")),
    "wan_gelu_exact": in_both(Line(module="blocks.0.act")),
    "wan_rotary_halves": Lines((_HALVES,), (_PAIRS,)),
    "wan_query_and_key_exchanged": in_both(Line("parts[index].unflatten"), _WAN_ATTENTION),
    "wan_query_and_key_weights_exchanged": _weights(_QUERIES),
    "wan_tokens_by_columns": in_both(Line("grid.transpose(-1, -2) if self.by_columns")),
    "wan_weight_through_fp8": _weights("blocks.1.ffn_in.weight"),
    "wan_attention_lost": in_both(Line("self.after(mixed", module="blocks.1.attn.to_out"), Line("self.after(mixed", module="blocks.1.attn")),
    "wan_weight_not_loaded": _weights("blocks.1.attn.to_v."),
    "wan_norm_left_out": Lines((Line("else self.to_q(x)"), Line(function="rotate_pairs", module="blocks.0.attn")), (Line(leaf="blocks.0.attn.norm_q."),)),
    "unet_bilinear": in_both(Line("F.interpolate(")),
    "unet_weight_noise": _weights("mid.conv1.weight"),
    "llama_fused_parts_in_another_order": _weights("h.1.ff.gate_up.weight", "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"),
    "llama_query_part_scaled": _weights("h.0.attn.qkv.", _Q.format(0)),
    "llama_query_in_rotary_pairs": _weights("h.1.attn.qkv.", _Q.format(1)),
    "llama_scale_of_the_length": Lines((_PORT_ATTENTION,), (_SCALE,)),
    "llama_queries_not_rotated": Lines((_PORT_ATTENTION,), (_HALVES,)),
    "llama_relu_for_silu": _ACTIVATION,
    "llama_norm_skipped": _weights("h.2.ff.gate_up.", "layers.2.post_attention_layernorm."),
    "llama_layer_norm_for_rms": _beside("llama_layer_norm_for_rms", Line(module="layers.0.input_layernorm")),
    "llama_norm_without_weight": _beside("llama_norm_without_weight", Line(leaf="norm.weight")),
    "wan_query_without_bias": _beside("wan_query_without_bias", Line(leaf="blocks.0.attn.to_q.bias")),
    "wan_bias_twice": _beside("wan_bias_twice", Line(leaf="blocks.1.ffn_in.bias")),
    "wan_output_of_the_first_block": _weights("blocks.2.ffn_out."),
    "wan_modulation_scaled": _weights("blocks.0.modulation"),
    "wan_shift_and_scale_exchanged": _weights("blocks.0.modulation"),
    "wan_two_columns_exchanged": _weights("proj_out.weight"),
    "wan_scale_missing": in_both(_WAN_ATTENTION),
    "unet_convolutions_exchanged": _weights("mid.conv1. mid.conv2."),
    "unet_kernel_zero": _weights("conv_out.weight"),
    "unet_channels_transposed": _weights("mid.conv2.weight"),
    "unet_shortcut_missing": _beside("unet_shortcut_missing", Line(leaf="mid.shortcut.")),
    "unet_padding_reflected": in_both(Line(module="mid.conv1")),
}
# fmt: on
