"""What a run looks like so far: folded row by row, in memory that grows with tensors, not steps."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from otel_torch.recording.row_schema import UNREADABLE, RowRecord, decode_record, record_of
from otel_torch.recording.rows import parse_line
from otel_torch.records import LoopStep
from otel_torch.show.selection import row_location
from otel_torch.training_quantities import PHASE

# losses that are drawn: a line of a terminal has no room for more
_MAX_LOSSES = 120
# records of a tensor before a change of it counts
_MIN_RECORDS = 3
# tensors beyond these are counted only
_MAX_TENSORS = 100_000
# phases that describe no activations
_NOT_COMPARED = frozenset({PHASE, "attach", "update"})
_TENSOR = ("model", "module", "tensor", "phase", "branch")
_tensor_of = attrgetter(*_TENSOR)


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
    """How large a tensor is: in its newest record, and on average in those before it.

    Attributes:
        nonfinite: Records with a NaN or Inf, which count for nothing else.
    """

    nonfinite: int = 0
    records: int = 0
    before: float = 0.0
    now: float = 0.0

    def add(self, size: float) -> None:
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
        first_damage: Number and fault of the first one of them; "" without one.
        step: Of the newest row that has one.
        steps: How many times the step has changed.
        training: By model.
        nonfinite: Rows with a NaN or Inf, counted or as a statistic, and losses that are one.
        first_nonfinite: Where the first one of them was recorded; "" without one.
        unfollowed: Rows of further tensors, whose changes are not seen.
    """

    def __init__(self) -> None:
        self.records = self.damaged = self.steps = self.nonfinite = self.unfollowed = 0
        self.step: LoopStep | None = None
        self.training: dict[str, Health] = {}
        self.first_nonfinite = self.first_damage = ""
        self._levels: dict[tuple[Any, ...], Level] = {}

    def add_lines(self, lines: Iterable[bytes]) -> None:
        """Add lines of a recording; those that are no rows are counted."""
        for line in lines:
            try:
                self._add(decode_record(line))
            except UNREADABLE:
                self._add_tolerantly(line)

    def _add_tolerantly(self, line: bytes) -> None:
        """Add a row with bare NaN tokens or behind a byte-order mark; count any other line."""
        row = parse_line(line.removeprefix(b"\xef\xbb\xbf"))
        if isinstance(row, dict):
            self._add(record_of(row))
        elif row:
            self.damaged += 1
            self.first_damage = self.first_damage or f"line {self.records + self.damaged} {row}"

    def _add(self, row: RowRecord) -> None:
        self.records += 1
        place = (row.loop, row.step)
        if place != self.step and row.step is not None and row.phase != "attach":
            self.step = LoopStep(*place)
            self.steps += 1
        if row.phase == PHASE:
            self._add_training(row)
            return
        size = _size_of(row)
        is_finite = size is None or math.isfinite(size)
        is_finite = is_finite and (type(row.nonfinite) is not int or not row.nonfinite)
        if not is_finite:
            self._count_nonfinite(row)
        if row.phase not in _NOT_COMPARED or not is_finite:
            self._add_level(row, size, is_finite)

    def _add_training(self, row: RowRecord) -> None:
        value = _number(row.mean)
        if row.module or value is None:
            return
        health = self.training.setdefault(row.model, Health())
        health.add(row.tensor, LoopStep(row.loop, row.step), value)
        # the gradients of a step that the gradient scaler skips may be infinite
        if row.tensor == "loss" and not math.isfinite(value):
            self._count_nonfinite(row)

    def _count_nonfinite(self, row: RowRecord) -> None:
        self.nonfinite += 1
        if not self.first_nonfinite:
            names = (*_TENSOR, "loop", "step", "call")
            self.first_nonfinite = row_location({name: getattr(row, name) for name in names})

    def _add_level(self, row: RowRecord, size: float | None, is_finite: bool) -> None:
        tensor = _tensor_of(row)
        level = self._levels.get(tensor)
        if level is None:
            if len(self._levels) == _MAX_TENSORS:
                self.unfollowed += 1
                return
            level = self._levels[tensor] = Level()
        if not is_finite:
            level.nonfinite += 1
        elif size is not None:
            level.add(size)

    def worst_tensor(self) -> tuple[str, int]:
        """Return the tensor with the most records that have a NaN or Inf, and how many."""
        tensor, level = max(
            self._levels.items(), key=lambda item: item[1].nonfinite, default=(None, Level())
        )
        if tensor is None or not level.nonfinite:
            return "", 0
        return row_location(dict(zip(_TENSOR, tensor, strict=True))), level.nonfinite

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


def _size_of(row: RowRecord) -> float | None:
    """Return how large a tensor's values are, None where that was not recorded."""
    for size in (row.rms, row.abs_mean, row.l2):
        if size is not None:
            return size if type(size) is float else _number(size)
    return None


def _number(value: float | str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None  # what FastVideo writes for a statistic that failed
