"""A recording as a table: modules by statistics, what is not finite first.

For the person who asks at night whether the run is all right, and where it went wrong first.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_torch.console import say
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.rows import Row
from otel_torch.records import FINGERPRINTS, json_safe
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import Line, escape, format_table, paint, supports_color, write_line
from otel_torch.settings import STATISTICS
from otel_torch.show.selection import Selection, place, troubles

SCHEMA = "otel_torch.show/1"

# over several records the extremes are the extremes of all and counts add up; every other statistic
# is the last one
_SUMMARISE: dict[str, Callable[[float, float], float]] = {
    "min": lambda one, other: math.nan if one != one or other != other else min(one, other),
    "max": lambda one, other: math.nan if one != one or other != other else max(one, other),
    "nonfinite": lambda one, other: one + other,
    "zeros": lambda one, other: one + other,
}
# what is shown in another way, or is no reading for people
_NO_COLUMN = FINGERPRINTS | {"histogram", "shape", "dtype"}
_NAMES = ("module", "tensor", "step", "call", "loop", "model", "phase", "branch")


def print_overview(selection: Selection, as_json: bool, progress: Progress) -> int:
    """Print the table, or one JSON object. Returns 0, or 2 after one line on stderr where nothing
    is selected.
    """
    with progress:
        overview = _read(selection, progress)
    if not overview.groups:
        say(
            f"{selection.path}: none of its {selection.records} records is selected; {selection.hint()}"
        )
        return 2
    try:
        if as_json:
            write_line(sys.stdout, json.dumps(overview.as_json(), allow_nan=False))
        else:
            overview.print(supports_color(sys.stdout))
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # `| head` has seen enough; the interpreter's own flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@dataclass(slots=True)
class _Group:
    """One line of the table: the records of one tensor, or a single one."""

    row: Row
    records: int = 0
    first_bad: Row | None = None
    shapes: set[str] = field(default_factory=set)

    def add(self, row: Row) -> None:
        """Take one more record of the tensor in."""
        self.records += 1
        if self.first_bad is None and _is_bad(row):
            self.first_bad = {name: row[name] for name in _NAMES if name in row}
        self.shapes.add(str(row.get("shape")))
        summary = dict(row)
        for name, combine in _SUMMARISE.items():
            if self.records > 1 and _is_number(self.row.get(name)) and _is_number(row.get(name)):
                summary[name] = combine(self.row[name], row[name])
        self.row = summary


@dataclass(slots=True)
class _Overview:
    """What is shown: the lines, and what is to be said above them."""

    selection: Selection
    meta: dict[str, Any]
    groups: dict[tuple[Any, ...], _Group] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    first_bad: Row | None = None

    @property
    def single(self) -> bool:
        """Whether each record has a line of its own."""
        return self.selection.steps is not None

    def add(self, row: Row) -> None:
        """Take a selected record in."""
        key: tuple[Any, ...] = tuple(
            row.get(name) for name in ("model", "module", "tensor", "phase", "branch")
        )
        if self.single:
            key = (*key, self.selection.selected)
        group = self.groups.setdefault(key, _Group(row))
        group.add(row)
        if self.first_bad is None:
            self.first_bad = group.first_bad

    def ordered(self) -> list[_Group]:
        """The groups, those with a non-finite value first, each part in the order of the
        recording.
        """
        return sorted(self.groups.values(), key=lambda group: group.first_bad is None)

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON object, with non-finite numbers as strings."""
        return {
            "schema": SCHEMA,
            "recording": self.selection.path,
            "records": self.selection.records,
            "meta": _spell(self.meta),
            "warnings": self.warnings,
            "first_nonfinite": self.first_bad,
            "rows": [
                {**_spell(group.row), "records": group.records, "finite": group.first_bad is None}
                for group in self.ordered()
            ],
        }

    def print(self, color: bool) -> None:
        """Write heading, warnings and table to stdout."""
        write_line(sys.stdout, escape(self._heading()))
        for warning in self.warnings:
            write_line(sys.stdout, paint(escape(f"! {warning}"), "yellow", color))
        if self.first_bad is not None:
            write_line(
                sys.stdout,
                paint(escape(f"! first non-finite value: {place(self.first_bad)}"), "red", color),
            )
        write_line(sys.stdout, "")
        groups = self.ordered()
        columns = _columns(groups, self.single)
        lines = [
            Line(
                [text(group) for _, text in columns], "red" if group.first_bad is not None else None
            )
            for group in groups
        ]
        left = sum(
            1 for name, _ in columns if name in ("", "model", "module", "tensor", "phase", "branch")
        )
        write_line(
            sys.stdout, format_table([name for name, _ in columns], lines, left=left, color=color)
        )

    def _heading(self) -> str:
        seen, steps = self.selection, self.selection.seen_steps
        parts = [f"{seen.path}: {seen.records} records, {len(seen.seen_modules)} modules"]
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
    overview = _Overview(
        selection, read_metadata(selection.path, warnings.append), warnings=warnings
    )
    for row in selection.rows(warnings.append, progress):
        overview.add(row)
    warnings += troubles(overview.meta)
    return overview


_Column = tuple[str, Callable[[_Group], str]]


def _columns(groups: Sequence[_Group], single: bool) -> list[_Column]:
    """The columns worth showing: names that differ, statistics that were recorded."""
    columns: list[_Column] = [("", lambda group: "!" if group.first_bad is not None else "")]
    if _differ(groups, "model"):
        columns.append(("model", _text("model")))
    columns += [
        ("module", lambda group: group.row["module"] or "(root)"),
        ("tensor", _text("tensor")),
    ]
    columns += [(name, _text(name)) for name in ("phase", "branch") if _differ(groups, name)]
    if single:
        columns += [
            (name, _text(name))
            for name in ("loop", "step", "call")
            if name == "step" or _differ(groups, name)
        ]
    else:
        columns.append(("records", lambda group: str(group.records)))
        if any(group.first_bad for group in groups):
            columns.append(("bad since", lambda group: _since(group.first_bad)))
    recorded = {name for group in groups for name in group.row}
    columns += [
        (name, _text(name)) for name in STATISTICS if name in recorded and name not in _NO_COLUMN
    ]
    known = {*STATISTICS, *_NAMES}
    further = dict.fromkeys(
        name
        for group in groups
        for name, value in group.row.items()
        if name not in known and _is_number(value)
    )
    columns += [
        (name, _text(name))
        for name in further
        if name not in ("value", "storage", "order", "parent")
    ]
    if "shape" in recorded:
        columns.append(
            (
                "shape",
                lambda group: (
                    _shape(group.row.get("shape")) + (" ..." if len(group.shapes) > 1 else "")
                ),
            )
        )
    if "dtype" in recorded:
        columns.append(
            ("dtype", lambda group: str(group.row.get("dtype", "")).removeprefix("torch."))
        )
    return columns


def _differ(groups: Iterable[_Group], name: str) -> bool:
    return len({str(group.row.get(name)) for group in groups}) > 1


def _text(name: str) -> Callable[[_Group], str]:
    def text(group: _Group) -> str:
        value = group.row.get(name)
        if value is None:
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return text


def _shape(value: Any) -> str:
    return "x".join(map(str, value)) or "scalar" if isinstance(value, list) else ""


def _since(row: Row | None) -> str:
    """When a tensor first was not finite: its step, with the loop where that is not the first."""
    if row is None:
        return ""
    return f"step {row['step']}" + (f" of loop {row['loop']}" if row.get("loop") else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bad(row: Row) -> bool:
    """Whether a record shows a value that is not finite."""
    nonfinite = row.get("nonfinite")
    if _is_number(nonfinite) and nonfinite != 0:
        return True
    return any(isinstance(value, float) and not math.isfinite(value) for value in row.values())


def _spell(value: Any) -> Any:
    """A value as strict JSON carries it."""
    if isinstance(value, dict):
        return {name: _spell(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_spell(item) for item in value]
    return json_safe(value)
