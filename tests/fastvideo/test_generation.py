"""An unmodified FastVideo generation, recorded with the master switch alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import Any

import pytest

from tests.fastvideo.runs import Run

pytestmark = pytest.mark.fastvideo

TRANSFORMER, TEXT_ENCODER, VAE = "WanTransformer3DModel", "UMT5EncoderModel", "AutoencoderKLWan"
STAGES = (
    "InputValidationStage", "TextEncodingStage", "ConditioningStage", "TimestepPreparationStage", "LatentPreparationStage",
    "DenoisingStage", "DecodingStage",
)  # fmt: skip


def of(run: Run, model: str) -> list[dict[str, Any]]:
    return [record for record in run.records() if record["model"] == model]


def test_the_worker_records_and_the_parent_has_nothing_to_record(generation: Run) -> None:
    assert generation.status == 0, generation.output
    assert len(generation.recordings()) == 1
    assert {record["model"] for record in generation.records()} == {TRANSFORMER, TEXT_ENCODER, VAE}
    (metadata,) = generation.metadata()
    assert metadata["ended_cleanly"] is True and metadata["records_written"] == len(
        generation.records()
    )


def test_videos_are_what_they_are_without_recording(generation: Run, unrecorded: Run) -> None:
    assert unrecorded.status == 0, unrecorded.output
    assert not (unrecorded.folder / "otel-torch").exists()
    videos = sorted((unrecorded.folder / "videos").glob("*.mp4"))
    assert len(videos) == 2
    for video in videos:
        assert (generation.folder / "videos" / video.name).read_bytes() == video.read_bytes()


def test_every_record_of_the_transformer_names_step_branch_and_loop(generation: Run) -> None:
    calls = Counter(
        (record["loop"], record["step"], record["branch"], record["call"])
        for record in of(generation, TRANSFORMER)
    )
    expected = {
        (loop, step, *which)
        for loop in (0, 1)
        for step in (0, 1, 2)
        for which in (("cond", 0), ("uncond", 1))
    }
    assert set(calls) == expected
    assert len(set(calls.values())) == 1, "each forward has as many records as any other"


def test_modules_are_named_as_in_the_model(generation: Run) -> None:
    modules = {record["module"] for record in of(generation, TRANSFORMER)}
    assert {"", "blocks.0", "blocks.1", "blocks.1.to_q", "patch_embedding", "proj_out"} <= modules


def test_text_encoder_and_vae_count_their_own_forwards_in_the_loop_of_the_video(
    generation: Run,
) -> None:
    # two prompts a video, one of them negative; the VAE is never called itself, only its `decode`
    assert {(r["loop"], r["step"]) for r in of(generation, TEXT_ENCODER)} == {
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    }
    assert {(r["loop"], r["step"]) for r in of(generation, VAE)} == {(0, 0), (1, 1)}
    assert any(record["module"].startswith("decoder.") for record in of(generation, VAE))
    assert not any(
        "branch" in record for record in of(generation, TEXT_ENCODER) + of(generation, VAE)
    )


def test_no_two_records_share_a_key(generation: Run) -> None:
    fields = ("model", "module", "tensor", "loop", "step", "call", "phase")
    keys = Counter(tuple(record[field] for field in fields) for record in generation.records())
    assert max(keys.values()) == 1


def test_pipeline_stages_and_regions_are_timed(generation: Run) -> None:
    (metadata,) = generation.metadata()
    counts = {name: row["count"] for name, row in metadata["regions"].items()}
    assert counts == {
        "fastvideo.pipeline::WanPipeline": 2,
        **{f"fastvideo.stage::{name}": 2 for name in STAGES},
        "fastvideo.region::profiler_region_model_loading": 1,
        "fastvideo.region::profiler_region_inference_pre_denoising": 2,
        "fastvideo.region::profiler_region_inference_denoising": 2,
        "fastvideo.region::profiler_region_inference_post_denoising": 2,
    }


def test_own_variables_drive_the_recording_and_nothing_is_recorded_twice(
    own_variables: Run,
) -> None:
    assert own_variables.status == 0, own_variables.output
    assert own_variables.recordings() == [], "FASTVIDEO_TRACE_OUTPUT says where the recording goes"
    (trace,) = own_variables.folder.glob("trace*.jsonl")
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {record["module"] for record in records if record["model"] == TRANSFORMER} == {
        "blocks.0",
        "blocks.1",
    }
    assert {record["step"] for record in records if record["model"] == TRANSFORMER} == {0, 2}
    # two videos x two steps x two branches x two blocks; FastVideo's own trace would have written
    # nothing at all
    assert len([record for record in records if record["model"] == TRANSFORMER]) == 16
    assert all(
        {"abs_mean", "shape"} <= record.keys() and "mean" not in record for record in records
    )


def test_own_profiler_variables_collect_inside_denoising_only(own_variables: Run) -> None:
    profile = own_variables.folder / "profile"
    assert (profile / "summary_rank0.json").is_file()
    (trace,) = profile.glob("*.gz")
    events = [
        event
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    ]
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"] == "fastvideo.region::profiler_region_inference_denoising"
    )
    assert len(marks) == 2
    operators = [event for event in events if event["name"].startswith("aten::")]
    assert operators
    assert all(any(start <= event["ts"] <= end for start, end in marks) for event in operators)


def test_families_that_hand_over_a_timestep_get_steps_all_the_same(families: Run) -> None:
    assert families.status == 0, families.output
    seen = {
        model: [
            (record["step"], record["call"], record.get("branch")) for record in of(families, model)
        ]
        for model in (
            "Index",
            "Timestep",
            "Sigma",
            "Tensor",
            "Guided",
            "Tracing",
            "Unasked",
            "Raising",
        )
    }
    assert seen == {
        "Index": [(0, 0, None), (1, 0, None), (2, 0, None)],
        "Timestep": [
            (0, 0, None),
            (0, 1, None),
            (1, 0, None),
            (1, 1, None),
            (2, 0, None),
            (2, 1, None),
        ],
        "Sigma": [(0, 0, None), (1, 0, None), (2, 0, None)],
        "Tensor": [(0, 0, None), (1, 0, None)],
        "Guided": [(0, 0, "cond"), (0, 1, "uncond"), (1, 0, "cond"), (1, 1, "uncond")],
        "Tracing": [(0, 0, None), (1, 0, None)],
        "Unasked": [(0, 0, None), (1, 0, None)],
        "Raising": [(0, 0, None)],
    }


def test_everything_is_taken_over_by_start_and_given_back_by_stop(start_and_stop: Run) -> None:
    assert start_and_stop.status == 0, start_and_stop.output
    said = json.loads(start_and_stop.output.splitlines()[-1])
    assert said == {"not replaced": [], "not restored": [], "resolved": [True, True, True]}
