"""Cuts a recording into episodes, one outermost forward each, so that two long runs can be compared in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_torch.parity.program import Parameter, build_parameters
from otel_torch.parity.recording import Row, iterate_rows


@dataclass(slots=True, eq=False)
class Episode:
    """The rows of one outermost forward (without recorded calls: of one model in one step), in the recording's order."""

    model: str
    loop: int | None
    step: int | None
    phase: str
    rows: list[Row] = field(default_factory=list)

    @property
    def when(self) -> tuple[Any, ...]:
        """What names it within its run."""
        return self.model, self.loop, self.step, self.phase, self.rows[0].get("call")


def iterate_episodes(path: str | Path, problem: Callable[[str], None] = lambda message: None) -> Iterator[Episode]:
    """The episodes of a recording one after the other. Raises RecordingError; see `iterate_rows`."""
    episode: Episode | None = None
    top: dict[int, int] = {}  # entered -> entered of the outermost recorded call
    current: Any = None
    for row in iterate_rows(path, problem):
        if row.get("phase") in ("attach", "backward", "recompute"):
            continue
        key = _outermost(row, top)
        if episode is None or key != current:
            if episode is not None:
                yield episode
            if not isinstance(key, int):
                top = {}
            episode = Episode(row.get("model") or "", row.get("loop"), row["step"], row.get("phase") or "forward")
            current = key
        episode.rows.append(row)
    if episode is not None:
        yield episode


def _outermost(row: Row, top: dict[int, int]) -> Any:
    """What all rows of an episode have in common: when the outermost call was entered, or without that the step."""
    order = row.get("order")
    entered = order[0] if order else None
    if entered is None:
        return row.get("model"), row.get("loop"), row["step"], row.get("phase")
    found = top.get(entered)
    if found is None:
        parent = row.get("parent")
        found = top[entered] = entered if parent is None else top.get(parent, parent)
    return found


def read_parameters(path: str | Path) -> list[Parameter]:
    """The parameters at attach, without reading the rest of a long recording in full."""
    from otel_torch.parity.recording import iterate_attached

    return build_parameters(iterate_attached(path))
