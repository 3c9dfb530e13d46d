"""Programs that run several models in one step: each has the step and phase of the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.runs import check_logged, distinct, record

pytestmark = pytest.mark.frameworks

# program: the steps of each model and phase
EXPECTED = {
    "image_classifier.py": {
        ("ResNet", "forward"): [0, 1, 2, 3],
        ("ResNet", "eval"): [2, 4],
        ("SoftTargetCrossEntropy", "forward"): [0, 1, 2, 3],
        ("CrossEntropyLoss", "eval"): [2, 4],
        ("ResNet#2", "eval"): [2, 4],
    },
    "trainers/soft_actor_critic.py": {
        ("SACPolicy", "eval"): [0, 1, 2, 3, 4, 5],
        ("SACPolicy", "forward"): [0, 1, 2, 3, 4, 5],
    },
    "adapter_generates.py": {
        ("LlamaForCausalLM", "forward"): [0, 1, 2, 3, 4, 5, 6, 7],
        ("T5ForConditionalGeneration", "forward"): [0, 1, 2, 3],
    },
}

LOGGED = {"image_classifier.py": {"loss", "lr[0]", "grad_norm"}}
TRAINED = {"image_classifier.py": {"ResNet"}, "trainers/soft_actor_critic.py": {"SACPolicy"}}


@pytest.mark.parametrize("program", EXPECTED)
def test_every_model_has_the_steps_of_its_loop(program: str, tmp_path: Path) -> None:
    run = record(tmp_path, program, OTEL_TORCH_CAPTURE="outputs,gradients,parameters")
    rows = [row for row in run.rows if row["phase"] in ("forward", "eval")]
    steps = {
        key: distinct((row for row in rows if (row["model"], row["phase"]) == key), "step")
        for key in distinct(rows, "model", "phase")
    }
    assert steps == EXPECTED[program]
    assert check_logged(run) == LOGGED.get(program, set())
    gradients = [row for row in run.rows if row["tensor"].startswith("param_grad.")]
    trained = {row["model"] for row in gradients}
    assert trained == TRAINED.get(program, set())
    for model in trained:
        assert distinct(gradients, "step") == EXPECTED[program][model, "forward"]


def test_activations_that_all_detectors_share_belong_to_the_one_that_runs(tmp_path: Path) -> None:
    run = record(tmp_path, "object_detector.py", OTEL_TORCH_CAPTURE="outputs,gradients,parameters")
    trained = {row["model"] for row in run.rows if row["tensor"].startswith("param_grad.")}
    assert trained == {"DetectionModel#2"}  # the first is the one that training replaces
    first = [row for row in run.rows if row["model"] == "DetectionModel"]
    rates = {f"lr[{group}]" for group in range(3)}
    assert check_logged(run) == rates | {"grad_norm"}
    # its strides were learned from an image of zeros
    assert distinct(first, "phase", "step", "loop") == [("attach", 0, 0), ("warmup", 0, 0)]
    # operations are counted on images of one stride, of memory that nobody has written
    images = [row for row in run.rows if (row["module"], row["tensor"]) == ("model.0.conv", "out")]
    counted = [row["phase"] for row in images if row["shape"] == [1, 16, 16, 16]]
    assert counted == ["warmup", "warmup"]
    others = [row for row in run.rows if row["phase"] != "warmup"]
    assert distinct(others, "loop") == [0]
    assert "nonfinite" not in run.metadata()
    shared = [row for row in run.rows if row["module"].endswith("model.0.act")]
    assert {"DetectionModel#2", "DetectionModel#3"} <= {row["model"] for row in shared}
