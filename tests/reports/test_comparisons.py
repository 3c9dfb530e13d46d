"""`otel-torch diff` says nothing that the recordings do not show, and each command it prints leads
on.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

import otel_torch
from otel_torch.cli.main import main
from otel_torch.parity.finding import Report
from otel_torch.parity.report.next_steps import next_step
from tests.reports.sides import PROGRAMS, command, diff, record
from tests.support import metadata, run_python

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
    done = command(tmp_path, "diff", *sides, "--html", page)
    assert done.returncode == 2 and done.stderr.startswith("otel_torch: partial: ")
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
GIVEN = re.compile("(was|were) given (other|different) inputs|is given other inputs")


def run_next(folder: Path, report: Report, case: str, kind: str) -> Report:
    """Run the commands of a report as its reader would; return the report of the last diff."""
    last = report
    for words in map(shlex.split, next_step(report)[1]):
        if "=" in words[0]:
            *settings, program = words
            side = {"REFERENCE_COMMAND": "ref", "PORT_COMMAND": "port"}[program]
            variables = dict(setting.split("=", 1) for setting in settings)
            assert variables.pop("OTEL_TORCH_ENABLED") == "1"
            run_python(folder, PROGRAMS / case / "prog.py", side, kind, **variables)
        else:
            assert words[0] == "otel-torch"
            status, out, err = main_in(folder, words[1:])
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


def main_in(folder: Path, words: list[str]) -> tuple[int, str, str]:
    """Run a command in this process, within a folder."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


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
        assert place_of(report) == place
        if kind not in ("other", "shape"):
            assert not GIVEN.search(report.first.explanation)
        report = run_next(tmp_path, report, "next", kind)
