"""Programs whose framework counts the steps: each record has the framework's own step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.runs import Recorded, check_logged, distinct, record
from tests.support import lines

pytestmark = pytest.mark.frameworks


def steps(run: Recorded, model: str, phase: str) -> list[int]:
    rows = [row for row in run.rows if row["model"] == model and row["phase"] == phase]
    return distinct(rows, "step")


def updated(run: Recorded, model: str, tensor: str) -> dict[int, float]:
    """Return the mean absolute gradient by step."""
    rows = [row for row in run.rows if row["model"] == model and row["tensor"] == tensor]
    assert len({(row["module"], row["step"]) for row in rows}) == len(rows)
    return {row["step"]: row["abs_mean"] for row in rows}


def test_transformers_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = record(tmp_path, "trainers/trainer_resume.py")
    first, second = "BertForSequenceClassification", "BertForSequenceClassification#2"
    assert steps(run, first, "forward") == [0, 1]
    assert steps(run, first, "eval") == [0, 2]  # before training, too
    assert steps(run, second, "forward") == [2, 3]
    assert steps(run, second, "eval") == [4]
    assert distinct(run.rows, "loop") == [0]
    gradients = [row for row in run.rows if row["tensor"].startswith("param_grad.")]
    assert distinct(gradients, "model", "step") == [
        (first, 0), (first, 1), (second, 2), (second, 3)
    ]  # fmt: skip


def test_lightning_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = record(tmp_path, "trainers/lightning_resume.py")
    assert steps(run, "Regression", "forward") == [0, 1]
    assert steps(run, "Regression#2", "forward") == [2, 3]
    assert steps(run, "Regression", "eval")[0] == 0  # the sanity check
    assert steps(run, "Regression#2", "eval")[-1] == 4
    calls = [row for row in run.rows if row["module"] == "net" and row["tensor"] == "out"]
    assert {row["call"] for row in calls if row["phase"] == "forward"} == {0, 1}
    used = [line.split() for line in run.output.splitlines() if line.startswith("CHECK gradient")]
    recorded = updated(run, "Regression", "param_grad.weight")
    recorded |= updated(run, "Regression#2", "param_grad.weight")
    assert recorded == pytest.approx({int(step): float.fromhex(value) for *_, step, value in used})


def test_a_batch_of_two_optimizers_is_one_step(tmp_path: Path) -> None:
    run = record(tmp_path, "trainers/lightning_gan.py")
    batches = [line.split() for line in run.output.splitlines() if line.startswith("CHECK batch")]
    counted = [int(step) for *_, step in batches]
    assert counted == [0, 2, 4]  # Lightning counts the steps of both optimizers
    for module in ("generator", "critic"):
        rows = [row for row in run.rows if row["module"] == module and row["phase"] != "attach"]
        assert sorted(distinct(rows, "step")) == counted
        gradients = [row for row in rows if row["tensor"] == "param_grad.weight"]
        assert distinct(gradients, "step") == counted


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_deepspeed_at_every_stage_of_zero(tmp_path: Path, stage: str) -> None:
    capture = "inputs,outputs,gradients,parameters,updates"
    run = record(tmp_path, "deepspeed_zero.py", STAGE=stage, OTEL_TORCH_CAPTURE=capture)
    (model,) = distinct(run.rows, "model")
    assert steps(run, model, "forward") == [0, 1, 2]
    assert steps(run, model, "eval") == [2]
    calls = [row for row in run.rows if row["phase"] == "forward" and row["tensor"] == "out"]
    assert set(distinct(calls, "step", "call")) == {(s, c) for s in range(3) for c in range(2)}
    weights = [row for row in run.rows if row["tensor"] == "param.weight"]
    shapes = [row["shape"] for row in weights if row["phase"] == "attach"]
    assert shapes == [[16, 8], [4, 16]]
    # copied back from the flat copies, in the step that computed them
    assert [row["shape"] for row in weights] == shapes * 4
    assert distinct(weights[2:], "phase", "step") == [("update", 0), ("update", 1), ("update", 2)]
    assert len({row["abs_mean"] for row in weights}) == len(weights)
    gradients = [row for row in run.rows if row["tensor"] == "param_grad.weight"]
    assert [row["shape"] for row in gradients] == shapes * 3
    assert distinct(gradients, "step") == [0, 1, 2]
    assert check_logged(run) == {"loss", "lr[0]", "grad_norm"}


@pytest.mark.parametrize(("stage", "recorded", "lost"), [("1", 9, 3), ("3", 0, 16)])
def test_what_zero_spreads_over_ranks_is_counted(
    tmp_path: Path, stage: str, recorded: int, lost: int
) -> None:
    """Three steps of two ranks and four parameters.

    In stage 1, the second rank has the gradients of three of them and a part of the fourth. In
    stage 3, each rank has a part of every parameter and gradient.
    """
    run = record(tmp_path, "deepspeed_zero.py", ranks=2, STAGE=stage)
    gradients = [
        (row["step"], row["module"], row["tensor"])
        for path in run.ranks
        for row in lines(path)
        if row["tensor"].startswith("param_grad.")
    ]
    assert len(set(gradients)) == len(gradients) == recorded
    assert check_logged(run) == {"loss", "lr[0]", "grad_norm"}
    for rank in (0, 1):
        (loss,) = run.metadata(rank)["lost"]
        assert (loss["reason"], loss["count"]) == ("spread_over_ranks", lost)
        (said,) = [line for line in run.messages if f"rank {rank}" in line and "gradients" in line]
        assert said.endswith("over several ranks are not recorded (for example '0.weight')")
