"""The reference: diffusers' own pipeline generates videos from a Wan folder.  python wan_in_diffusers.py MODEL PRECISION VIDEOS

An ordinary script. PRECISION is that of the transformer, float32 or bfloat16; the rest is float32.
"""

import sys

import torch
from diffusers import WanPipeline


def main(model: str, precision: str, videos: str) -> None:
    pipeline = WanPipeline.from_pretrained(
        model, torch_dtype={"transformer": getattr(torch, precision), "default": torch.float32}
    )
    for _ in range(int(videos)):
        pipeline(
            "a raccoon in a field of sunflowers", "blurred static", height=64, width=64, num_frames=5, num_inference_steps=3,
            guidance_scale=3.0, generator=torch.Generator("cpu").manual_seed(1024),
        )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
