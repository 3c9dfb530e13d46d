"""The two charts of the HTML report: error by depth, and a heat map of modules by steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from otel_torch.parity.finding import ComparedPair, Report, State
from otel_torch.parity.report.pairs import (
    CURVE_STATES,
    StepKey,
    excess,
    group_neighbors,
    pairs_around_finding,
    sorted_steps,
    worst_pair,
)
from otel_torch.parity.report.wording import (
    STATE_MARKS,
    format_error,
    module_name,
    step_name,
)
from otel_torch.rendering.page import plot_of
from otel_torch.rendering.table import escape

MAX_POINTS = 1000  # of the curve; neighbors are grouped beyond that
MAX_ROWS, MAX_COLUMNS = 120, 60  # of the heat map, likewise
_WIDE_COLUMNS = 12  # fewer columns than that do not stretch to the width of the page

# From harmless to guilty: modules and groups of pairs take the color of their worst pair.
STATES: tuple[State, ...] = ("right", "healed", "layout", "dtype", "inherited", "introduced")

# Error over floor, and the names of the ranges; the last one is for NaN and Inf.
_HEAT_LIMITS = (10.0, 1e3, 1e5)
_HEAT_NAMES = (
    "within its floor",
    "up to 10 times",
    "up to 1,000 times",
    "up to 100,000 times",
    "more",
    "NaN or Inf",
)
_ONLY_INTRODUCED = {"filter": "datum.state === 'introduced'"}
_TOOLTIP = {"field": "text", "type": "nominal"}


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot, its title, and the sentences and the legend needed to read it."""

    title: str
    notes: Sequence[str]
    legend: Sequence[str]
    plot: dict[str, Any]

    def section(self, id: str) -> list[str]:
        """Return the HTML around the element in which the page's script draws the plot."""
        return [
            f"<h2>{self.title}</h2>",
            f'<p class="faint">{" ".join(self.notes)}</p>',
            f'<p class="legend">{"".join(self.legend)}</p>',
            f'<div class="plot" id="{id}"></div>',
        ]


def hover_text(pair: ComparedPair) -> str:
    """Return the tooltip of a pair."""
    call = f", call {pair.call}" if pair.call else ""
    return (
        f"{STATE_MARKS[pair.state]} {pair.state}\n"
        f"reference  {module_name(pair.module)}  {escape(pair.tensor)}\n"
        f"port       {module_name(pair.port_module)}  {escape(pair.port_tensor)}\n"
        f"error {format_error(pair.error)}, floor {format_error(pair.floor)}, "
        f"{step_name((pair.loop, pair.step))}{call}"
    )


# -- error by depth


def error_by_depth(report: Report) -> Chart | None:
    """Return the error and the floor of each pair in execution order."""
    pairs = pairs_around_finding(report)
    groups = group_neighbors(pairs, MAX_POINTS)
    points = [worst for group in groups if (worst := worst_pair(group)) is not None]
    sizes = [
        size for pair in points for size in (pair.error, pair.floor) if size and math.isfinite(size)
    ]
    if not sizes:
        return None
    first = report.first
    if first is None or first.step is None:
        steps = "all steps"
    else:
        steps = step_name((first.loop, first.step))
    notes = [f"{len(pairs):,} pairs of {steps}, in execution order. The gray area is the floor."]
    if len(pairs) > len(points):
        notes.append(f"Neighbors form {len(points):,} groups; each shows its worst pair.")
    notes.append("Drag to move, Shift and wheel to zoom.")
    legend = [f'<span class="{state}">● {state}</span>' for state in CURVE_STATES]
    plot = _curve_plot(points, low=min(sizes) / 3, high=max(sizes) * 3)
    return Chart("Error by depth", notes, legend, plot)


def _curve_plot(points: Sequence[ComparedPair], low: float, high: float) -> dict[str, Any]:
    """Return the plot. Errors of zero are drawn at `low`, errors of NaN or Inf at `high`."""
    values = [
        {
            "depth": pair.depth,
            "error": _clamp_error(pair.error, low, high),
            "floor": max(pair.floor, low),
            "base": low,
            "state": pair.state,
            "text": hover_text(pair),
        }
        for pair in points
    ]
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    depth = {
        "field": "depth",
        "type": "quantitative",
        "title": "depth: index in execution order",
        "scale": {"nice": False},
        "axis": {"tickMinStep": 1},
    }
    error = {
        "field": "error",
        "type": "quantitative",
        "title": "error (relative L2)",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {"format": ".0e", "values": [10.0**exponent for exponent in exponents]},
    }
    color = {
        "field": "state",
        "type": "nominal",
        "scale": {"domain": list(STATES), "range": [f"var(--{state})" for state in STATES]},
        "legend": None,
    }
    is_introduced = _ONLY_INTRODUCED["filter"]
    floor_area = {
        "mark": {
            "type": "area",
            "color": "var(--floor)",
            "opacity": 0.55,
            "interpolate": "step",
            "tooltip": None,
        },
        "encoding": {"x": depth, "y": {**error, "field": "floor"}, "y2": {"field": "base"}},
    }
    zoom = {
        "name": "shown",
        "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
        "bind": "scales",
    }
    error_line = {
        "mark": {
            "type": "line",
            "color": "var(--faint)",
            "strokeWidth": 1,
            "opacity": 0.3,
            "tooltip": None,
        },
        "encoding": {"x": depth, "y": error},
        "params": [zoom],
    }
    introduced_rule = {
        "transform": [_ONLY_INTRODUCED],
        "mark": {
            "type": "rule",
            "color": "var(--introduced)",
            "strokeDash": [4, 3],
            "tooltip": None,
        },
        "encoding": {"x": depth},
    }
    pair_points = {
        "mark": {"type": "point", "filled": True, "opacity": 1, "clip": True},
        "encoding": {
            "x": depth,
            "y": error,
            "color": color,
            "size": {"condition": {"test": is_introduced, "value": 140}, "value": 36},
            "shape": {
                "condition": {"test": is_introduced, "value": "diamond"},
                "value": "circle",
            },
            "tooltip": _TOOLTIP,
        },
    }
    return plot_of(values, height=320, layer=[floor_area, error_line, introduced_rule, pair_points])


def _clamp_error(error: float | None, low: float, high: float) -> float:
    if not error:
        return low
    return min(error, high) if math.isfinite(error) else high


# -- module by step


@dataclass(frozen=True, slots=True)
class _Grid:
    """The heat map: names of rows (modules) and columns (steps), the worst pair of each cell."""

    rows: list[str]
    columns: list[str]
    cells: dict[tuple[int, int], ComparedPair]


def module_by_step(report: Report) -> Chart | None:
    """Return a heat map of error over floor, modules down and steps across."""
    grid = _grid_of(report)
    if not grid.cells:
        return None
    legend = [
        f'<span><span style="color:var(--heat{index})">■</span> {name}</span>'
        for index, name in enumerate(_HEAT_NAMES)
    ]
    return Chart("Module × step", _grid_notes(report, grid), legend, _grid_plot(grid))


def _grid_notes(report: Report, grid: _Grid) -> list[str]:
    notes = [
        "Each cell is the worst error over floor of a module in a step; "
        "◆ marks where an error was introduced."
    ]
    if len(grid.rows) < len({(pair.model, pair.module) for pair in report.compared}):
        notes.append(f"Modules are grouped under {len(grid.rows):,} names.")
    if len(grid.columns) < len({(pair.loop, pair.step) for pair in report.compared}):
        notes.append(f"Steps are grouped in {len(grid.columns):,} columns.")
    if report.compared_left_out:
        notes.append(
            f"{report.compared_left_out:,} pairs of steps without a difference are left out."
        )
    return notes


def _grid_plot(grid: _Grid) -> dict[str, Any]:
    values = [
        {
            "row": row,
            "module": grid.rows[row],
            "column": column,
            "step": grid.columns[column],
            "heat": _HEAT_NAMES[_heat_index(pair)],
            "state": pair.state,
            "text": hover_text(pair),
        }
        for (row, column), pair in grid.cells.items()
    ]
    x = {
        "field": "step",
        "type": "nominal",
        "title": "step",
        "sort": {"field": "column"},
        "axis": {"labelAngle": 0, "labelOverlap": True},
    }
    y = {
        "field": "module",
        "type": "nominal",
        "title": None,
        "sort": {"field": "row"},
        "axis": {"labelLimit": 360},
    }
    colors = [f"var(--heat{index})" for index in range(len(_HEAT_NAMES))]
    color = {
        "field": "heat",
        "type": "nominal",
        "scale": {"domain": list(_HEAT_NAMES), "range": colors},
        "legend": None,
    }
    cells = {
        "mark": {"type": "rect", "stroke": "var(--back)", "strokeWidth": 1},
        "encoding": {"x": x, "y": y, "color": color, "tooltip": _TOOLTIP},
    }
    introduced = {
        "transform": [_ONLY_INTRODUCED],
        "mark": {
            "type": "point",
            "shape": "diamond",
            "filled": True,
            "color": "var(--back)",
            "size": 70,
            "opacity": 1,
        },
        "encoding": {"x": x, "y": y, "tooltip": _TOOLTIP},
    }
    fixed_cells = {"width": {"step": 60}, "autosize": "pad"}
    width = {} if len(grid.columns) > _WIDE_COLUMNS else fixed_cells
    # A height by step would make Vega-Lite print a warning.
    return plot_of(values, **width, height=15 * len(grid.rows), layer=[cells, introduced])


def _grid_of(report: Report) -> _Grid:
    """Return the worst pair of each module and step; what exceeds the grid is grouped.

    Rows are grouped under shorter prefixes of their names: `blocks.0.attn.q` and `blocks.0.attn.k`
    become `blocks.0.attn`.
    """
    labels = _row_labels(report)
    steps = sorted_steps({(pair.loop, pair.step) for pair in report.compared})
    groups = group_neighbors(steps, MAX_COLUMNS)
    column_of = {step: index for index, group in enumerate(groups) for step in group}
    cells: dict[tuple[str, int], ComparedPair] = {}
    for pair in report.compared:
        cell = (labels[pair.model, pair.module], column_of[pair.loop, pair.step])
        cells[cell] = worst_pair((cells.get(cell, pair), pair)) or pair

    rows = list(dict.fromkeys(row for row, _ in cells))
    if len(rows) > MAX_ROWS:  # the names share no prefix: keep the worst rows
        rows = _worst_rows(rows, cells)
    row_of = {row: index for index, row in enumerate(rows)}
    shown = {(row_of[row], column): pair for (row, column), pair in cells.items() if row in row_of}
    return _Grid(rows, [_column_label(group) for group in groups], shown)


def _row_labels(report: Report) -> dict[tuple[str, str], str]:
    """Return the row of each (model, module), with names shortened until they fit the grid."""
    models = {pair.model for pair in report.compared}
    labels = {}
    for pair in report.compared:
        model = f"{escape(pair.model)}: " if len(models) > 1 else ""
        labels[pair.model, pair.module] = model + module_name(pair.module)
    parts = max((label.count(".") + 1 for label in labels.values()), default=0)
    shortened = labels
    while parts > 1 and len(set(shortened.values())) > MAX_ROWS:
        parts -= 1
        shortened = {key: ".".join(label.split(".")[:parts]) for key, label in labels.items()}
    return shortened


def _worst_rows(rows: Sequence[str], cells: dict[tuple[str, int], ComparedPair]) -> list[str]:
    heat = dict.fromkeys(rows, -1.0)
    for (row, _), pair in cells.items():
        heat[row] = max(heat[row], math.inf if pair.state == "introduced" else excess(pair))
    worst = set(sorted(rows, key=heat.__getitem__, reverse=True)[:MAX_ROWS])
    return [row for row in rows if row in worst]


def _column_label(steps: Sequence[StepKey]) -> str:
    first, last = _step_label(steps[0]), _step_label(steps[-1])
    return first if len(steps) == 1 else f"{first}–{last}"


def _step_label(key: StepKey) -> str:
    loop, step = key
    label = "none" if step is None else str(step)
    return f"{label} (loop {loop})" if loop else label


def _heat_index(pair: ComparedPair) -> int:
    """Return the index in `_HEAT_NAMES` of a pair."""
    if pair.error is not None and not math.isfinite(pair.error):
        return len(_HEAT_NAMES) - 1
    if pair.state not in ("inherited", "introduced"):
        return 0
    for index, limit in enumerate(_HEAT_LIMITS, 1):
        if excess(pair) <= limit:
            return index
    return len(_HEAT_LIMITS) + 1
