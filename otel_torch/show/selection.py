"""Reads the rows of a recording that were selected, and describes rows and runs in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from otel_torch.laws.series import TrainingSeries
from otel_torch.recording.reader import iterate_rows
from otel_torch.recording.rows import Row
from otel_torch.records import LoopStep, Losses
from otel_torch.rendering.near_name import near_name
from otel_torch.rendering.table import escape
from otel_torch.settings import NumberSet
from otel_torch.training_quantities import PHASE

_PROGRESS_INTERVAL = 4096  # records
_NAMED_MODULES = 3


@dataclass(slots=True)
class Selection:
    """The rows of a recording to show. modules, steps: None selects all.

    Attributes:
        records: How many records were read, once `rows` has run.
        selected: How many of them were selected.
        training: The health of a training. Its rows are no records of tensors: they are neither
            yielded nor counted. `modules` does not leave out those of a whole model.
        seen_modules, seen_steps: The modules and steps of all records, selected or not.
    """

    path: str
    modules: re.Pattern[str] | None = None
    steps: NumberSet | None = None
    records: int = 0
    selected: int = 0
    training: TrainingSeries = field(default_factory=TrainingSeries)
    seen_modules: dict[str, None] = field(default_factory=dict)
    seen_steps: set[int] = field(default_factory=set)

    def rows(
        self, warn: Callable[[str], None], progress: Callable[[str], None] = lambda text: None
    ) -> Iterator[Row]:
        """Yield the selected rows in the order of the recording.

        Raises:
            RecordingError: If the recording cannot be read.
        """
        for count, row in enumerate(iterate_rows(self.path, warn)):
            if count and not count % _PROGRESS_INTERVAL:
                progress(f"{count:,} records read of {self.path}")
            module, step = row["module"], row["step"]
            if step is not None:
                self.seen_steps.add(step)
            if row.get("phase") == PHASE:
                if self._has_step(step) and (not module or self._has_module(module)):
                    self.training.add(row)
                continue
            self.records += 1
            self.seen_modules.setdefault(module)
            if self._has_module(module) and self._has_step(step):
                self.selected += 1
                yield row

    def _has_module(self, module: str) -> bool:
        return self.modules is None or self.modules.search(module) is not None

    def _has_step(self, step: int | None) -> bool:
        return self.steps is None or (step is not None and step in self.steps)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show: no record, and no training without `modules`."""
        return not self.selected and (self.modules is not None or not self.training.rows)

    def nothing_selected(self) -> str:
        """Return the message for an empty selection: what could have been selected instead."""
        modules, steps = list(self.seen_modules), sorted(self.seen_steps)
        names = [escape(name) or "the root" for name in modules[:_NAMED_MODULES]]
        if len(modules) > _NAMED_MODULES:
            names.append("...")
        hint = escape(near_name(self.modules.pattern, modules)) if self.modules else ""
        step_range = f" and steps {steps[0]} to {steps[-1]}" if steps else ""
        if not self.records and steps:
            return f"{self.path}: nothing is selected; it has the values of a training{step_range}"
        return (
            f"{self.path}: none of its {self.records} records is selected; "
            f"it has {len(modules)} modules ({', '.join(names)}){step_range}{hint}"
        )


def describe_losses(metadata: dict[str, Any]) -> str:
    """Return what a run lost, by its metadata, in one line; empty if nothing was lost."""
    losses, entries = Losses(), metadata.get("lost")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("count"), int):
            losses.count(str(entry.get("what")), str(entry.get("reason")), entry["count"])
    return losses.describe()


def run_warnings(metadata: dict[str, Any]) -> list[str]:
    """Return what went wrong in a run, by its metadata: one line each."""
    warnings = []
    if metadata.get("ended_cleanly") is False:
        warnings.append("the run was killed or is still running: the recording ends early")
    if metadata.get("writing_ended"):
        warnings.append(f"writing ended before the run did ({metadata['writing_ended']})")
    if losses := describe_losses(metadata):
        warnings.append(f"lost: {losses}")
    return warnings


def origin_of_nonfinite(metadata: dict[str, Any]) -> str:
    """Return what the run itself said of its first NaN or Inf, in one line; empty without one."""
    nonfinite = metadata.get("nonfinite")
    line = nonfinite.get("line") if isinstance(nonfinite, dict) else None
    return line if isinstance(line, str) else ""


class Outcome(NamedTuple):
    """How a run went: `fine`, `trouble` or `unknown`, and in words."""

    kind: str
    text: str


def describe_outcome(metadata: dict[str, Any], first_bad: LoopStep | None) -> Outcome:
    """Return how a run went, the worst first. first_bad: the first step with NaN or Inf.

    >>> describe_outcome({"ended_cleanly": True}, None)
    Outcome(kind='fine', text='ended cleanly')
    >>> describe_outcome({"ended_cleanly": True}, LoopStep(0, 3)).text
    'NaN or Inf since step 3'
    """
    ending = Outcome("fine", "ended cleanly")
    if "ended_cleanly" not in metadata:
        ending = Outcome("unknown", "no metadata")
    elif not metadata["ended_cleanly"]:
        ending = Outcome("trouble", "killed or still running")
    elif metadata.get("writing_ended"):
        ending = Outcome("trouble", "writing ended early")
    if first_bad is None:
        return ending
    since = f"NaN or Inf since {first_bad}"
    return Outcome("trouble", f"{since}, {ending.text}" if ending.kind == "trouble" else since)


def format_step(row: Row) -> str:
    """Return the step of a row, with its loop unless that is the first.

    >>> format_step({"step": 3, "loop": 0}), format_step({"step": 3, "loop": 1})
    ('step 3', 'step 3 of loop 1')
    """
    return str(LoopStep(row.get("loop"), row.get("step")))


def row_location(row: Row) -> str:
    """Return where in the run a row was recorded.

    >>> row_location({"model": "M", "module": "", "tensor": "out", "phase": "forward", "step": 4})
    'M (root) out, step 4'
    """
    parts = [f"{row.get('model', '')} {row['module'] or '(root)'} {row['tensor']}".strip()]
    for name in ("phase", "branch", "loop", "step", "call"):
        if row.get(name) not in (None, "forward"):
            parts.append(f"{name} {row[name]}")
    return ", ".join(parts)
