"""Faults of training programs are named as what they are, by `otel-torch diff`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

import otel_torch
from otel_torch.parity.finding import Report
from tests.reports.sides import record


class Expected(NamedTuple):
    """A finding: its place in the reference, its cause, and a part of its explanation."""

    phase: str
    module: str
    tensor: str
    step: int
    cause: str | None
    text: str


EXPECTED = {
    "labels": Expected("forward", "", "in.labels", 0, "other_inputs", "different inputs"),
    "detached": Expected(
        "backward", "", "param_grad", 0, "no_gradient", "no parameter has a gradient in the port"
    ),
    "stale optimizer": Expected(
        "update", "", "param", 0, "not_held", "holds other tensors than the parameters"
    ),
    "one stale parameter": Expected(
        "update", "up", "param.weight", 0, "not_held", "no optimizer of the port updates up.weight"
    ),
    "plain list": Expected(
        "update", "layers.0", "param.weight", 0, "not_held", "no optimizer of the port updates"
    ),
    "steps counted anew": Expected(
        "update", "", "param", 2, "optimizer_state", "a count of steps of 0, the reference's 2"
    ),
    "accumulation": Expected(
        "backward", "", "param_grad", 0, "accumulation", "after 1 batch (backward passes), the "
        "reference's after 4 batches",
    ),
    "clipping": Expected(
        "update", "", "param_grad", 0, "clip", "the port clips the gradients after each batch"
    ),
    "eval": Expected(
        "forward", "norm", "out", 0, "training_mode",
        "norm is in eval mode in the port, and in training mode in the reference",
    ),
    "eval from step 2 on": Expected(
        "forward", "norm", "out", 2, "training_mode", "norm is in eval mode in the port"
    ),
    "one number": Expected(
        "forward", "", "param.gain", 0, "number", "gain is 0.31, and the reference's 0.7"
    ),
    "dropout": Expected(
        "forward", "0.down", "in[0]", 0, "dropout", "training mode"
    ),
}  # fmt: skip


def compared(tmp_path: Path, kind: str) -> Report:
    reference, port = (
        record(tmp_path, "trainings", side, KIND=kind, OTEL_TORCH_CAPTURE="training")
        for side in ("ref", "port")
    )
    return otel_torch.diff(reference, port)


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_fault_of_a_training_is_named(tmp_path: Path, kind: str) -> None:
    report, expected = compared(tmp_path, kind), EXPECTED[kind]
    first = report.first
    assert first is not None
    place = first.phase, first.module, first.tensor, first.step
    assert place == expected[:4]
    assert (first.cause and first.cause.kind) == expected.cause
    assert expected.text.lower() in first.explanation.lower()
    assert "gradients of the step match" not in first.explanation or first.phase == "update"
    assert not any(finding.tensor == first.tensor for finding in report.harmless)


def test_weights_without_masters_never_match_silently(tmp_path: Path) -> None:
    report = compared(tmp_path, "masters")
    text = "the port's optimizer has parameters in bfloat16, the reference's float32"
    assert report.first is None
    assert any(text in warning for warning in report.warnings), report.warnings


@pytest.mark.parametrize("kind", ["plain", "eval"])
def test_the_same_training_matches(tmp_path: Path, kind: str) -> None:
    reference, again = (
        record(tmp_path / name, "trainings", "ref", KIND=kind, OTEL_TORCH_CAPTURE="training")
        for name in ("first", "second")
        if not (tmp_path / name).mkdir()
    )
    report = otel_torch.diff(reference, again)
    assert (report.verdict, report.warnings) == ("match", [])
    assert reference.read_bytes() == again.read_bytes()


def test_a_sum_over_ranks_that_is_left_out_is_named(tmp_path: Path) -> None:
    for side in ("ref", "port"):
        (tmp_path / side).mkdir()
        for rank in "01":
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            record(tmp_path / side, "unreduced", side, OTEL_TORCH_TENSORS="", **place)
    first = otel_torch.diff(tmp_path / "ref", tmp_path / "port").first
    assert first is not None and first.cause is not None
    assert (first.module, first.side, first.cause.kind) == ("mlp", "output", "partial_sum")
