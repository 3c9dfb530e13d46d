"""Denoise a latent video with a tiny diffusion transformer: five steps, each with two forwards for
guidance.

An ordinary script without any tracing code. It downloads nothing and takes a second on a CPU.
"""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

STEPS, GUIDANCE = 5, 3.0


def main() -> torch.Tensor:
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=32,
    ).eval()  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler()
    prompt, no_prompt = torch.randn(1, 7, 16), torch.zeros(1, 7, 16)
    latents = torch.randn(1, 4, 2, 8, 8)

    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            time = timestep.expand(1)
            conditional = transformer(latents, time, prompt).sample
            unconditional = transformer(latents, time, no_prompt).sample
            noise = unconditional + GUIDANCE * (conditional - unconditional)
            latents = scheduler.step(noise, timestep, latents).prev_sample
    mean, deviation = latents.mean(), latents.std()
    print(f"{STEPS} steps; the latents end with mean {mean:.4f} and deviation {deviation:.4f}")
    return latents


if __name__ == "__main__":
    main()
