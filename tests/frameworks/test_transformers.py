"""The Trainer of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.runs import distinct, record

pytestmark = pytest.mark.frameworks


def test_the_trainer_counts_its_global_steps_and_evaluates_between_them(tmp_path: Path) -> None:
    run = record(tmp_path, "trainer.py")
    root = [row for row in run.rows if row["module"] == "" and row["phase"] in ("forward", "eval")]
    assert distinct(run.rows, "model") == ["LlamaForCausalLM"]
    assert distinct((r for r in root if r["phase"] == "forward"), "step", "call") == [
        (step, call) for step in range(6) for call in range(2)
    ]
    assert distinct((r for r in root if r["phase"] == "eval"), "step") == [2, 4, 6]
    gradients = [row for row in run.rows if row["tensor"] == "param_grad.weight"]
    assert distinct(gradients, "step") == list(range(6))
    assert "recompute" in distinct(run.rows, "phase")
    assert len(run.messages) == 1, run.messages
