"""Which records of a recording are shown, and how many there were to choose from."""

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

_TOLD_EVERY = 4096  # records


@dataclass(slots=True)
class Selection:
    """A recording's rows, and which of them are asked for. modules, steps: None for all.

    After `rows`: records is how many there are, selected how many were asked for; seen_modules and
    seen_steps name them.
    """

    path: str
    modules: re.Pattern[str] | None = None
    steps: NumberSet | None = None
    records: int = 0
    selected: int = 0
    seen_modules: dict[str, None] = field(default_factory=dict)
    seen_steps: set[int] = field(default_factory=set)

    def rows(
        self, problem: Callable[[str], None], progress: Callable[[str], None] = lambda text: None
    ) -> Iterator[Row]:
        """The rows that are asked for, in the order of the recording. Raises RecordingError."""
        for row in iterate_rows(self.path, problem):
            if self.records and not self.records % _TOLD_EVERY:
                progress(f"{self.records:,} records read of {self.path}")
            self.records += 1
            module, step = row["module"], row["step"]
            self.seen_modules.setdefault(module)
            if step is not None:
                self.seen_steps.add(step)
            if (self.modules is None or self.modules.search(module)) and (
                self.steps is None or (step is not None and step in self.steps)
            ):
                self.selected += 1
                yield row

    def hint(self) -> str:
        """What could have been selected."""
        modules, steps = list(self.seen_modules), sorted(self.seen_steps)
        named = ", ".join(escape(name) or "the root" for name in modules[:3]) + (
            ", ..." if len(modules) > 3 else ""
        )
        return f"it has {len(modules)} modules ({named})" + (
            f" and steps {steps[0]} to {steps[-1]}" if steps else ""
        )


def lost(meta: dict[str, Any]) -> str:
    """What did not arrive, by a recording's metadata, in one line; empty where nothing was lost."""
    losses, found = Losses(), meta.get("lost")
    for loss in found if isinstance(found, list) else ():
        if isinstance(loss, dict) and isinstance(loss.get("count"), int):
            losses.count(str(loss.get("what")), str(loss.get("reason")), loss["count"])
    return losses.describe()


def troubles(meta: dict[str, Any]) -> list[str]:
    """What a person must know of how the run ended, by a recording's metadata, a line each."""
    found = []
    if meta.get("ended_cleanly") is False:
        found.append("the run was killed, or is still going on: the recording ends early")
    if meta.get("writing_ended"):
        found.append(f"writing ended before the run did ({meta['writing_ended']})")
    if said := lost(meta):
        found.append(f"lost: {said}")
    return found


def place(row: Row) -> str:
    """Where a record stands in the run, in words."""
    parts = [f"{row.get('model', '')} {row['module'] or '(root)'} {row['tensor']}".strip()]
    parts += [
        f"{name} {row[name]}"
        for name in ("phase", "branch", "loop", "step", "call")
        if row.get(name) not in (None, "forward")
    ]
    return ", ".join(parts)
