"""The real ports as cases of the scoreboard: bugs made by hand, faults of real ports, clean pairs,
faults drawn by a machine.

python -m tests.parity.scoreboard --corpus tests.fastvideo.ports.cases [--together] [--only WORD]
python -m tests.parity.scoreboard --faults 4 --seed 7
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tests.fastvideo.ports import places
from tests.fastvideo.ports.bugs import BUGS, REAL
from tests.fastvideo.ports.corpus import PAIRS, Side, build
from tests.fastvideo.ports.faults import Fault, draw
from tests.fastvideo.ports.quiet import quietly
from tests.parity.case import Case, Place

PROGRAM = Path(__file__).with_name("program.py")
ENVIRONMENT = {"FASTVIDEO_LOGGING_LEVEL": "ERROR"}

# What bf16 does to an output hides what does less than three times as much: relative L2 of the
# output, by the fault alone in fp32, and by bf16 alone in the clean port (for faults of real ports,
# in the reference).
BELOW_ROUNDING: dict[str, tuple[float, float]] = {
    "cosmos25_epsilon": (2.4e-6, 1.2e-2),
    "hunyuan_activation": (6.6e-5, 8.8e-3),
    "wan_text_projection": (9.1e-5, 6.7e-3),
    "kandinsky5": (3.5e-4, 8.6e-3),
    "lingbot_t5_eps": (1.2e-3, 2.0e-2),
    "hunyuan15_condition_type": (4.8e-3, 5.8e-3),
    "clip_activation": (7.4e-3, 7.8e-3),
    "wan_image_length": (7.2e-3, 6.9e-3),
    "hunyuan15_masked": (7.9e-3, 6.5e-3),
    "wan_qk_norm": (9.6e-3, 6.7e-3),
    "cosmos_frame_rate": (2.4e-2, 1.2e-2),
    "hunyuan_refiner_time": (1.9e-2, 8.8e-3),
    "hunyuan_masked": (2.8e-2, 1.0e-2),
}

# a clean port whose reference does in fp32 what it need not do: a real difference, rightly named,
# and nobody's fault
LEGAL: dict[str, tuple[str, tuple[places.Place, ...], tuple[places.Place, ...]]] = {
    "kandinsky5": (
        "the reference rounds rotated q and k to bf16 whatever it runs in",
        tuple(
            place("text_transformer_blocks.0.self_attention.local_attention")
            for place in (places.into, places.out_of)
        ),
        (places.into("text_transformer_blocks.0.self_attention.out_layer"),),
    ),
}

# Faults drawn once (`faults.draw`, two each of the seeds 20 and 21), so that a test of many is
# quick and always the same.
DRAWN: dict[str, tuple[str, ...]] = {
    "wan_t2v": (
        "input.roll@blocks.2.attn2.attn",
        "input.scale@blocks.1.to_k",
        "input.scale@condition_embedder.text_embedder.fc_in",
        "bias.zero@blocks.1.attn2.to_k",
    ),
    "wan_i2v": (
        "input.roll@norm_out",
        "output.round@blocks.2.self_attn_residual_norm",
        "input.swap@condition_embedder.image_embedder.ff.fc_in",
        "input.swap@blocks.0.ffn.act",
    ),
    "wan_ti2v": (
        "output.flip@blocks.0.attn2.attn",
        "input.roll@condition_embedder.time_embedder.mlp.fc_in",
        "weight.transpose@blocks.0.attn2.to_k",
        "input.swap@blocks.0",
    ),
    "flux": (
        "output.scale@transformer_blocks.0.attn.to_out.0",
        "input.roll@time_text_embed",
        "sister@single_transformer_blocks.1.attn.norm_k#0",
        "output.noise@single_transformer_blocks.1.attn.attn",
    ),
    "flux2": (
        "input.swap@single_transformer_blocks.0.attn.norm_k",
        "output.noise@transformer_blocks.1.attn.to_out.1",
        "output.noise@transformer_blocks.0.ff.linear_in",
        "sister@single_transformer_blocks.0.attn.to_qkv_mlp_proj#1",
    ),
    "hunyuan": (
        "skip@double_blocks.0.txt_attn_k_norm",
        "sister@single_blocks.1.linear2#0",
        "sister@double_blocks.1.txt_attn_q_norm#0",
        "output.scale@single_blocks.1.modulation",
    ),
    "hunyuan15": (
        "output.flip@double_blocks.0.img_attn_residual_mlp_norm.norm",
        "weight.transpose@txt_in.c_embedder.fc_out",
        "output.round@double_blocks.1.img_mlp.act",
        "output.noise@double_blocks.0.img_mlp_residual",
    ),
    "cosmos": (
        "input.swap@transformer_blocks.1.norm1",
        "weight.transpose@transformer_blocks.1.attn1.to_v",
        "sister@transformer_blocks.1.attn2.to_out#0",
        "input.roll@transformer_blocks.0.attn1.to_v",
    ),
    "cosmos25": (
        "input.swap@transformer_blocks.1.mlp.fc_out",
        "weight.scale@transformer_blocks.1.attn1.norm_k",
        "skip@transformer_blocks.0.attn1.to_k",
        "output.scale@transformer_blocks.1.attn2.to_v",
    ),
    "sd3": (
        "output.flip@transformer_blocks.1.attn.to_q",
        "input.roll@transformer_blocks.1.attn.to_v",
        "output.flip@transformer_blocks.2.attn",
        "output.noise@transformer_blocks.0.attn.norm_added_q",
    ),
    "stable_audio": (
        "bias.zero@transformer.layers.1.ff.ff.2",
        "sister@transformer.layers.1.cross_attn.to_q#0",
        "output.flip@transformer.layers.1.ff",
        "output.scale@transformer.layers.0.cross_attn.q_norm",
    ),
    "zimage": (
        "output.noise@context_refiner.0.attention.to_v",
        "weight.transpose@layers.0.attention.to_v",
        "output.scale@layers.0.feed_forward.w1",
        "output.noise@layers.1.attention.to_v",
    ),
    "kandinsky5": (
        "output.flip@visual_transformer_blocks.0.visual_modulation",
        "input.scale@time_embeddings.in_layer",
        "weight.transpose@visual_transformer_blocks.0.cross_attention.out_layer",
        "output.noise@visual_transformer_blocks.1.cross_attention",
    ),
    "glm_image": (
        "weight.scale@time_condition_embed.condition_embedder.linear_2",
        "weight.scale@transformer_blocks.1.norm1.linear",
        "skip@prior_projector",
        "bias.zero@transformer_blocks.1.attn1.to_v",
    ),
    "llama": (
        "weight.scale@layers.0.input_layernorm",
        "weight.transpose@layers.1.self_attn.o_proj",
        "output.flip@layers.0.mlp",
        "input.scale@layers.1.self_attn",
    ),
    "clip_text": (
        "output.flip@text_model.embeddings.position_embedding",
        "weight.transpose@text_model.encoder.layers.2.self_attn.out_proj",
        "output.round@text_model.encoder.layers.2.self_attn.attn",
        "input.swap@text_model.encoder.layers.1.self_attn.out_proj",
    ),
    "clip_vision": (
        "weight.scale@vision_model.encoder.layers.0.self_attn.qkv_proj",
        "input.swap@vision_model.encoder.layers.1.self_attn.out_proj",
        "output.flip@vision_model.encoder.layers.0.layer_norm1",
        "skip@vision_model.encoder.layers.2.self_attn",
    ),
    "siglip": (
        "weight.scale@vision_model.encoder.layers.2.layer_norm2",
        "output.noise@vision_model.encoder.layers.1",
        "output.noise@vision_model.encoder.layers.1.layer_norm1",
        "input.swap@vision_model.encoder.layers.1.mlp.fc2",
    ),
    "t5": (
        "skip@encoder.block.1",
        "input.swap@encoder.block.1.layer.1.DenseReluDense.wo",
        "output.flip@encoder.block.1.layer.1.DenseReluDense",
        "input.swap@encoder.block.0.layer.1.layer_norm",
    ),
    "umt5": (
        "output.round@encoder.block.0.layer.0.SelfAttention.qkv_proj",
        "output.scale@encoder.block.1.layer.1.layer_norm",
        "skip@encoder.final_layer_norm",
        "sister@encoder.block.0#2",
    ),
    "lingbot_t5": (
        "output.noise@blocks.2.attn.o",
        "output.round@blocks.0.attn",
        "output.round@blocks.2.norm2",
        "output.round@blocks.1.norm2",
    ),
    "qwen2_5_vl": (
        "skip@layers.1.self_attn",
        "output.scale@layers.0.post_attention_layernorm",
        "output.scale@layers.1.input_layernorm",
        "sister@layers.1.self_attn.qkv_proj#2",
    ),
    "qwen3": (
        "output.scale@layers.1.mlp",
        "output.flip@layers.0.mlp.act_fn",
        "input.swap@layers.2.mlp",
        "output.flip@layers.0.self_attn.k_norm",
    ),
    "wan_vae": (
        "sister@encoder.mid_block.resnets.1.conv2#0",
        "bias.zero@decoder.up_blocks.0.upsamplers.0.resample.1",
        "skip@encoder.mid_block.resnets.1.conv1",
        "sister@decoder.up_blocks.1.resnets.0.conv2#0",
    ),
    "lingbot_wan_vae": (
        "input.scale@decoder.middle.0.residual.2",
        "output.noise@encoder.downsamples.2.residual.1",
        "skip@decoder.head.1",
        "bias.zero@encoder.downsamples.2.residual.2",
    ),
    "minimax_vae": (
        "skip@decoder.transformer_blocks.1.norm1",
        "weight.scale@decoder.proj_in",
        "skip@decoder.transformer_blocks.0.attn.norm_k",
        "weight.scale@post_quant_conv",
    ),
    "hunyuan_vae": (
        "output.noise@encoder.mid_block.resnets.0.nonlinearity",
        "output.flip@decoder.mid_block.resnets.1.norm1",
        "sister@decoder.up_blocks.0.upsamplers.0.conv#1",
        "output.round@decoder.up_blocks.0.resnets.0.conv2",
    ),
    "hunyuan15_vae": (
        "input.swap@decoder.up_blocks.2.resnets.0.nonlinearity",
        "input.scale@decoder.up_blocks.2",
        "bias.zero@encoder.mid_block.resnets.0.conv2.conv",
        "weight.scale@encoder.down_blocks.2.resnets.0.conv2.conv",
    ),
    "flux2_vae": (
        "weight.transpose@encoder.mid_block.attentions.0.to_out.0",
        "weight.scale@encoder.mid_block.resnets.0.norm2",
        "output.noise@decoder.mid_block.resnets.0.conv2",
        "sister@encoder.mid_block.resnets.1.norm1#0",
    ),
    "oobleck": (
        "input.swap@encoder.block.1.res_unit3.snake2",
        "sister@decoder.block.0.res_unit2.snake1#1",
        "output.scale@decoder.block.1.res_unit3.conv2",
        "output.noise@encoder.block.0",
    ),
}


class PortCase(Case):
    """A case whose place in the reference's names is not known is judged by the port's names
    alone.
    """

    @property
    def places_in_reference(self) -> tuple[Place, ...]:
        return self.expected_reference


def _places(found: Iterable[places.Place]) -> tuple[Place, ...]:
    return tuple(Place(place.side, place.module) for place in found)


def _case(
    name: str,
    pair: str,
    what: str = "",
    port: Iterable[places.Place] = (),
    reference: Iterable[places.Place] = (),
    planted: tuple[str, ...] = (),
) -> Case:
    return PortCase(
        name=name, family=pair, bug=what, program=PROGRAM, reference=(pair, "reference"), port=(pair, "port", *planted),
        expected=_places(port), expected_reference=_places(reference), above_rounding=name not in BELOW_ROUNDING,
        environment=ENVIRONMENT,
    )  # fmt: skip


def fault_case(pair: str, spec: str, truth: Iterable[places.Place]) -> Case:
    """A fault planted by a machine: `spec` is its line of text, `truth` the right answers in the
    port's names.
    """
    return _case(f"{pair} {spec}", pair, spec, truth, planted=("--fault", spec))


def drawn(count: int, seed: int, only: str = "") -> tuple[Case, ...]:
    """`count` faults for each pair, all of which reach the output; of pairs whose name holds
    `only`, if one does.
    """
    quietly()
    pairs = [pair for pair in PAIRS if only in pair] or list(PAIRS)
    return tuple(with_truth(pair, spec) for pair in pairs for spec in draw(pair, count, seed))


def with_truth(pair: str, spec: str) -> Case:
    """The case of a fault, whose right answers the broken port itself tells: modules may hang in it
    under several names.
    """
    quietly()
    with build(pair, "port", fault=spec) as broken:
        return fault_case(pair, spec, Fault.parse(spec).truth(broken.model))


def written_down() -> tuple[Case, ...]:
    """The cases of `DRAWN`."""
    return tuple(with_truth(pair, spec) for pair, specs in DRAWN.items() for spec in specs)


@contextmanager
def program(arguments: Sequence[str], dtype: str, seed: int) -> Iterator[Callable[[], object]]:
    """What `program.py` does with these arguments, in this process; a bug's patches end with the
    context.
    """
    quietly()
    pair, side, *planted = arguments
    what = dict(zip(planted[::2], planted[1::2], strict=True))
    with build(
        pair,
        cast(Side, side),
        bug=what.get("--bug"),
        fault=what.get("--fault"),
        dtype=dtype,
        seed=seed,
    ) as built:
        yield built.run


CASES: tuple[Case, ...] = (
    *(_case(pair, pair) for pair in PAIRS if pair not in LEGAL),
    *(_case(pair, pair, *said) for pair, said in (LEGAL | REAL).items()),
    *(
        _case(name, bug.pair, bug.what, bug.port, bug.reference, ("--bug", name))
        for name, bug in BUGS.items()
    ),
)
