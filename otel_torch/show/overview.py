"""A recording as a table of modules by statistics, tensors with NaN or Inf first."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_torch.process.console import say
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.rows import Row
from otel_torch.records import FINGERPRINTS, json_safe
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import Line, escape, format_table, paint, supports_color, write_line
from otel_torch.settings import STATISTICS
from otel_torch.show.selection import Selection, row_location, run_warnings

SCHEMA = "otel_torch.show/1"

_LOCATION = ("module", "tensor", "step", "call", "loop", "model", "phase", "branch")
_TEXT_COLUMNS = ("", "model", "module", "tensor", "phase", "branch")
# Statistics that are shown in another way, or that people cannot read.
_WITHOUT_COLUMN = FINGERPRINTS | {"histogram", "shape", "dtype"}
_BOOKKEEPING = ("value", "storage", "order", "parent")


def _min(first: float, second: float) -> float:
    return math.nan if first != first or second != second else min(first, second)


def _max(first: float, second: float) -> float:
    return math.nan if first != first or second != second else max(first, second)


def _sum(first: float, second: float) -> float:
    return first + second


# How several records of a tensor become one line. Other statistics show the last record.
_COMBINE: dict[str, Callable[[float, float], float]] = {
    "min": _min,
    "max": _max,
    "nonfinite": _sum,
    "zeros": _sum,
}


def print_overview(selection: Selection, as_json: bool, progress: Progress) -> int:
    """Print the table, or one JSON object. Return 0, or 2 if nothing is selected."""
    with progress:
        overview = _read(selection, progress)
    if not overview.lines:
        say(selection.nothing_selected())
        return 2
    try:
        if as_json:
            write_line(sys.stdout, json.dumps(overview.as_json(), allow_nan=False))
        else:
            overview.print(supports_color(sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`; the flush at interpreter exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@dataclass(slots=True)
class _TensorLine:
    """One line of the table: all records of a tensor, or a single record.

    Attributes:
        row: The statistics of the line.
        first_bad: The location of the first record with NaN or Inf, if any.
    """

    row: Row
    records: int = 0
    first_bad: Row | None = None
    shapes: set[str] = field(default_factory=set)

    def add(self, row: Row) -> None:
        """Add a record of the tensor."""
        self.records += 1
        if self.first_bad is None and _is_nonfinite(row):
            self.first_bad = {name: row[name] for name in _LOCATION if name in row}
        self.shapes.add(str(row.get("shape")))
        combined = dict(row)
        if self.records > 1:
            for name, combine in _COMBINE.items():
                if _is_number(self.row.get(name)) and _is_number(row.get(name)):
                    combined[name] = combine(self.row[name], row[name])
        self.row = combined


@dataclass(slots=True)
class _Overview:
    """The lines of the table, and the warnings above it."""

    selection: Selection
    meta: dict[str, Any]
    lines: dict[tuple[Any, ...], _TensorLine] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    first_bad: Row | None = None

    @property
    def has_line_per_record(self) -> bool:
        """Whether each record has its own line, rather than each tensor."""
        return self.selection.steps is not None

    def add(self, row: Row) -> None:
        """Add a selected record."""
        key: tuple[Any, ...] = tuple(
            row.get(name) for name in ("model", "module", "tensor", "phase", "branch")
        )
        if self.has_line_per_record:
            key = (*key, self.selection.selected)
        line = self.lines.setdefault(key, _TensorLine(row))
        line.add(row)
        if self.first_bad is None:
            self.first_bad = line.first_bad

    def sorted_lines(self) -> list[_TensorLine]:
        """Return the lines in the order of the recording, those with NaN or Inf first."""
        return sorted(self.lines.values(), key=lambda line: line.first_bad is None)

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object; NaN and Inf are strings."""
        return {
            "schema": SCHEMA,
            "recording": self.selection.path,
            "records": self.selection.records,
            "meta": _json_safe(self.meta),
            "warnings": self.warnings,
            "first_nonfinite": self.first_bad,
            "rows": [
                {**_json_safe(line.row), "records": line.records, "finite": line.first_bad is None}
                for line in self.sorted_lines()
            ],
        }

    def print(self, color: bool) -> None:
        """Print heading, warnings and table."""
        write_line(sys.stdout, escape(self._heading()))
        for warning in self.warnings:
            write_line(sys.stdout, paint(escape(f"! {warning}"), "yellow", color))
        if self.first_bad is not None:
            text = f"! first NaN or Inf: {row_location(self.first_bad)}"
            write_line(sys.stdout, paint(escape(text), "red", color))
        write_line(sys.stdout, "")
        lines = self.sorted_lines()
        columns = _columns(lines, self.has_line_per_record)
        table_lines = [
            Line(
                [format_cell(line) for _, format_cell in columns],
                None if line.first_bad is None else "red",
            )
            for line in lines
        ]
        header = [name for name, _ in columns]
        left_columns = sum(name in _TEXT_COLUMNS for name in header)
        write_line(
            sys.stdout, format_table(header, table_lines, left_columns=left_columns, color=color)
        )

    def _heading(self) -> str:
        selection, steps = self.selection, self.selection.seen_steps
        parts = [
            f"{selection.path}: {selection.records} records, {len(selection.seen_modules)} modules"
        ]
        if steps:
            first, last = min(steps), max(steps)
            parts.append(f"step {first}" if first == last else f"steps {first} to {last}")
        if "run_id" in self.meta:
            parts.append(f"run {self.meta['run_id']}")
        if "rank" in self.meta:
            parts.append(f"rank {self.meta['rank']} of {self.meta.get('world_size', '?')}")
        return ", ".join(parts)


def _read(selection: Selection, progress: Progress) -> _Overview:
    warnings: list[str] = []
    metadata = read_metadata(selection.path, warnings.append)
    overview = _Overview(selection, metadata, warnings=warnings)
    for row in selection.rows(warnings.append, progress):
        overview.add(row)
    warnings += run_warnings(metadata)
    return overview


_Column = tuple[str, Callable[[_TensorLine], str]]  # its name, and the text of a line's cell


def _columns(lines: Sequence[_TensorLine], has_line_per_record: bool) -> list[_Column]:
    """Return the columns worth showing: names that differ, and statistics that were recorded."""
    columns: list[_Column] = [("", lambda line: "" if line.first_bad is None else "!")]
    if _differs(lines, "model"):
        columns.append(_field_column("model"))
    columns.append(("module", lambda line: line.row["module"] or "(root)"))
    columns.append(_field_column("tensor"))
    columns += [_field_column(name) for name in ("phase", "branch") if _differs(lines, name)]
    if has_line_per_record:
        for name in ("loop", "step", "call"):
            if name == "step" or _differs(lines, name):
                columns.append(_field_column(name))
    else:
        columns.append(("records", lambda line: str(line.records)))
        if any(line.first_bad for line in lines):
            columns.append(("bad since", lambda line: _format_step(line.first_bad)))
    columns += map(_field_column, _recorded_statistics(lines))
    recorded = {name for line in lines for name in line.row}
    if "shape" in recorded:
        columns.append(("shape", _format_shape))
    if "dtype" in recorded:
        columns.append(
            ("dtype", lambda line: str(line.row.get("dtype", "")).removeprefix("torch."))
        )
    return columns


def _recorded_statistics(lines: Sequence[_TensorLine]) -> list[str]:
    """Return the known statistics in their usual order, then further numbers of the recording."""
    names = dict.fromkeys(name for line in lines for name in line.row)
    usual = [name for name in STATISTICS if name in names and name not in _WITHOUT_COLUMN]
    ignored = {*STATISTICS, *_LOCATION, *_BOOKKEEPING}
    further = dict.fromkeys(
        name
        for line in lines
        for name, value in line.row.items()
        if name not in ignored and _is_number(value)
    )
    return usual + list(further)


def _differs(lines: Iterable[_TensorLine], name: str) -> bool:
    return len({str(line.row.get(name)) for line in lines}) > 1


def _field_column(name: str) -> _Column:
    def format_cell(line: _TensorLine) -> str:
        value = line.row.get(name)
        if value is None:
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return name, format_cell


def _format_shape(line: _TensorLine) -> str:
    shape = line.row.get("shape")
    text = ""
    if isinstance(shape, list):
        text = "x".join(map(str, shape)) or "scalar"
    return f"{text} ..." if len(line.shapes) > 1 else text


def _format_step(location: Row | None) -> str:
    """Return the step of a location, with its loop unless that is the first."""
    if location is None:
        return ""
    step = f"step {location['step']}"
    return f"{step} of loop {location['loop']}" if location.get("loop") else step


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_nonfinite(row: Row) -> bool:
    """Return whether a record counts or contains NaN or Inf."""
    nonfinite = row.get("nonfinite")
    if _is_number(nonfinite) and nonfinite != 0:
        return True
    return any(isinstance(value, float) and not math.isfinite(value) for value in row.values())


def _json_safe(value: Any) -> Any:
    """Return the value with NaN and Inf as strings, also inside lists and dicts."""
    if isinstance(value, dict):
        return {name: _json_safe(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    return json_safe(value)
