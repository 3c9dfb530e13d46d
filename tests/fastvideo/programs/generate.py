"""Two short videos, as FastVideo's documentation shows it; knows nothing of otel_torch."""

import os
import sys

from fastvideo import VideoGenerator


def main() -> None:
    generator = VideoGenerator.from_pretrained(
        sys.argv[1],
        num_gpus=int(os.environ.get("GPUS", "1")),
        use_fsdp_inference=False,
        dit_cpu_offload=False,
        vae_cpu_offload=False,
        text_encoder_cpu_offload=False,
        pin_cpu_memory=False,
    )
    for prompt in ("the quick brown fox", "pack my box with five dozen liquor jugs"):
        generator.generate_video(
            prompt,
            output_path=sys.argv[2],
            save_video=True,
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=3,
            guidance_scale=3.0,
            seed=1024,
        )
    generator.shutdown()


if __name__ == "__main__":
    main()
