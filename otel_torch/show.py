"""`otel-torch show`: a recording as a table, modules by statistics, what is not finite first.

For the person who asks at night whether the run is all right, and where it went wrong first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_torch.console import say
from otel_torch.parity.recording import RecordingError, Row, iterate_rows, read_metadata
from otel_torch.records import FINGERPRINTS, Losses, spell
from otel_torch.settings import STATISTICS, BadValue, Numbers
from otel_torch.table import Line, colourful, escape, paint, render, write

SCHEMA = "otel_torch.show/1"

# over several records the extremes are the extremes of all and counts add up; every other statistic is the last one
_SUMMARISE: dict[str, Callable[[float, float], float]] = {
    "min": lambda one, other: math.nan if one != one or other != other else min(one, other),
    "max": lambda one, other: math.nan if one != one or other != other else max(one, other),
    "nonfinite": lambda one, other: one + other,
    "zeros": lambda one, other: one + other,
}
# what is shown in another way, or is no reading for people
_NO_COLUMN = FINGERPRINTS | {"histogram", "shape", "dtype"}
_NAMES = ("module", "tensor", "step", "call", "loop", "model", "phase", "branch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `otel-torch show`."""
    parser.add_argument("recording", metavar="RECORDING", help="a recording (.jsonl), also one of FastVideo's own trace")
    parser.add_argument("--module", metavar="REGEX", help="only modules in whose name this is found")
    parser.add_argument("--step", metavar="LIST", help="only these steps (0,2,10-20,*/10), each record on a line of its own")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Returns 0, or 2 after one line on stderr for bad input."""
    try:
        modules = re.compile(arguments.module) if arguments.module else None
        steps = Numbers.parse(arguments.step, problem=lambda message: say(f"--step: {message}")) if arguments.step else None
        overview = _read(arguments.recording, modules, steps)
    except re.error as error:
        say(f"--module {arguments.module!r} is not a regular expression: {error}")
        return 2
    except RecordingError as error:
        say(str(error))
        return 2
    except BadValue as error:
        say(f"--step {arguments.step!r}: {error}")
        return 2
    if not overview.groups:
        say(f"{arguments.recording}: none of its {overview.records} records is selected; {overview.hint()}")
        return 2
    try:
        if arguments.json:
            write(sys.stdout, json.dumps(overview.as_json(), allow_nan=False))
        else:
            overview.print(colourful(sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; the interpreter's own flush at exit must not fail either
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

    path: str
    meta: dict[str, Any]
    single: bool
    records: int = 0
    groups: dict[tuple[Any, ...], _Group] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    modules: dict[str, None] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    first_bad: Row | None = None

    def add(self, row: Row) -> None:
        """Take a selected record in."""
        key: tuple[Any, ...] = tuple(row.get(name) for name in ("model", "module", "tensor", "phase", "branch"))
        if self.single:
            key = (*key, self.records)
        group = self.groups.setdefault(key, _Group(row))
        group.add(row)
        if self.first_bad is None:
            self.first_bad = group.first_bad

    def ordered(self) -> list[_Group]:
        """The groups, those with a non-finite value first, each part in the order of the recording."""
        return sorted(self.groups.values(), key=lambda group: group.first_bad is None)

    def hint(self) -> str:
        """What could have been selected."""
        modules, steps = list(self.modules), sorted(self.steps)
        named = ", ".join(escape(name) or "the root" for name in modules[:3]) + (", ..." if len(modules) > 3 else "")
        return f"it has {len(modules)} modules ({named})" + (f" and steps {steps[0]} to {steps[-1]}" if steps else "")

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON object, with non-finite numbers as strings."""
        return {
            "schema": SCHEMA,
            "recording": self.path,
            "records": self.records,
            "meta": _spell(self.meta),
            "warnings": self.warnings,
            "first_nonfinite": self.first_bad,
            "rows": [
                {**_spell(group.row), "records": group.records, "finite": group.first_bad is None} for group in self.ordered()
            ],
        }

    def print(self, colour: bool) -> None:
        """Write heading, warnings and table to stdout."""
        write(sys.stdout, escape(self._heading()))
        for warning in self.warnings:
            write(sys.stdout, paint(escape(f"! {warning}"), "yellow", colour))
        if self.first_bad is not None:
            write(sys.stdout, paint(escape(f"! first non-finite value: {_place(self.first_bad)}"), "red", colour))
        write(sys.stdout, "")
        groups = self.ordered()
        columns = _columns(groups, self.single)
        lines = [Line([text(group) for _, text in columns], "red" if group.first_bad is not None else None) for group in groups]
        left = sum(1 for name, _ in columns if name in ("", "model", "module", "tensor", "phase", "branch"))
        write(sys.stdout, render([name for name, _ in columns], lines, left=left, colour=colour))

    def _heading(self) -> str:
        parts = [f"{self.path}: {self.records} records, {len(self.modules)} modules"]
        if self.steps:
            first, last = min(self.steps), max(self.steps)
            parts.append(f"step {first}" if first == last else f"steps {first} to {last}")
        if "run_id" in self.meta:
            parts.append(f"run {self.meta['run_id']}")
        if "rank" in self.meta:
            parts.append(f"rank {self.meta['rank']} of {self.meta.get('world_size', '?')}")
        return ", ".join(parts)


def _read(path: str, modules: re.Pattern[str] | None, steps: Numbers | None) -> _Overview:
    warnings: list[str] = []
    meta = read_metadata(path, warnings.append)
    overview = _Overview(path, meta, single=steps is not None, warnings=warnings)
    for row in iterate_rows(path, warnings.append):
        overview.records += 1
        overview.modules.setdefault(row["module"])
        step = row["step"]
        if step is not None:
            overview.steps.add(step)
        if (modules is None or modules.search(row["module"])) and (steps is None or (step is not None and step in steps)):
            overview.add(row)
    if meta.get("ended_cleanly") is False:
        warnings.append("the run was killed, or is still going on: the recording ends early")
    if meta.get("writing_ended"):
        warnings.append(f"writing ended before the run did ({meta['writing_ended']})")
    losses, lost = Losses(), meta.get("lost")
    for loss in lost if isinstance(lost, list) else ():
        if isinstance(loss, dict) and isinstance(loss.get("count"), int):
            losses.count(str(loss.get("what")), str(loss.get("reason")), loss["count"])
    if said := losses.describe():
        warnings.append(f"lost: {said}")
    return overview


_Column = tuple[str, Callable[[_Group], str]]


def _columns(groups: Sequence[_Group], single: bool) -> list[_Column]:
    """The columns worth showing: names that differ, statistics that were recorded."""
    columns: list[_Column] = [("", lambda group: "!" if group.first_bad is not None else "")]
    if _differ(groups, "model"):
        columns.append(("model", _text("model")))
    columns += [("module", lambda group: group.row["module"] or "(root)"), ("tensor", _text("tensor"))]
    columns += [(name, _text(name)) for name in ("phase", "branch") if _differ(groups, name)]
    if single:
        columns += [(name, _text(name)) for name in ("loop", "step", "call") if name == "step" or _differ(groups, name)]
    else:
        columns.append(("records", lambda group: str(group.records)))
        if any(group.first_bad for group in groups):
            columns.append(("bad since", lambda group: _since(group.first_bad)))
    recorded = {name for group in groups for name in group.row}
    columns += [(name, _text(name)) for name in STATISTICS if name in recorded and name not in _NO_COLUMN]
    known = {*STATISTICS, *_NAMES}
    further = dict.fromkeys(
        name for group in groups for name, value in group.row.items() if name not in known and _is_number(value)
    )
    columns += [(name, _text(name)) for name in further if name not in ("value", "storage", "order", "parent")]
    if "shape" in recorded:
        columns.append(("shape", lambda group: _shape(group.row.get("shape")) + (" ..." if len(group.shapes) > 1 else "")))
    if "dtype" in recorded:
        columns.append(("dtype", lambda group: str(group.row.get("dtype", "")).removeprefix("torch.")))
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


def _place(row: Row) -> str:
    parts = [f"{row.get('model', '')} {row['module'] or '(root)'} {row['tensor']}".strip()]
    parts += [
        f"{name} {row[name]}" for name in ("phase", "branch", "loop", "step", "call") if row.get(name) not in (None, "forward")
    ]
    return ", ".join(parts)


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
    return spell(value)
