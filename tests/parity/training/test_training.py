"""A comparison follows a training step: forward, loss, backward, update, and names the first fault.

Real programs in child processes, with only the environment set.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_torch.parity.compare import compare
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.text import render_text
from tests.contradictions import contradictions
from tests.support import lines

Record = Callable[..., Path]


@pytest.fixture
def record(recorded_program: Record) -> Record:
    """Return a function that runs a training and returns its recording."""

    def run(*arguments: str, program: str = "training/train_two_ways.py") -> Path:
        return recorded_program(program, *arguments, capture="training")

    return run


# kind: phase, step, module, tensor, kind of the cause
BACKWARD = {
    "backward of an activation": ("backward", 0, "blocks.1.act", "grad_in[0]", "scaled"),
    "detached keys": ("backward", 0, "blocks.1.attn.k", "grad", "no_gradient"),
    "detached residual": ("backward", 0, "blocks.1", "grad_in[0]", None),
    "hook between modules": ("backward", 0, "blocks.0.up", "grad", "scaled"),
    "hook on a parameter": ("backward", 0, "blocks.1.attn.v", "param_grad.weight", "scaled"),
    "loss scale of a parameter": (
        "backward",
        0,
        "blocks.1.attn.v",
        "param_grad.weight",
        "scaled",
    ),
    "frozen": ("backward", 0, "blocks.0.norm2", "param_grad.bias", "frozen"),
    "untied": ("backward", 0, "head", "param_grad.weight", "untied"),
}
CLIPPING = {
    "clipped": ("update", 0, "", "param_grad", "clip"),
    "clipped to another norm": ("update", 0, "", "param_grad", "clip"),
}
LOSS = {
    "loss": ("loss", 0, "", "loss", "scaled"),
    "accumulated sum": ("loss", 0, "", "loss", "scaled"),
    "smoothed loss": ("loss", 0, "", "loss", None),
}
UPDATE = {
    "not held": ("update", 0, "blocks.1.up", "param.bias", "not_held"),
    "decay of biases": ("update", 0, "blocks.0.norm1", "param.weight", "weight_decay"),
    "decay": ("update", 0, "embed", "param.weight", "weight_decay"),
    "rate": ("update", 0, "", "param", "learning_rate"),
    "schedule": ("update", 1, "", "param", "learning_rate"),
    "betas": ("update", 1, "", "param", "betas"),
    "eps": ("update", 0, "", "param", "eps"),
    "amsgrad": ("update", 1, "", "param", "amsgrad"),
    "coupled decay": ("update", 0, "", "param", "optimizer"),
    "sgd momentum": ("update", 1, "", "param", "momentum"),
    "resume": ("update", 2, "", "param", "optimizer_state"),
}
OTHERS = {"batch": ("forward", 2, "", "in[0]", "other_inputs")}
FAULTS = BACKWARD | CLIPPING | LOSS | UPDATE | OTHERS
REFERENCES = {"untied": "tied", "clipped to another norm": "clipped", "sgd momentum": "sgd"}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_first_fault_of_a_training_is_named(record: Record, kind: str) -> None:
    report = compare(record(REFERENCES.get(kind, "reference")), record(kind))
    first = report.first
    assert report.verdict == "diverged" and first is not None and len(report.introduced) == 1
    assert (first.model, first.port_model) == ("Transformer", "Transformer")
    assert (first.module, first.tensor) == (first.port_module, first.port_tensor)
    cause = None if first.cause is None else first.cause.kind
    assert (first.phase, first.step, first.module, first.tensor, cause) == FAULTS[kind]
    assert contradictions(report) == []
    text = render_text(report, color=False)
    assert "First divergence: the " in text and "weights" not in text
    if kind != "batch":
        again = next_steps(report)[-2]
        is_mended = again.why.startswith("mend this")
        capture = "training" if is_mended else "graph"
        assert is_mended == (first.cause is not None)
        assert again.environment["OTEL_TORCH_CAPTURE"] == capture


CLEAN = (
    "another kernel",
    "checkpointed",
    "foreach",
    "for-loop",
    "fused",
    "accumulated",
    "loss scale",
)


@pytest.mark.parametrize("kind", CLEAN)
def test_a_training_that_computes_the_same_matches(record: Record, kind: str) -> None:
    report = compare(record("reference"), record(kind))
    assert report.verdict == "match" and report.introduced == []
    assert report.pairs > 400
    assert not any("optimizer" in warning for warning in report.warnings)


def test_no_module_is_blamed_for_parameters_that_a_sharded_optimizer_keeps(
    record: Record, tmp_path: Path
) -> None:
    """ZeRO-3 leaves neither parameters nor their gradients on a rank, only what a step made."""
    sharded = tmp_path / "sharded.jsonl"
    rows = [row for row in lines(record("rate")) if row["phase"] != "attach"]
    kept = [json.dumps(row) for row in rows if not row["tensor"].startswith("param_grad")]
    sharded.write_text("\n".join(kept) + "\n")
    shutil.copy(record("rate").with_suffix(".meta.json"), tmp_path / "sharded.meta.json")
    report = compare(record("reference"), sharded)
    first = report.first
    assert first is not None and len(report.introduced) == 1
    assert (first.step, first.module, first.tensor) == (1, "", "param")


def test_a_setting_whose_effect_is_below_rounding_is_a_warning(record: Record) -> None:
    """In bf16 such are weight decays and betas that matter in the long run."""
    report = compare(record("reference"), record("decay below rounding"))
    assert report.verdict == "match" and report.introduced == []
    (warning,) = [warning for warning in report.warnings if "optimizer" in warning]
    assert warning.startswith(
        "Transformer: the port's optimizer has weight decay 0.10001, the reference's 0.1 ("
    )
    assert warning.endswith(
        " parameters). Its updates match all the same: this is below rounding so far"
    )


# -- a port with other names, a fused projection and another attention
# --------------------------------------------------------------------------------------------------

# fault: phase, step, module of the port, tensor, kind of the cause
PORTED = {
    "norm": ("backward", 0, "layers.1.norm_b", "grad_in[0]", None),
    "values": ("backward", 0, "layers.1.qkv", "param_grad.bias", None),
    "embedding": ("backward", 0, "wte", "grad", "no_gradient"),
    "part of the batch": ("backward", 1, "", "param_grad", None),
    "projection": ("update", 0, "layers.0.qkv", "param.weight", "not_held"),
    "decay": ("update", 0, "wte", "param.weight", "weight_decay"),
    "epsilon": ("forward", 2, "layers.1.norm_b", "out", None),
}


@pytest.mark.parametrize("fault", PORTED)
def test_the_first_fault_is_named_in_the_ports_terms(record: Record, fault: str) -> None:
    program = "training/train_a_port.py"
    report = compare(record("reference", program=program), record("port", fault, program=program))
    first = report.first
    assert report.verdict == "diverged" and first is not None
    cause = None if first.cause is None else first.cause.kind
    found = first.phase, first.step, first.port_module, first.port_tensor
    assert found == PORTED[fault][:4]
    if first.phase != "forward":
        assert cause == PORTED[fault][4]
    assert contradictions(report) == []


def test_a_port_with_other_rounding_trains_alike(record: Record) -> None:
    program = "training/train_a_port.py"
    report = compare(record("reference", program=program), record("port", program=program))
    assert report.verdict == "match" and report.harmless == []
