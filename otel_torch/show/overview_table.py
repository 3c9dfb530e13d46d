"""The overview of a recording as lines of text: outcome, warnings and a table.

In a terminal the table fits the width, and what matters is repeated below a table that is higher
than the screen. A file or a pipe gets every column and the complete names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from otel_torch.process.console import say
from otel_torch.records import FINGERPRINTS
from otel_torch.rendering.next_step import NextStep, advice_lines
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.table import (
    Line,
    escape,
    format_table,
    paint,
    supports_color,
    terminal_size,
    without_wide_columns,
    write_line,
)
from otel_torch.settings import STATISTICS
from otel_torch.show.combined import BOOKKEEPING, LOCATION, is_number
from otel_torch.show.next_steps import next_steps
from otel_torch.show.overview import Overview, TensorLine, read_overview
from otel_torch.show.selection import Selection, format_step, origin_of_nonfinite
from otel_torch.show.training.table import training_lines, verdict_lines
from otel_torch.show.training.trouble import troubles

_COMBINED = "each row: all records of a tensor, taken as one (one row per record: --step LIST)"
_STYLES = {"fine": "green", "trouble": "red", "unknown": "yellow"}
_TEXT_COLUMNS = ("", "model", "module", "tensor", "phase", "branch")
# Statistics that are shown in another way, or that people cannot read.
_WITHOUT_COLUMN = FINGERPRINTS | {"histogram", "shape", "dtype"}
# What a narrow terminal leaves out, in this order, after statistics that are not named here.
_EXPENDABLE = (
    *("numel", "l2", "rms", "sum", "dtype", "zeros", "std", "mean", "shape", "records"),
    *("nonfinite", "abs_mean"),
)


def print_overview(selection: Selection, as_json: bool, progress: Progress) -> int:
    """Print the table, or one JSON object. Return 0, or 2 if nothing is selected."""
    with progress:
        overview = read_overview(selection, progress)
    if selection.is_empty:
        say(selection.nothing_selected())
        return 2
    if as_json:
        write_line(sys.stdout, json.dumps(overview.as_json(), allow_nan=False))
    else:
        terminal = terminal_size(sys.stdout)
        for line in overview_lines(overview, terminal, supports_color(sys.stdout)):
            write_line(sys.stdout, line)
        for line in next_step_lines(next_steps(overview)):
            write_line(sys.stdout, line)
    return 0


def next_step_lines(steps: Sequence[NextStep]) -> list[str]:
    """Return the steps below an empty line, if any."""
    return ["", *map(escape, advice_lines(steps))] if steps else []


def overview_lines(
    overview: Overview, terminal: os.terminal_size | None, color: bool
) -> Iterator[str]:
    """Yield the lines. terminal: Its columns and lines, or None for a file or a pipe."""
    outcome = overview.outcome()
    summary = []
    if origin := origin_of_nonfinite(overview.meta):
        summary.append(paint(escape(f"! {origin}"), _STYLES["trouble"], color))
    summary += [paint(escape(outcome.text), _STYLES[outcome.kind], color)]
    summary += [paint(escape(f"! {text}"), "yellow", color) for text in overview.warnings]
    training = overview.selection.training
    for line in verdict_lines(training, overview.meta, overview.laws):
        summary.append(paint(escape(line.text), _STYLES[line.kind], color))
    found = troubles(training, overview.laws)
    summary += [paint(escape(f"! {text}"), "red", color) for text in found]
    yield escape(overview.heading())
    yield from summary
    if training.rows:
        yield ""
        yield from training_lines(training, overview.meta, color, terminal and terminal.columns)
    if not overview.lines:
        return
    if not overview.has_line_per_record:
        yield _COMBINED
    yield ""
    table, left_out = _format_table(overview, terminal.columns if terminal else None, color)
    yield table
    is_scrolled = terminal is not None and len(overview.lines) + 1 >= terminal.lines
    if is_scrolled or left_out:
        yield ""
    if left_out:
        yield f"no room for {', '.join(left_out)}: widen the terminal, or add `| cat`"
    if is_scrolled:
        yield from summary


def _format_table(overview: Overview, width: int | None, color: bool) -> tuple[str, list[str]]:
    """Return the table, and the columns that did not fit."""
    tensors = overview.sorted_lines()
    columns = _columns(tensors, overview.has_line_per_record)
    header = [name for name, _ in columns]
    lines = [
        Line(
            [format_cell(tensor) for _, format_cell in columns],
            None if tensor.first_bad is None else "red",
        )
        for tensor in tensors
    ]
    left_columns = sum(name in _TEXT_COLUMNS for name in header)
    left_out: list[str] = []
    if width is not None:
        usual = {"min", "max", *_EXPENDABLE}
        unusual = [name for name in _recorded_statistics(tensors) if name not in usual]
        header, lines, left_out = without_wide_columns(
            header, lines, [*unusual, *_EXPENDABLE], width=width, left_columns=left_columns
        )
    table = format_table(header, lines, left_columns=left_columns, color=color, width=width)
    return table, left_out


_Column = tuple[str, Callable[[TensorLine], str]]  # its name, and the text of a line's cell


def _columns(lines: Sequence[TensorLine], has_line_per_record: bool) -> list[_Column]:
    """Return the columns worth showing: names that differ, and statistics that were recorded."""
    columns: list[_Column] = [("", lambda line: "" if line.first_bad is None else "!")]
    if _differs(lines, "model"):
        columns.append(_field_column("model"))
    columns.append(("module", lambda line: line.row["module"] or "(root)"))
    columns.append(_field_column("tensor"))
    columns += [_field_column(name) for name in ("phase", "branch") if _differs(lines, name)]
    if has_line_per_record:
        for name in ("loop", "step", "call"):
            if name == "step" or _differs(lines, name):
                columns.append(_field_column(name))
    else:
        columns.append(("records", lambda line: str(line.records)))
        if any(line.first_bad for line in lines):
            columns.append(("bad since", _format_bad_since))
    columns += map(_field_column, _recorded_statistics(lines))
    recorded = {name for line in lines for name in line.row}
    if "shape" in recorded:
        columns.append(("shape", _format_shape))
    if "dtype" in recorded:
        columns.append(
            ("dtype", lambda line: str(line.row.get("dtype", "")).removeprefix("torch."))
        )
    return columns


def _recorded_statistics(lines: Sequence[TensorLine]) -> list[str]:
    """Return the known statistics in their usual order, then further numbers of the recording."""
    names = dict.fromkeys(name for line in lines for name in line.row)
    usual = [name for name in STATISTICS if name in names and name not in _WITHOUT_COLUMN]
    ignored = {*STATISTICS, *LOCATION, *BOOKKEEPING}
    further = dict.fromkeys(
        name
        for line in lines
        for name, value in line.row.items()
        if name not in ignored and is_number(value)
    )
    return usual + list(further)


def _differs(lines: Iterable[TensorLine], name: str) -> bool:
    return len({str(line.row.get(name)) for line in lines}) > 1


def _field_column(name: str) -> _Column:
    def format_cell(line: TensorLine) -> str:
        value = line.row.get(name)
        if value is None:
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return name, format_cell


def _format_shape(line: TensorLine) -> str:
    shape = line.row.get("shape")
    text = ""
    if isinstance(shape, list):
        text = "x".join(map(str, shape)) or "scalar"
    return f"{text} ..." if len(line.shapes) > 1 else text


def _format_bad_since(line: TensorLine) -> str:
    return "" if line.first_bad is None else format_step(line.first_bad)
