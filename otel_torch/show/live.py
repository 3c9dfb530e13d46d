"""What a run looks like so far: folded row by row, in memory that grows with tensors, not steps."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from otel_torch.recording.rows import Row, parse_line, parse_lines
from otel_torch.show.combined import is_number
from otel_torch.show.loop_step import LoopStep
from otel_torch.show.selection import row_location
from otel_torch.training_quantities import PHASE

# losses that are drawn: a line of a terminal has no room for more
_MAX_LOSSES = 120
# records of a tensor before a change of it counts
_MIN_RECORDS = 3
# statistics that say how large the values of a tensor are, the best one first
_SIZES = ("rms", "abs_mean", "l2")
# phases that describe no activations
_NOT_COMPARED = frozenset({PHASE, "attach", "update"})
_TENSOR = ("model", "module", "tensor", "phase", "branch")


@dataclass(slots=True)
class Health:
    """The training of one model.

    Attributes:
        step: Of the newest row.
        values: The newest value by label: `loss`, `lr[0]`, `grad_norm`.
        losses: The mean loss of each of the last steps.
    """

    step: LoopStep | None = None
    values: dict[str, float] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_LOSSES))
    _calls: int = 0  # losses that the last one is the mean of

    def add(self, label: str, step: LoopStep, value: float) -> None:
        """Add a row of the whole model."""
        if step != self.step:
            self.step, self._calls = step, 0
        if label == "loss":
            self._calls += 1
            if self._calls == 1:
                self.losses.append(value)
            else:
                self.losses[-1] += (value - self.losses[-1]) / self._calls
            value = self.losses[-1]
        self.values[label] = value


@dataclass(slots=True)
class Level:
    """How large a tensor is: in its newest record, and on average in those before it."""

    records: int = 0
    before: float = 0.0
    now: float = 0.0

    def add(self, size: float) -> None:
        """Add the size of the next record."""
        if self.records:
            self.before += (self.now - self.before) / self.records
        self.records += 1
        self.now = size

    @property
    def ratio(self) -> float:
        """How many times as large as before the tensor is; 1 while too little is known."""
        if self.records < _MIN_RECORDS or not (self.before > 0 and self.now > 0):
            return 1.0
        return self.now / self.before


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor whose size has changed. where: model, module and tensor in words."""

    where: str
    before: float
    now: float
    ratio: float


class LiveRun:
    """The state of a run, by the rows that were recorded so far.

    Attributes:
        records: Rows, without damaged ones.
        damaged: Lines that are no rows.
        step: Of the newest row that has one.
        steps: How many times the step has changed.
        training: By model.
        nonfinite: Rows with a NaN or Inf.
        first_nonfinite: Where the first one of them was recorded; "" without one.
    """

    def __init__(self) -> None:
        self.records = self.damaged = self.steps = self.nonfinite = 0
        self.step: LoopStep | None = None
        self.training: dict[str, Health] = {}
        self.first_nonfinite = ""
        self._levels: dict[tuple[Any, ...], Level] = {}

    def add_lines(self, lines: list[bytes]) -> None:
        """Add lines of a recording; those that are no rows are counted."""
        rows = parse_lines(lines)
        for row in self._rows_one_by_one(lines) if rows is None else rows:
            self._add(row)

    def _rows_one_by_one(self, lines: Iterable[bytes]) -> Iterable[Row]:
        for line in lines:
            row = parse_line(line)
            if isinstance(row, dict):
                yield row
            elif row:
                self.damaged += 1

    def _add(self, row: Row) -> None:
        self.records += 1
        step = LoopStep(row.get("loop"), row["step"])
        phase = row.get("phase", "forward")
        if step.number is not None and phase != "attach" and step != self.step:
            self.step = step
            self.steps += 1
        if row.get("nonfinite"):
            self.nonfinite += 1
            self.first_nonfinite = self.first_nonfinite or row_location(row)
        if phase == PHASE:
            if not row["module"] and is_number(row.get("mean")):
                health = self.training.setdefault(str(row.get("model") or ""), Health())
                health.add(row["tensor"], step, float(row["mean"]))
        elif phase not in _NOT_COMPARED:
            size = next((row[name] for name in _SIZES if is_number(row.get(name))), None)
            if size is not None and math.isfinite(size):
                tensor = tuple(map(row.get, _TENSOR))
                level = self._levels.get(tensor)
                if level is None:
                    level = self._levels[tensor] = Level()
                level.add(float(size))

    def largest_changes(self, count: int) -> list[Change]:
        """Return the tensors whose size differs most from their records before, by its ratio."""
        largest = heapq.nlargest(
            count, self._levels.items(), key=lambda item: abs(math.log(item[1].ratio))
        )
        return [
            Change(
                row_location(dict(zip(_TENSOR, tensor, strict=True))),
                level.before,
                level.now,
                level.ratio,
            )
            for tensor, level in largest
            if level.ratio != 1
        ]
