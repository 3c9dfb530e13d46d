"""Diffusion transformers: FastVideo's against diffusers', tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from tests.fastvideo.ports.pair import (
    Draw,
    Inputs,
    Pair,
    Settings,
    configured,
    load_by_mapping,
    load_by_name,
    renamed,
)
from tests.fastvideo.ports.weights import State, generator


def _wan(image: bool = False, first_frame: bool = False) -> Pair:
    """`image`: tokens of an image beside the text; `first_frame`: the first frame is given, each
    token has its timestep.
    """
    settings = Settings(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=64,
        freq_dim=64, ffn_dim=256, num_layers=3, cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6,
        rope_max_seq_len=1024,
    )  # fmt: skip
    if image:
        settings |= Settings(image_dim=48, added_kv_proj_dim=128)

    def reference() -> nn.Module:
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits import WanVideoConfig
        from fastvideo.models.dits.wanvideo import WanTransformer3DModel

        return WanTransformer3DModel(configured(WanVideoConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        batch = 1 if first_frame else 2  # all that the port takes
        made = Inputs(
            latents=draw("latents", batch, 4, 3, 8, 12),
            timestep=torch.tensor([[0] * 24 + [500] * 48])
            if first_frame
            else torch.tensor([500, 37]),
            text=draw("text", batch, 512 if image else 9, 64),
        )
        return made | (Inputs(image=draw("image", 2, 257, 48)) if image else Inputs())

    return Pair(
        reference,
        port,
        inputs,
        lambda model, i: model(
            i["latents"], i["timestep"], i["text"], i.get("image"), return_dict=False
        )[0],
        lambda model, i: model(i["latents"], i["text"], i["timestep"], i.get("image")),
        partial(load_by_mapping, left_out=("norm_added_q",)),
    )


def positions(*lengths: int, axes: int = 3, first: int = 1) -> Tensor:
    """Grid positions [tokens, axes], the grid's axes at `first` and after."""
    grid = torch.cartesian_prod(*(torch.arange(length) for length in lengths)).float()
    table = torch.zeros(len(grid), axes)
    table[:, first : first + len(lengths)] = grid
    return table


def _flux() -> Pair:
    settings = Settings(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=48, pooled_projection_dim=24, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.flux import FluxDiTConfig
        from fastvideo.models.dits.flux import FluxTransformer2DModel

        return FluxTransformer2DModel(configured(FluxDiTConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            hidden_states=draw("latents", 2, 24, 16),
            encoder_hidden_states=draw("text", 2, 7, 48),
            pooled_projections=draw("pooled", 2, 24),
            timestep=torch.tensor([0.5, 0.25]),
            img_ids=positions(4, 6),
            txt_ids=torch.zeros(7, 3),
            guidance=torch.tensor([4.0, 4.0]),
        )

    def call(model: nn.Module, i: Inputs) -> Tensor:
        return model(**i, return_dict=False)[0]

    return Pair(reference, port, inputs, call, call, load_by_mapping, exact=("img_ids", "txt_ids"))


def _text_mask(masked: bool) -> Tensor:
    """One prompt of seven tokens, the last two of them padding when `masked`."""
    mask = torch.ones(1, 7, dtype=torch.long)
    if masked:
        mask[:, -2:] = 0
    return mask


def _hunyuan(masked: bool = False) -> Pair:
    settings = Settings(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, num_single_layers=2,
        num_refiner_layers=2, mlp_ratio=4.0, patch_size=2, patch_size_t=1, guidance_embeds=True, text_embed_dim=48,
        pooled_projection_dim=24, rope_theta=256, rope_axes_dim=(8, 12, 12),
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import HunyuanVideoTransformer3DModel

        return HunyuanVideoTransformer3DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits import HunyuanVideoConfig
        from fastvideo.models.dits.hunyuanvideo import HunyuanVideoTransformer3DModel

        return HunyuanVideoTransformer3DModel(configured(HunyuanVideoConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            latents=draw("latents", 1, 4, 3, 8, 12),
            timestep=torch.tensor([500]),
            text=draw("text", 1, 7, 48),
            mask=_text_mask(masked),
            pooled=draw("pooled", 1, 24),
            guidance=torch.tensor([6016.0]),
        )

    def call_reference(model: nn.Module, i: Inputs) -> Tensor:
        arguments = (i["latents"], i["timestep"], i["text"], i["mask"], i["pooled"], i["guidance"])
        return model(*arguments, return_dict=False)[0]

    def call_port(model: nn.Module, i: Inputs) -> Tensor:
        return model(i["latents"], [i["text"], i["pooled"]], i["timestep"], guidance=i["guidance"])

    return Pair(reference, port, inputs, call_reference, call_port, load_by_mapping)


def _hunyuan15(masked: bool = False) -> Pair:
    settings = Settings(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, num_refiner_layers=1,
        text_embed_dim=48, text_embed_2_dim=40, image_embed_dim=24, rope_axes_dim=(8, 12, 12), target_size=64,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import HunyuanVideo15Transformer3DModel

        return HunyuanVideo15Transformer3DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.hunyuanvideo15 import HunyuanVideo15Config
        from fastvideo.models.dits.hunyuanvideo15 import HunyuanVideo15Transformer3DModel

        return HunyuanVideo15Transformer3DModel(configured(HunyuanVideo15Config(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            latents=draw("latents", 1, 9, 3, 4, 6),
            timestep=torch.tensor([500.0]),
            text=draw("text", 1, 7, 48),
            glyphs=draw("glyphs", 1, 5, 40),
            image=draw("image", 1, 6, 24),
            mask=_text_mask(masked),
            glyph_mask=torch.ones(1, 5, dtype=torch.long),
        )

    def call_reference(model: nn.Module, i: Inputs) -> Tensor:
        return model(
            i["latents"],
            i["timestep"],
            i["text"],
            i["mask"],
            encoder_hidden_states_2=i["glyphs"],
            encoder_attention_mask_2=i["glyph_mask"],
            image_embeds=i["image"],
            return_dict=False,
        )[0]

    def call_port(model: nn.Module, i: Inputs) -> Tensor:
        return model(i["latents"], [i["text"], i["glyphs"]], i["timestep"], [i["image"]])

    return Pair(reference, port, inputs, call_reference, call_port, load_by_mapping)


def _cosmos(frame_rate: int = 16) -> Pair:
    settings = Settings(
        in_channels=5, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, text_embed_dim=48,
        adaln_lora_dim=16, max_size=(8, 16, 16), patch_size=(1, 2, 2), rope_scale=(1.0, 3.0, 3.0), concat_padding_mask=True,
        extra_pos_embed_type=None,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import CosmosTransformer3DModel

        return CosmosTransformer3DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits import CosmosVideoConfig
        from fastvideo.models.dits.cosmos import CosmosTransformer3DModel

        return CosmosTransformer3DModel(configured(CosmosVideoConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        condition = torch.zeros(2, 1, 3, 8, 12)
        condition[:, :, 0] = 1
        return Inputs(
            hidden_states=draw("latents", 2, 4, 3, 8, 12),
            timestep=torch.tensor([500, 37]),
            encoder_hidden_states=draw("text", 2, 7, 48),
            fps=frame_rate,
            condition_mask=condition,
            padding_mask=torch.zeros(1, 1, 8, 12),
        )

    def call(model: nn.Module, i: Inputs) -> Tensor:
        return model(**i, return_dict=False)[0]

    return Pair(reference, port, inputs, call, call, load_by_mapping)


# as Cosmos' authors published it: what FastVideo's own mapping starts from
_ORIGINAL_COSMOS_NAMES = {
    r"^patch_embed\.proj\.": "net.x_embedder.proj.1.",
    r"^time_embed\.t_embedder\.": "net.t_embedder.1.",
    r"^time_embed\.norm\.": "net.t_embedding_norm.",
    r"^norm_out\.linear_(\d)\.": r"net.final_layer.adaln_modulation.\1.",
    r"^proj_out\.": "net.final_layer.linear.",
    r"^transformer_blocks\.": "net.blocks.",
    r"\.attn1\.": ".self_attn.",
    r"\.attn2\.": ".cross_attn.",
    r"\.to_(q|k|v)\.": r".\1_proj.",
    r"\.to_out\.0\.": ".output_proj.",
    r"\.norm_(q|k)\.": r".\1_norm.",
    r"\.norm1\.linear_(\d)\.": r".adaln_modulation_self_attn.\1.",
    r"\.norm2\.linear_(\d)\.": r".adaln_modulation_cross_attn.\1.",
    r"\.norm3\.linear_(\d)\.": r".adaln_modulation_mlp.\1.",
    r"\.ff\.net\.0\.proj\.": ".mlp.layer1.",
    r"\.ff\.net\.2\.": ".mlp.layer2.",
}


def _cosmos25(epsilon: float | None = 1e-6) -> Pair:
    """`epsilon` of the reference's norms of q and k, None for its own: the two programs do not
    agree about it.
    """
    settings = Settings(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=2, text_embed_dim=48,
        adaln_lora_dim=16, max_size=(8, 16, 16), patch_size=(1, 2, 2), rope_scale=(1.0, 3.0, 3.0), concat_padding_mask=True,
        extra_pos_embed_type=None,
    )  # fmt: skip

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.cosmos2_5 import Cosmos25VideoConfig
        from fastvideo.models.dits.cosmos2_5 import Cosmos25Transformer3DModel

        return Cosmos25Transformer3DModel(configured(Cosmos25VideoConfig(), settings), {})

    def call_port(model: nn.Module, i: Inputs) -> Tensor:
        return model(**i | Inputs(padding_mask=i["padding_mask"].expand(2, -1, -1, -1)))

    def load(model: nn.Module, state: State) -> None:
        load_by_mapping(model, renamed(state, _ORIGINAL_COSMOS_NAMES))

    def reference() -> nn.Module:
        model = _cosmos().reference()
        for name, module in model.named_modules():
            if epsilon is not None and name.endswith((".norm_q", ".norm_k")):
                module.eps = epsilon
        return model

    return replace(_cosmos(), reference=reference, port=port, call_port=call_port, load=load)


# as Stability AI published it, but for what is fused
_ORIGINAL_STABLE_AUDIO_NAMES = {
    r"^time_proj\.": "timestep_features.",
    r"^timestep_proj\.": "to_timestep_embed.",
    r"^global_proj\.": "to_global_embed.",
    r"^cross_attention_proj\.": "to_cond_embed.",
    r"^proj_(in|out)\.": r"transformer.project_\1.",
    r"^transformer_blocks\.": "transformer.layers.",
    r"\.norm1\.": ".pre_norm.",
    r"\.norm2\.": ".cross_attend_norm.",
    r"\.norm3\.": ".ff_norm.",
    r"\.attn1\.": ".self_attn.",
    r"\.attn2\.": ".cross_attn.",
    r"\.to_out\.0\.": ".to_out.",
    r"\.ff\.net\.": ".ff.ff.",
}
_STABLE_AUDIO_FUSED = {
    ("self_attn", "to_qkv"): ("to_q", "to_k", "to_v"),
    ("cross_attn", "to_kv"): ("to_k", "to_v"),
}


def _load_stable_audio(model: nn.Module, state: State) -> None:
    state = renamed(state, _ORIGINAL_STABLE_AUDIO_NAMES)
    for (attention, whole), parts in _STABLE_AUDIO_FUSED.items():
        for layer in [
            name.split(".")[2] for name in state if name.endswith(f".{attention}.to_k.weight")
        ]:
            owner = f"transformer.layers.{layer}.{attention}"
            state[f"{owner}.{whole}.weight"] = torch.cat(
                [state.pop(f"{owner}.{part}.weight") for part in parts]
            )
    state["timestep_features.weight"] = state["timestep_features.weight"][:, None]
    load_by_name(model, state)


def _stable_audio() -> Pair:
    def reference() -> nn.Module:
        from diffusers import StableAudioDiTModel

        return StableAudioDiTModel(
            in_channels=8,
            num_layers=2,
            attention_head_dim=64,
            num_attention_heads=2,
            num_key_value_attention_heads=1,
            out_channels=8,
            cross_attention_dim=64,
            time_proj_dim=256,
            global_states_input_dim=48,
            cross_attention_input_dim=64,
        )

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.stable_audio import StableAudioConfig
        from fastvideo.models.dits.stable_audio import StableAudioDiT

        settings = Settings(
            io_channels=8,
            embed_dim=128,
            depth=2,
            num_attention_heads=2,
            cond_token_dim=64,
            global_cond_dim=48,
        )
        return StableAudioDiT(configured(StableAudioConfig(), settings))

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            latents=draw("latents", 2, 8, 20),
            timestep=torch.tensor([0.5, 0.25]),
            text=draw("text", 2, 7, 64),
            duration=draw("duration", 2, 48),
        )

    def call_reference(model: nn.Module, i: Inputs) -> Tensor:
        from diffusers.models.embeddings import get_1d_rotary_pos_embed

        rotary = get_1d_rotary_pos_embed(32, 21, use_real=True, repeat_interleave_real=False)
        return model(
            i["latents"],
            i["timestep"],
            i["text"],
            i["duration"][:, None],
            rotary,
            return_dict=False,
        )[0]

    def call_port(model: nn.Module, i: Inputs) -> Tensor:
        return model(
            i["latents"], i["timestep"], cross_attn_cond=i["text"], global_embed=i["duration"]
        )

    return Pair(reference, port, inputs, call_reference, call_port, _load_stable_audio)


def _sd3() -> Pair:
    settings = Settings(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=48, caption_projection_dim=64, pooled_projection_dim=24,
        pos_embed_max_size=16, qk_norm="rms_norm",
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import SD3Transformer2DModel

        return SD3Transformer2DModel(**settings, dual_attention_layers=(0,))

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.sd3 import SD3DiTConfig
        from fastvideo.models.dits.sd3 import SD3Transformer2DModel

        return SD3Transformer2DModel(
            configured(SD3DiTConfig(), settings | Settings(dual_attention_layers=[0])), {}
        )

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            hidden_states=draw("latents", 2, 4, 8, 12),
            encoder_hidden_states=draw("text", 2, 7, 48),
            pooled_projections=draw("pooled", 2, 24),
            timestep=torch.tensor([500, 37]),
        )

    def call(model: nn.Module, i: Inputs) -> Tensor:
        return model(**i, return_dict=False)[0]

    return Pair(reference, port, inputs, call, call, load_by_mapping)


def _flux2() -> Pair:
    settings = Settings(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=48, timestep_guidance_channels=32, axes_dims_rope=(8, 8, 8, 8),
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import Flux2Transformer2DModel

        return Flux2Transformer2DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.flux_2 import Flux2Config
        from fastvideo.models.dits.flux_2 import Flux2Transformer2DModel

        return Flux2Transformer2DModel(
            configured(Flux2Config(), settings | Settings(out_channels=None)), {}
        )

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            hidden_states=draw("latents", 2, 24, 16),
            encoder_hidden_states=draw("text", 2, 7, 48),
            timestep=torch.tensor([0.5, 0.25]),
            img_ids=positions(4, 6, axes=4),
            txt_ids=positions(1, 7, axes=4, first=2),
            guidance=torch.tensor([4.0, 4.0]),
        )

    return Pair(
        reference,
        port,
        inputs,
        lambda model, i: model(**i, return_dict=False)[0],
        lambda model, i: model(**i),
        load_by_mapping,
        exact=("img_ids", "txt_ids"),
    )


def _zimage() -> Pair:
    settings = Settings(
        in_channels=4, dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=48,
        axes_dims=(8, 12, 12), axes_lens=(128, 32, 32),
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import ZImageTransformer2DModel

        return ZImageTransformer2DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.zimage import ZImageDiTConfig
        from fastvideo.models.dits.zimage import ZImageTransformer2DModel

        return ZImageTransformer2DModel(configured(ZImageDiTConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            latents=draw("latents", 2, 4, 1, 8, 12),
            timestep=torch.tensor([0.5, 0.25]),
            text=draw("text", 2, 7, 48),
        )

    return Pair(
        reference,
        port,
        inputs,
        lambda model, i: torch.stack(
            model(list(i["latents"]), i["timestep"], list(i["text"]), return_dict=False)[0]
        ),
        lambda model, i: torch.stack(model(list(i["latents"]), list(i["text"]), i["timestep"])[0]),
        load_by_mapping,
    )


def _kandinsky5() -> Pair:
    settings = Settings(
        in_visual_dim=4, in_text_dim=48, in_text_dim2=24, time_dim=32, out_visual_dim=4, patch_size=(1, 2, 2), model_dim=64,
        ff_dim=128, num_text_blocks=1, num_visual_blocks=2, axes_dims=(8, 12, 12),
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import Kandinsky5Transformer3DModel

        return Kandinsky5Transformer3DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.kandinsky5 import Kandinsky5VideoConfig
        from fastvideo.models.dits.kandinsky5 import Kandinsky5Transformer3DModel

        return Kandinsky5Transformer3DModel(configured(Kandinsky5VideoConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            hidden_states=draw("latents", 1, 3, 8, 12, 4),
            encoder_hidden_states=draw("text", 1, 7, 48),
            timestep=torch.tensor([500.0]),
            pooled_projections=draw("pooled", 1, 24),
            visual_rope_pos=(torch.arange(3), torch.arange(4), torch.arange(6)),
            text_rope_pos=torch.arange(7),
        )

    def call(model: nn.Module, i: Inputs) -> Tensor:
        output = model(**i, return_dict=False)
        return output[0] if isinstance(output, tuple) else output

    return Pair(
        reference,
        port,
        inputs,
        call,
        call,
        load_by_mapping,
        keep_fp32=(
            "time_embeddings",
            "modulation",
            "visual_modulation",
            "text_modulation",
        ),  # by autocast, on a GPU
        limit=1e-3,
        note="the reference rounds rotated q and k to bf16 whatever it runs in",
    )


def _glm_image() -> Pair:
    settings = Settings(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        text_embed_dim=48, time_embed_dim=32, condition_dim=16, prior_vq_quantizer_codebook_size=64,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers.models import GlmImageTransformer2DModel

        return GlmImageTransformer2DModel(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.dits.glm_image import GlmImageDiTConfig
        from fastvideo.models.dits.glm_image import GlmImageTransformer2DModel

        return GlmImageTransformer2DModel(configured(GlmImageDiTConfig(), settings), {})

    def inputs(draw: Draw) -> Inputs:
        return Inputs(
            hidden_states=draw("latents", 2, 4, 8, 12),
            encoder_hidden_states=draw("text", 2, 7, 48),
            prior_token_id=torch.randint(
                64, (2, 24), generator=generator(draw.seed, f"{draw.pair}: prior")
            ),
            prior_token_drop=torch.zeros(2, 24, dtype=torch.bool),
            timestep=torch.tensor([500, 37]),
            target_size=torch.tensor([[64.0, 96.0], [64.0, 96.0]]),
            crop_coords=torch.zeros(2, 2),
        )

    return Pair(
        reference,
        port,
        inputs,
        lambda model, i: model(**i, return_dict=False)[0],
        lambda model, i: model(**i),
        load_by_mapping,
        exact=("target_size", "crop_coords"),
    )


PAIRS: dict[str, Callable[[], Pair]] = {
    "wan_t2v": _wan,
    "wan_i2v": partial(_wan, image=True),
    "wan_ti2v": partial(_wan, first_frame=True),
    "flux": _flux,
    "flux2": _flux2,
    "hunyuan": _hunyuan,
    "hunyuan15": _hunyuan15,
    "cosmos": _cosmos,
    "cosmos25": _cosmos25,
    "sd3": _sd3,
    "stable_audio": _stable_audio,
    "zimage": _zimage,
    "kandinsky5": _kandinsky5,
    "glm_image": _glm_image,
}

# real differences of FastVideo 0.2.1, met on the way: the pairs above keep clear of them
FAULTY: dict[str, Callable[[], Pair]] = {
    "hunyuan_masked": partial(_hunyuan, masked=True),
    "hunyuan15_masked": partial(_hunyuan15, masked=True),
    "cosmos_frame_rate": partial(_cosmos, frame_rate=24),
    "cosmos25_epsilon": partial(_cosmos25, epsilon=None),
}
