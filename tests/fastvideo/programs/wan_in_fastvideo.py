"""The port: FastVideo generates the same video from the same folder.  python wan_in_fastvideo.py MODEL [PRECISION [MISTAKE]]

It knows nothing of tracing. PRECISION is that of the transformer, float32 or bfloat16; the rest is float32. MISTAKE is one to
make, by name, or `as_it_is` for FastVideo with none of its own ways changed. A worker imports this file again, so what is done
to FastVideo when it is imported is done there too.
"""

import inspect
import sys
import textwrap

from fastvideo import VideoGenerator
from fastvideo.configs.pipelines.wan import WanT2V480PConfig
from fastvideo.models.dits.wanvideo import WanTransformerBlock
from fastvideo.models.schedulers.scheduling_flow_unipc_multistep import FlowUniPCMultistepScheduler
from fastvideo.pipelines.stages import DecodingStage, DenoisingStage, TextEncodingStage

MODEL, PRECISION, MISTAKE = (sys.argv[1:] + ["model", "float32", "none"][len(sys.argv) - 1 :])[:3]

# what FastVideo does otherwise than diffusers, and how to make it do the same
WAYS = {
    # the largest noise level is shifted when the scheduler is made, and once more with the others
    "schedule": (FlowUniPCMultistepScheduler, "set_timesteps", "np.linspace(self.sigma_max,", "np.linspace(0.999,"),
    # its text encoder sees the words of a prompt and no padding behind them
    "padding": (
        TextEncodingStage, "encode_text", "dict(encoder_config.tokenizer_kwargs)",
        "dict(encoder_config.tokenizer_kwargs, padding='max_length')",
    ),
}  # fmt: skip
MISTAKES = {
    # the feed-forward of each block gets the gate of its attention
    "gate": (WanTransformerBlock, "forward", "ff_output, c_gate_msa", "ff_output, gate_msa"),
    # guidance leans on the wrong one of the two predictions
    "guidance": (
        DenoisingStage, "forward", "noise_pred = noise_pred_uncond + current_guidance_scale * (noise_pred_text -",
        "noise_pred = noise_pred_text + current_guidance_scale * (noise_pred_text -",
    ),
    # the solver stays of first order
    "order": (FlowUniPCMultistepScheduler, "step", "self.lower_order_nums += 1", "self.lower_order_nums += 0"),
    # the second step of the loop is given the timestep of the first
    "timestep": (
        DenoisingStage, "forward", "t_expand = t.repeat(latent_model_input.shape[0])",
        "t_expand = (timesteps[0] if i == 1 else t).repeat(latent_model_input.shape[0])",
    ),
    # latents are handed to the VAE without their mean
    "decode": (DecodingStage, "_denormalize_latents", "latents * latents_std + latents_mean", "latents * latents_std"),
}  # fmt: skip


def rewrite(owner, name, old, new):
    """Put `new` in the place of `old` in a method of FastVideo's."""
    method = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(method))
    assert old in source, f"FastVideo's {owner.__name__}.{name} has no {old!r}"
    scope = {}
    code = compile(source.replace(old, new), f"<{owner.__name__}.{name}, rewritten>", "exec")
    exec(code, vars(sys.modules[owner.__module__]), scope)
    setattr(owner, name, scope[name])


if PRECISION == "float32":  # it denoises in bfloat16, whatever it is told
    rewrite(DenoisingStage, "forward", "target_dtype = torch.bfloat16", "target_dtype = torch.float32")
for way, change in WAYS.items():
    if MISTAKE not in (way, "as_it_is"):
        rewrite(*change)
if MISTAKE in MISTAKES:
    rewrite(*MISTAKES[MISTAKE])


def main():
    config = WanT2V480PConfig()
    config.dit_precision = {"float32": "fp32", "bfloat16": "bf16"}[PRECISION]
    config.vae_decode_precision = "fp32"
    generator = VideoGenerator.from_pretrained(
        MODEL, pipeline_config=config, num_gpus=1, use_fsdp_inference=False, dit_cpu_offload=False, vae_cpu_offload=False,
        text_encoder_cpu_offload=False, pin_cpu_memory=False,
    )  # fmt: skip
    generator.generate_video(
        "a raccoon in a field of sunflowers", negative_prompt="blurred static", output_path="videos", save_video=False, height=64,
        width=64, num_frames=5, num_inference_steps=3, guidance_scale=3.0, seed=1024,
    )  # fmt: skip
    generator.shutdown()


if __name__ == "__main__":
    main()
