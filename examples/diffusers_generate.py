"""Generate two images with a tiny Stable Diffusion pipeline of random weights: text encoder,
denoising with guidance, VAE.

An ordinary script without any tracing code. The tokenizer is built here, so that nothing is
downloaded.
"""

import json
import pathlib
import tempfile

import numpy
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

PROMPTS = ("a raccoon in a field of sunflowers", "a lion on the savanna")


def make_tokenizer() -> CLIPTokenizer:
    """Return a CLIP tokenizer whose vocabulary is the letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [
        "<|startoftext|>",
        "<|endoftext|>",
        *letters,
        *(f"{letter}</w>" for letter in letters),
    ]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = pathlib.Path(folder, "vocab.json"), pathlib.Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
        merges.write_text("#version: 0.2\n")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=40)


def make_pipeline() -> StableDiffusionPipeline:
    """Return the whole pipeline, with 0.3 million random weights."""
    tokenizer = make_tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=40, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=16, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main() -> list[numpy.ndarray]:
    torch.manual_seed(0)
    pipeline = make_pipeline()
    images = []
    for prompt in PROMPTS:
        generator = torch.Generator().manual_seed(1024)
        result = pipeline(
            prompt, num_inference_steps=3, guidance_scale=3.0, generator=generator, output_type="np"
        )
        images.append(result.images[0])
        print(f"{prompt!r}: {images[-1].shape}, mean {images[-1].mean():.4f}")
    return images


if __name__ == "__main__":
    main()
