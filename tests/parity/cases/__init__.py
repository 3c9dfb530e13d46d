"""Programs of plain transformers and diffusers models, with and without a fault in the port.

Both sides of a case are the same library, so a place has the same name in both. The figures are
what `python -m tests.parity.truth` measures; the first place of each case is what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.parity.case import Case, Place

PROGRAM = Path(__file__).with_name("run_side.py")


class Figures(NamedTuple):
    """error: at the first place, in fp32. fp32, bf16: of the final output. All relative L2."""

    error: float
    fp32: float
    bf16: float
    above_rounding: bool = True


@contextmanager
def program(arguments: Sequence[str], dtype: str, seed: int) -> Iterator[Callable[[], object]]:
    """Yield what `run_side.py` calls with these arguments; undo the planted fault afterwards."""
    from tests.parity.cases import families
    from tests.parity.cases.bugs import BUGS, Patches

    name, side = arguments
    family, patches = name.partition("_")[0], Patches()
    model = families.load(family, side, dtype, seed)
    try:
        if side == "port" and name in BUGS:
            BUGS[name](model, patches)
        yield lambda: families.run(family, model, dtype, seed)
    finally:
        patches.undo()


def _clean(family: str, fp32: float, bf16: float) -> Case:
    return Case(
        name=family, family=family, bug="", program=PROGRAM, reference=(family, "reference"), port=(family, "port"),
        final={"fp32": fp32, "bf16": bf16},
    )  # fmt: skip


def _case(name: str, bug: str, figures: Figures, *places: Place) -> Case:
    family = name.partition("_")[0]
    return Case(
        name=name, family=family, bug=bug, program=PROGRAM, reference=(family, "reference"), port=(name, "port"),
        expected=places, error=figures.error, final={"fp32": figures.fp32, "bf16": figures.bf16},
        above_rounding=figures.above_rounding,
    )  # fmt: skip


def _input(module: str) -> Place:
    return Place("input", module)


def _output(module: str) -> Place:
    return Place("output", module)


def _weight(module: str) -> Place:
    return Place("parameter", module)


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
          _input("model.layers.0.self_attn.o_proj")),
    _case("llama_q_proj_transposed", "a square weight transposed, one layer", Figures(1.4, 0.15, 0.15),
          _output("model.layers.3.self_attn.q_proj"), _weight("model.layers.3.self_attn.q_proj")),
    _case("llama_swiglu_swapped", "SwiGLU activates the other branch", Figures(1.4, 1, 1),
          _input("model.layers.0.mlp.act_fn")),
    _case("llama_causal_mask_dropped", "no causal mask", Figures(0.86, 1.3, 1.3),
          _input("model.layers.0.self_attn.o_proj")),
    _case("llama_layers_exchanged", "two blocks have each other's weights", Figures(0.14, 1, 1),
          _output("model.layers.1.input_layernorm"), _weight("model.layers.1.input_layernorm"),
          _weight("model.layers.1.self_attn.q_proj"), _weight("model.layers.1")),
    _case("llama_norm_not_loaded", "a norm's weight is still ones", Figures(0.096, 0.054, 0.056),
          _output("model.layers.4.post_attention_layernorm"), _weight("model.layers.4.post_attention_layernorm")),
    _case("llama_residual_scaled", "one residual scaled by 0.9", Figures(0.09, 0.088, 0.091),
          _input("model.layers.2.post_attention_layernorm")),
    _case("llama_last_layer_skipped", "one layer too few", Figures(_NONE, 0.45, 0.45),
          _input("model.layers.5"), _output("model.layers.5"), _input("model.layers.5.input_layernorm"), _input("model.norm")),
    _case("qwen3_q_norm_missing", "the norm of the queries is never called", Figures(_NONE, 0.22, 0.22),
          _input("model.layers.0.self_attn.q_norm"), _output("model.layers.0.self_attn.q_norm"),
          _input("model.layers.0.self_attn.o_proj")),
    _case("qwen3_k_norm_epsilon", "epsilon of the keys' norm 1e-3, not 1e-6",
          Figures(0.0006, 0.00094, 0.018, above_rounding=False),
          _output("model.layers.0.self_attn.k_norm")),
    _case("qwen3_attention_scale", "attention scaled by the hidden size", Figures(0.41, 0.75, 0.75),
          _input("model.layers.0.self_attn.o_proj")),
    _case("qwen3_heads_tiled", "key heads repeated in the wrong order", Figures(1, 1.3, 1.3),
          _input("model.layers.0.self_attn.o_proj")),
    _case("mistral_rope_theta", "rotary base 1e6, not 1e4", Figures(0.93, 0.91, 0.91),
          _output("model.rotary_emb"), _weight("model.rotary_emb")),
    _case("mistral_window_dropped", "no sliding window", Figures(_NONE, 1, 1),
          _input("model.layers.0"), _input("model.layers.0.self_attn"), _input("model.layers.0.self_attn.o_proj")),
    _case("mistral_positions_in_bf16", "positions go through bf16", Figures(0.062, 0.11, 0.11),
          _output("model.rotary_emb")),
    _case("gpt2_gelu_exact", "GELU by erf, not by tanh", Figures(0.0002, 0.00023, 0.01, above_rounding=False),
          _output("transformer.h.0.mlp.act")),
    _case("gpt2_bias_missing", "a bias is zero, one layer", Figures(0.1, 0.051, 0.052),
          _output("transformer.h.2.mlp.c_fc"), _weight("transformer.h.2.mlp.c_fc")),
    _case("gpt2_dropout_left_on", "the model is in training mode", Figures(0.32, 0.55, 0.55),
          _output("transformer.drop")),
    _case("gpt2_positions_shifted", "position table off by two rows", Figures(1.4, 0.61, 0.61),
          _output("transformer.wpe"), _weight("transformer.wpe")),
    _case("gpt2_query_and_key_exchanged", "fused projection split in the wrong order", Figures(0.8, 0.42, 0.42),
          _input("transformer.h.0.attn.c_proj")),
    _case("wan_timestep_halves_swapped", "sine before cosine", Figures(1.3, 0.24, 0.24),
          _output("condition_embedder.timesteps_proj")),
    _case("wan_token_order", "tokens column by column", Figures(1.3, 1.2, 1.2),
          _input("blocks.0")),
    _case("wan_unpatchify_order", "rows and columns of a patch exchanged at the end", Figures(0.87, 0.87, 0.87),
          _output("")),
    _case("wan_rope_axes", "rotary tables of height and width exchanged", Figures(0.46, 0.012, 0.014),
          _output("rope")),
    _case("wan_gate_missing", "a residual leaves out its gate", Figures(0.33, 0.28, 0.28),
          _input("blocks.1.norm2")),
    _case("flux_norm_out_swapped", "shift and scale exchanged in the weight", Figures(1.5, 0.37, 0.38),
          _output("norm_out.linear"), _weight("norm_out.linear")),
    _case("flux_guidance_unscaled", "guidance is not multiplied by 1000", Figures(1, 0.086, 0.092),
          _input("time_text_embed")),
    _case("flux_parts_exchanged", "attention and MLP concatenated in the wrong order", Figures(1.3, 0.058, 0.061),
          _input("single_transformer_blocks.2.proj_out")),
    _case("unet_timestep_halves_swapped", "sine before cosine", Figures(1.3, 0.084, 0.085),
          _output("time_proj")),
    _case("unet_skip_order", "skip connection concatenated in front", Figures(1, 0.47, 0.46),
          _input("up_blocks.0.resnets.0")),
    _case("unet_norm_epsilon", "epsilon of the group norms 1e-3, not 1e-5", Figures(0.0015, 0.0047, 0.012, above_rounding=False),
          _output("down_blocks.0.resnets.0.norm1")),
    _case("vae_scaling_factor", "latents scaled for another model", Figures(0.4, 0.19, 0.19),
          _input("post_quant_conv")),
    _case("vae_padding_side", "padding on the other side", Figures(1.4, 0.5, 0.5),
          _input("encoder.down_blocks.0.downsamplers.0.conv")),
    _case("vae_upsample_bilinear", "bilinear, not nearest", Figures(0.17, 0.22, 0.22),
          _input("decoder.up_blocks.0.upsamplers.0.conv")),
)
# fmt: on
