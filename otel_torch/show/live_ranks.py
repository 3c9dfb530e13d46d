"""Draws the state of all ranks of a run: each has a line of a table, or of text, or an object."""

from __future__ import annotations

from collections import Counter
from typing import Any

from otel_torch.laws.series import quantity_of
from otel_torch.rendering.table import Line, escape, format_table, paint, shorten
from otel_torch.show import live_view
from otel_torch.show.live_view import BRIEF, SCHEMA, words_of
from otel_torch.show.watched import WAITING, WatchedFolder, WatchedRecording

# ranks whose first NaN or Inf is named
_MAX_TROUBLED = 3


def view_lines(folder: WatchedFolder, *, width: int, color: bool) -> list[str]:
    states = Counter(rank.state for rank in folder.ranks).most_common()
    heading = ", ".join(f"{count:,} {state}" for state, count in states) or WAITING
    lines = [paint(shorten(escape(f"{folder.path}: {heading}"), width), "bold", color)]
    troubled = [rank for rank in folder.ranks if rank.run.nonfinite]
    for rank in troubled[:_MAX_TROUBLED]:
        text = f"{_rank_name(rank)}: the first NaN or Inf: {rank.run.first_nonfinite}"
        lines.append(paint(shorten(escape(text), width), "red", color))
    cells = [Line(_rank_cells(rank), "red" if rank in troubled else None) for rank in folder.ranks]
    header = ["rank", "state", "step", "steps/s", *map(words_of, BRIEF), "NaN or Inf", "records"]
    table = format_table(header, cells, left_columns=2, color=color, width=width)
    return [*lines, "", *table.splitlines()]


def view_json(folder: WatchedFolder) -> dict[str, Any]:
    """Return the state of a folder as a JSON object: `ranks` has that of each rank."""
    return {
        "schema": SCHEMA,
        "recording": str(folder.path),
        "ranks": [live_view.view_json(rank) for rank in folder.ranks],
    }


def brief_lines(folder: WatchedFolder) -> list[str]:
    lines = [
        escape(f"{_rank_name(rank)}: ") + line
        for rank in folder.ranks
        for line in live_view.brief_lines(rank)
    ]
    return lines or [escape(f"{folder.path}: {WAITING}")]


def _rank_name(rank: WatchedRecording) -> str:
    number = rank.metadata.get("rank")
    return rank.path.name if number is None else f"rank {number}"


def _rank_cells(rank: WatchedRecording) -> list[str]:
    run, pace = rank.run, rank.pace
    values: dict[str, str] = {}  # of the first model and group
    for health in run.training.values():
        for label, value in health.values.items():
            values.setdefault(quantity_of(label), f"{value:.5g}")
    return [
        _rank_name(rank),
        rank.state,
        "" if run.step is None else str(run.step).removeprefix("step "),
        "" if pace is None or rank.is_over else f"{pace:.3g}",
        *(values.get(quantity, "") for quantity in BRIEF),
        f"{run.nonfinite:,}" if run.nonfinite else "",
        f"{run.records:,}",
    ]
