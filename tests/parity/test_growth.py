"""The work of a comparison grows with the recordings, not with their square, whatever their rows.

Work is counted as the lines of Python that run, so that nothing depends on the machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_torch.parity.compare import compare
from otel_torch.parity.finding import Report

SIZE = 200
Row = dict[str, Any]


def numbers(index: int) -> Row:
    return {
        "sum": float(index),
        "abs_mean": index + 1.0,
        "min": 0.0,
        "max": float(index),
        "numel": 4,
    }


def one_call(count: int) -> Iterator[Row]:
    """Many tensors with one name in one recorded call."""
    for i in range(count):
        yield {"module": "fc", "tensor": "out", "step": 0, "order": [0, 1], "value": i} | numbers(i)


def one_key(count: int) -> Iterator[Row]:
    """Many rows with the same key, without calls."""
    for i in range(count):
        yield {"module": "fc", "tensor": "out", "step": 0} | numbers(i)


def steps(count: int) -> Iterator[Row]:
    for i in range(count):
        yield {"module": "fc", "tensor": "out", "step": i} | numbers(i)


def modules(count: int) -> Iterator[Row]:
    """Many modules in one forward, without order and parents."""
    for i in range(count):
        yield {"module": f"blocks.{i}.fc", "tensor": "in[0]", "step": 0} | numbers(i)
        yield {"module": f"blocks.{i}.fc", "tensor": "out", "step": 0} | numbers(i + 1)


def orphans(count: int) -> Iterator[Row]:
    """Many calls whose enclosing calls have no rows."""
    place = {"tensor": "out", "step": 0}
    for i in range(count):
        order = {"order": [3 * i + 1, 3 * i + 2], "parent": 3 * i, "value": i}
        yield {"module": f"blocks.{i}"} | place | order | numbers(i)
    yield {"module": "", "order": [0, 3 * count], "value": count} | place | numbers(count)


def counted(run: Callable[[], Report]) -> tuple[Report, int]:
    """Return a report, and how many lines of Python ran for it."""
    lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return run(), lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        *((make, False) for make in (one_call, one_key, steps, modules, orphans)),
        *((make, True) for make in (one_key, steps, modules)),
    ],
)
def test_twice_the_rows_are_twice_the_work(make, wrong: bool, tmp_path: Path) -> None:
    works = []
    for size in (SIZE, 2 * SIZE):
        rows = list(make(size))
        port = [row | {"abs_mean": 1e3 + row["abs_mean"]} for row in rows] if wrong else rows
        for name, side in (("ref", rows), ("port", port)):
            text = "".join(json.dumps(row) + "\n" for row in side)
            (tmp_path / f"{name}.jsonl").write_text(text)
        report, work = counted(lambda: compare(tmp_path / "ref.jsonl", tmp_path / "port.jsonl"))
        assert (report.verdict == "match") is not wrong, report.reason
        works.append(work)
    assert works[1] < 2.7 * works[0], works


def test_a_call_with_too_many_tensors_to_search_is_paired_by_name_and_said(tmp_path: Path) -> None:
    path = tmp_path / "ref.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in one_call(SIZE)))
    report = compare(path, path)
    assert (report.verdict, report.pairs) == ("match", SIZE)
    assert report.warnings == [
        "fc: a call has over 128 inputs or outputs; they were paired by name and order alone"
    ]
