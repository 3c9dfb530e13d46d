"""`otel-torch export --tensorboard`: TensorBoard's own reader finds the scalars."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

import pytest

from otel_torch.cli.main import main
from otel_torch.recording.reader import read_recording
from tests.support import metadata

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curves(recording: Path, folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the points of each tag of each run."""
    assert main(["export", str(recording), "--tensorboard", str(folder)]) == 0
    runs = {}
    for run in sorted(folder.iterdir()):
        read = event_accumulator.EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        runs[run.name] = {
            tag: [(event.step, event.value) for event in read.Scalars(tag)]
            for tag in read.Tags()["scalars"]
        }
    return runs


def test_each_rank_is_a_run_with_its_training(ranks, tmp_path):
    runs = curves(ranks, tmp_path / "events")
    assert list(runs) == ["run.rank0", "run.rank1"]
    for name, tags in runs.items():
        rows = read_recording(ranks / f"{name}.jsonl")
        losses = [(row["step"], row["mean"]) for row in rows if row["tensor"] == "loss"]
        *finite, (last, value) = tags["train/loss"]
        assert finite == losses[:-1] and last == 11 and math.isnan(value)
        assert [value for _, value in tags["train/learning_rate"]] == pytest.approx([0.01] * 12)
        assert len(tags["train/gradient_norm"]) == 12 and "gradient_norm/Sequential.0" in tags
        assert {"train/update_ratio", "train/parameter_norm"} <= tags.keys()
        assert [value for _, value in tags["laws/gradients_not_cleared"]] == [1]


def test_statistics_of_activations_are_curves(ranks, tmp_path):
    tags = curves(ranks / "run.rank0.jsonl", tmp_path / "events")["run.rank0"]
    rows = read_recording(ranks / "run.rank0.jsonl")
    for statistic in ("abs_mean", "std", "nonfinite"):
        of_module = [
            (row["step"], row[statistic])
            for row in rows
            if (row["module"], row["tensor"], row["phase"]) == ("2", "out", "forward")
        ][:11]
        points = tags[f"{statistic}/Sequential.2.out"][:11]
        assert [step for step, _ in points] == [step for step, _ in of_module] == list(range(11))
        assert [value for _, value in points] == pytest.approx([value for _, value in of_module])


def test_events_have_the_time_at_which_the_run_began(ranks, tmp_path):
    curves(ranks, tmp_path / "events")
    read = event_accumulator.EventAccumulator(str(tmp_path / "events" / "run.rank1")).Reload()
    began = datetime.fromisoformat(metadata(ranks / "run.rank1.jsonl")["start"]).timestamp()
    (time,) = {event.wall_time for event in read.Scalars("train/loss")}
    assert time == pytest.approx(began)


def rows_of(*values: tuple[int, int, str, float]) -> str:
    return "".join(
        json.dumps({
            "module": "", "tensor": tensor, "loop": loop, "step": step, "call": 0, "model": "Net",
            "phase": "train", "mean": value,
        })
        + "\n"
        for loop, step, tensor, value in values
    )  # fmt: skip


def test_losses_of_a_step_are_their_mean_and_loops_follow_each_other(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        rows_of(
            (0, 0, "loss", 1), (0, 0, "loss", 3), (0, 1, "loss", 4), (0, 1, "lr[head]", 0.5),
            (1, 0, "loss", 8), (1, 1, "loss", 9),
        )
    )  # fmt: skip
    tags = curves(path, tmp_path / "events")["run"]
    assert tags["train/loss"] == [(0, 2.0), (1, 4.0), (2, 8.0), (3, 9.0)]
    assert tags["train/learning_rate/head"] == [(1, 0.5)]


def test_a_law_that_the_run_has_not_said_stands_at_the_last_step(tmp_path):
    path = tmp_path / "run.jsonl"
    steps = [(0, step, name, 0.0) for step in range(6) for name in ("lr[0]", "update_ratio")]
    path.write_text(rows_of(*steps))
    tags = curves(path, tmp_path / "events")["run"]
    laws = {tag: points for tag, points in tags.items() if tag.startswith("laws/")}
    assert laws == {"laws/learning_rate_zero": [(5, 1.0)]}
