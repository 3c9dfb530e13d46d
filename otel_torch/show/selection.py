"""Reads the rows of a recording that were selected, and describes rows and runs in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from otel_torch.recording.reader import iterate_rows
from otel_torch.recording.rows import Row
from otel_torch.records import Losses
from otel_torch.rendering.table import escape
from otel_torch.settings import NumberSet

_PROGRESS_INTERVAL = 4096  # records
_NAMED_MODULES = 3


@dataclass(slots=True)
class Selection:
    """The rows of a recording to show. modules, steps: None selects all.

    Attributes:
        records: How many records were read, once `rows` has run.
        selected: How many of them were selected.
        seen_modules, seen_steps: The modules and steps of all records, selected or not.
    """

    path: str
    modules: re.Pattern[str] | None = None
    steps: NumberSet | None = None
    records: int = 0
    selected: int = 0
    seen_modules: dict[str, None] = field(default_factory=dict)
    seen_steps: set[int] = field(default_factory=set)

    def rows(
        self, warn: Callable[[str], None], progress: Callable[[str], None] = lambda text: None
    ) -> Iterator[Row]:
        """Yield the selected rows in the order of the recording.

        Raises:
            RecordingError: If the recording cannot be read.
        """
        for row in iterate_rows(self.path, warn):
            if self.records and not self.records % _PROGRESS_INTERVAL:
                progress(f"{self.records:,} records read of {self.path}")
            self.records += 1
            module, step = row["module"], row["step"]
            self.seen_modules.setdefault(module)
            if step is not None:
                self.seen_steps.add(step)
            if self.modules is not None and not self.modules.search(module):
                continue
            if self.steps is not None and (step is None or step not in self.steps):
                continue
            self.selected += 1
            yield row

    def nothing_selected(self) -> str:
        """Return the message for an empty selection: what could have been selected instead."""
        modules, steps = list(self.seen_modules), sorted(self.seen_steps)
        names = [escape(name) or "the root" for name in modules[:_NAMED_MODULES]]
        if len(modules) > _NAMED_MODULES:
            names.append("...")
        step_range = f" and steps {steps[0]} to {steps[-1]}" if steps else ""
        return (
            f"{self.path}: none of its {self.records} records is selected; "
            f"it has {len(modules)} modules ({', '.join(names)}){step_range}"
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
