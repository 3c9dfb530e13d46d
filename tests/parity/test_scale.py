"""Long recordings are compared like short ones, in little memory, and steps without a counterpart
are reported.

Each recording is a real one of two forwards, lengthened: further steps repeat the rows of the
second forward with other numbers.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_torch.parity import compare as comparing
from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report
from otel_torch.recording.metadata import metadata_path
from otel_torch.recording.reader import RecordingError
from tests.support import lines, metadata

PROGRAM = "denoise_with_context.py"
NUMBERS = ("abs_mean", "sum", "min", "max", "mean", "std", "rms", "l2")
STEPS = 40

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def real(recorded_program) -> Callable[[str], tuple[Rows, dict[str, Any]]]:
    """Return a function that gives the rows and metadata of a program's recording."""

    @cache
    def read(kind: str) -> tuple[Rows, dict[str, Any]]:
        noise = {"OTEL_TORCH_NOISE": "1"} if kind == "noise" else {}
        path = recorded_program(PROGRAM, "reference" if noise else kind, **noise)
        return lines(path), metadata(path)

    return read


def attached(rows: Rows) -> Rows:
    return [row for row in rows if row["phase"] == "attach"]


def forward(rows: Rows, step: int) -> Rows:
    return [row for row in rows if row["phase"] != "attach" and row["step"] == step]


def further(rows: Rows, step: int, scale: float = 1.0) -> Rows:
    """Return the rows of the second forward again, as a later step with other numbers."""
    template = forward(rows, 1)
    start = min(row["value"] for row in template if "sketch" in row)
    ahead = step * 10_000
    later_rows = []
    for row in template:
        new = {**row, "step": step, "order": [index + ahead for index in row["order"]]}
        if row["parent"] is not None:
            new["parent"] = row["parent"] + ahead
        if row["value"] >= start:  # not a tensor of the first step that is given again
            new["value"] += ahead
            for name in NUMBERS:
                if name in new:
                    new[name] *= scale
            if "sketch" in new:
                numbers = np.frombuffer(base64.b64decode(new["sketch"]), "<f4") * np.float32(scale)
                new["sketch"] = base64.b64encode(numbers.tobytes()).decode()
        later_rows.append(new)
    return later_rows


def scale_of(step: int) -> float:
    return 1 - 0.25 * abs(math.sin(step))


@pytest.fixture
def lengthened(real):
    def lengthened(
        kind: str, steps: Iterable[int] = range(2, STEPS), wrong_at: Iterable[int] = ()
    ) -> Rows:
        """Return a program's rows with further steps, some of them of a faulty program."""
        rows, wrong_at = real(kind)[0], set(wrong_at)
        all_rows = list(rows)
        for step in steps:
            template = real("wrong")[0] if step in wrong_at else rows
            all_rows += further(template, step, scale_of(step))
        return all_rows

    return lengthened


@pytest.fixture
def write(tmp_path, real, lengthened):
    def write(kind: str, rows: Rows | None = None, **fields: Any) -> Path:
        """Write a recording with the metadata of a program, and its lengthened rows or others."""
        path = tmp_path / f"{kind}.jsonl"
        rows = lengthened(kind) if rows is None else rows
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        meta = json.loads(json.dumps(real(kind)[1]))
        forwards = len({row["step"] for row in rows if row["phase"] != "attach"})
        for facts in meta["models"].values():
            facts["forwards"] = forwards
        metadata_path(path).write_text(json.dumps({**meta, **fields}))
        return path

    return write


@pytest.fixture
def analysed(monkeypatch) -> list[int]:
    """Count the forwards that each comparison analyses in full."""
    counts: list[int] = []
    in_full, run = comparing._Comparison._compare_in_full, comparing._Comparison.run

    def count(self, *arguments):
        counts[-1] += 1
        return in_full(self, *arguments)

    def start(self):
        counts.append(0)
        return run(self)

    monkeypatch.setattr(comparing._Comparison, "_compare_in_full", count)
    monkeypatch.setattr(comparing._Comparison, "run", start)
    return counts


def same(actual: Report, expected: Report) -> None:
    """Check that two reports agree; errors may differ by the order of summation."""

    def near(a, b):
        return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6))

    assert (actual.verdict, actual.reason, actual.warnings) == (
        expected.verdict,
        expected.reason,
        expected.warnings,
    )
    # of a wrong forward the full analysis expects less: what is made of wrong inputs
    assert expected.pairs <= actual.pairs <= 1.02 * expected.pairs and (
        actual.first or actual.pairs == expected.pairs
    )
    assert (actual.unpaired, actual.ambiguous, actual.weaker) == (
        expected.unpaired,
        expected.ambiguous,
        expected.weaker,
    )
    whole = [[pair for pair in report.compared if pair.statistics] for report in (actual, expected)]
    for actual_pairs, expected_pairs in (
        (actual.introduced, expected.introduced),
        (actual.harmless, expected.harmless),
        whole,
    ):
        assert [replace(a, error=0, floor=0) for a in actual_pairs] == [
            replace(b, error=0, floor=0) for b in expected_pairs
        ]
        assert all(
            near(a.error, b.error) and near(a.floor, b.floor)
            for a, b in zip(actual_pairs, expected_pairs, strict=True)
        )
    states = [
        {(pair.step, pair.module, pair.tensor): pair.state for pair in report.compared}
        for report in (actual, expected)
    ]
    assert all(
        states[1][place] == state for place, state in states[0].items() if place in states[1]
    )


def both(analysed: list[int], *paths: Path, **options: Any) -> Report:
    """Compare, and check that comparing every forward in full gives the same report."""
    quick, thorough = compare(*paths, **options), compare(*paths, thorough=True, **options)
    same(quick, thorough)
    assert analysed[-1] >= STEPS - 5 and analysed[-2] < analysed[-1] / 3
    return quick


@pytest.fixture(params=[False, True], ids=["no noise", "noise"])
def noise(request, write) -> dict[str, Path]:
    return {"noise": write("noise")} if request.param else {}


def test_a_long_match_is_analysed_once_for_each_structure(write, analysed, noise):
    report = both(analysed, write("reference"), write("port"), **noise)
    assert (report.verdict, report.first, report.warnings, report.weaker) == (
        "match",
        None,
        [],
        False,
    )
    assert report.pairs > STEPS * 25
    assert analysed[0] == 2  # the context is new in the first forward and known in all others
    assert {pair.step for pair in report.compared} == set(range(STEPS))


def test_a_divergence_that_begins_late_is_found_where_it_begins(write, lengthened, analysed, noise):
    late = lengthened("port", wrong_at=range(30, STEPS))
    report = both(analysed, write("reference"), write("port", late), **noise)
    assert report.verdict == "diverged"
    assert (report.first.port_module, report.first.side, report.first.step) == (
        "blocks.1.act",
        "output",
        30,
    )
    assert len(report.introduced) == 1
    whole = {
        step
        for step in range(STEPS)
        if len([pair for pair in report.compared if pair.step == step]) > 25
    }
    assert whole == {0, 1, 29, 30}
    assert (
        report.compared_left_out == report.pairs - len(report.compared) - 24
    )  # parameters are pairs of no step


def test_a_divergence_that_heals_stays_found(write, lengthened, analysed):
    healing = lengthened("port", wrong_at=range(20, 23))
    report = both(analysed, write("reference"), write("port", healing))
    assert (report.verdict, report.first.step, len(report.introduced)) == ("diverged", 20, 1)
    states = {
        step: {pair.state for pair in report.compared if pair.step == step} for step in (19, 20, 30)
    }
    assert states == {19: {"right"}, 20: {"right", "introduced", "inherited"}, 30: {"right"}}


def test_a_structure_that_changes_is_analysed_anew(write, lengthened, analysed):
    def changed(rows):
        return [row for row in rows if row["step"] < 25 or not row["module"].startswith("context")]

    late = lengthened("port", wrong_at=range(35, STEPS))
    report = both(
        analysed,
        write("reference", changed(lengthened("reference"))),
        write("port", changed(late)),
    )
    assert (report.first.port_module, report.first.step) == ("blocks.1.act", 35)


def test_rows_that_are_missing_on_one_side_are_said(write, lengthened, analysed):
    late = lengthened("port", wrong_at=range(35, STEPS))
    lost = [row for row in late if not (row["step"] >= 20 and row["module"] == "blocks.0.fc1")]
    report = both(analysed, write("reference"), write("port", lost))
    assert (report.first.port_module, report.first.step) == ("blocks.1.act", 35)
    assert report.warnings == [
        "calls without a counterpart, of modules that have one: 20 of blocks.0.up in the reference"
    ]


@pytest.mark.parametrize("side", ["reference", "port"])
def test_warm_up_forwards_have_no_counterpart(real, write, analysed, side):
    warm = real(side)[0]
    names = {row["module"] for row in warm}
    first = [
        {**row, "value": row["value"] + 500_000}
        for row in forward(real("dummy")[0], 0)
        if row["module"] in names
    ]
    whole = attached(warm) + first
    for step in range(STEPS):
        for row in forward(warm, step) if step < 2 else further(warm, step, scale_of(step)):
            parent = None if row["parent"] is None else row["parent"] + 5000
            whole.append(
                {
                    **row,
                    "step": step + 1,
                    "order": [index + 5000 for index in row["order"]],
                    "parent": parent,
                }
            )
    report = compare(
        *(write(kind, whole if kind == side else None) for kind in ("reference", "port"))
    )
    left_out = f"1 forward of Model in the {side} has no counterpart and was not compared"
    assert (report.verdict, report.reason, report.first) == ("partial", left_out, None)
    assert left_out in report.warnings
    assert report.pairs > STEPS * 25


def test_steps_that_are_numbered_otherwise_are_compared_in_turn_and_said(write, lengthened):
    moved = [
        row if row["phase"] == "attach" else {**row, "step": row["step"] + 1}
        for row in lengthened("port")
    ]
    report = compare(write("reference"), write("port", moved))
    assert report.verdict == "match"
    assert {(pair.step, pair.port_step) for pair in report.compared} == {
        (step, step + 1) for step in range(STEPS)
    }
    assert report.warnings == [
        "the first forward of Model that can be compared is of step 0 in the reference and of step 1 in the port: forwards are "
        "paired by their inputs and in order"
    ]


def test_a_shorter_recording_is_compared_as_far_as_it_goes(write, lengthened):
    short = write("port", lengthened("port", range(2, 30)), ended_cleanly=False)
    report = compare(write("reference"), short)
    assert report.verdict == "partial" and max(pair.step for pair in report.compared) == 29
    assert report.reason == "; ".join(report.warnings)
    killed, uncompared = report.warnings
    assert "port.jsonl: ends early: its run was killed or is still running" in killed
    assert (
        uncompared
        == "10 forwards of Model in the reference have no counterpart and were not compared"
    )


def test_many_steps_are_kept_in_bounded_memory(write, lengthened, monkeypatch):
    monkeypatch.setattr("otel_torch.parity.retained_pairs._CELLS", 200)
    report = compare(
        *(write(kind, lengthened(kind, range(2, 200))) for kind in ("reference", "port"))
    )
    assert len(report.compared) < 400 < report.compared_left_out
    steps = {pair.step for pair in report.compared}
    assert steps >= {0, 1} and max(steps) > 150
    assert {pair.module for pair in report.compared if pair.step > 1} == {
        pair.module for pair in report.compared
    }


# -- FastVideo's own rows
# --------------------------------------------------------------------------------------------------


def bare(
    rows: Rows, step: Callable[[dict[str, Any]], int | None] = lambda row: row["step"]
) -> Rows:
    """Return the outputs only, as FastVideo's own trace writes them."""
    return [
        {
            "module": row["module"],
            "tensor": row["tensor"],
            "step": step(row),
            **{n: row[n] for n in NUMBERS if n in row},
        }
        for row in rows
        if row["phase"] != "attach" and row["tensor"].startswith("out")
    ]


def plainly(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("numbered", [True, False], ids=["steps", "null steps"])
def test_rows_without_calls(tmp_path, real, lengthened, analysed, numbered):
    def step(row):
        return row["step"] if numbered else None

    named = {"layer_norm": "norm", "fc1": "up", "fc2": "down"}
    for row in real("wrong")[0]:
        row["module"] = ".".join(named.get(part, part) for part in row["module"].split("."))
    right = bare(lengthened("reference"), step)
    ref = plainly(tmp_path / "ref.jsonl", right)
    assert both(analysed, ref, plainly(tmp_path / "same.jsonl", right)).verdict == "match"
    late = lengthened("reference", wrong_at=range(30, STEPS))
    report = both(analysed, ref, plainly(tmp_path / "late.jsonl", bare(late, step)))
    assert report.verdict == "diverged" and report.weaker
    assert (report.first.port_module, report.first.step) == (
        "blocks.1.act",
        30 if numbered else None,
    )


def test_two_forwards_in_a_step_without_calls_are_paired_in_order_and_said(tmp_path, lengthened):
    rows = bare(lengthened("reference"), lambda row: row["step"] // 2)
    ref, port = (plainly(tmp_path / f"{name}.jsonl", rows) for name in ("ref", "port"))
    report = compare(ref, port)
    assert report.verdict == "match"
    assert [warning for warning in report.warnings if "port.jsonl" in warning] == [
        f"{port}: tensors repeat within a step and name no call: paired in order of occurrence"
    ]


def test_a_forward_without_an_end_is_cut_where_its_step_changes(lengthened, write, monkeypatch):
    """The outermost module of this program runs all steps itself."""

    def around(rows):
        last = max(row["order"][1] for row in rows if row["phase"] != "attach")
        outer = {
            **forward(rows, 0)[0],
            "module": "loop",
            "order": [0, last + 5],
            "parent": None,
            "value": 10**8,
        }
        shifted = [
            {
                **row,
                "order": [index + 1 for index in row["order"]],
                "parent": 0 if row["parent"] is None else row["parent"] + 1,
            }
            for row in rows
            if row["phase"] != "attach"
        ]
        return [*attached(rows), outer, *shifted]

    monkeypatch.setattr("otel_torch.parity.forwards._LONGEST", 50)
    paths = [write(kind, around(lengthened(kind))) for kind in ("reference", "port")]
    report = compare(*paths)
    assert report.verdict == "match" and report.pairs >= STEPS * 25
    assert any(
        f"{paths[0]}: a stretch of many rows without an end was cut" in warning
        for warning in report.warnings
    )


# -- what does not belong together
# -----------------------------------------------------------------------------------------


def test_a_schema_that_is_not_known_is_one_line(write):
    later = write("port", schema="otel_torch.recording/7")
    with pytest.raises(
        RecordingError,
        match=r"port\.jsonl: its schema is 'otel_torch\.recording/7'; this version reads",
    ):
        compare(write("reference"), later)


def test_noise_of_the_port_is_one_line(write, tmp_path):
    paths = write("reference"), write("port")
    with pytest.raises(RecordingError, match="noise takes the reference"):
        compare(*paths, noise=paths[1])


def test_noise_that_lacks_forwards_is_said(write, lengthened):
    short = write("noise", lengthened("noise", range(2, 35)))
    report = compare(write("reference"), write("port"), noise=short)
    assert report.verdict == "match"
    assert report.warnings == [
        "5 forwards have no counterpart in the noise; the constants of the dtypes decided there"
    ]


def test_progress_tells_how_much_is_read(write, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))
    messages: list[str] = []
    paths = write("reference"), write("port")
    compare(*paths, progress=messages.append)
    shares = [int(text.split(" %")[0]) for text in messages]
    assert shares == sorted(shares) and shares[-1] == 100 and len(shares) > 1
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    messages.clear()
    compare(*paths, progress=messages.append)
    assert len(messages) == 1  # no time has passed since
