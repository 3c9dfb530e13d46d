"""The first NaN or Inf of an unmodified program, named at what produced it."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from otel_torch.cli.main import main
from tests.support import PROGRAMS, metadata, run_python

PROGRAM = PROGRAMS / "make_nonfinite.py"

# by mistake: who produced it, and what the line on stderr must say
FORWARD = {
    "fp16_overflow": ("module", ["first Inf: step 0", "'big' of Net", "float16 ends at 65504"]),
    "bf16_overflow": ("module", ["first Inf: step 0", "'big' of Net", "bfloat16 ends at 3.38"]),
    "exp_in_glue": ("glue", ["first Inf: step 0", "code of 'block'", "in front of 'block.down'"]),
    "behind_modules": ("glue", ["step 0, the code of 'block' of Net behind its modules"]),
    "inplace_division": ("module", ["step 0, 'divide' of Net produced it from finite inputs"]),
    "inplace_input": ("module", ["'divide' of Net or the code in front", "changes its input"]),
    "leaf": ("module", ["first NaN: step 0, 'log' of Net produced it", "inputs 1.64 (in[0])"]),
    "no_key": ("glue", ["first NaN: step 0, the code of 'attn' of Reader", "in[1] has -Inf"]),
    "nan_in_data": ("input", ["first NaN: step 3, the input in[0] of Net has it"]),
    "checkpoint": ("weights", ["step 0, 'weight' of 'block.down' of Net has it", "checkpoint"]),
    "unseen_row": ("weights", ["step 2, 'weight' of 'emb' of Language", "before the first update"]),
    "raises": ("module", ["first NaN: step 0, 'check' of Net produced it from finite inputs"]),
}
QUIET = (
    "clean_scaler",
    "clean_bf16",
    "causal",
    "masked_scores",
    "inf_on_purpose",
    "top_k",
    "masked_loss",
)


def said(stderr: str) -> list[str]:
    """Return the lines about NaN or Inf."""
    return [line for line in stderr.splitlines() if "first " in line and ": step " in line]


@pytest.mark.parametrize("case", FORWARD)
def test_a_mistake_is_named_at_once_at_the_end_and_in_the_metadata(
    case: str, tmp_path: Path
) -> None:
    producer, parts = FORWARD[case]
    done = run_python(tmp_path, PROGRAM, case, check=case != "raises")
    at_once, at_the_end = said(done.stderr)
    assert [part for part in parts if part not in at_once] == [], at_once
    assert at_the_end.endswith(at_once.removeprefix("otel_torch: "))
    found = metadata(tmp_path / "run.jsonl")["nonfinite"]
    assert (found["producer"], found["line"]) == (producer, at_once.removeprefix("otel_torch: "))


@pytest.mark.parametrize("case", QUIET)
def test_inf_on_purpose_and_skipped_steps_are_quiet(case: str, tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, case)
    assert said(done.stderr) == []
    assert "nonfinite" not in metadata(tmp_path / "run.jsonl")


def test_a_line_on_what_led_there_has_the_last_steps(tmp_path: Path) -> None:
    program = """
import torch
net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 2, bias=False)).half()
torch.nn.init.constant_(net[1].weight, 100)
for size in (1, 10, 100, 1000):
    net(torch.full((1, 2), float(size), dtype=torch.half))
"""
    line = said(run_python(tmp_path, program).stderr)[0]
    assert line == (
        "otel_torch: first Inf: step 3, '1' of Sequential produced it from finite inputs; largest "
        "|x| of its inputs 1000 (in[0]); of its weights 100; torch.float16 ends at 65504; "
        "largest |out| at steps 0, 1, 2: 200, 2000, 20000"
    )


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            {"OTEL_TORCH_MODULES": r"^block\.down$"},
            ["something inside 'block' of Net", "'block.down'"],
        ),
        ({"OTEL_TORCH_MODULES": "^block$"}, ["something inside 'block' of Net produced it"]),
        ({"OTEL_TORCH_STATS": "shape"}, ["code of 'block' of Net", "in front of 'block.down'"]),
        ({"OTEL_TORCH_CAPTURE": "parity"}, ["code of 'block' of Net", "in front of 'block.down'"]),
        ({"OTEL_TORCH_KERNEL": "torch"}, ["code of 'block' of Net", "in front of 'block.down'"]),
    ],
)
def test_it_is_found_whatever_is_recorded(
    variables: dict[str, str], parts: list[str], tmp_path: Path
) -> None:
    line = said(run_python(tmp_path, PROGRAM, "exp_in_glue", **variables).stderr)[0]
    assert [part for part in parts if part not in line] == [], line


def test_stop_ends_the_program_behind_the_forward_with_everything_written(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, "nan_in_data", check=False, OTEL_TORCH_ON_NONFINITE="stop")
    assert done.returncode == 1
    line = said(done.stderr)[0].removeprefix("otel_torch: ")
    assert f"otel_torch.NonFiniteError: {line}" in done.stderr.splitlines()
    rows = [json.loads(row) for row in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 1, 2, 3}
    assert metadata(tmp_path / "run.jsonl")["ended_cleanly"]


def test_zoom_names_the_operation_at_the_next_call(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, "no_key", OTEL_TORCH_ON_NONFINITE="zoom")
    assert "operations of 'attn' of Reader at step 1: the first NaN or Inf is op[" in done.stderr
    rows = [json.loads(row) for row in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if row["tensor"].startswith("op[")} == {1}


def test_the_hook_of_zoom_is_gone_after_that_call(tmp_path: Path) -> None:
    program = """
import torch
class Root(torch.nn.Module):
    def forward(self, x):
        return x.sub(100).sqrt()
net = torch.nn.Sequential(torch.nn.Linear(2, 2), Root())
for step in range(4):
    net(torch.ones(1, 2))
    print(len(net[1]._forward_hooks))
"""
    done = run_python(tmp_path, program, OTEL_TORCH_ON_NONFINITE="zoom")
    assert done.stdout.split() == ["2", "1", "1", "1"]
    assert "operations of '1' of Sequential at step 1" in done.stderr
    assert "the first NaN or Inf is op[1].aten.sqrt.out" in done.stderr


def test_a_shown_recording_says_first_what_produced_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(run_python(tmp_path, PROGRAM, "leaf").stderr)[0].removeprefix("otel_torch: ")
    assert main(["show", str(tmp_path / "run.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"! {line}"
    page = tmp_path / "page.html"
    assert main(["show", str(tmp_path / "run.jsonl"), "--html", str(page)]) == 0
    assert html.escape(line).replace("&#x27;", "&#39;") in page.read_text().replace(
        "&#x27;", "&#39;"
    )
