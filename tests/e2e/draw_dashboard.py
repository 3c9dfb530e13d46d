"""Draws the dashboard *Training* from its definition and from what Prometheus answers about a real
training: `python -m tests.e2e.draw_dashboard`. Grafana cannot be built here, so the look is ours.

The picture is docs/pictures/dashboard-training.svg.
"""

from __future__ import annotations

import math
import re
import runpy
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.e2e import apis
from tests.e2e.conftest import Stack
from tests.e2e.stack import SHIPPED, Running, eventually
from tests.support import PROGRAMS, run_python

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "dashboard-training.svg"
PROGRAM = PROGRAMS / "training/train_for_an_hour.py"
MINUTES, SAMPLES = 60, 120  # of the queries' range
# pixels of a 24th of the width, of a unit of height, between panels, above and below a plot
COLUMN, ROW, GAP, HEAD, FOOT = 50, 26, 8, 26, 18
COLORS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0")


@dataclass(frozen=True)
class Series:
    """One line: its legend, and (seconds, value) of its points in order of time."""

    legend: str
    points: list[tuple[float, float]]


def ask(prometheus: Running, query: Any, end: float) -> list[Series]:
    """Return what Prometheus answers to a panel's query about the last hour."""
    text = re.sub(r"\$\{?(\w+)\}?", lambda match: {"__range": "1h"}.get(match[1], ".*"), query.text)
    start = end - 60 * MINUTES if query.form == "time_series" else end
    answer = apis.ask(
        prometheus.url("PROMETHEUS_PORT", "/api/v1/query_range"),
        query=text,
        start=start,
        end=end,
        step=60 * MINUTES / SAMPLES,
    )
    found = []
    for each in answer["data"]["result"]:
        labels = each["metric"]
        legend = re.sub(
            r"{{(\w+)}}", lambda match, labels=labels: labels.get(match[1], ""), query.legend
        )
        names = [value for name, value in labels.items() if name != "__name__"]
        points = [(float(at), float(value)) for at, value in each["values"]]
        found.append(Series(legend or ", ".join(names), points))
    return found


def text(x: float, y: float, content: str, size: int = 11, **attributes: str) -> str:
    """Return a line of text; `fill` and `anchor` are attributes of SVG."""
    fill, anchor = attributes.get("fill", "#c7d0d9"), attributes.get("anchor", "start")
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{escape(content)}</text>'


def number(value: float, unit: str = "") -> str:
    """Return a value with its unit, as short as an axis needs it."""
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    return f"{value:.3g}" + {"s": " s"}.get(unit, "")


def draw_lines(panel: Any, series: Sequence[Series], width: float, height: float) -> list[str]:
    """Return a plot of lines over time, with the first legends below it."""
    values = [value for each in series for _, value in each.points if math.isfinite(value)]
    low, high = min(values), max(values)
    if high == low:
        low, high = low - 0.5 * abs(low), high + (0.5 * abs(high) or 1)
    times = [at for each in series for at, _ in each.points]
    begin, length = min(times), max(max(times) - min(times), 1)
    left, right, top, bottom = 52, width - 10, HEAD + 8, height - FOOT - 6
    parts = []
    for share in (0, 0.5, 1):
        y = bottom - share * (bottom - top)
        parts.append(f'<path d="M{left} {y:.0f}H{right:.0f}" stroke="#2c3235"/>')
        parts.append(
            text(left - 5, y + 4, number(low + share * (high - low), panel.unit), 10, anchor="end")
        )
    for index, each in enumerate(series):
        places = [
            (
                left + (at - begin) / length * (right - left),
                bottom - (value - low) / (high - low) * (bottom - top),
            )
            for at, value in each.points
            if math.isfinite(value)
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        color = COLORS[index % len(COLORS)]
        parts.append(
            f'<path d="M{path}h0" fill="none" stroke="{color}" stroke-width="1.5" stroke-linecap="round"/>'
        )
    x = 10.0
    for index, each in enumerate(series):
        if x + 6.2 * len(each.legend) > width:
            break
        parts.append(text(x, height - 8, each.legend, 11, fill=COLORS[index % len(COLORS)]))
        x += 6.2 * len(each.legend) + 14
    return parts


def draw_map(panel: Any, series: Sequence[Series], width: float, height: float) -> list[str]:
    """Return a map of series by time, colored by the logarithm of the value."""
    logs = [math.log(value) for each in series for _, value in each.points if value > 0]
    low, high = min(logs), max(logs)
    begin = min(each.points[0][0] for each in series)
    length = max(each.points[-1][0] for each in series) - begin + 60 * MINUTES / SAMPLES
    left, right = 150, width - 10
    row = (height - HEAD - 14) / len(series)
    cell = (right - left) * 60 * MINUTES / SAMPLES / length
    parts = []
    for index, each in enumerate(sorted(series, key=lambda one: one.legend)):
        y = HEAD + 6 + index * row
        parts.append(text(left - 6, y + row / 2 + 4, each.legend, 11, anchor="end"))
        # Prometheus repeats a value until the next one: one rectangle for all of them
        for value, run in groupby(each.points, key=lambda point: point[1]):
            times = [at for at, _ in run]
            share = (math.log(value) - low) / ((high - low) or 1) if value > 0 else 0.0
            hue = 220 * (1 - share)
            x = left + (times[0] - begin) / length * (right - left)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell * len(times) + 0.3:.1f}" height="{row - 1:.1f}" fill="hsl({hue:.0f},70%,50%)"/>'
            )
    return parts


def draw_table(panel: Any, series: Sequence[Series], width: float, height: float) -> list[str]:
    """Return the last value of each series, the largest first."""
    ordered = sorted(series, key=lambda each: -each.points[-1][1])
    parts = []
    for index, each in enumerate(ordered[: int((height - HEAD - 8) // 18)]):
        y = HEAD + 20 + 18 * index
        parts.append(text(12, y, each.legend))
        parts.append(text(width - 12, y, number(each.points[-1][1], panel.unit), anchor="end"))
    return parts


def draw_number(panel: Any, series: Sequence[Series], width: float, height: float) -> list[str]:
    """Return the last value in large digits."""
    value = number(series[0].points[-1][1], panel.unit)
    return [text(width / 2, height / 2 + 22, value, 44, fill="#73bf69", anchor="middle")]


Draw = Callable[[Any, Sequence[Series], float, float], list[str]]
KINDS: dict[str, Draw] = {
    "timeseries": draw_lines,
    "statushistory": draw_map,
    "table": draw_table,
    "stat": draw_number,
}


def draw_panel(panel: Any, series: Sequence[Series], x: float, y: float) -> str:
    """Return a panel at its place."""
    width, height = panel.width * COLUMN - GAP, panel.height * ROW - GAP
    parts = [
        f'<rect width="{width}" height="{height}" rx="2" fill="#181b1f" stroke="#2c3235"/>',
        text(10, 18, panel.title, 13, fill="#d8d9da"),
    ]
    if series:
        parts += KINDS[panel.kind](panel, series, width, height)
    else:
        parts.append(
            text(width / 2, height / 2 + 6, "No data", 14, fill="#8e8e8e", anchor="middle")
        )
    return f'<g transform="translate({x:.0f},{y:.0f})">{"".join(parts)}</g>'


def draw(board: Any, answers: Callable[[Any], list[Series]]) -> str:
    """Return a dashboard as SVG.

    Args:
        board: as `make_dashboards.py` defines it.
        answers: returns the series of a panel.
    """
    width, y = 24 * COLUMN + GAP, 40
    parts = [
        text(GAP, 26, f"otel_torch / {board.title}", 18, fill="#d8d9da"),
        text(width - GAP, 26, "drawn without Grafana", 12, fill="#8e8e8e", anchor="end"),
    ]
    for title, panels in board.rows.items():
        parts.append(text(GAP, y + 18, title, 14, fill="#8ab8ff"))
        y += 28
        x = line_height = 0
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + line_height * ROW
                line_height = 0
            parts.append(draw_panel(panel, answers(panel), GAP + x * COLUMN, y))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="#111217"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    board = runpy.run_path(str(SHIPPED / "grafana" / "make_dashboards.py"))["TRAINING_BOARD"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        stack = Stack(Path(folder), running)
        (program := Path(folder) / "program").mkdir()
        run_python(program, PROGRAM, **stack.environment("training"))
        end = time.time()
        prometheus = stack.prometheus
        eventually(lambda: apis.series(prometheus, "torch_training_step_duration_seconds_count"))

        def answers(panel: Any) -> list[Series]:
            return [each for query in panel.queries for each in ask(prometheus, query, end)]

        PICTURE.write_text(draw(board, answers))
        print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
