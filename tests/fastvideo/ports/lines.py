"""The lines of each bug that are right to name, in the port and in its original.

A line is right if it is the one that was edited, or the one that computes the first wrong tensor: of
two names that are exchanged when a tensor is split, no tensor is wrong before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.corpora.case import Line, Lines
from tests.fastvideo.ports.bugs import BUGS, Edit
from tests.fastvideo.ports.faults import Fault


def _text(text: str, function: str = "") -> Line:
    return Line(text, function)


def _in(module: str, text: str = "") -> Line:
    """Return a line that runs in a module."""
    return Line(text, module=module)


def _of(function: str) -> Line:
    return Line(function=function)


def _weight(leaf: str) -> Line:
    return Line(leaf=leaf)


_FUSED = _text("scaled_dot_product_attention(")
_EDITED = "edited"  # the port's line as the bug's edit has it

# fmt: off
# name: (lines of the port, lines of the reference)
_TABLE: dict[str, tuple[tuple[Line | str, ...], tuple[Line, ...]]] = {
    "wan_gate": ((_EDITED,), (_text("attn_output * gate_msa"),)),
    "wan_rope": ((_EDITED, _of("_apply_rotary_emb")), (_of("apply_rotary_emb"),)),
    "wan_timestep": ((_EDITED,), (_text("torch.cat([", "get_timestep_embedding"),)),
    "wan_activation": ((_in("blocks.0.ffn.act"),), (_in("blocks.0.ffn.net.0", "gelu("),)),
    "wan_qk_norm": ((_of("_per_head"),), (_in("blocks.0.attn1.norm_q"),)),
    "wan_token_order": ((_text("x.transpose(-1, -2).reshape(x.shape)"),), (_text("hidden_states.flatten(2).transpose(1, 2)"),)),
    "wan_exchanged_weights": (
        (_weight("blocks.0.attn2.to_q."), _weight("blocks.0.attn2.to_k.")),
        (_weight("blocks.0.attn2.to_q."), _weight("blocks.0.attn2.to_k."))),
    "wan_block_repeated": ((_weight("blocks.1."),), (_weight("blocks.2."),)),
    "wan_block_skipped": ((_weight("blocks.2."),), (_weight("blocks.1."),)),
    "wan_blocks_exchanged": ((_weight("blocks.1."),), (_weight("blocks.0."),)),
    "wan_shift_scale": ((_EDITED, _text("* (1 + scale_msa) + shift_msa")), (_text("* (1 + scale_msa) + shift_msa"),)),
    "wan_norm_bypassed": (
        (_EDITED, _in("blocks.0.attn2.to_q")), (_in("blocks.0.attn2.to_q"),)),
    "wan_text_projection": (
        (_in("condition_embedder.text_embedder.act"),), (_in("condition_embedder.text_embedder.act_1"),)),
    "wan_unpatchify": ((_EDITED,), (_text("permute(0, 7, 1, 4, 2, 5, 3, 6)"),)),
    "wan_image_dropped": ((_in("blocks.0.attn2.to_out"),), (_text("hidden_states + hidden_states_img"),)),
    "wan_image_length": ((_EDITED, _in("blocks.0.attn2.to_k")), (_text("image_context_length"), _in("blocks.0.attn2.to_k"))),
    "flux_timestep_scale": ((_in("time_text_embed.time_proj"),), (_text("timestep.to(hidden_states.dtype) * 1000"),)),
    "flux_guidance": ((_EDITED, _text("time_guidance_emb + pooled_projections")), (_text("timesteps_emb + guidance_emb"),)),
    "flux_final_modulation": (
        (_EDITED, _text("(1 + scale)[:, None, :] + shift[:, None, :]")), (_text("(1 + scale)[:, None, :] + shift[:, None, :]"),)),
    "flux_single_gate": ((_EDITED, _text("residual + hidden_states", "FluxSingleTransformerBlock")), (_text("gate * self.proj_out("),)),
    "flux_key_rope": (
        (_in("transformer_blocks.0.attn.attn"),), (_of("apply_rotary_emb"),)),
    "flux2_swiglu": ((_EDITED,), (_text("self.gate_fn("),)),
    "hunyuan_slices": (
        (_EDITED, _weight("double_blocks.0.img_attn_q_norm."), _weight("double_blocks.0.img_attn_k_norm.")),
        (_weight("transformer_blocks.0.attn.norm_q."), _weight("transformer_blocks.0.attn.norm_k."))),
    "hunyuan_fused_order": (
        (_weight("double_blocks.0.img_attn_qkv."),),
        (_weight("transformer_blocks.0.attn.to_q."), _weight("transformer_blocks.0.attn.to_k."))),
    "hunyuan_activation": ((_in("single_blocks.0.mlp_act"),), (_in("single_transformer_blocks.0.act_mlp"),)),
    "hunyuan_refiner_time": (
        (_EDITED, _text("self.adaLN_modulation(c)")), (_text("timesteps_emb + pooled_projections"), _text("timesteps_emb + guidance_emb"))),
    "hunyuan15_condition_type": ((_EDITED,), (_text("* torch.ones_like("),)),
    "cosmos_rope": ((_EDITED, _of("apply_rotary_emb")), (_of("apply_rotary_emb"),)),
    "cosmos_modulation": (
        (_text("hidden_states * (1 + scale) + shift", "CosmosAdaLayerNormZero"),), (_text("embedded_timestep + temb"),)),
    "cosmos25_gate": ((_EDITED,), (_text("hidden_states + gate * attn_output"),)),
    "stable_audio_glu": ((_EDITED, _text("x * self.act(gate)")), (_text("self.activation(gate)"), _text("hidden_states, gate ="))),
    "wan_ti2v_timestep": ((_EDITED,), (_text("timestep.flatten()"),)),
    "sd3_modulation": ((_EDITED, _text("(1 + scale_msa2[:, None])")), (_text("(1 + scale_msa2[:, None])"),)),
    "sd3_position_crop": ((_text("top:top + height"),), (_text("top : top + height"),)),
    "zimage_gate": ((_EDITED, _text("gate_msa * self.attention_norm2(attn_out)")), (_text("gate_msa.tanh()"),)),
    "zimage_padding": ((), (_text("x_pad_token"), _text("pad_token"))),
    "glm_image_prior": ((_EDITED,), (_text("prior_embedding[prior_token_drop] *= 0.0"),)),
    "kandinsky5_time": ((_EDITED,), (_text("torch.cat([torch.cos(args), torch.sin(args)]"),)),
    "llama_causal": ((_FUSED,), (_FUSED,)),
    "llama_rope_base": (
        (_weight("layers.0.self_attn.rotary_emb.cos_sin_cache"), _in("layers.0.self_attn.rotary_emb")), (_weight("rotary_emb.inv_freq"),)),
    "llama_swiglu": ((_EDITED,), (_text("self.act_fn(self.gate_proj(x))"),)),
    "llama_residual": ((_in("layers.0.post_attention_layernorm", "x + residual"),), (_text("residual + hidden_states"),)),
    "clip_activation": (
        (_in("text_model.encoder.layers.0.mlp.activation_fn"),), (_in("encoder.layers.0.mlp.activation_fn"),)),
    "clip_positions": ((_EDITED,), (_text("self.position_ids[:, :seq_length]"),)),
    "clip_class_token": ((_EDITED,), (_text("torch.cat([class_embeds, patch_embeds]"),)),
    "siglip_softmax_scale": ((_FUSED,), (_FUSED,)),
    "t5_buckets": ((_EDITED, _of("_relative_position_bucket")), (_of("_relative_position_bucket"),)),
    "t5_softmax_scale": ((_EDITED,), (_FUSED,)),
    "umt5_mask": ((_text("attn += attn_bias"),), (_FUSED, _of("masking_utils.py"))),
    "qwen2_5_vl_rope": ((_EDITED,), (_text("torch.cat((-x2, x1)"),)),
    "qwen3_key_norm": ((_in("layers.0.self_attn.rotary_emb"),), (_weight("layers.0.self_attn.k_norm."),)),
    "lingbot_t5_eps": (
        (_in("blocks.0.norm1", "torch.rsqrt("),), (_in("encoder.block.0.layer.0.layer_norm", "torch.rsqrt("),)),
    "wan_vae_padding": ((_text("F.pad(x, padding)"),), (_text("F.pad(x, padding)"),)),
    "wan_vae_upsampling": (
        (_in("decoder.up_blocks.0.upsamplers.0.resample.0"),), (_in("decoder.up_blocks.0.upsamplers.0.resample.0"),)),
    "wan_vae_cache": (
        (_EDITED, _in("encoder.down_blocks.0.conv1", "F.pad(x, padding)")),
        (_in("encoder.down_blocks.0.conv1", "torch.cat([cache_x, x], dim=2)"),)),
    "lingbot_wan_vae_norm": ((_EDITED,), (_text("* self.scale"),)),
    "hunyuan_vae_mask": ((_text("torch.where(x <= y, 0, 0.0)"),), (_text('-float("inf")'),)),
    "oobleck_snake": ((_EDITED, _text("torch.sin(alpha * x)")), (_text("torch.exp(self.alpha)"),)),
    # of real ports
    "hunyuan_masked": ((_text("torch.mean(x, dim=1)"),), (_text("mask_float"),)),
    "hunyuan15_masked": ((_text("x.mean(dim=1)"),), (_text("mask_float"),)),
    "cosmos_frame_rate": ((_text("/ fps * self.base_fps"),), (_text("/ fps * self.base_fps"),)),
    "cosmos25_epsilon": ((_in("transformer_blocks.0.attn1.norm_q"),), (_in("transformer_blocks.0.attn1.norm_q"),)),
    "kandinsky5": ((), (_text(".to(torch.bfloat16)"),)),
}
# fmt: on


def _lines(name: str, port: Iterable[Line | str], reference: tuple[Line, ...]) -> Lines:
    return Lines(
        tuple(edited for line in port for edited in (_edit(name) if line == _EDITED else (line,))),  # type: ignore[misc]
        reference,
    )


def _edit(name: str) -> tuple[Line, ...]:
    """Return the lines that the edit of a bug changes."""
    plan = BUGS[name].plan
    assert isinstance(plan, Edit)
    return tuple(
        Line(text.strip(), plan.where)
        for text in plan.new.splitlines()
        if text not in plan.old.splitlines()
    )


def lines_of_fault(fault: Fault) -> Lines:
    """Return the right lines of a fault that a machine planted: those of the function that plants it, or
    the weight. Of a module that is skipped none is known.
    """
    if fault.kind == "skip":
        return Lines()
    if fault.kind == "sister":
        return Lines((_weight(f"{fault.module}."),))
    kind = fault.kind.partition(".")[0]
    if kind in ("weight", "bias"):
        return Lines((_weight(f"{fault.module}.{kind}"),))
    return Lines((_of("ports/faults.py"),))


LINES = {name: _lines(name, *sides) for name, sides in _TABLE.items()}
