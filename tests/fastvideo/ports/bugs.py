"""Bugs as people make them in ports, planted in FastVideo's real code at run time, and where each
begins.

Most are an edit of FastVideo's source text: a function is compiled anew with one piece of it
replaced. The others change the built model. Each names its place in both programs' names; any of
several places is right. `test_corpus.py` holds these claims against what hooks on every module of
both programs see.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.corpora.case import Place, into, missing, out_of, parameter_of
from tests.corpora.edited_text import compile_text

Places = Place | tuple[Place, ...]


@dataclass(frozen=True)
class Edit:
    """A piece of FastVideo's source replaced, wherever it occurs in one function: `where` is
    `module:Class.function`.
    """

    where: str
    old: str
    new: str

    def apply(self, patches: ExitStack) -> None:
        """Until `patches` closes. LookupError where FastVideo's source no longer has the piece."""
        module_name, _, path = self.where.partition(":")
        module = import_module(f"fastvideo.{module_name}")
        *owners, name = path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        if self.old not in source:
            raise LookupError(f"{self.where} has no {self.old!r}")
        # the enclosing function stands for the class, which `super()` looks for
        wrapped = "def enclosing(__class__):\n" + textwrap.indent(
            source.replace(self.old, self.new), "    "
        )
        scope: dict[str, Any] = {}
        edited = compile_text(f"{wrapped}\n    return {name}", f"<{self.where}, edited>")
        exec(edited, module.__dict__, scope)
        setattr(owner, name, scope["enclosing"](owner))
        patches.callback(setattr, owner, name, original)


@dataclass(frozen=True)
class Bug:
    pair: str
    what: str
    plan: Edit | Callable[[nn.Module], None]  # an edit of the code, or a change of the built model
    port: tuple[Place, ...]
    reference: tuple[Place, ...]

    def patch(self, patches: ExitStack) -> None:
        """What is done before the port is built."""
        if isinstance(self.plan, Edit):
            self.plan.apply(patches)

    def change(self, model: nn.Module) -> None:
        """What is done to the built port."""
        if not isinstance(self.plan, Edit):
            self.plan(model)


def _bug(
    pair: str,
    what: str,
    plan: Edit | Callable[[nn.Module], None],
    port: Places,
    reference: Places | None = None,
) -> Bug:
    """Without `reference`, the place has the same name in both programs."""
    reference = port if reference is None else reference
    return Bug(
        pair,
        what,
        plan,
        *(places if isinstance(places, tuple) else (places,) for places in (port, reference)),
    )


def _each(
    pattern: Callable[[nn.Module], Any], change: Callable[[Any], None]
) -> Callable[[nn.Module], None]:
    """A change of a part of every block of a transformer."""

    def apply(model: nn.Module) -> None:
        for part in pattern(model):
            change(part)

    return apply


def _per_head(heads: int) -> Callable[[Any], None]:
    """RMS norms that norm every head by itself, where the checkpoint was trained with one norm over
    all.
    """

    def change(norm: Any) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            each = x.float().unflatten(-1, (heads, -1))
            each = each * torch.rsqrt(each.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            return each.flatten(-2).to(x.dtype) * norm.weight

        norm.forward = forward

    return change


def _exchange(a: nn.Module, b: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in a.state_dict().items()}
    a.load_state_dict(b.state_dict())
    b.load_state_dict(state)


def _exchange_rows(linear: Any) -> None:
    """The first two thirds of a fused projection exchanged: k, q, v for q, k, v."""
    for tensor in (linear.weight.data, linear.bias.data):
        first, second, _ = tensor.clone().chunk(3)
        tensor.copy_(torch.cat([second, first, tensor.chunk(3)[2]]))


def _wrong_scale(attention: Any) -> None:
    attention.attn_impl.softmax_scale = 1.0


_WAN = "models.dits.wanvideo"
_FLUX = "models.dits.flux"
_HUNYUAN = "models.dits.hunyuanvideo"
_COSMOS = "models.dits.cosmos"
_SD3 = "models.dits.sd3"
_ZIMAGE = "models.dits.zimage"
_T5 = "models.encoders.t5"
_T5_FIRST = "encoder.block.0.layer.0.SelfAttention"
_CLIP = "models.encoders.clip"
_LLAMA = "models.encoders.llama"
_WAN_VAE = "models.vaes.wanvae"

# fmt: off
BUGS: dict[str, Bug] = {
    # Wan
    "wan_gate": _bug("wan_t2v", "the residual of self-attention leaves out its gate",
        Edit("layers.layernorm:ScaleResidualLayerNormScaleShift.forward", "residual + x * gate", "residual + x"),
        into("blocks.0.self_attn_residual_norm.norm"), into("blocks.0.norm2")),
    "wan_rope": _bug("wan_t2v", "RoPE rotates halves, the weights want neighbours",
        Edit("attention.layer:DistributedAttention.forward", "cos, sin, is_neox_style=False", "cos[..., ::2], sin[..., ::2], is_neox_style=True"),
        out_of("blocks.0.attn1"), into("blocks.0.attn1.to_out.0")),
    "wan_timestep": _bug("wan_t2v", "sines before cosines in the timestep's embedding",
        Edit("layers.visual_embedding:timestep_embedding", "torch.cos(args), torch.sin(args)", "torch.sin(args), torch.cos(args)"),
        into("condition_embedder.time_embedder.mlp"), out_of("condition_embedder.timesteps_proj")),
    "wan_activation": _bug("wan_t2v", "SiLU for GELU in the feed-forward",
        Edit(f"{_WAN}:WanTransformerBlock.__init__", 'act_type="gelu_pytorch_tanh"', 'act_type="silu"'),
        out_of("blocks.0.ffn.act"), out_of("blocks.0.ffn.net.0")),
    "wan_qk_norm": _bug("wan_t2v", "q and k normed head by head instead of over all heads",
        _each(lambda model: [norm for block in model.blocks for norm in (block.norm_q, block.norm_k)], _per_head(2)),
        out_of("blocks.0.norm_q"), out_of("blocks.0.attn1.norm_q")),
    "wan_token_order": _bug("wan_t2v", "tokens by columns instead of rows",
        Edit("layers.visual_embedding:PatchEmbed.forward", "x = self.norm(x)", "x = self.norm(x)\n    x = x.transpose(-1, -2).reshape(x.shape)"),
        out_of("patch_embedding"), (out_of("patch_embedding"), into("blocks.0"))),
    "wan_exchanged_weights": _bug("wan_t2v", "cross-attention's q has k's weights and k has q's",
        _each(lambda model: model.blocks, lambda block: _exchange(block.attn2.to_q, block.attn2.to_k)),
        (out_of("blocks.0.attn2.to_q"), parameter_of("blocks.0.attn2.to_q"), parameter_of("blocks.0.attn2.to_k"))),
    "wan_block_repeated": _bug("wan_t2v", "block 1 runs twice, block 2 never",
        Edit(f"{_WAN}:WanTransformer3DModel.forward", "for block in self.blocks:", "for block in [self.blocks[0], self.blocks[1], self.blocks[1]]:"),
        missing("blocks.2"), (missing("blocks.2"), out_of("blocks.2"), into("blocks.2.attn1"))),
    "wan_block_skipped": _bug("wan_t2v", "block 1 is left out",
        Edit(f"{_WAN}:WanTransformer3DModel.forward", "for block in self.blocks:", "for block in [self.blocks[0], self.blocks[2]]:"),
        missing("blocks.1"), (missing("blocks.1"), out_of("blocks.1"), into("blocks.1.attn1"))),
    "wan_blocks_exchanged": _bug("wan_t2v", "block 1 runs before block 0",
        Edit(f"{_WAN}:WanTransformer3DModel.forward", "for block in self.blocks:", "for block in [self.blocks[1], self.blocks[0], self.blocks[2]]:"),
        (into("blocks.1"), into("blocks.0"), into("blocks.1.to_q"), into("blocks.0.to_q")), (into("blocks.1"), into("blocks.0"), into("blocks.0.attn1"), into("blocks.1.attn1"))),
    "wan_shift_scale": _bug("wan_t2v", "shift and scale of the first modulation exchanged",
        Edit(f"{_WAN}:WanTransformerBlock.forward", "shift_msa, scale_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = e.chunk", "scale_msa, shift_msa, gate_msa, c_shift_msa, c_scale_msa, c_gate_msa = e.chunk"),
        into("blocks.0.to_q"), (into("blocks.0.attn1"), into("blocks.0.attn1.to_q"))),
    "wan_norm_bypassed": _bug("wan_t2v", "cross-attention sees the residual instead of its norm",
        Edit(f"{_WAN}:WanTransformerBlock.forward", "self.attn2(norm_hidden_states,", "self.attn2(hidden_states,"),
        into("blocks.0.attn2")),
    "wan_text_projection": _bug("wan_t2v", "the exact GELU in the text projection, which was trained with its approximation by tanh",
        Edit(f"{_WAN}:WanTimeTextImageEmbedding.__init__", 'act_type="gelu_pytorch_tanh"', 'act_type="gelu"'),
        out_of("condition_embedder.text_embedder.act"), out_of("condition_embedder.text_embedder.act_1")),
    "wan_unpatchify": _bug("wan_t2v", "height and width of a patch exchanged when it is laid out again",
        Edit(f"{_WAN}:WanTransformer3DModel.forward", "permute(0, 7, 1, 4, 2, 5, 3, 6)", "permute(0, 7, 1, 4, 2, 6, 3, 5)"),
        out_of("")),
    "wan_image_dropped": _bug("wan_i2v", "what attends to the image is never added",
        Edit(f"{_WAN}:WanI2VCrossAttention.forward", "x = x + img_x", "pass"),
        into("blocks.0.attn2.to_out"), into("blocks.0.attn2.to_out.0")),
    "wan_image_length": _bug("wan_i2v", "the image's last token is taken for text",
        Edit(f"{_WAN}:WanI2VCrossAttention.forward", "257", "256"),
        into("blocks.0.attn2.to_k")),
    # Flux
    "flux_timestep_scale": _bug("flux", "the timestep is not multiplied by a thousand",
        Edit(f"{_FLUX}:FluxTransformer2DModel.forward", "ts = timestep.to(hidden_states.dtype) * 1000", "ts = timestep"),
        into("time_text_embed")),
    "flux_guidance": _bug("flux", "guidance is embedded and then forgotten",
        Edit(f"{_FLUX}:FluxCombinedTimestepGuidanceTextProjEmbeddings.forward", "timesteps_emb + guidance_emb", "timesteps_emb"),
        out_of("time_text_embed")),
    "flux_final_modulation": _bug("flux", "scale and shift of the last norm exchanged",
        Edit(f"{_SD3}:SD3AdaLayerNormContinuous.forward", "scale, shift = torch.chunk", "shift, scale = torch.chunk"),
        out_of("norm_out")),
    "flux_single_gate": _bug("flux", "single blocks leave out their gate",
        Edit(f"{_FLUX}:FluxSingleTransformerBlock.forward", "gate * self.proj_out(", "self.proj_out("),
        out_of("single_transformer_blocks.0")),
    "flux_key_rope": _bug("flux", "joint attention rotates q and not k",
        Edit(f"{_FLUX}:FluxJointAttention.forward", "k = apply_rotary_emb(k, image_rotary_emb, sequence_dim=1)", "pass"),
        into("transformer_blocks.0.attn.attn"), into("transformer_blocks.0.attn.to_out.0")),
    "flux2_swiglu": _bug("flux2", "the gate's half of SwiGLU taken for the other",
        Edit("models.dits.flux_2:Flux2SwiGLU.forward", "self.gate_fn(x1) * x2", "self.gate_fn(x2) * x1"),
        into("transformer_blocks.0.ff.act_fn.gate_fn")),
    # Hunyuan
    "hunyuan_slices": _bug("hunyuan", "q and k exchanged when they are cut out of the fused projection",
        Edit(f"{_HUNYUAN}:MMDoubleStreamBlock.forward", "img_q, img_k, img_v = img_qkv", "img_k, img_q, img_v = img_qkv"),
        into("double_blocks.0.img_attn_q_norm"), into("transformer_blocks.0.attn.norm_q")),
    "hunyuan_fused_order": _bug("hunyuan", "the fused projection's weights put together as k, q, v",
        _each(lambda model: model.double_blocks, lambda block: _exchange_rows(block.img_attn_qkv)),
        (out_of("double_blocks.0.img_attn_qkv"), parameter_of("double_blocks.0.img_attn_qkv")), (*(place(f"transformer_blocks.0.attn.{name}") for place in (out_of, parameter_of) for name in ("to_q", "to_k")),)),
    "hunyuan_activation": _bug("hunyuan", "the exact GELU in single blocks, which were trained with its approximation by tanh",
        Edit(f"{_HUNYUAN}:MMSingleStreamBlock.__init__", 'nn.GELU(approximate="tanh")', "nn.GELU()"),
        out_of("single_blocks.0.mlp_act"), out_of("single_transformer_blocks.0.act_mlp")),
    "hunyuan_refiner_time": _bug("hunyuan", "the text refiner does not see the timestep",
        Edit(f"{_HUNYUAN}:SingleTokenRefiner.forward", "c = timestep_aware_representations + ", "c = "),
        into("txt_in.refiner_blocks.0"), out_of("context_embedder.time_text_embed")),
    "hunyuan15_condition_type": _bug("hunyuan15", "image tokens carry the mark of glyph tokens",
        Edit("models.dits.hunyuanvideo15:HunyuanVideo15Transformer3DModel.forward", "2 * torch.ones_like(", "1 * torch.ones_like("),
        (into("cond_type_embed"), out_of("cond_type_embed"))),
    # other transformers
    "cosmos_rope": _bug("cosmos", "RoPE rotates neighbours, the weights want halves",
        Edit(f"{_COSMOS}:CosmosSelfAttention.forward", "use_real_unbind_dim=-2", "use_real_unbind_dim=-1"),
        into("transformer_blocks.0.attn1.to_out"), into("transformer_blocks.0.attn1.to_out.0")),
    "cosmos_modulation": _bug("cosmos", "the shared part of the modulation is never added",
        Edit(f"{_COSMOS}:CosmosAdaLayerNormZero.forward", "if temb is not None:", "if False:"),
        out_of("transformer_blocks.0.norm1")),
    "cosmos25_gate": _bug("cosmos25", "cross-attention's residual takes the gate of self-attention",
        Edit("models.dits.cosmos2_5:Cosmos25TransformerBlock.forward", "hidden_states + gate_cross_attn * attn_output", "hidden_states + gate_self_attn * attn_output"),
        into("transformer_blocks.0.norm3")),
    "stable_audio_glu": _bug("stable_audio", "gate and value of the feed-forward's GLU exchanged",
        Edit("models.dits.stable_audio:_GLU.forward", "x, gate = ", "gate, x = "),
        into("transformer.layers.0.ff.ff.0.act"), (out_of("transformer_blocks.0.ff.net.0"), into("transformer_blocks.0.ff.net.0.activation"))),
    "wan_ti2v_timestep": _bug("wan_ti2v", "tokens take the timesteps of the frame before them",
        Edit(f"{_WAN}:WanTransformer3DModel.forward", "timestep = timestep.flatten()", "timestep = timestep.flatten().roll(24)"),
        into("condition_embedder"), (into("condition_embedder"), into("condition_embedder.timesteps_proj"), out_of("condition_embedder.timesteps_proj"))),
    "sd3_modulation": _bug("sd3", "shift and scale of the second attention's modulation exchanged",
        Edit(f"{_SD3}:SD35AdaLayerNormZeroX.forward", "shift_msa2, scale_msa2,", "scale_msa2, shift_msa2,"),
        out_of("transformer_blocks.0.norm1")),
    "sd3_position_crop": _bug("sd3", "positions cut out of the table's top instead of its middle",
        Edit(f"{_SD3}:SD3PatchEmbed.cropped_pos_embed", "top = (self.pos_embed_max_size - height) // 2", "top = 0"),
        out_of("pos_embed")),
    "zimage_gate": _bug("zimage", "gates without their tanh",
        Edit(f"{_ZIMAGE}:ZImageTransformerBlock.forward", "gate_msa.tanh(), gate_mlp.tanh()", "gate_msa, gate_mlp"),
        into("noise_refiner.0.ffn_norm1")),
    "zimage_padding": _bug("zimage", "padding keeps the last patch instead of the learned token",
        Edit(f"{_ZIMAGE}:ZImageTransformer2DModel.forward", "hidden_states[torch.cat(image_inner_pad_masks)] = self.x_pad_token", "pass"),
        into("noise_refiner.0")),
    "glm_image_prior": _bug("glm_image", "the mask of dropped prior tokens upside down",
        Edit("models.dits.glm_image:GlmImageTransformer2DModel.forward", "(~prior_token_drop)", "prior_token_drop"),
        into("prior_projector")),
    "kandinsky5_time": _bug("kandinsky5", "sines before cosines in the timestep's embedding",
        Edit("models.dits.kandinsky5:Kandinsky5TimeEmbeddings.forward", "torch.cos(args), torch.sin(args)", "torch.sin(args), torch.cos(args)"),
        into("time_embeddings.in_layer")),
    # encoders
    "llama_causal": _bug("llama", "attention looks ahead",
        Edit(f"{_LLAMA}:LlamaAttention.__init__", "causal=True", "causal=False"),
        out_of("layers.0.self_attn.attn"), into("layers.0.self_attn.o_proj")),
    "llama_rope_base": _bug("llama", "another base of RoPE than the checkpoint's",
        Edit(f"{_LLAMA}:LlamaAttention.__init__", "base=int(rope_theta)", "base=500000"),
        out_of("layers.0.self_attn.rotary_emb"), (into("layers.0.self_attn.o_proj"), out_of("rotary_emb"))),
    "llama_swiglu": _bug("llama", "gate and up exchanged",
        Edit("layers.activation:SiluAndMul.forward_native", "F.silu(x[..., :d]) * x[..., d:]", "F.silu(x[..., d:]) * x[..., :d]"),
        out_of("layers.0.mlp.act_fn"), (into("layers.0.mlp.down_proj"), into("layers.0.mlp.act_fn"), out_of("layers.0.mlp.act_fn"))),
    "llama_residual": _bug("llama", "the residual is taken behind the first norm",
        Edit(f"{_LLAMA}:LlamaDecoderLayer.forward", "residual = hidden_states\n        hidden_states = self.input_layernorm(hidden_states)", "hidden_states = self.input_layernorm(hidden_states)\n        residual = hidden_states"),
        into("layers.0.post_attention_layernorm")),
    "clip_activation": _bug("clip_text", "GELU for quick GELU",
        Edit(f"{_CLIP}:CLIPMLP.__init__", "get_act_fn(config.hidden_act)", 'get_act_fn("gelu")'),
        out_of("text_model.encoder.layers.0.mlp.activation_fn"), out_of("encoder.layers.0.mlp.activation_fn")),
    "clip_positions": _bug("clip_text", "positions count from one",
        Edit(f"{_CLIP}:CLIPTextEmbeddings.forward", "self.position_ids[:, :seq_length]", "self.position_ids[:, 1 : seq_length + 1]"),
        (into("text_model.embeddings.position_embedding"), out_of("text_model.embeddings.position_embedding")), (into("embeddings.position_embedding"), out_of("embeddings.position_embedding"))),
    "clip_class_token": _bug("clip_vision", "the class token is put last",
        Edit(f"{_CLIP}:CLIPVisionEmbeddings.forward", "[class_embeds, patch_embeds]", "[patch_embeds, class_embeds]"),
        out_of("vision_model.embeddings"), out_of("embeddings")),
    "siglip_softmax_scale": _bug("siglip", "attention's logits are not scaled",
        _each(lambda model: [layer.self_attn.attn for layer in model.vision_model.encoder.layers], _wrong_scale),
        out_of("vision_model.encoder.layers.0.self_attn.attn"), into("encoder.layers.0.self_attn.out_proj")),
    "t5_buckets": _bug("t5", "relative positions look backwards only",
        Edit(f"{_T5}:T5Attention.compute_bias", "bidirectional=(not self.is_decoder)", "bidirectional=False"),
        (into(f"{_T5_FIRST}.relative_attention_bias"), out_of(f"{_T5_FIRST}.relative_attention_bias"))),
    "t5_softmax_scale": _bug("t5", "attention's logits are scaled, which T5 does not do",
        Edit(f"{_T5}:T5MultiHeadAttention.forward", 'attn = torch.einsum("binc,bjnc->bnij", q, k)', 'attn = torch.einsum("binc,bjnc->bnij", q, k) * c**-0.5'),
        out_of(f"{_T5_FIRST}.attn"), into(f"{_T5_FIRST}.o")),
    "umt5_mask": _bug("umt5", "padding is attended to",
        Edit(f"{_T5}:T5Attention.forward", "if attention_mask is not None:", "if False:"),
        (into(f"{_T5_FIRST}.attn"), out_of(f"{_T5_FIRST}.attn")), into(f"{_T5_FIRST}.o")),
    "qwen2_5_vl_rope": _bug("qwen2_5_vl", "RoPE turns the other way",
        Edit("models.encoders.qwen2_5:rotate_half", "torch.cat((-x2, x1)", "torch.cat((x2, -x1)"),
        into("layers.0.self_attn.o_proj")),
    "qwen3_key_norm": _bug("qwen3", "k is not normed",
        Edit("models.encoders.qwen3:Qwen3Attention.forward", "k = self.k_norm(k)", "pass"),
        missing("layers.0.self_attn.k_norm"), (missing("layers.0.self_attn.k_norm"), out_of("layers.0.self_attn.k_norm"))),
    "lingbot_t5_eps": _bug("lingbot_t5", "a thousand times the norms' epsilon",
        Edit("models.encoders.lingbotworld2_t5:T5LayerNorm.__init__", "eps: float = 1e-6", "eps: float = 1e-3"),
        out_of("blocks.0.norm1"), out_of("encoder.block.0.layer.0.layer_norm")),
    # autoencoders
    "wan_vae_padding": _bug("wan_vae", "convolutions padded on both sides of time instead of before only",
        Edit(f"{_WAN_VAE}:WanCausalConv3d.__init__", "2 * self.padding[0], 0)", "self.padding[0], self.padding[0])"),
        out_of("encoder.conv_in")),
    "wan_vae_upsampling": _bug("wan_vae", "bilinear upsampling for the nearest neighbour's",
        Edit(f"{_WAN_VAE}:WanResample.__init__", 'mode="nearest-exact"', 'mode="bilinear"'),
        out_of("decoder.up_blocks.0.upsamplers.0.resample.0")),
    "wan_vae_cache": _bug("wan_vae", "a block's first convolution forgets the frames of the chunk before: wrong from the second call on",
        Edit(f"{_WAN_VAE}:WanResidualBlock.forward", "self.conv1(x, _feat_cache[idx])", "self.conv1(x)"),
        (into("encoder.down_blocks.0.conv1"), out_of("encoder.down_blocks.0.conv1"))),
    "lingbot_wan_vae_norm": _bug("lingbot_wan_vae", "the norm's scale is the root of the number of frames",
        Edit("models.vaes.lingbotworld2_wanvae:RMS_norm.forward", "self.scale", "x.shape[2] ** 0.5"),
        out_of("encoder.downsamples.0.residual.0"), out_of("encoder.down_blocks.0.norm1")),
    "hunyuan_vae_mask": _bug("hunyuan_vae", "frames attend to later frames",
        Edit("models.vaes.hunyuanvae:prepare_causal_attention_mask", '-float("inf")', "0.0"),
        (into("encoder.mid_block.attentions.0"), into("encoder.mid_block.attentions.0.to_out")), (into("encoder.mid_block.attentions.0"), into("encoder.mid_block.attentions.0.to_out"), into("encoder.mid_block.attentions.0.to_out.0"))),
    "oobleck_snake": _bug("oobleck", "Snake's frequency is not exponentiated",
        Edit("models.vaes.oobleck:Snake1d.forward", "alpha = self.alpha if not self.logscale else torch.exp(self.alpha)", "alpha = self.alpha"),
        out_of("encoder.block.0.res_unit1.snake1")),
}
# fmt: on

# where the real faults of `corpus.FAULTY` begin, in the port's names and in the reference's
REAL: dict[str, tuple[str, tuple[Place, ...], tuple[Place, ...]]] = {
    "hunyuan_masked": (
        "the mask of the text never arrives: padding is averaged and attended to",
        (into("txt_in.c_embedder"),),
        (into("context_embedder.time_text_embed"),),
    ),
    "hunyuan15_masked": (
        "the mask of the text never arrives: padding is averaged and attended to",
        (into("txt_in.c_embedder"),),
        (into("context_embedder.time_text_embed"),),
    ),
    "cosmos_frame_rate": (
        "RoPE takes every video for one of 16 frames a second",
        (out_of("rope"),),
        (out_of("rope"),),
    ),
    "cosmos25_epsilon": (
        "the norms of q and k take an epsilon of 1e-6, diffusers' take 1e-5: 2.5e-6 of the output",
        (out_of("transformer_blocks.0.attn1.norm_q"),),
        (out_of("transformer_blocks.0.attn1.norm_q"),),
    ),
}
