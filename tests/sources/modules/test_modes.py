"""Modes, tracers and transforms of the program see its own operations and none of ours.

Each program runs in a process of its own, because what is set up on first use must be invisible
too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import PROGRAMS, lines, metadata, run_python

PROGRAM = PROGRAMS / "run_under_a_mode.py"
MODES = [
    "dispatch", "function", "flops", "fake", "jit", "make_fx", "functionalize", "transforms",
    "export",
]  # fmt: skip
EVERY_STATISTIC = "min,max,mean,std,abs_mean,l2,nonfinite,zeros,histogram,sketch"
# what is recorded, by setting
CAPTURES = {
    "outputs": {},
    "everything": {
        "CAPTURE": "inputs,outputs,gradients,parameters", "STATS": EVERY_STATISTIC, "TENSORS": "kept"
    },
    "parity": {"CAPTURE": "parity,gradients", "STATS": EVERY_STATISTIC},
    "by_torch": {"CAPTURE": "inputs,outputs", "STATS": EVERY_STATISTIC, "KERNEL": "torch"},
    "operations": {"OPERATIONS": "first|act"},
    "watch": {"BUDGET": "0.001%"},
    "noise": {"NOISE": "1"},
}  # fmt: skip


@pytest.fixture(scope="module")
def seen_bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each mode sees without recording."""
    folder = tmp_path_factory.mktemp("bare")
    return {
        mode: run_python(folder, PROGRAM, mode, OTEL_TORCH_ENABLED="0").stdout for mode in MODES
    }


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_what_it_sees_without_recording(
    tmp_path: Path, seen_bare: dict[str, str], mode: str, capture: str
) -> None:
    settings = {f"OTEL_TORCH_{name}": value for name, value in CAPTURES[capture].items()}
    done = run_python(tmp_path, PROGRAM, mode, **settings)
    seen, expected = done.stdout.splitlines(), seen_bare[mode].splitlines()
    if capture == "operations":
        # torch 2.9 detaches the result of an operation in place once for each active mode
        seen, expected = (_without_repeated_detach(printed) for printed in (seen, expected))
    assert seen[:-1] == expected[:-1]
    # the last line has the values of a later forward
    assert (seen[-1] == expected[-1]) == (capture != "noise")
    assert len(lines(tmp_path / "run.jsonl")) > 0
    kernel = "torch" if capture == "by_torch" else "native"
    assert metadata(tmp_path / "run.jsonl")["kernels"].startswith(kernel)


def _without_repeated_detach(printed: list[str]) -> list[str]:
    return [
        line
        for line, before in zip(printed, ["", *printed], strict=False)
        if not line == before == "aten.detach.default"
    ]
