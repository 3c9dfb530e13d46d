"""The models: transformers and diffusers classes as they are, tiny, with random weights; and one
run of each.

Norms start as ones and biases as zeros, which would hide half of all faults, so every parameter of
one dimension is perturbed. The reference and the port differ in their attention kernel, and so by
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 128
TEXT = {"vocab_size": VOCABULARY, "initializer_range": 0.06, "bos_token_id": 0, "eos_token_id": 1}
LLAMA_LIKE = {
    **TEXT, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """build: the model in fp32. run: one forward, given the model, a generator of random inputs and
    the type of the weights; returns the final tensor. attend: gives the model one of its `kernels`,
    the reference's or the port's.
    """

    build: Callable[[], nn.Module]
    run: Callable[[Any, torch.Generator, torch.dtype], torch.Tensor]
    attend: Callable[[Any, str], object]
    kernels: tuple[str, str]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**LLAMA_LIKE, head_dim=32))


def _mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**LLAMA_LIKE, sliding_window=64))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**TEXT, n_embd=256, n_layer=6, n_head=8, n_positions=512))


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=64, ffn_dim=192, num_layers=4, cross_attn_norm=True, rope_max_seq_len=64,
    )  # fmt: skip


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def _vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, latent_channels=4, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _run_text(
    batch: int, length: int
) -> Callable[[Any, torch.Generator, torch.dtype], torch.Tensor]:
    def run(model: Any, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        tokens = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
        return model(input_ids=tokens, use_cache=False).logits

    return run


def _run_wan(model: Any, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    latents = torch.randn(2, 4, 3, 8, 12, generator=generator).to(dtype)
    text = torch.randn(2, 10, 32, generator=generator).to(dtype)
    return model(
        hidden_states=latents, timestep=torch.tensor([531, 742]), encoder_hidden_states=text
    ).sample


def _run_flux(model: Any, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    return model(
        hidden_states=torch.randn(2, 24, 16, generator=generator).to(dtype),
        encoder_hidden_states=torch.randn(2, 10, 32, generator=generator).to(dtype),
        pooled_projections=torch.randn(2, 32, generator=generator).to(dtype),
        timestep=torch.tensor([0.53, 0.74]).to(dtype),
        img_ids=image_ids,
        txt_ids=torch.zeros(10, 3),
        guidance=torch.tensor([3.5, 3.5]),
    ).sample


def _run_unet(model: Any, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    latents = torch.randn(2, 4, 16, 16, generator=generator).to(dtype)
    text = torch.randn(2, 10, 32, generator=generator).to(dtype)
    return model(latents, torch.tensor([531, 742]), encoder_hidden_states=text).sample


def _run_vae(model: Any, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    image = torch.randn(2, 3, 32, 32, generator=generator).to(dtype)
    latents = model.encode(image).latent_dist.mode() * 0.18215
    # as a pipeline does: the scale of the latents is the trainer's, the one to undo is the
    # configuration's
    return model.decode(latents / model.config.scaling_factor).sample


def _attend_with_implementation(model: Any, kernel: str) -> None:
    model.set_attn_implementation(kernel)


def _attend_with_backend(model: Any, kernel: str) -> None:
    model.set_attention_backend(kernel)


def _attend_with_processor(model: Any, kernel: str) -> None:
    from diffusers.models import attention_processor

    model.set_attn_processor(getattr(attention_processor, kernel)())


TRANSFORMERS = (_attend_with_implementation, ("eager", "sdpa"))
BACKENDS = (_attend_with_backend, ("_native_math", "native"))
PROCESSORS = (_attend_with_processor, ("AttnProcessor", "AttnProcessor2_0"))

FAMILIES = {
    "llama": Family(_llama, _run_text(2, 40), *TRANSFORMERS),
    "qwen3": Family(_qwen3, _run_text(2, 40), *TRANSFORMERS),
    # longer than the sliding window, and than the last whole number that bf16 holds
    "mistral": Family(_mistral, _run_text(1, 288), *TRANSFORMERS),
    "gpt2": Family(_gpt2, _run_text(2, 40), *TRANSFORMERS),
    "wan": Family(_wan, _run_wan, *BACKENDS),
    "flux": Family(_flux, _run_flux, *BACKENDS),
    "unet": Family(_unet, _run_unet, *PROCESSORS),
    "vae": Family(_vae, _run_vae, *PROCESSORS),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(family: str, side: str, dtype: str, seed: int) -> nn.Module:
    """The model of one side ("reference" or "port"), the same weights on both."""
    torch.manual_seed(seed)
    model = FAMILIES[family].build().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        # buffers (rotary frequencies) stay in fp32, as `from_pretrained` leaves them
        parameter.data = parameter.data.to(DTYPES[dtype])
    chosen = FAMILIES[family]
    chosen.attend(model, chosen.kernels[side == "port"])
    return model


def run(family: str, model: nn.Module, dtype: str, seed: int) -> torch.Tensor:
    """One run on the same random inputs; the final output."""
    torch.manual_seed(seed + 2)
    with torch.no_grad():
        return FAMILIES[family].run(model, torch.Generator().manual_seed(seed + 3), DTYPES[dtype])
