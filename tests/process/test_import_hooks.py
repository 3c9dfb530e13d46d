"""A module is noticed whatever other finders of the program do with its import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import PROGRAMS, lines, run_python

PROGRAM = PROGRAMS / "hide_an_import.py"
# the finders of the program, by their place among the others; Python cannot load torch twice
HANDING_OVER = [
    f"{where} {what}" for where in ("before", "after") for what in ("hands_over", "instruments")
] + ["wrapt"]
SCHEDULERS = "diffusers.schedulers.scheduling_utils"
# the steps of the rows: of three calls, and of three steps of denoising with two calls each
STEPS = {"torch": [0, 1, 2], SCHEDULERS: [0, 0, 1, 1, 2, 2]}
CASES = [
    *((kind, "torch") for kind in HANDING_OVER),
    *((kind, SCHEDULERS) for kind in [*HANDING_OVER, "before loads", "after loads"]),
]


@pytest.mark.parametrize(("kind", "hidden"), CASES)
def test_a_hidden_import_is_noticed(tmp_path: Path, kind: str, hidden: str) -> None:
    # a warm interpreter has torch from a finder of its own
    done = run_python(tmp_path, PROGRAM, kind, hidden, fresh=hidden == "torch")
    assert "otel_torch" not in done.stdout and "Traceback" not in done.stderr
    steps = [row["step"] for row in lines(tmp_path / "run.jsonl")]
    assert steps == STEPS[hidden]
