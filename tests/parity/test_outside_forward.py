"""Differences that no module made are not blamed on one: other inputs, and updated parameters.

Real programs in child processes, with only the environment set.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from otel_torch.parity.call_graph import build_program
from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.text import render_text
from otel_torch.parity.tolerance import Tolerance
from otel_torch.parity.values import Comparer
from otel_torch.recording.metadata import metadata_path

Record = Callable[..., Path]


# -- other inputs
# --------------------------------------------------------------------------------------------------

INPUTS = {
    "batch": ("reference", "[2, 6] in the reference and [1, 6] in the port"),
    "right padding": ("reference", "[2, 6] in the reference and [2, 8] in the port"),
    "left padding": ("reference", "[2, 6] in the reference and [2, 8] in the port"),
    "prefill and decode": ("reference", "[2, 6] in the reference and [2, 5] in the port"),
    "prompt": ("reference", "[2, 6] in both, but other values"),
    "image of another size": ("image", "[1, 3, 16, 16] in the reference and [1, 3, 16, 24] in the"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_other_inputs_are_told_and_no_code_is_accused(recorded_program: Record, kind: str) -> None:
    program = "run_on_other_inputs.py"
    reference, shapes = INPUTS[kind]
    report = compare(recorded_program(program, reference), recorded_program(program, kind))
    first = report.first
    assert report.verdict == "diverged" and first is not None and first.cause is not None
    assert (first.module, first.side, first.port_side) == ("", "input", "input")
    assert first.cause.kind == "other_inputs" and shapes in first.explanation
    assert "the code before" not in first.explanation
    again, port, _ = next_steps(report)
    assert "give both programs the same inputs" in again.why
    assert "OTEL_TORCH_MODULES" not in {*again.environment, *port.environment}
    assert (again.command, port.command) == (["REFERENCE_COMMAND"], ["PORT_COMMAND"])


# -- training
# --------------------------------------------------------------------------------------------------

CAPTURES = ("parity", "parity,gradients")
TRAINING = [
    ("backward", "sgd", 1), ("backward", "adamw", 1), ("backward", "accumulation", 1),
    ("betas", "adamw", 2), ("rate", "sgd", 1), ("loss", "adamw", 1),
]  # fmt: skip


def trained(recorded_program: Record, kind: str, optimizer: str, capture: str = "parity") -> Report:
    reference, port = (
        recorded_program("training/train_with_fault.py", name, optimizer, capture=capture)
        for name in ("reference", kind)
    )
    return compare(reference, port)


def changed_warnings(report: Report) -> list[str]:
    return [line for line in report.warnings if "were not recorded again" in line]


@pytest.mark.parametrize(("kind", "optimizer", "step"), TRAINING)
def test_a_fault_of_training_is_no_fault_of_a_module(
    recorded_program: Record, kind: str, optimizer: str, step: int
) -> None:
    report = trained(recorded_program, kind, optimizer)
    first = report.first
    assert report.verdict == "diverged" and first is not None and len(report.introduced) == 1
    assert (first.model, first.module, first.tensor, first.side) == (
        "Model",
        "",
        "param",
        "parameter",
    )
    assert (first.phase, first.step, first.kind) == ("update", step, "weights")
    assert changed_warnings(report) == [
        "the parameters of Model changed after step 0 and were not recorded again: what differs "
        "later may come from gradients or the optimizer, so no module is named for it"
    ]
    assert "introduced" not in {pair.state for pair in report.compared}
    assert "the parameters of Model differ after an update" in render_text(report, color=False)
    assert "another order" not in render_text(report, color=False)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "accumulation"])
def test_a_fault_before_the_first_update_is_named_exactly(
    recorded_program: Record, optimizer: str
) -> None:
    report = trained(recorded_program, "forward at step 0", optimizer)
    assert report.first is not None and len(report.introduced) == 1
    assert (report.first.module, report.first.side, report.first.step) == ("act", "output", 0)
    assert changed_warnings(report)


def test_a_fault_of_a_frozen_model_is_named_at_a_later_step(recorded_program: Record) -> None:
    report = trained(recorded_program, "frozen at step 2", "adamw")
    assert report.first is not None
    assert (report.first.model, report.first.module, report.first.side) == (
        "Frozen",
        "act",
        "input",
    )
    assert report.first.step == 2


@pytest.mark.parametrize("capture", CAPTURES)
def test_gradients_without_an_optimizer_change_nothing(
    recorded_program: Record, capture: str
) -> None:
    report = trained(recorded_program, "frozen at step 2", "none", capture)
    assert report.first is not None and changed_warnings(report) == []
    assert (report.first.module, report.first.step, report.first.phase) == ("act", 2, "forward")


def test_a_match_says_that_parameters_changed(recorded_program: Record) -> None:
    report = trained(recorded_program, "reference", "adamw")
    assert report.verdict == "match" and len(changed_warnings(report)) == 1


def test_other_data_are_other_inputs_at_any_step(recorded_program: Record) -> None:
    report = trained(recorded_program, "data", "adamw")
    assert report.first is not None and report.first.cause is not None
    assert (report.first.cause.kind, report.first.side) == ("other_inputs", "input")


def test_the_same_sums_with_other_extremes_are_no_other_order() -> None:
    """An update moves each element a little: its sums stay, its extremes need not."""
    numbers = np.random.default_rng(0).normal(size=(2, 64)).astype("<f4")
    statistics = {"sum": 1.0, "abs_mean": 0.8, "mean": 0.001, "std": 1.0, "l2": 32.0, "min": -3.0}
    row = {"module": "fc", "tensor": "out", "step": 0, "shape": [1024], "numel": 1024} | statistics
    for largest, state in ((3.0, "order"), (3.0 + 1e-7, "order"), (3.001, "different")):
        values = [
            build_program([row | {"max": high, "sketch": b64encode(sketch.tobytes()).decode()}])
            for high, sketch in zip((3.0, largest), numbers, strict=True)
        ]
        reference, port = (program.values[0] for program in values)
        assert Comparer(Tolerance()).relation(reference, port).state == state


def test_a_recording_of_an_older_version_tells_by_its_gradients(
    recorded_program: Record, tmp_path: Path
) -> None:
    paths = []
    for kind in ("reference", "betas"):
        made = recorded_program(
            "training/train_with_fault.py", kind, "adamw", capture="parity,gradients"
        )
        meta = json.loads(metadata_path(made).read_text())
        for facts in meta["models"].values():
            del facts["trained"]
        paths.append(tmp_path / f"{kind}.jsonl")
        paths[-1].write_bytes(made.read_bytes())
        metadata_path(paths[-1]).write_text(json.dumps(meta))
    report = compare(*paths)
    assert report.first is not None and report.first.phase == "update"
