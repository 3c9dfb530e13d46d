"""The first NaN or Inf of an unmodified program, named at what produced it."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from otel_torch.cli.main import main
from tests.support import PROGRAMS, metadata, run_python, run_ranks

PROGRAM = PROGRAMS / "training/make_nonfinite.py"

# by mistake: who produced it, and what the line on stderr must say
FORWARD = {
    "fp16_overflow": (
        "module",
        ["first Inf: step 0", "'big' of Net", "largest torch.float16 is 65504"],
    ),
    "bf16_overflow": ("module", ["first Inf: step 0", "'big' of Net", "torch.bfloat16 is 3.38"]),
    "exp_in_glue": (
        "glue",
        ["first Inf: step 0", "forward of 'block' of Net", "it called 'block.down'"],
    ),
    "behind_modules": (
        "glue",
        ["step 0, the forward of 'block' of Net produced it, after its modules"],
    ),
    "inplace_division": ("module", ["step 0, 'divide' of Net produced it from finite inputs"]),
    "inplace_input": ("module", ["'divide' of Net or the code before it", "changes its input"]),
    "leaf": ("module", ["first NaN: step 0, 'log' of Net produced it", "inputs 1.64 (in[0])"]),
    "no_key": ("glue", ["first NaN: step 0, the forward of 'attn' of Reader", "in[1] has -Inf"]),
    "nan_in_data": ("input", ["first NaN: step 3, the input in[0] of Net has it"]),
    "checkpoint": ("weights", ["step 0, 'weight' of 'block.down' of Net has it", "checkpoint"]),
    "unseen_row": ("weights", ["step 2, 'weight' of 'emb' of Language", "before the first update"]),
    "checkpointed": ("glue", ["step 0, the forward of Block produced it before it called 'down'"]),
    "compiled": ("module", ["'block.down' of Net or the code before it", "is not known"]),
    "autocast": (
        "module",
        ["first Inf: step 0, 'big' of Net", "the largest torch.float16 is 65504"],
    ),
    "raises": ("module", ["first NaN: step 0, 'check' of Net produced it from finite inputs"]),
}
TRAINING = {
    "log_of_zero_in_loss": (
        "loss",
        ["first -Inf: step 0, the code that computes the loss", "Net returned finite"],
    ),
    "custom_backward": ("backward", ["step 0, the backward of 'custom'", "'inp' and 'block.up'"]),
    "root_of_zero": ("backward", ["step 0, the backward of 'norm2'", "that of 'inp' is not"]),
    "clipped": ("backward", ["step 0, the backward of 'custom'", "'inp' and 'block.up'"]),
    "clipped_late": ("backward", ["step 12, the backward pass of Net", "clipping has spread it"]),
    "late": ("backward", ["step 12, the backward of 'custom'"]),
    "late_and_tied": ("backward", ["step 12, the backward of 'custom'", "'inp' and 'block.up'"]),
    "own_backward": ("backward", ["step 0, 'scale' of Net produced it in its backward"]),
    "adam_without_eps": (
        "update",
        ["step 0, Adam (lr 0.001, eps 0) put it into 'weight' of 'block.unused'"],
    ),
    "rate_explodes": (
        "update",
        ["the update after step 0 by SGD (lr 1e+30) made", "so large that"],
    ),
    "masked_label": ("module", ["first -Inf: step 0, 'hide' of", "the loss has it, too"]),
    "scaler_at_its_limit": (
        "backward",
        ["the backward of 'custom'", "18 steps in a row", "to 0.5"],
    ),
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


@pytest.mark.parametrize("case", [*FORWARD, *TRAINING])
def test_a_mistake_is_named_at_once_at_the_end_and_in_the_metadata(
    case: str, tmp_path: Path
) -> None:
    producer, parts = (FORWARD | TRAINING)[case]
    done = run_python(tmp_path, PROGRAM, case, check=case != "raises")
    at_once, at_the_end = said(done.stderr)
    assert [part for part in parts if part not in at_once] == [], at_once
    assert at_the_end.endswith(at_once.removeprefix("otel_torch: "))
    found = metadata(tmp_path / "run.jsonl")["nonfinite"]
    assert (found["producer"], found["line"]) == (producer, at_once.removeprefix("otel_torch: "))


@pytest.mark.parametrize("case", QUIET)
def test_inf_on_purpose_and_skipped_steps_are_quiet(case: str, tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, case, OTEL_TORCH_ON_NONFINITE="zoom")
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
        "|x| of its inputs 1000 (in[0]); of its weights 100; the largest torch.float16 is 65504; "
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
        (
            {"OTEL_TORCH_STATS": "shape"},
            ["forward of 'block' of Net", "it called 'block.down', whose in[0]"],
        ),
        (
            {"OTEL_TORCH_CAPTURE": "parity"},
            ["forward of 'block' of Net", "it called 'block.down', whose in[0]"],
        ),
        (
            {"OTEL_TORCH_KERNEL": "torch"},
            ["forward of 'block' of Net", "it called 'block.down', whose in[0]"],
        ),
    ],
)
def test_it_is_found_whatever_is_recorded(
    variables: dict[str, str], parts: list[str], tmp_path: Path
) -> None:
    line = said(run_python(tmp_path, PROGRAM, "exp_in_glue", **variables).stderr)[0]
    assert [part for part in parts if part not in line] == [], line


def test_a_budget_looks_closer_in_the_steps_that_follow(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, "skipped_by_a_budget", OTEL_TORCH_BUDGET="0.001")
    first, closer, _ = said(done.stderr)
    assert "first NaN: step 25, something inside Net or its input: that step was not" in first
    assert "first NaN: step 26, the input in[0] of Net has it" in closer
    assert closer.endswith("seen first at step 25, which was not recorded")


def test_without_the_rows_of_training_the_next_forward_tells_of_the_update(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, "custom_backward", OTEL_TORCH_TRAINING="off")
    assert "first NaN: step 1, the update after step 0 by SGD (lr 0.01) put it" in done.stderr


def test_detecting_anomalies_works_as_without_recording(tmp_path: Path) -> None:
    bare, recorded = (
        run_python(tmp_path, PROGRAM, "anomaly", check=False, OTEL_TORCH_ENABLED=enabled)
        for enabled in ("0", "1")
    )
    for done in (bare, recorded):
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        assert done.returncode == 1
        assert errors == [
            "RuntimeError: Function 'AddmmBackward0' returned nan values in its 0th output."
        ]
        # torch's traceback of the forward that made the function
        _, found, traceback = done.stderr.partition("Error detected in AddmmBackward0.")
        assert found and "x = layer(x)" in traceback
    assert "otel_torch: " not in bare.stderr
    rows = [json.loads(row) for row in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["module"] == "custom"] == [0]


def test_every_rank_says_its_own(tmp_path: Path) -> None:
    program = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x = torch.ones(3, 4)
    if step == 1 and dist.get_rank() == 1:
        x[0, 0] = float("nan")
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
    lines = said(run_ranks(tmp_path, program).stderr)
    own = [line for line in lines if "the input in[0] of Sequential has it" in line]
    other = [line for line in lines if "or another rank did" in line]
    assert all(line.startswith("otel_torch[rank 1]: ") for line in own)
    assert all(line.startswith("otel_torch[rank 0]: ") for line in other)
    assert own and other


def test_stop_ends_the_program_behind_the_forward_with_everything_written(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, "nan_in_data", check=False, OTEL_TORCH_ON_NONFINITE="stop")
    assert done.returncode == 1
    line = said(done.stderr)[0].removeprefix("otel_torch: ")
    assert f"otel_torch.NonFiniteError: {line}" in done.stderr.splitlines()
    rows = [json.loads(row) for row in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 1, 2, 3}
    assert metadata(tmp_path / "run.jsonl")["ended_cleanly"]


@pytest.mark.parametrize(
    ("case", "operation"),
    [
        ("no_key", "aten._softmax made NaN of -inf to "),
        ("leaf", "aten.log made NaN of -10"),
        ("exp_in_glue", "aten.exp made Inf of -"),
        ("fp16_overflow", "aten.addmm made Inf of "),
        ("behind_modules", "aten.div made "),
        ("checkpointed", "aten.exp made Inf of -"),
    ],
)
def test_zoom_names_the_operation_by_a_replay(case: str, operation: str, tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, case, OTEL_TORCH_ON_NONFINITE="zoom")
    line = said(done.stderr)[0]
    assert f"replayed: {operation}" in line
    found = metadata(tmp_path / "run.jsonl")["nonfinite"]
    assert found["operation"] == line.partition("replayed: ")[2]
    assert '"op[' not in (tmp_path / "run.jsonl").read_text()


def test_zoom_names_the_operation_at_the_next_call_without_a_replay(tmp_path: Path) -> None:
    done = run_python(tmp_path, PROGRAM, "inplace_input", OTEL_TORCH_ON_NONFINITE="zoom")
    assert "not replayed: it changes its input in place" in said(done.stderr)[0]
    assert "operations of 'divide' of Net at step 1: the first NaN or Inf is op[" in done.stderr
    rows = [json.loads(row) for row in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if row["tensor"].startswith("op[")} == {1}


def test_the_hook_of_zoom_is_gone_after_that_call(tmp_path: Path) -> None:
    program = """
import torch
class Root(torch.nn.Module):
    def forward(self, x):
        return x.sub(100).sqrt()
net = torch.nn.Sequential(torch.nn.Linear(2, 2), Root())
net[1].forward = net[1].forward  # is not replayed
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
    head = page.read_text().partition("</header>")[0]  # seen without scrolling
    assert html.escape(line).replace("&#x27;", "&#39;") in head.replace("&#x27;", "&#39;")
