"""The recordings of a folder, such as those of a run's ranks: each as if it were alone, and then
what is said of all of them together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence

from otel_torch.laws.facts import BrokenLaw
from otel_torch.laws.ranks import broken_rank_laws
from otel_torch.laws.series import quantity_of
from otel_torch.laws.table import switched_off
from otel_torch.process.console import say
from otel_torch.recording.reader import RecordingError
from otel_torch.rendering.next_step import NextStep
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import (
    Line,
    escape,
    format_table,
    supports_color,
    terminal_size,
    write_line,
)
from otel_torch.rendering.words import plural
from otel_torch.show.live_view import BRIEF, words_of
from otel_torch.show.next_steps import next_steps
from otel_torch.show.overview import SCHEMA, Overview, read_overview
from otel_torch.show.overview_table import next_step_lines, overview_lines
from otel_torch.show.selection import Selection, row_location
from otel_torch.show.training.table import extent_of


def print_ranks(
    folder: str, selections: Sequence[Selection], as_json: bool, progress: Progress
) -> int:
    """Print the recordings of a folder, or one JSON object. Return 0, or 2 if one of them cannot
    be read or nothing is selected in any.
    """
    overviews: list[Overview] = []
    status = 0
    for selection in selections:
        try:
            with progress:
                overview = read_overview(selection, progress)
        except RecordingError as error:
            say(str(error))
            status = 2
            continue
        if selection.is_empty:
            continue
        overviews.append(overview)
        if not as_json:
            _print([*overview_lines(overview, terminal_size(sys.stdout), _color()), ""])
            overview.lines.clear()  # those of a thousand ranks do not fit into memory
    empty = [selection for selection in selections if selection.records and selection.is_empty]
    if empty and not overviews:
        say(empty[0].nothing_selected())
    elif empty:
        say(f"{folder}: nothing is selected in {len(empty)} of its {len(selections)} recordings")
    if as_json and overviews:
        ranks = [overview.as_json() for overview in overviews]
        steps = [step.as_json() for step in _next_steps(folder, overviews)]
        laws = [law._asdict() for law in _broken_together(overviews)]
        shown = {"schema": SCHEMA, "recording": folder, "ranks": ranks, "next": steps}
        _print([json.dumps(shown | {"training": {"laws": laws}}, allow_nan=False)])
    elif overviews:
        _print(line for describe in _ALL_RANKS for line in describe(folder, overviews))
    return status if overviews else 2


def _color() -> bool:
    return supports_color(sys.stdout)


def _print(lines: Sequence[str] | Iterator[str]) -> None:
    for line in lines:
        write_line(sys.stdout, line)
    sys.stdout.flush()


def _table(folder: str, overviews: Sequence[Overview]) -> Iterator[str]:
    yield escape(f"{folder}: {plural(len(overviews), 'recording')}")
    terminal = terminal_size(sys.stdout)
    yield format_table(
        ["recording", "rank", "steps", *map(words_of, BRIEF), "records", "run", "first NaN or Inf"],
        [
            Line(_cells(overview), "red" if overview.first_bad is not None else None)
            for overview in overviews
        ],
        left_columns=1,
        color=_color(),
        width=terminal.columns if terminal else None,
    )


def _laws(folder: str, overviews: Sequence[Overview]) -> Iterator[str]:
    """Yield what the ranks of one training break together."""
    yield from (escape(f"! {law.model}: {law.text}") for law in _broken_together(overviews))


def _broken_together(overviews: Sequence[Overview]) -> list[BrokenLaw]:
    trainings = [overview.selection.training for overview in overviews]
    off = frozenset().union(*(switched_off(overview.meta) for overview in overviews))
    return broken_rank_laws(trainings, off)


def _cells(overview: Overview) -> list[str]:
    selection, steps = overview.selection, overview.selection.seen_steps
    training = selection.training
    last: dict[str, str] = {}  # of the first model and group
    for model in training.models:
        for label, series in training.totals(model).items():
            last.setdefault(quantity_of(label), f"{extent_of(series, training).last:.5g}")
    return [
        selection.path.rpartition("/")[2],
        str(overview.meta.get("rank", "")),
        f"{min(steps)} to {max(steps)}" if steps else "",
        *(last.get(quantity, "") for quantity in BRIEF),
        f"{selection.records:,}",
        overview.ending().text,
        "" if overview.first_bad is None else row_location(overview.first_bad),
    ]


def _advice(folder: str, overviews: Sequence[Overview]) -> Iterator[str]:
    yield from next_step_lines(_next_steps(folder, overviews))


def _next_steps(folder: str, overviews: Sequence[Overview]) -> list[NextStep]:
    """Return those of the first rank that has any, for all ranks."""
    all_steps = (next_steps(overview, folder) for overview in overviews)
    return next(filter(None, all_steps), [])


# what is said of all ranks together, in this order: functions of the folder and of its recordings,
# in the order of their ranks, whose table of tensors is gone
_ALL_RANKS: tuple[Callable[[str, Sequence[Overview]], Iterator[str]], ...] = (
    _table,
    _laws,
    _advice,
)
