"""The block of a text report with two curves: error by depth, and error by step.

A bar is drawn with block characters on a log scale. With floor 1e-6 and largest error 1.0, eight
levels a row and three rows, an error of 1e-3 is half the height:

    1  │      ███ │   level 24
       │   ▄▄▄███ │   level 12: the lower row full, half of the middle one
  1e-6 │··········│   `·`: within its floor
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from otel_torch.parity.finding import ComparedPair, Report
from otel_torch.parity.report.pairs import (
    group_neighbors,
    pairs_around_finding,
    worst_by_step,
    worst_pair,
)
from otel_torch.parity.report.screen import Screen
from otel_torch.parity.report.wording import format_error, place_of, step_name

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LEVELS = len(_BLOCKS) - 1  # of one row
_ROWS = 3
_LABEL_WIDTH = 9  # columns left of the curve, for its scale
_WIDEST_BAR = 3  # columns of one pair, if there are few pairs


def curves_block(report: Report, screen: Screen) -> list[str]:
    """Return the curves that are not empty."""
    return error_by_depth(report, screen) + _error_by_step(report, screen)


def error_by_depth(report: Report, screen: Screen) -> list[str]:
    """Return the curve of the first finding's step, or none if all its pairs are right."""
    pairs = pairs_around_finding(report)
    room = screen.width - _LABEL_WIDTH - 1
    groups = group_neighbors(pairs, room)
    bars = [worst for group in groups if (worst := worst_pair(group)) is not None]
    above_floor = [pair for pair in bars if pair.state != "right"]
    if not above_floor:
        return []
    bar_width = min(room // len(bars), _WIDEST_BAR)
    columns = [pair for pair in bars for _ in range(bar_width)]
    if len(columns) < 2:
        return []
    first = report.first
    step = ""
    if first is not None and first.step is not None:
        step = f" of {step_name((first.loop, first.step))}"
    title = (
        f"error by depth: {len(pairs):,} pairs{step} in execution order, log scale, "
        "· within its floor"
    )
    lines = [screen.paint(title, "bold"), *_bar_rows(columns, above_floor)]
    marks = [
        index
        for index, pair in enumerate(columns)
        if pair.state == "introduced" and (index == 0 or columns[index - 1] is not pair)
    ]
    if marks:
        label = "" if first is None else place_of(first)
        arrows = _arrows(marks, label, screen.width - _LABEL_WIDTH)
        lines.append(screen.paint(" " * _LABEL_WIDTH + arrows, "red"))
    return lines


def _bar_rows(columns: Sequence[ComparedPair], above_floor: Sequence[ComparedPair]) -> list[str]:
    level_of = _log_scale(columns, _LEVELS * _ROWS)
    levels = [0 if pair.state == "right" else level_of(pair.error) for pair in columns]
    labels = [""] * _ROWS
    labels[0] = format_error(max(_finite_errors(above_floor), default=None))
    labels[-1] = format_error(_smallest_floor(columns))
    rows = []
    for row, label in enumerate(labels):
        levels_below = _LEVELS * (_ROWS - 1 - row)
        is_lowest = levels_below == 0
        bars = ""
        for level in levels:
            block = _BLOCKS[min(max(level - levels_below, 0), _LEVELS)]
            bars += "·" if is_lowest and level == 0 else block
        rows.append(f"{label:>7}  {bars}".rstrip())
    return rows


def _arrows(marks: Sequence[int], label: str, room: int) -> str:
    """Return an arrow under each mark, with the label after or before them if there is room.

    >>> _arrows([2, 4], "here", 20), _arrows([8], "here", 10)
    ('  ▲ ▲ here', '   here ▲')
    """
    arrows = "".join("▲" if index in marks else " " for index in range(marks[-1] + 1))
    if len(arrows) + 1 + len(label) <= room:
        return f"{arrows} {label}".rstrip()
    if len(label) < marks[0]:
        return f"{label} ".rjust(marks[0]) + arrows[marks[0] :]
    return arrows


def _error_by_step(report: Report, screen: Screen) -> list[str]:
    steps = list(worst_by_step(report).items())
    if len(steps) < 2 or all(pair.state == "right" for _, pair in steps):
        return []
    worst = [
        max((pair for _, pair in group), key=lambda pair: pair.error or 0)
        for group in group_neighbors(steps, screen.width // 2 - 10)
    ]
    level_of = _log_scale(worst, _LEVELS)
    bars = "".join(
        "·" if pair.state == "right" else _BLOCKS[level_of(pair.error)] for pair in worst
    )
    ends = ", ".join(
        f"{format_error(pair.error)} at {step_name(key)}" for key, pair in (steps[0], steps[-1])
    )
    return [f"{screen.paint('error by step:', 'bold')} {bars}  {ends}"]


def _log_scale(pairs: Sequence[ComparedPair], levels: int) -> Callable[[float | None], int]:
    """Return a function from an error to a level from 1 (smallest floor) to `levels` (largest
    error), by its logarithm.
    """
    low = math.log10(_smallest_floor(pairs))
    high = max(math.log10(max(_finite_errors(pairs), default=1.0)), low + 1e-9)

    def level_of(error: float | None) -> int:
        if error is None or not math.isfinite(error):
            return levels
        part = (math.log10(error) - low) / (high - low) if error > 0 else 0.0
        return min(max(math.ceil(part * levels), 1), levels)

    return level_of


def _smallest_floor(pairs: Iterable[ComparedPair]) -> float:
    return min((pair.floor for pair in pairs if pair.floor > 0), default=1e-9)


def _finite_errors(pairs: Iterable[ComparedPair]) -> list[float]:
    return [pair.error for pair in pairs if pair.error and math.isfinite(pair.error)]
