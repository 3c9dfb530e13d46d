"""Which modules of a framework's program are recorded, under which names, with which gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.runs import distinct, record

pytestmark = pytest.mark.frameworks


def test_modules_that_return_tensordicts_have_records(tmp_path: Path) -> None:
    run = record(tmp_path, "tensordicts.py")
    outputs = [row for row in run.rows if row["tensor"].startswith("out")]
    assert set(distinct(outputs, "model")) == {
        "ClipPPOLoss", "GAE", "ProbabilisticActor", "TensorDictSequential", "ValueOperator",
    }  # fmt: skip
    losses = [row["tensor"] for row in outputs if row["model"] == "ClipPPOLoss"]
    assert {"out.loss_objective", "out.loss_critic", "out.loss_entropy"} <= set(losses)
    nested = [row["step"] for row in outputs if row["tensor"] == "out.next.state_value"]
    assert set(nested) == {0, 1, 2, 3}
    assert not any("not_walked" in message for message in run.messages)


def test_lightning_steps_with_the_gradients_that_are_recorded(tmp_path: Path) -> None:
    """Lightning gives `step` a closure, which accumulates and clips."""
    run = record(tmp_path, "lightning_closure.py", OTEL_TORCH_CAPTURE="gradients,parameters")
    used = [line.split()[2:] for line in run.output.splitlines() if "CHECK used" in line]
    recorded = [
        (row["step"], row["call"], row["abs_mean"])
        for row in run.rows
        if row["tensor"] == "param_grad.weight"
    ]
    assert recorded == [
        (int(step), 0, pytest.approx(float.fromhex(magnitude), rel=1e-5))
        for step, magnitude in used
    ]
    assert len(used) == 4
