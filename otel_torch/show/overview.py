"""A recording by tensors: the statistics of each, and which turned to NaN or Inf first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from otel_torch.laws.facts import BrokenLaw
from otel_torch.laws.table import broken_laws
from otel_torch.process.console import as_given
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.rows import Row
from otel_torch.records import json_safe
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.words import plural
from otel_torch.show.combined import LOCATION, CombinedStatistics, is_number
from otel_torch.show.selection import (
    Outcome,
    Selection,
    describe_outcome,
    row_location,
    run_warnings,
)
from otel_torch.show.training.table import training_json
from otel_torch.show.training.trouble import first_nonfinite

SCHEMA = "otel_torch.show/1"

_TENSOR = ("model", "module", "tensor", "phase", "branch")


@dataclass(slots=True)
class TensorLine:
    """One line of the table: all records of a tensor, or a single record.

    Attributes:
        row: The first record; once `combine` has run, the statistics of all of them.
        first_bad: The location of the first record with NaN or Inf, if any.
        bad_position: How many records had been selected then.
    """

    row: Row
    records: int = 0
    first_bad: Row | None = None
    bad_position: float = math.inf
    shapes: set[str] = field(default_factory=set)
    _statistics: CombinedStatistics = field(default_factory=CombinedStatistics)

    def add(self, row: Row, position: int) -> None:
        """Add a record of the tensor, the `position`th that was selected."""
        self.records += 1
        if self.first_bad is None and _is_nonfinite(row):
            self.first_bad = {name: row[name] for name in LOCATION if name in row}
            self.bad_position = position
        self.shapes.add(str(row.get("shape")))
        self._statistics.add(row)

    def combine(self) -> None:
        """Make `row` describe all records; fields of a single one, such as its step, go."""
        if self.records > 1:
            shared = (*_TENSOR, "shape", "dtype")
            self.row = {name: self.row[name] for name in shared if name in self.row}
            self.row |= self._statistics.values


@dataclass
class Overview:
    """What a recording holds, and what became of its run."""

    selection: Selection
    meta: dict[str, Any]
    lines: dict[tuple[Any, ...], TensorLine] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    first_bad: Row | None = None

    @property
    def has_line_per_record(self) -> bool:
        """Whether each record has its own line, rather than each tensor."""
        return self.selection.steps is not None

    @cached_property
    def laws(self) -> list[BrokenLaw]:
        """The laws of training that the run breaks; to be asked once all records are added."""
        return broken_laws(self.selection.training, self.meta, self.selection.seen_modules)

    def add(self, row: Row) -> None:
        key: tuple[Any, ...] = tuple(row.get(name) for name in _TENSOR)
        if self.has_line_per_record:
            key = (*key, self.selection.selected)
        line = self.lines.setdefault(key, TensorLine(row))
        line.add(row, self.selection.selected)
        if self.first_bad is None:
            self.first_bad = line.first_bad

    def sorted_lines(self) -> list[TensorLine]:
        """Return the lines with NaN or Inf as they turned bad, then the others as recorded."""
        return sorted(self.lines.values(), key=lambda line: line.bad_position)

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object; NaN and Inf are strings."""
        from otel_torch.show.next_steps import next_steps

        training = self.selection.training
        health = training_json(training, self.meta, self.laws) if training.rows else None
        return {
            "schema": SCHEMA,
            "recording": self.selection.path,
            "records": self.selection.records,
            "meta": _json_safe(self.meta),
            "warnings": self.warnings,
            **({"training": _json_safe(health)} if health else {}),
            "first_nonfinite": self.first_bad,
            "rows": [
                {**_json_safe(line.row), "records": line.records, "finite": line.first_bad is None}
                for line in self.sorted_lines()
            ],
            "next": [step.as_json() for step in next_steps(self)],
        }

    def heading(self) -> str:
        """Return what was recorded, in one line."""
        selection, steps = self.selection, self.selection.seen_steps
        parts = []
        if selection.training.rows:
            parts.append(f"{plural(selection.training.rows, 'value')} of a training")
        if selection.records or not parts:
            parts.append(plural(selection.records, "record"))
            parts.append(plural(len(selection.seen_modules), "module"))
        if steps:
            first, last = min(steps), max(steps)
            parts.append(f"step {first}" if first == last else f"steps {first} to {last}")
        if "run_id" in self.meta:
            parts.append(f"run {self.meta['run_id']}")
        if "rank" in self.meta:
            parts.append(f"rank {self.meta['rank']} of {self.meta.get('world_size', '?')}")
        return f"{as_given(selection.path)}: {', '.join(parts)}"

    def ending(self) -> Outcome:
        """Return what became of the run, and since when its training has NaN or Inf."""
        return describe_outcome(self.meta, first_nonfinite(self.selection.training))

    def outcome(self) -> Outcome:
        """Return what matters most about the run."""
        if self.first_bad is None:
            kind, text = self.ending()
            if not self.selection.training.is_finite:
                return Outcome(kind, text)
            return Outcome(kind, f"{text}, no NaN or Inf in what is shown")
        bad = sum(line.first_bad is not None for line in self.lines.values())
        lines = plural(len(self.lines), "record" if self.has_line_per_record else "tensor")
        location = row_location(self.first_bad)
        return Outcome("trouble", f"! first NaN or Inf: {location} (in {bad:,} of {lines})")


def read_overview(selection: Selection, progress: Progress) -> Overview:
    """Return what a recording holds. Raises RecordingError."""
    warnings: list[str] = []
    metadata = read_metadata(selection.path, warnings.append)
    overview = Overview(selection, metadata, warnings=warnings)
    for row in selection.rows(warnings.append, progress):
        overview.add(row)
    for line in overview.lines.values():
        line.combine()
    warnings += run_warnings(metadata)
    return overview


def _is_nonfinite(row: Row) -> bool:
    """Return whether a record counts or contains NaN or Inf.

    Operations make masks of -Inf, and masked scores.
    """
    if "op" in row and row.get("min") == -math.inf and is_number(row.get("max")):
        return False
    nonfinite = row.get("nonfinite")
    if is_number(nonfinite) and nonfinite != 0:
        return True
    return any(isinstance(value, float) and not math.isfinite(value) for value in row.values())


def _json_safe(value: Any) -> Any:
    """Return the value with NaN and Inf as strings, also inside lists and dicts."""
    if isinstance(value, dict):
        return {name: _json_safe(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    return json_safe(value)
