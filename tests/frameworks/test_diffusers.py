"""Denoise loops: the schedule gives steps, setting it again gives loops, and regions need no call
site.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import lines, metadata, recording, run_python

diffusers = pytest.importorskip("diffusers")

EXAMPLES = Path(__file__).parents[2] / "examples"


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def denoise(scheduler, model: nn.Module, steps: int, limit: int | None = None) -> None:
    scheduler.set_timesteps(steps)
    x = torch.ones(1, 4)
    with torch.no_grad():
        for timestep in scheduler.timesteps[:limit]:
            x = scheduler.step(model(x) + model(x), timestep, x).prev_sample


def test_a_schedule_gives_steps_guidance_gives_calls_and_a_second_generation_is_a_loop() -> None:
    with recording() as sink:
        scheduler, model = diffusers.FlowMatchEulerDiscreteScheduler(), Denoiser()
        encoder, decoder = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)
        for _ in range(2):
            encoder(torch.ones(1, 4))
            denoise(scheduler, model, 3)
            decoder(torch.ones(1, 4), torch.ones(1, 4))
    assert sink.rows("loop", "step", "call", model="Denoiser", module="") == [
        (loop, step, call) for loop in (0, 1) for step in (0, 1, 2) for call in (0, 1)
    ]
    # outside of the running schedule a model counts its own forwards; the loop is the one that is
    # going on
    assert sink.rows("loop", "step", model="Linear") == [(0, 0), (0, 1)]
    assert sink.rows("loop", "step", model="Bilinear") == [(0, 0), (1, 1)]


def test_a_schedule_set_before_it_ran_or_left_early_is_told_apart() -> None:
    with recording() as sink:
        scheduler, model = diffusers.FlowMatchEulerDiscreteScheduler(), Denoiser()
        scheduler.set_timesteps(9)
        denoise(scheduler, model, 4, limit=2)
        denoise(scheduler, model, 4)
    steps = sink.rows("loop", "step", model="Denoiser", module="", call=0)
    assert steps == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_the_busiest_of_several_running_schedules_counts() -> None:
    with recording() as sink:
        video, sound = (
            diffusers.FlowMatchEulerDiscreteScheduler(),
            diffusers.FlowMatchEulerDiscreteScheduler(),
        )
        model, x = Denoiser(), torch.ones(1, 4)
        for _ in range(2):
            video.set_timesteps(4)
            sound.set_timesteps(2)
            for index, timestep in enumerate(video.timesteps):
                x = video.step(model(x).detach(), timestep, x).prev_sample
                if index < 2:
                    sound.step(x, sound.timesteps[index], x)
    assert sink.rows("loop", "step", module="") == [
        (loop, step) for loop in (0, 1) for step in range(4)
    ]


def test_a_scheduler_of_the_programs_own_counts_too() -> None:
    with recording() as sink:

        class Mine(diffusers.SchedulerMixin):
            def set_timesteps(self, number: int) -> None:
                self.timesteps = torch.arange(number)

            def step(self, output: torch.Tensor) -> torch.Tensor:
                return output

        class Better(Mine):
            def step(self, output: torch.Tensor) -> torch.Tensor:
                return super().step(output)

        model = Denoiser()
        scheduler = Better()
        scheduler.set_timesteps(3)
        for _ in scheduler.timesteps:
            scheduler.step(model(torch.ones(1, 4)))
    assert sink.rows("step", module="") == [0, 1, 2]


def test_a_bounded_step_is_said_to_be_one() -> None:
    with recording() as sink:
        denoise(diffusers.FlowMatchEulerDiscreteScheduler(), Denoiser(), 2)
    scopes = [scope for scope in sink.closed if scope.name == "torch.step"]
    assert [(s.attributes["torch.step"], s.bounded, s.training) for s in scopes] == [
        (0, True, False),
        (1, True, False),
    ]


def test_denoising_is_a_region_without_a_call_site() -> None:
    with recording() as sink:
        denoise(diffusers.FlowMatchEulerDiscreteScheduler(), Denoiser(), 2)
    natural = [scope for scope in sink.closed if scope.kind == "natural"]
    assert [scope.attributes["torch.region"] for scope in natural] == [
        "profiler_region_inference_denoising"
    ]
    steps = [scope for scope in sink.closed if scope.name == "torch.step"]
    assert natural[0].start_ns <= steps[0].start_ns and steps[-1].end_ns <= natural[0].end_ns


def test_classes_are_given_back() -> None:
    scheduler, pipeline = diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDIMPipeline

    def now() -> tuple[object, ...]:
        return (
            scheduler.step,
            scheduler.set_timesteps,
            pipeline.__call__,
            "__init_subclass__" in vars(diffusers.SchedulerMixin),
        )

    before = now()
    with recording():
        assert not set(before) & set(now()[:3])
    assert now() == before


def test_an_unmodified_pipeline_is_recorded_whole(tmp_path: Path) -> None:
    run_python(tmp_path, EXAMPLES / "diffusers_generate.py")
    rows = lines(tmp_path / "run.jsonl")
    unet = [row for row in rows if row["model"] == "UNet2DConditionModel" and row["module"] == ""]
    assert [(row["loop"], row["step"], row["call"]) for row in unet] == [
        (loop, step, 0) for loop in (0, 1) for step in range(3)
    ]
    # two prompts, with and without text: two forwards a generation, before the schedule is set anew
    assert {(row["loop"], row["step"]) for row in rows if row["model"] == "CLIPTextModel"} == {
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
    }
    # the VAE's root is never called; one decode is one forward
    vae = Counter((row["loop"], row["step"]) for row in rows if row["model"] == "AutoencoderKL")
    assert list(vae) == [(0, 0), (1, 1)] and len(set(vae.values())) == 1
    keys = Counter(
        (r["model"], r["module"], r["tensor"], r["loop"], r["step"], r["call"], r["phase"])
        for r in rows
    )
    assert set(keys.values()) == {1}
    recorded = metadata(tmp_path / "run.jsonl")
    assert (
        recorded["models"]["UNet2DConditionModel"]["held_as"] == ["unet"]
        and recorded["ended_cleanly"]
    )
    regions = {
        name.rpartition("profiler_region_")[2]: table["count"]
        for name, table in recorded["regions"].items()
    }
    assert regions == {
        "inference_pre_denoising": 2,
        "inference_denoising": 2,
        "inference_post_denoising": 2,
    }


def test_pipelines_that_validate_belong_to_the_training_around_them() -> None:
    config = {"sample_size": 8, "block_out_channels": (8, 8), "norm_num_groups": 2}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    with recording(models="UNet|Linear") as sink:
        unet = diffusers.UNet2DModel(layers_per_block=1, **config, **blocks)
        encoder, scheduler = nn.Linear(8, 8), diffusers.DDPMScheduler()
        optimizer = torch.optim.AdamW(unet.parameters())
        for _ in range(2):
            for _ in range(2):
                with torch.no_grad():
                    latents = encoder(torch.ones(1, 3, 8, 8))
                unet(latents, 5).sample.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            pipeline = diffusers.DDPMPipeline(unet, scheduler)
            pipeline.set_progress_bar_config(disable=True)
            pipeline(num_inference_steps=2, output_type="np")
    rows = sink.rows("loop", "step", "phase", module="conv_out")
    assert [row for row in rows if row[2] != "train"] == [
        (0, 0, "forward"), (0, 1, "forward"), (0, 2, "eval"), (0, 2, "eval"),
        (0, 2, "forward"), (0, 3, "forward"), (0, 4, "eval"), (0, 4, "eval"),
    ]  # fmt: skip
    assert sink.rows("loop", "step", "phase", model="Linear") == [
        (0, step, "forward") for step in range(4)
    ]
