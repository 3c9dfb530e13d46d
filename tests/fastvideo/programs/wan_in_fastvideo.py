"""The port: FastVideo generates videos from a Wan folder.  python wan_in_fastvideo.py MODEL PRECISION MISTAKE...

It knows nothing of tracing. PRECISION is that of the transformer, float32 or bfloat16; the rest is
float32. One video is made for each MISTAKE, with it; `none` makes none, `as_it_is` leaves FastVideo
the ways in which it differs from diffusers by itself. A worker imports this file again, so what is
done to FastVideo when it is imported is done there too.
"""

import functools
import inspect
import sys
import textwrap

from fastvideo import VideoGenerator
from fastvideo.configs.pipelines.wan import WanT2V480PConfig
from fastvideo.models.dits.wanvideo import WanTransformerBlock
from fastvideo.models.schedulers.scheduling_flow_unipc_multistep import FlowUniPCMultistepScheduler
from fastvideo.pipelines.stages import (
    DecodingStage,
    DenoisingStage,
    InputValidationStage,
    TextEncodingStage,
)

MODEL, PRECISION, *VIDEOS = sys.argv[1:]

# its largest noise level is 0.999, and shifted twice; that of diffusers is 1
SCHEDULE = (
    FlowUniPCMultistepScheduler, "set_timesteps",
    {
        "np.linspace(self.sigma_max, self.sigma_min,": "np.linspace(1.0, 0.001,",
        "sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)":
            "sigmas = np.minimum(shift * sigmas / (1 + (shift - 1) * sigmas), 1 - 1e-6)",
    },
)  # fmt: skip
# its text encoder sees the words of a prompt and no padding behind them
PADDING = (
    TextEncodingStage, "encode_text",
    {"dict(encoder_config.tokenizer_kwargs)": "dict(encoder_config.tokenizer_kwargs, padding='max_length')"},
)  # fmt: skip
# it denoises in bfloat16, whatever it is told
IN_FLOAT32 = (
    DenoisingStage,
    "forward",
    {"target_dtype = torch.bfloat16": "target_dtype = torch.float32"},
)

MISTAKES = {
    # the feed-forward of each block gets the gate of its attention
    "gate": (WanTransformerBlock, "forward", {"ff_output, c_gate_msa": "ff_output, gate_msa"}),
    # guidance leans on the wrong one of the two predictions
    "guidance": (DenoisingStage, "forward", {"noise_pred = noise_pred_uncond +": "noise_pred = noise_pred_text +"}),
    # the solver stays of first order
    "order": (FlowUniPCMultistepScheduler, "step", {"self.lower_order_nums += 1": "self.lower_order_nums += 0"}),
    # the second step of the loop is given the timestep of the first
    "timestep": (DenoisingStage, "forward", {"t_expand = t.repeat(": "t_expand = (timesteps[0] if i == 1 else t).repeat("}),
    # latents are handed to the VAE without their mean
    "decode": (DecodingStage, "_denormalize_latents", {"latents * latents_std + latents_mean": "latents * latents_std"}),
}  # fmt: skip

video = -1  # which one is being made


def rewritten(method, changes):
    """A method of FastVideo's with pieces of its source replaced."""
    source = getattr(method, "source", None) or textwrap.dedent(
        inspect.getsource(inspect.unwrap(method))
    )
    for old, new in changes.items():
        assert old in source, f"FastVideo's {method.__qualname__} has no {old!r}"
        source = source.replace(old, new)
    scope = {}
    exec(
        compile(source, f"<{method.__qualname__}, rewritten>", "exec"),
        vars(sys.modules[method.__module__]),
        scope,
    )
    made = functools.wraps(method)(scope[method.__name__])
    made.source = source
    return made


def only_in(videos, owner, name, changes):
    """Replace pieces of a method's source, for the videos of these numbers only."""
    method = getattr(owner, name)
    other = rewritten(method, changes)

    @functools.wraps(method)
    def either(*args, **kwargs):
        return (other if video in videos else method)(*args, **kwargs)

    either.source = getattr(method, "source", None)
    setattr(owner, name, either)


def count(owner, name):
    method = getattr(owner, name)

    @functools.wraps(method)
    def counted(*args, **kwargs):
        global video
        video += 1
        return method(*args, **kwargs)

    setattr(owner, name, counted)


count(InputValidationStage, "forward")
if PRECISION == "float32":
    owner, name, changes = IN_FLOAT32
    setattr(owner, name, rewritten(getattr(owner, name), changes))
for change, way in ((SCHEDULE, "schedule"), (PADDING, "padding")):
    only_in(
        [number for number, name in enumerate(VIDEOS) if name not in (way, "as_it_is")], *change
    )
for mistake, change in MISTAKES.items():
    only_in([number for number, name in enumerate(VIDEOS) if name == mistake], *change)


def main():
    config = WanT2V480PConfig()
    config.dit_precision = {"float32": "fp32", "bfloat16": "bf16"}[PRECISION]
    config.vae_decode_precision = "fp32"
    generator = VideoGenerator.from_pretrained(
        MODEL, pipeline_config=config, num_gpus=1, use_fsdp_inference=False, dit_cpu_offload=False, vae_cpu_offload=False,
        text_encoder_cpu_offload=False, pin_cpu_memory=False,
    )  # fmt: skip
    for _ in VIDEOS:
        generator.generate_video(
            "a raccoon in a field of sunflowers", negative_prompt="blurred static", save_video=False, height=64, width=64,
            num_frames=5, num_inference_steps=3, guidance_scale=3.0, seed=1024,
        )  # fmt: skip
    generator.shutdown()


if __name__ == "__main__":
    main()
