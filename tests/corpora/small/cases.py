"""Programs of plain transformers and diffusers models, with and without a fault in the port.

Both sides of a case are the same library, so a place has the same name in both. The figures are
what `python -m tests.corpora.truth` measures; the first place of each case is what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.corpora.case import Case, Place, Right, into, out_of, parameter_of, sides_of
from tests.corpora.judge import OURS, RULE
from tests.corpora.scores import DTYPES, Corpus
from tests.corpora.small.bugs import BUGS
from tests.corpora.small.lines import LINES


class Figures(NamedTuple):
    """error: of the faulty port against the clean one at the first place, in fp32; inf if the tensor
    is missing there. fp32, bf16: of the final output against the reference. All relative L2.
    """

    error: float
    fp32: float
    bf16: float
    above_rounding: bool = True


FIGURES: dict[str, Figures] = {}


def _clean(family: str, fp32: float, bf16: float) -> Case:
    FIGURES[family] = Figures(0.0, fp32, bf16)
    return Case(name=family, family=family, **sides_of("small", family, family))


def _case(name: str, edit: str, figures: Figures, *places: Place) -> Case:
    FIGURES[name], family = figures, name.partition("_")[0]
    return Case(
        name=name, family=family, edit=edit, plant=BUGS[name], **sides_of("small", family, name),
        right=Right(places=places, in_reference=places, lines=LINES[name]),
        invisible=() if figures.above_rounding else ("bf16",),
    )  # fmt: skip


# a call that is not there has no error
_NONE = float("inf")

# fmt: off
CASES: tuple[Case, ...] = (
    _clean("llama", 9.9e-07, 0.017),
    _clean("qwen3", 9.9e-07, 0.018),
    _clean("mistral", 1.2e-06, 0.02),
    _clean("gpt2", 5.1e-07, 0.0097),
    _clean("wan", 1.9e-07, 0.0039),
    _clean("flux", 1.4e-07, 0.003),
    _clean("unet", 5.2e-07, 0.0097),
    _clean("vae", 1.6e-06, 0.016),
    _case("llama_rope_interleaved", "RoPE rotates neighbours, not halves", Figures(0.53, 0.86, 0.86),
          into("model.layers.0.self_attn.o_proj")),
    _case("llama_q_proj_transposed", "a square weight transposed, one layer", Figures(1.4, 0.15, 0.15),
          out_of("model.layers.3.self_attn.q_proj"), parameter_of("model.layers.3.self_attn.q_proj")),
    _case("llama_swiglu_swapped", "SwiGLU activates the other branch", Figures(1.4, 1, 1),
          into("model.layers.0.mlp.act_fn")),
    _case("llama_causal_mask_dropped", "no causal mask", Figures(0.86, 1.3, 1.3),
          into("model.layers.0.self_attn.o_proj")),
    _case("llama_layers_exchanged", "two blocks have each other's weights", Figures(0.14, 1, 1),
          out_of("model.layers.1.input_layernorm"), parameter_of("model.layers.1.input_layernorm"),
          parameter_of("model.layers.1.self_attn.q_proj"), parameter_of("model.layers.1")),
    _case("llama_norm_not_loaded", "a norm's weight is still ones", Figures(0.096, 0.054, 0.056),
          out_of("model.layers.4.post_attention_layernorm"), parameter_of("model.layers.4.post_attention_layernorm")),
    _case("llama_residual_scaled", "one residual scaled by 0.9", Figures(0.09, 0.088, 0.091),
          into("model.layers.2.post_attention_layernorm")),
    _case("llama_last_layer_skipped", "one layer too few", Figures(_NONE, 0.45, 0.45),
          into("model.layers.5"), out_of("model.layers.5"), into("model.layers.5.input_layernorm"), into("model.norm")),
    _case("qwen3_q_norm_missing", "the norm of the queries is never called", Figures(_NONE, 0.22, 0.22),
          into("model.layers.0.self_attn.q_norm"), out_of("model.layers.0.self_attn.q_norm"),
          into("model.layers.0.self_attn.o_proj")),
    _case("qwen3_k_norm_epsilon", "epsilon of the keys' norm 1e-3, not 1e-6",
          Figures(0.0006, 0.00094, 0.018, above_rounding=False),
          out_of("model.layers.0.self_attn.k_norm")),
    _case("qwen3_attention_scale", "attention scaled by the hidden size", Figures(0.41, 0.75, 0.75),
          into("model.layers.0.self_attn.o_proj")),
    _case("qwen3_heads_tiled", "key heads repeated in the wrong order", Figures(1, 1.3, 1.3),
          into("model.layers.0.self_attn.o_proj")),
    _case("mistral_rope_theta", "rotary base 1e6, not 1e4", Figures(0.93, 0.91, 0.91),
          out_of("model.rotary_emb"), parameter_of("model.rotary_emb")),
    _case("mistral_window_dropped", "no sliding window", Figures(_NONE, 1, 1),
          into("model.layers.0"), into("model.layers.0.self_attn"), into("model.layers.0.self_attn.o_proj")),
    _case("mistral_positions_in_bf16", "positions go through bf16", Figures(0.062, 0.11, 0.11),
          out_of("model.rotary_emb")),
    _case("gpt2_gelu_exact", "GELU by erf, not by tanh", Figures(0.0002, 0.00023, 0.01, above_rounding=False),
          out_of("transformer.h.0.mlp.act")),
    _case("gpt2_bias_missing", "a bias is zero, one layer", Figures(0.1, 0.051, 0.052),
          out_of("transformer.h.2.mlp.c_fc"), parameter_of("transformer.h.2.mlp.c_fc")),
    _case("gpt2_dropout_left_on", "the model is in training mode", Figures(0.32, 0.55, 0.55),
          out_of("transformer.drop")),
    _case("gpt2_positions_shifted", "position table off by two rows", Figures(1.4, 0.61, 0.61),
          out_of("transformer.wpe"), parameter_of("transformer.wpe")),
    _case("gpt2_query_and_key_exchanged", "fused projection split in the wrong order", Figures(0.8, 0.42, 0.42),
          into("transformer.h.0.attn.c_proj")),
    _case("wan_timestep_halves_swapped", "sine before cosine", Figures(1.3, 0.24, 0.24),
          out_of("condition_embedder.timesteps_proj")),
    _case("wan_token_order", "tokens column by column", Figures(1.3, 1.2, 1.2),
          into("blocks.0")),
    _case("wan_unpatchify_order", "rows and columns of a patch exchanged at the end", Figures(0.87, 0.87, 0.87),
          out_of("")),
    _case("wan_rope_axes", "rotary tables of height and width exchanged", Figures(0.46, 0.012, 0.014),
          out_of("rope")),
    _case("wan_gate_missing", "a residual leaves out its gate", Figures(0.33, 0.28, 0.28),
          into("blocks.1.norm2")),
    _case("flux_norm_out_swapped", "shift and scale exchanged in the weight", Figures(1.5, 0.37, 0.38),
          out_of("norm_out.linear"), parameter_of("norm_out.linear")),
    _case("flux_guidance_unscaled", "guidance is not multiplied by 1000", Figures(1, 0.086, 0.092),
          into("time_text_embed")),
    _case("flux_parts_exchanged", "attention and MLP concatenated in the wrong order", Figures(1.3, 0.058, 0.061),
          into("single_transformer_blocks.2.proj_out")),
    _case("unet_timestep_halves_swapped", "sine before cosine", Figures(1.3, 0.084, 0.085),
          out_of("time_proj")),
    _case("unet_skip_order", "skip connection concatenated in front", Figures(1, 0.47, 0.46),
          into("up_blocks.0.resnets.0")),
    _case("unet_norm_epsilon", "epsilon of the group norms 1e-3, not 1e-5", Figures(0.0015, 0.0047, 0.012, above_rounding=False),
          out_of("down_blocks.0.resnets.0.norm1")),
    _case("vae_scaling_factor", "latents scaled for another model", Figures(0.4, 0.19, 0.19),
          into("post_quant_conv")),
    _case("vae_padding_side", "padding on the other side", Figures(1.4, 0.5, 0.5),
          into("encoder.down_blocks.0.downsamplers.0.conv")),
    _case("vae_upsample_bilinear", "bilinear, not nearest", Figures(0.17, 0.22, 0.22),
          into("decoder.up_blocks.0.upsamplers.0.conv")),
)
# fmt: on


class Small(Corpus):
    name, variants, judges = "small", DTYPES, (OURS, RULE)
    together = noise = True

    def load(self) -> Sequence[Case]:
        return CASES


CORPORA = {"small": Small()}
