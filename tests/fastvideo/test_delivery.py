"""What of a FastVideo run arrives at an OTLP receiver, and how it hangs together there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fastvideo.runs import Run

pytestmark = pytest.mark.fastvideo

KEY = ("model", "module", "tensor", "loop", "step", "call", "phase")


def keys_on_disk(run: Run) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(record[name] for name in KEY) for record in run.records())


def keys_received(run: Run) -> Counter[tuple[Any, ...]]:
    events = [record["attributes"] for record in run.receiver.log_records()]
    return Counter(tuple(event[f"torch.{name}"] for name in KEY) for event in events)


def path_of(span: dict[str, Any], spans: dict[str, dict[str, Any]]) -> list[str]:
    names = []
    while span is not None:
        names.append(span["name"])
        span = spans.get(span["parent_id"])
    return names[::-1]


def test_every_record_arrives_once(generation: Run) -> None:
    assert generation.status == 0
    assert keys_received(generation) == keys_on_disk(generation)
    assert "lost:" not in generation.output


def test_parent_and_worker_are_one_trace_and_two_processes(generation: Run) -> None:
    runs = generation.receiver.spans("torch.run")
    assert len(runs) == 2 and len({span["resource"]["process.pid"] for span in runs}) == 2
    assert len({span["trace_id"] for span in runs}) == 1
    assert {span["trace_id"] for span in generation.receiver.spans()} == {runs[0]["trace_id"]}
    assert len(generation.receiver.spans("fastvideo.generate")) == 2


def test_steps_stand_in_stages_in_the_pipeline(generation: Run) -> None:
    spans = {span["span_id"]: span for span in generation.receiver.spans()}
    named = [span for span in spans.values() if span["name"] == "torch.step"]
    steps = [span for span in named if span["attributes"]["torch.model"] == "WanTransformer3DModel"]
    steps.sort(key=lambda span: span["start"])
    numbers = [
        (span["attributes"]["torch.loop"], span["attributes"]["torch.step"]) for span in steps
    ]
    assert numbers == [(loop, step) for loop in (0, 1) for step in range(3)]
    for step in steps:
        names = path_of(step, spans)
        assert names[0] == "torch.run" and names[-1] == "torch.step"
        assert (
            "fastvideo.pipeline::WanPipeline" in names
            and "fastvideo.stage::DenoisingStage" in names
        )
        branches = Counter(
            record["attributes"].get("torch.branch")
            for record in generation.receiver.log_records()
            if record["span_id"] == step["span_id"]
        )
        assert set(branches) == {"cond", "uncond"} and branches["cond"] == branches["uncond"]


def test_stages_and_regions_are_spans(generation: Run) -> None:
    names = Counter(span["name"] for span in generation.receiver.spans())
    assert names["fastvideo.pipeline::WanPipeline"] == 2
    assert names["fastvideo.region::profiler_region_model_loading"] == 1
    assert names["fastvideo.region::profiler_region_inference_denoising"] == 2
    stages = {name: count for name, count in names.items() if name.startswith("fastvideo.stage::")}
    assert len(stages) >= 7 and set(stages.values()) == {2}


def test_before_during_and_after_denoising_are_parts_of_the_pipeline(generation: Run) -> None:
    spans = {span["span_id"]: span for span in generation.receiver.spans()}
    for part in ("pre_denoising", "denoising", "post_denoising"):
        named = generation.receiver.spans(f"fastvideo.region::profiler_region_inference_{part}")
        assert [path_of(span, spans)[-2] for span in named] == [
            "fastvideo.pipeline::WanPipeline"
        ] * 2, part
        for span in named:
            parent = spans[span["parent_id"]]
            assert parent["start"] <= span["start"] <= span["end"] <= parent["end"]


def test_metrics_have_every_step_and_branch(generation: Run) -> None:
    points = [
        point["attributes"]
        for point in generation.receiver.metric_points("torch.module.activation.abs_mean")
        if point["attributes"]["torch.model"] == "WanTransformer3DModel"
        and point["attributes"]["torch.module"] == "blocks.0"
    ]
    found = {(point["torch.step"], point["torch.branch"]) for point in points}
    assert found == {(step, branch) for step in range(3) for branch in ("cond", "uncond")}


def test_of_a_forward_that_raises_the_completed_steps_arrive(broken: Run) -> None:
    on_disk, received = keys_on_disk(broken), keys_received(broken)
    assert not received - on_disk
    completed = Counter(
        {
            key: count
            for key, count in on_disk.items()
            if key[0] == "WanTransformer3DModel" and key[4] < 2
        }
    )
    assert completed and not completed - received
