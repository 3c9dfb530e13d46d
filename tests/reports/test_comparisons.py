"""`otel-torch diff` says nothing that the recordings do not show, and each command it prints leads
on.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import otel_torch
from otel_torch.cli.main import main
from otel_torch.parity.finding import Report
from otel_torch.parity.report.next_steps import next_steps
from otel_torch.parity.report.text import render_text
from tests.interpreters import command_of_tests
from tests.reports.robot import Robot
from tests.reports.sides import PROGRAMS, command, diff, record
from tests.sampling import sample
from tests.support import metadata, recording_to, run_python

# -- a comparison that is not whole


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("steps")
    return record(folder, "steps", "ref"), record(folder, "steps", "port")


def cut(recording: Path, folder: Path, *, torn: bool) -> Path:
    """Copy a recording up to the middle of its second forward."""
    text = recording.read_bytes()
    lines = text.splitlines(keepends=True)
    second = next(n for n, line in enumerate(lines) if json.loads(line)["step"] == 1)
    kept = b"".join(lines[: second + 2])
    target = folder / recording.name
    target.write_bytes(kept[:-20] if torn else kept)
    facts = metadata(recording)
    target.with_suffix("").with_suffix(".meta.json").write_text(json.dumps(facts))
    return target


@pytest.mark.parametrize("torn", [True, False])
@pytest.mark.parametrize("side", [0, 1])
def test_a_recording_that_was_cut_does_not_match(
    tmp_path: Path, steps: tuple[Path, Path], side: int, torn: bool
) -> None:
    sides = list(steps)
    sides[side] = cut(sides[side], tmp_path, torn=torn)
    answer = diff(tmp_path, *sides)
    assert (answer.status, answer.verdict, answer.report["first"]) == (2, "partial", None)
    words = "was cut off" if torn else "was cut: it has"
    assert words in answer.report["reason"] and words in answer.text
    assert "1 forward of Denoiser" in answer.report["reason"]
    assert "matches" not in answer.text
    page = tmp_path / "page.html"
    status, _, error = command(tmp_path, "diff", *sides, "--html", page)
    assert status == 2 and error.startswith("otel_torch: partial: ")
    assert "not everything was compared" in page.read_text()
    assert "matches the reference" not in page.read_text()


@pytest.mark.parametrize("bitwise", [True, False])
def test_steps_that_only_one_side_runs_are_not_compared(tmp_path: Path, bitwise: bool) -> None:
    reference = record(tmp_path, "steps", "ref")
    fewer = tmp_path / "fewer.jsonl"
    lines = reference.read_text().splitlines(keepends=True)
    fewer.write_text("".join(line for line in lines if json.loads(line)["step"] != 2))
    facts = metadata(reference)
    facts["models"]["Denoiser"]["forwards"] = 2
    facts["records_written"] = len(fewer.read_text().splitlines())
    fewer.with_suffix(".meta.json").write_text(json.dumps(facts))
    for sides in ((reference, fewer), (fewer, reference)):
        report = otel_torch.diff(*sides, bitwise=bitwise)
        assert (report.verdict, report.first) == ("partial", None)
        assert "without a counterpart" in report.reason or "no counterpart" in report.reason
        assert report.as_json()["reason"] == report.reason


def test_ranks_are_whole_only_if_each_is(tmp_path: Path, steps: tuple[Path, Path]) -> None:
    for side in ("reference", "port"):
        for rank in (0, 1):
            folder = tmp_path / side
            folder.mkdir(exist_ok=True)
            target = folder / f"run.rank{rank}.jsonl"
            target.write_bytes(steps[0].read_bytes())
            facts = metadata(steps[0]) | {"rank": rank, "world_size": 2}
            target.with_suffix(".meta.json").write_text(json.dumps(facts))
    reference, port = tmp_path / "reference", tmp_path / "port"
    assert otel_torch.diff(reference, port).verdict == "match"
    broken = port / "run.rank1.jsonl"
    broken.write_bytes(b"".join(broken.read_bytes().splitlines(keepends=True)[:-3]))
    report = otel_torch.diff(reference, port)
    assert (report.verdict, report.first) == ("partial", None)
    assert report.reason.startswith("rank 1: ") and "was cut" in report.reason
    broken.unlink()
    broken.with_suffix(".meta.json").unlink()
    report = otel_torch.diff(reference, port)
    assert report.verdict == "partial" and "only the first rank" in report.reason


def test_a_whole_comparison_matches(tmp_path: Path, steps: tuple[Path, Path]) -> None:
    answer = diff(tmp_path, *steps)
    assert (answer.status, answer.verdict, answer.report["reason"]) == (0, "match", None)


# -- the next step

KINDS = (
    "glue", "act", "weights", "layout", "missing", "nonfinite", "shape",
    "encode", "decode", "other", "rounded", "loop",
)  # fmt: skip
# the line of the port that the steps lead to
LINES = {"glue": "hidden**2", "act": "x**3", "nonfinite": "x.log()", "loop": "torch.sin(x)"}
GIVEN = re.compile("(was|were) given (other|different) inputs|is given other inputs")


def run_next(folder: Path, report: Report, case: str, kind: str) -> Report:
    """Run the commands of a report as its reader would; return the report of the last diff."""
    last = report
    for step in next_steps(report):
        words = list(step.command)
        if words[:2] == ["otel-torch", "bisect"]:
            continue  # the steps after it lead to the same answer
        if words[0] != "otel-torch":
            side = {"REFERENCE_COMMAND": "ref", "PORT_COMMAND": "port"}[words[0]]
            assert step.environment["OTEL_TORCH_ENABLED"] == "1"
            run_python(folder, PROGRAMS / case / "prog.py", side, kind, **step.environment)
        else:
            status, out, err = command(folder, *words[1:])
            assert status in (0, 1), (words, err)
            assert out.strip(), words
            if words[1] == "diff":
                last = parsed_diff(folder, words[2:])
    return last


def parsed_diff(folder: Path, words: list[str]) -> Report:
    """Return the report of `otel-torch diff` with these arguments."""
    reference, port, *options = words
    tensors = (options[1], options[2]) if options[:1] == ["--tensors"] else None
    with contextlib.chdir(folder):
        return otel_torch.diff(reference, port, tensors=tensors)


def place_of(report: Report) -> tuple[object, ...]:
    first = report.first
    assert first is not None
    return first.module, first.port_module, first.side, first.port_side, first.step


@pytest.mark.parametrize("kind", sample(LINES, 2))
def test_a_robot_that_knows_nothing_but_next_finds_the_line(tmp_path: Path, kind: str) -> None:
    prog = PROGRAMS / "next" / "prog.py"
    programs = {
        f"{name}_COMMAND": [command_of_tests("python"), str(prog), side, kind]
        for name, side in (("REFERENCE", "ref"), ("PORT", "port"))
    }

    def start(words: Sequence[str], settings: Mapping[str, str]) -> object:
        return run_python(tmp_path, Path(words[1]), *words[2:], **settings)

    for words, file in zip(programs.values(), ("ref.jsonl", "port.jsonl"), strict=True):
        start(words, {"OTEL_TORCH_CAPTURE": "parity", "OTEL_TORCH_JSONL": file})
    answer = Robot(tmp_path, programs, start).follow(
        ["otel-torch", "diff", "ref.jsonl", "port.jsonl"]
    )
    assert answer["schema"] == "otel_torch.bisect/1"
    assert LINES[kind] in answer["faults"][0]["port_line"]["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_of_next_leads_on(tmp_path: Path, kind: str) -> None:
    for side in ("ref", "port"):
        run_python(
            tmp_path, PROGRAMS / "next" / "prog.py", side, kind,
            OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_JSONL=f"{side}.jsonl",
        )  # fmt: skip
    report = parsed_diff(tmp_path, ["ref.jsonl", "port.jsonl"])
    place = place_of(report)
    for _ in range(2):
        assert report.verdict == "diverged" and report.first is not None
        assert place_of(report) == place or report.by_operations
        if kind not in ("other", "shape"):
            assert not GIVEN.search(report.first.explanation)
        report = run_next(tmp_path, report, "next", kind)
    if kind in LINES:
        assert report.first is not None and report.first.port_line is not None
        assert LINES[kind] in report.first.port_line.text


# -- what enters a model


@dataclass(frozen=True)
class Expected:
    """The place of a finding, its cause, and words of its text."""

    module: str
    side: str
    cause: str | None
    words: str
    tensor: str = "in[0]"


INPUTS = {
    "range": Expected("inner", "input", "scaled", "times 0.5, plus 0.5"),
    "inside": Expected("waves", "input", "rounded", "rounded to bfloat16"),
    "sigma": Expected("", "input", "rounded", "rounded to bfloat16", "in[1]"),
    "schedule": Expected("", "input", "number", "the reference's 987.3", "in[1]"),
    "mask": Expected("pool", "output", None, "Only the reference passes `mask` to pool", "out"),
    "rows": Expected("last", "input", "part", "row 3 of 5"),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", INPUTS)
def test_what_enters_is_named_as_what_it_is(tmp_path: Path, kind: str, whole: bool) -> None:
    for side in ("ref", "port"):
        tensors = {"OTEL_TORCH_TENSORS": f"{side}-tensors"} if whole else {}
        run_python(
            tmp_path, PROGRAMS / "inputs" / "prog.py", side, kind,
            OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_JSONL=f"{side}.jsonl", **tensors,
        )  # fmt: skip
    with contextlib.chdir(tmp_path):
        report = otel_torch.diff("ref.jsonl", "port.jsonl")
    first, expected = report.first, INPUTS[kind]
    assert first is not None
    place = first.module, first.port_module, first.side, first.tensor
    assert place == (expected.module, expected.module, expected.side, expected.tensor)
    text = " ".join(render_text(report, color=False).split())
    assert "same prompt" not in text and not GIVEN.search(text)
    assert not re.search(r"\btokens?\b", text) or kind not in ("rows", "inside")
    if whole or kind != "rows":
        assert (first.cause and first.cause.kind) == expected.cause
        assert expected.words in text
    assert ("Everything" in text) == (kind in ("inside", "rows"))


@pytest.mark.parametrize(
    ("reference", "port", "words"),
    [
        (5, 6, "sees the last 6 tokens, the reference's the last 5"),
        (5, 3, "sees the last 5 tokens, the port's the last 3"),
        (5, 99, "The reference's attention sees the last 5 tokens only"),
        (99, 4, "sees the last 4 tokens only"),
    ],
)
def test_another_window_of_attention_is_named(
    tmp_path: Path, reference: int, port: int, words: str
) -> None:
    for side, window in (("ref", reference), ("port", port)):
        run_python(
            tmp_path, PROGRAMS / "windows" / "prog.py", side, str(window),
            OTEL_TORCH_CAPTURE="parity", OTEL_TORCH_JSONL=f"{side}.jsonl",
            OTEL_TORCH_TENSORS=f"{side}-tensors",
        )  # fmt: skip
    with contextlib.chdir(tmp_path):
        first = otel_torch.diff("ref.jsonl", "port.jsonl").first
    assert first is not None and first.cause is not None
    assert (first.module, first.side, first.cause.kind) == ("o", "input", "mask")
    assert words in first.explanation


# -- a finding is in one place, and sure of what it says


class Blocks(nn.Module):
    """A stack whose modules the port calls in another order, and whose factor it forgets."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.stack):
            hidden = block[1](block[0](x))
            if self.fault == "other" and number == 1:
                hidden = block[0](x)
            if self.fault == "scaled" and number == 1:
                hidden = hidden * 0.9
            x = x + block[2](hidden)
        return x


def compared(tmp_path: Path, fault: str) -> Report:
    for name, model in (("ref", Blocks()), ("port", Blocks(fault))):
        with recording_to(tmp_path / f"{name}.jsonl"):
            model(torch.linspace(-1, 1, 32).reshape(4, 8))
    return otel_torch.diff(tmp_path / "ref.jsonl", tmp_path / "port.jsonl")


@pytest.mark.parametrize("fault", ["other", "scaled"])
def test_the_table_ends_at_the_place_of_the_finding(tmp_path: Path, fault: str) -> None:
    report = compared(tmp_path, fault)
    first = report.first
    assert first is not None
    lines = render_text(report, color=False).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("  port ")]
    (end,) = [line for line in lines if line.startswith("✗ introduced")]
    assert row[2:4] == [first.port_module, first.port_tensor]
    assert first.module in end and first.tensor in end
    if first.port_module != first.module or first.port_tensor != first.tensor:
        assert first.port_module in end and first.port_tensor in end


def test_which_tensor_belongs_somewhere_is_said_with_care(tmp_path: Path) -> None:
    first = compared(tmp_path, "other").first
    assert first is not None and first.cause is not None
    assert (first.cause.kind, first.cause.certain) == ("other_tensor", False)
    assert first.explanation.startswith("Probably, the port has the output of stack.1.0")


# -- a reference that is not torch


def test_no_command_runs_a_reference_that_was_imported(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    kernels = [random.normal(0, 0.3, (16, 16)).astype(np.float32) for _ in range(4)]
    x = inputs = random.normal(0, 1, (4, 16)).astype(np.float32)
    dump = {}
    for number, kernel in enumerate(kernels):
        dump[f"layer_{number}/dense"] = product = x @ kernel
        dump[f"layer_{number}/act"] = x = np.tanh(product)
    np.savez(tmp_path / "dump.npz", **dump)

    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in kernels)
            self.act = nn.ModuleList(nn.Tanh() for _ in kernels)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, (dense, act) in enumerate(zip(self.dense, self.act, strict=True)):
                x = act(dense(x)) * (0.9 if number == 1 else 1)
            return x

    port = Port()
    with recording_to(tmp_path / "port.jsonl"):
        for dense, kernel in zip(port.dense, kernels, strict=True):
            dense.weight.copy_(torch.tensor(kernel.T))
        port(torch.tensor(inputs))
    assert (
        main(["import", str(tmp_path / "dump.npz"), "--output", str(tmp_path / "ref.jsonl")]) == 0
    )
    report = otel_torch.diff(tmp_path / "ref.jsonl", tmp_path / "port.jsonl")
    text = render_text(report, color=False)
    assert report.imported == (True, False) and report.verdict == "diverged"
    steps = next_steps(report)
    assert steps and not any("REFERENCE_COMMAND" in step.command for step in steps)
    assert "OTEL_TORCH_JSONL=ref" not in text and "record all of the reference" not in text
