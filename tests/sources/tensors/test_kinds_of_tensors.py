"""Every kind of tensor that torch has, with everything that can be recorded of it.

No kind may end the program or change, and each is recorded or counted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import PROGRAMS, lines, run_python

PROGRAM = PROGRAMS / "return_every_kind_of_tensor.py"
EVERY_STATISTIC = (
    "min,max,mean,std,abs_mean,sum,l2,rms,nonfinite,zeros,numel,shape,dtype,histogram,sketch"
)
CAPTURES = {
    "outputs": {},
    "everything": {"CAPTURE": "inputs,outputs,gradients,parameters", "STATS": EVERY_STATISTIC},
    "tensors": {"TENSORS": "kept", "RUN_ID": "run"},
    "parity": {"CAPTURE": "parity,gradients", "TENSORS": "kept", "RUN_ID": "run"},
    "by_torch": {"KERNEL": "torch", "STATS": EVERY_STATISTIC},
    "noise": {"NOISE": "1"},
    "operations": {"OPERATIONS": "."},
    "watch": {"BUDGET": "0.001%"},
}  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_python(tmp_path_factory.mktemp("bare"), PROGRAM, OTEL_TORCH_ENABLED="0").stdout


@pytest.mark.parametrize("capture", CAPTURES)
def test_every_kind_is_recorded_or_counted(tmp_path: Path, bare: str, capture: str) -> None:
    settings = {f"OTEL_TORCH_{name}": value for name, value in CAPTURES[capture].items()}
    done = run_python(tmp_path, PROGRAM, **settings)
    assert done.stdout == bare
    assert "Traceback" not in done.stderr
    rows = lines(tmp_path / "run.jsonl")
    # (older versions of torch report their connections on stdout)
    printed = [line for line in bare.splitlines()[:-1] if not line.startswith("[Gloo]")]
    kinds = {line.split()[0] for line in printed if "cannot be made" not in line}
    assert len(kinds) > 60
    missing = kinds - {row["model"] for row in rows}
    # what answers no question is counted as an error; a budget skips steps
    assert capture == "watch" or missing <= {"silent_wrapper_with_sizes"}
    assert not missing or "silent_wrapper_with_sizes: a tensor was not recorded" in done.stderr
    if "TENSORS" in CAPTURES[capture]:
        (kept,) = re.findall(r"(\d+) tensors in kept", done.stderr)
        (unreadable,) = re.findall(r"(\d+) tensors \(unreadable\)", done.stderr)
        assert int(kept) + int(unreadable) == len(rows)
