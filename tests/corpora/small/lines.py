"""The wrong lines of each fault, and what they should be like in the reference."""

from __future__ import annotations

from tests.corpora.case import Line, Lines, in_both


def _weights(*leaves: str) -> Lines:
    return in_both(*(Line(leaf=leaf) for leaf in leaves))


def _lines(port: Line, *reference: Line) -> Lines:
    return Lines((port,), reference)


_FUSED_ATTENTION = Line("scaled_dot_product_attention(", "sdpa_attention.py")
_MASK_ADDED = Line("attn_weights + attention_mask")
# sines and cosines put together, and their halves exchanged
_TIMESTEPS = in_both(Line("torch.cat([", "get_timestep_embedding"))

# fmt: off
LINES: dict[str, Lines] = {
    "llama_rope_interleaved": _lines(
        Line(function="llama_rope_interleaved"), Line(function="rotate_half"), Line(function="apply_rotary_pos_emb")),
    "llama_q_proj_transposed": _weights("model.layers.3.self_attn.q_proj.weight"),
    "llama_swiglu_swapped": _lines(Line("self.act_fn(self.up_proj(x))"), Line("self.act_fn(self.gate_proj(x))")),
    "llama_causal_mask_dropped": _lines(_FUSED_ATTENTION, _MASK_ADDED, Line(function="masking_utils.py")),
    "llama_layers_exchanged": _weights("model.layers.1.", "model.layers.2."),
    "llama_norm_not_loaded": _weights("model.layers.4.post_attention_layernorm.weight"),
    "llama_residual_scaled": _lines(
        Line("residual * 0.9 + hidden_states"), Line("residual + hidden_states", module="model.layers.2")),
    "llama_last_layer_skipped": _lines(Line(module="model.norm"), Line(leaf="model.layers.5.")),
    "qwen3_q_norm_missing": _lines(
        Line("self.q_proj(hidden_states).view(hidden_shape)"), Line(leaf="model.layers.0.self_attn.q_norm.weight")),
    "qwen3_k_norm_epsilon": in_both(Line("self.variance_epsilon", module="model.layers.0.self_attn.k_norm")),
    "qwen3_attention_scale": _lines(_FUSED_ATTENTION, Line("* scaling")),
    "qwen3_heads_tiled": _lines(Line("states.repeat(1, times, 1, 1)"), Line(function="repeat_kv")),
    "mistral_rope_theta": _weights("model.rotary_emb.inv_freq"),
    "mistral_window_dropped": _lines(_FUSED_ATTENTION, Line("kv_idx > q_idx - sliding_window"), _MASK_ADDED),
    "mistral_positions_in_bf16": _lines(
        Line("position_ids[..., None].to(torch.bfloat16).float()"), Line("position_ids[..., None].float()")),
    "gpt2_gelu_exact": _lines(Line("self.act(input)", "activations.py"), Line("torch.tanh(math.sqrt(2.0 / math.pi)")),
    "gpt2_bias_missing": _weights("transformer.h.2.mlp.c_fc.bias"),
    "gpt2_dropout_left_on": in_both(Line("self.drop(hidden_states)")),
    "gpt2_positions_shifted": _weights("transformer.wpe.weight"),
    "gpt2_query_and_key_exchanged": Lines(
        (Line("value_states = self.c_attn(hidden_states)"), _FUSED_ATTENTION),
        (Line("value_states = self.c_attn(hidden_states)"), Line("torch.matmul(query, key.transpose"))),
    "wan_timestep_halves_swapped": _TIMESTEPS,
    "wan_token_order": _lines(
        Line("hidden_states.transpose(-1, -2).flatten(2)"), Line("hidden_states.flatten(2).transpose(1, 2)")),
    "wan_unpatchify_order": _lines(
        Line("hidden_states.permute(0, 7, 1, 4, 2, 6, 3, 5)"), Line("hidden_states.permute(0, 7, 1, 4, 2, 5, 3, 6)")),
    "wan_rope_axes": in_both(Line("torch.cat([freqs_cos_f,")),
    "wan_gate_missing": _lines(Line("hidden_states.float() + attn_output)"), Line("attn_output * gate_msa")),
    "flux_norm_out_swapped": _weights("norm_out.linear.weight", "norm_out.linear.bias"),
    "flux_guidance_unscaled": in_both(Line("guidance = guidance.to(hidden_states.dtype)")),
    "flux_parts_exchanged": _lines(
        Line("torch.cat([mlp_hidden_states, attn_output], dim=2)"), Line("torch.cat([attn_output, mlp_hidden_states], dim=2)")),
    "unet_timestep_halves_swapped": _TIMESTEPS,
    "unet_skip_order": _lines(
        Line("torch.cat([res_hidden_states, hidden_states], dim=1)"), Line("torch.cat([hidden_states, res_hidden_states], dim=1)")),
    "unet_norm_epsilon": in_both(Line("self.norm1(", module="down_blocks.0.resnets.0.norm1")),
    "vae_scaling_factor": in_both(Line("latents / model.config.scaling_factor")),
    "vae_padding_side": in_both(Line("F.pad(hidden_states, pad")),
    "vae_upsample_bilinear": in_both(Line("F.interpolate(hidden_states, scale_factor=2.0")),
}
# fmt: on
