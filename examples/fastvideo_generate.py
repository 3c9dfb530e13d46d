"""Generate two short videos with FastVideo: python fastvideo_generate.py MODEL [FOLDER [GPUS]]

An ordinary script without any tracing code. MODEL is a folder or a name on the Hugging Face hub,
such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers.
"""

import sys

from fastvideo import VideoGenerator

PROMPTS = ("a raccoon in a field of sunflowers", "a lion on the savanna")


def main(model: str, folder: str = "videos", gpus: str = "1") -> None:
    """Write one video per prompt to `folder`."""
    generator = VideoGenerator.from_pretrained(
        model,
        num_gpus=int(gpus),
        use_fsdp_inference=False,
        dit_cpu_offload=False,
        vae_cpu_offload=False,
        text_encoder_cpu_offload=False,
        pin_cpu_memory=False,
    )
    for prompt in PROMPTS:
        generator.generate_video(
            prompt, output_path=folder, save_video=True, height=64, width=64, num_frames=5,
            num_inference_steps=3, guidance_scale=3.0, seed=1024,
        )  # fmt: skip
    generator.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
