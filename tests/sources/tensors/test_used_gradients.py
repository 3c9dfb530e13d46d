"""The gradient of a parameter is recorded as the optimizer uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import PROGRAMS, lines, run_python

PROGRAM = PROGRAMS / "training/optimizers_that_use_gradients.py"


@pytest.mark.parametrize(
    "way",
    ["positional", "accumulated", "lbfgs", "fused-scaled", "fused-unscaled", "no-closure"],
)
def test_the_gradient_that_an_optimizer_uses_is_recorded(way: str, tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, way, OTEL_TORCH_CAPTURE="parameters,gradients")
    used = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    recorded = [
        (row["step"], row["call"], pytest.approx(row["abs_mean"], rel=1e-5))
        for row in lines(tmp_path / "run.jsonl")
        if row["tensor"] == "param_grad.weight"
    ]
    assert used == recorded
    assert len(used) == 3 if way != "lbfgs" else len(used) > 3
