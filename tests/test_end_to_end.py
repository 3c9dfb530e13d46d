"""Unmodified programs, switched on by environment variables: the files are complete, and an OTLP
receiver gets everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from otel_torch.training_quantities import PHASE
from tests.otlp_receiver import Receiver
from tests.support import TURNS_NAN, lines, metadata, run_python, run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
KEY = ("model", "module", "tensor", "loop", "step", "call", "phase")


def keys_on_disk(path: Path) -> Counter[tuple[Any, ...]]:
    """Return the keys of the rows that are events: values of a training are none."""
    return Counter(tuple(row[name] for name in KEY) for row in lines(path) if row["phase"] != PHASE)


def keys_of_events(attributes: Iterable[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(
        tuple(row_attributes[f"torch.{name}"] for name in KEY) for row_attributes in attributes
    )


def of_logs(receiver: Receiver) -> list[dict[str, Any]]:
    return [record["attributes"] for record in receiver.log_records()]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_training_loop_arrives_whole(tmp_path: Path, protocol: str) -> None:
    with Receiver() as receiver:
        done = run_python(
            tmp_path, EXAMPLES / "transformers_train.py",
            OTEL_TORCH_CAPTURE="outputs,gradients", OTEL_TORCH_SIGNALS="spans,span_events,log_events,metrics",
            **receiver.environment(protocol),
        )  # fmt: skip
    assert "lost" not in done.stderr
    rows = lines(tmp_path / "run.jsonl")
    on_disk = keys_on_disk(tmp_path / "run.jsonl")
    assert set(on_disk.values()) == {1}
    forwards = [
        (r["step"], r["call"], r["phase"])
        for r in rows
        if r["module"] == "model.layers.0" and r["tensor"] == "out"
    ]
    assert forwards == [
        (0, 0, "forward"), (0, 1, "forward"), (1, 0, "forward"), (1, 1, "forward"), (2, 0, "forward"), (2, 1, "forward"),
        (3, 0, "eval"), (3, 0, "forward"), (3, 1, "forward"), (4, 0, "forward"), (4, 1, "forward"), (5, 0, "forward"),
        (5, 1, "forward"), (6, 0, "eval"),
    ]  # fmt: skip
    # the same records, as span events and as log events
    assert keys_of_events(receiver.events()) == on_disk
    assert keys_of_events(of_logs(receiver)) == on_disk
    # every training step is a trace of its own, linked from and to the run's span
    steps = receiver.spans("torch.step")
    run = receiver.spans("torch.run")[0]
    assert [span["attributes"]["torch.step"] for span in steps] == list(range(7))
    assert len({span["trace_id"] for span in steps} | {run["trace_id"]}) == 8
    assert all(span["links"] == [(run["trace_id"], run["span_id"])] for span in steps)
    assert set(run["links"]) == {(span["trace_id"], span["span_id"]) for span in steps}
    assert metadata(tmp_path / "run.jsonl")["trace_id"] == run["trace_id"]
    # OpenTelemetry's names, because the program registers no region
    assert Counter(span["name"] for span in receiver.spans()) == {
        "torch.run": 1, "torch.step": 7, "torch.forward": 14, "torch.backward": 12, "torch.optimizer.step": 6,
    }  # fmt: skip
    regions = metadata(tmp_path / "run.jsonl")["regions"]
    assert {name: totals["count"] for name, totals in regions.items()} == {
        "torch.step": 6, "torch.backward": 12, "torch.optimizer.step": 6,
    }  # fmt: skip
    durations = receiver.metric_points("torch.region.duration")
    assert {point["attributes"]["torch.region"] for point in durations} == set(regions)
    # every step's value of a series is a point
    points = receiver.metric_points("torch.module.activation.std")
    names = [
        (point["attributes"]["torch.module"], point["attributes"]["torch.phase"])
        for point in points
    ]
    assert names.count(("model.layers.0", "forward")) == 6


def test_a_generation_with_guidance_arrives_whole(tmp_path: Path) -> None:
    with Receiver() as receiver:
        run_python(tmp_path, EXAMPLES / "quickstart.py", **receiver.environment("grpc"))
    on_disk = keys_on_disk(tmp_path / "run.jsonl")
    assert set(on_disk.values()) == {1}
    # by default as log events, and not on the spans too
    assert keys_of_events(of_logs(receiver)) == on_disk
    assert not receiver.events()
    model = "WanTransformer3DModel"
    assert [key[3:6] for key in on_disk if key[:2] == (model, "")] == [
        (0, step, call) for step in range(5) for call in (0, 1)
    ]
    spans = {span["span_id"]: span for span in receiver.spans()}
    step_spans = receiver.spans("torch.step")
    assert [span["attributes"]["torch.step"] for span in step_spans] == list(range(5))
    parents = {spans[span["parent_id"]]["name"] for span in step_spans}
    assert parents == {"fastvideo.region::profiler_region_inference_denoising"}
    assert {spans[span["parent_id"]]["name"] for span in receiver.spans("torch.forward")} == {
        "torch.step"
    }
    assert len({span["trace_id"] for span in spans.values()}) == 1
    # a bounded loop: the step is an attribute of the metric
    points = receiver.metric_points("torch.module.activation.abs_mean")
    assert {point["attributes"]["torch.step"] for point in points} == set(range(5))


def test_two_ranks_share_a_trace_and_write_a_recording_each(tmp_path: Path) -> None:
    with Receiver() as receiver:
        run_ranks(tmp_path, EXAMPLES / "two_ranks.py", **receiver.environment("grpc"))
    paths = [tmp_path / f"run.rank{rank}.jsonl" for rank in range(2)]
    assert keys_on_disk(paths[0]) == keys_on_disk(paths[1])
    runs = receiver.spans("torch.run")
    assert sorted(span["resource"]["dl.rank"] for span in runs) == [0, 1]
    assert len({span["trace_id"] for span in runs}) == 1
    assert {metadata(path)["run_id"] for path in paths} == {
        runs[0]["resource"]["otel_torch.run.id"]
    }
    for rank, path in enumerate(paths):
        events = [
            record["attributes"]
            for record in receiver.log_records()
            if record["resource"]["dl.rank"] == rank
        ]
        assert keys_of_events(events) == keys_on_disk(path)


def test_a_run_that_turns_nan_reads_back_everywhere(tmp_path: Path) -> None:
    with Receiver() as receiver:
        signals = "spans,span_events,log_events,metrics"
        run_python(
            tmp_path,
            TURNS_NAN,
            fresh=True,
            OTEL_TORCH_SIGNALS=signals,
            **receiver.environment("http/protobuf"),
        )
    from otel_torch import read_recording

    rows = read_recording(tmp_path / "run.jsonl")
    assert [row["nonfinite"] for row in rows if row["module"] == "0"] == [0, 0, 2, 2]
    assert all(row["mean"] != row["mean"] for row in rows if row["step"] >= 2)
    for events in (receiver.events(), of_logs(receiver)):
        means = [
            attributes["torch.stat.mean"]
            for attributes in events
            if attributes["torch.module"] == "0"
        ]
        assert means[2:] == ["NaN", "NaN"] and all(isinstance(mean, float) for mean in means[:2])
    counted = receiver.metric_points("torch.module.activation.nonfinite")
    assert (
        max(point["value"] for point in counted if point["attributes"]["torch.module"] == "0") == 4
    )
    show = subprocess.run(
        [sys.executable, "-m", "otel_torch", "show", str(tmp_path / "run.jsonl")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert show.returncode == 0 and "step 2" in show.stdout and "nan" in show.stdout


def test_the_torch_profiler_collects_in_natural_regions_where_a_folder_is_set(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "profile"
    done = run_python(
        tmp_path,
        EXAMPLES / "transformers_train.py",
        OTEL_TORCH_JSONL="off",
        OTEL_TORCH_PROFILER_DIR=str(folder),
        OTEL_TORCH_PROFILER_REGIONS="training_backward",
    )
    assert done.returncode == 0
    summary = json.loads((folder / "summary_rank0.json").read_text())
    names = {row["name"] for row in summary}
    assert "torch.backward" in names and "torch.optimizer.step" not in names
    assert len(list(folder.glob("*.pt.trace.json.gz"))) == 1


BESIDE_OURS = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(2, 2))
with region("training_step"):
    model(torch.ones(1, 2))
"""


def test_a_program_that_imports_ours_before_torch_is_recorded_too(tmp_path: Path) -> None:
    done = run_python(
        tmp_path,
        "from otel_torch import ModuleHookManager, get_or_create_profiler, region, trace_step"
        + BESIDE_OURS,
        fresh=True,
    )
    assert done.stderr.splitlines() == [f"otel_torch: 2 records in {tmp_path / 'run.jsonl'}"]
    assert [row["module"] for row in lines(tmp_path / "run.jsonl")] == ["0", ""]


def test_what_a_program_starts_itself_wins_over_the_environment_before_torch_too(
    tmp_path: Path,
) -> None:
    program = (
        "import otel_torch\nprint(otel_torch.start(jsonl='mine.jsonl'))\nfrom otel_torch import region"
        + BESIDE_OURS
    )
    done = run_python(tmp_path, program, fresh=True)
    assert done.stdout == "True\n" and done.stderr == "otel_torch: 2 records in mine.jsonl\n"
    assert len(lines(tmp_path / "mine.jsonl")) == 2 and not (tmp_path / "run.jsonl").exists()
