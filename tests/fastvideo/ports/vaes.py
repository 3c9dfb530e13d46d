"""Autoencoders: FastVideo's against diffusers', tiny and with random weights. Encoded and decoded
again, without sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tests.fastvideo.ports.pair import (
    Draw,
    Inputs,
    Pair,
    Settings,
    configured,
    load_by_name,
    renamed,
)
from tests.fastvideo.ports.weights import State


def _autoencoder(
    reference: Callable[[], nn.Module],
    port: Callable[[], nn.Module],
    shape: tuple[int, ...],
    **more: Any,
) -> Pair:
    def inputs(draw: Draw) -> Inputs:
        return Inputs(sample=draw("sample", *shape))

    def call(model: Any, i: Inputs) -> Tensor:
        # by the methods that pipelines call: the model's own forward never runs
        posterior = model.encode(i["sample"])
        output = model.decode(getattr(posterior, "latent_dist", posterior).mode())
        return getattr(output, "sample", output)

    return Pair(reference, port, inputs, call, call, **{"load": load_by_name} | more)


_WAN = Settings(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4, scale_factor_spatial=4, scale_factor_temporal=2,
)  # fmt: skip


def _wan_vae() -> Pair:
    def reference() -> nn.Module:
        from diffusers import AutoencoderKLWan

        return AutoencoderKLWan(**_WAN)

    def port() -> nn.Module:
        from fastvideo.configs.models.vaes import WanVAEConfig
        from fastvideo.models.vaes.wanvae import AutoencoderKLWan

        return AutoencoderKLWan(configured(WanVAEConfig(), _WAN))

    return _autoencoder(reference, port, (1, 3, 5, 16, 24))


# as Wan's authors published it: everything in flat sequences
_ORIGINAL_WAN_NAMES = {
    r"^quant_conv\.": "conv1.",
    r"^post_quant_conv\.": "conv2.",
    r"\.conv_in\.": ".conv1.",
    r"\.norm_out\.": ".head.0.",
    r"\.conv_out\.": ".head.2.",
    r"\.mid_block\.resnets\.0\.": ".middle.0.",
    r"\.mid_block\.attentions\.0\.": ".middle.1.",
    r"\.mid_block\.resnets\.1\.": ".middle.2.",
    r"\.down_blocks\.": ".downsamples.",
    **{
        rf"\.up_blocks\.{i}\.resnets\.{j}\.": f".upsamples.{3 * i + j}."
        for i in range(3)
        for j in range(2)
    },
    **{rf"\.up_blocks\.{i}\.upsamplers\.0\.": f".upsamples.{3 * i + 2}." for i in range(3)},
    r"(samples|middle)\.(\d+)\.norm1\.": r"\1.\2.residual.0.",
    r"(samples|middle)\.(\d+)\.conv1\.": r"\1.\2.residual.2.",
    r"(samples|middle)\.(\d+)\.norm2\.": r"\1.\2.residual.3.",
    r"(samples|middle)\.(\d+)\.conv2\.": r"\1.\2.residual.6.",
    r"\.conv_shortcut\.": ".shortcut.",
}


def _lingbot_wan_vae() -> Pair:
    def port() -> nn.Module:
        from fastvideo.models.vaes.lingbotworld2_wanvae import WanVAE_

        return WanVAE_(
            dim=_WAN["base_dim"],
            z_dim=_WAN["z_dim"],
            dim_mult=_WAN["dim_mult"],
            num_res_blocks=_WAN["num_res_blocks"],
            temperal_downsample=_WAN["temperal_downsample"],
        )

    def call_port(model: Any, i: Inputs) -> Tensor:
        scale = [0.0, 1.0]
        return model.decode(model.encode(i["sample"], scale), scale).clamp(-1, 1)

    def load(model: nn.Module, state: State) -> None:
        load_by_name(model, renamed(state, _ORIGINAL_WAN_NAMES))

    return replace(_wan_vae(), port=port, call_port=call_port, load=load)


def _minimax_vae() -> Pair:
    settings = Settings(
        latent_channels=8, block_out_channels=(8, 16), layers_per_block=1, spatial_downsample_factors=(2, 2),
        temporal_downsample_factors=(1, 2), norm_num_groups=4, decoder_num_layers=2, decoder_num_attention_heads=2,
        decoder_attention_head_dim=32, clip_length=5, token_drop=1, latents_mean=(0.0,) * 8, latents_std=(1.0,) * 8,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3

        return AutoencoderKLMiniMaxH3(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.vaes.minimax_h3_video import MiniMaxH3VideoVAEConfig
        from fastvideo.models.vaes.minimax_h3_video import AutoencoderKLMiniMaxH3

        return AutoencoderKLMiniMaxH3(configured(MiniMaxH3VideoVAEConfig(), settings))

    return _autoencoder(reference, port, (1, 3, 9, 16, 24))


def _hunyuan_vae() -> Pair:
    settings = Settings(
        latent_channels=4, block_out_channels=(8, 16, 16), layers_per_block=1, norm_num_groups=4, spatial_compression_ratio=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3, up_block_types=("HunyuanVideoUpBlock3D",) * 3,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import AutoencoderKLHunyuanVideo

        return AutoencoderKLHunyuanVideo(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.vaes import HunyuanVAEConfig
        from fastvideo.models.vaes.hunyuanvae import AutoencoderKLHunyuanVideo

        return AutoencoderKLHunyuanVideo(configured(HunyuanVAEConfig(), settings))

    return _autoencoder(reference, port, (1, 3, 5, 16, 24))


def _hunyuan15_vae() -> Pair:
    settings = Settings(
        latent_channels=8, block_out_channels=(16, 16, 32), layers_per_block=1, spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import AutoencoderKLHunyuanVideo15

        return AutoencoderKLHunyuanVideo15(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.vaes.hunyuan15vae import Hunyuan15VAEConfig
        from fastvideo.models.vaes.hunyuan15vae import AutoencoderKLHunyuanVideo15

        return AutoencoderKLHunyuanVideo15(configured(Hunyuan15VAEConfig(), settings))

    return _autoencoder(reference, port, (1, 3, 5, 16, 24))


def _flux2_vae() -> Pair:
    settings = Settings(
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32, patch_size=(2, 2),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import AutoencoderKLFlux2

        return AutoencoderKLFlux2(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.vaes.flux2vae import Flux2VAEConfig
        from fastvideo.models.vaes.flux2vae import AutoencoderKLFlux2

        return AutoencoderKLFlux2(configured(Flux2VAEConfig(), settings))

    return _autoencoder(reference, port, (2, 3, 16, 24))


def _oobleck() -> Pair:
    settings = Settings(
        encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=8,
        decoder_input_channels=4, audio_channels=2,
    )  # fmt: skip

    def reference() -> nn.Module:
        from diffusers import AutoencoderOobleck

        return AutoencoderOobleck(**settings)

    def port() -> nn.Module:
        from fastvideo.configs.models.vaes.oobleck import OobleckVAEConfig
        from fastvideo.models.vaes.oobleck import OobleckVAE

        return OobleckVAE(configured(OobleckVAEConfig(), settings))

    return _autoencoder(reference, port, (2, 2, 64))


PAIRS: dict[str, Callable[[], Pair]] = {
    "wan_vae": _wan_vae,
    "lingbot_wan_vae": _lingbot_wan_vae,
    "minimax_vae": _minimax_vae,
    "hunyuan_vae": _hunyuan_vae,
    "hunyuan15_vae": _hunyuan15_vae,
    "flux2_vae": _flux2_vae,
    "oobleck": _oobleck,
}
