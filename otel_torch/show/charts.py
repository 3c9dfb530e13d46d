"""The charts of the HTML page: their HTML, and Vega-Lite plots without values.

The plots are templates: the script of the page fills in the values of the chosen statistic.
"""

from __future__ import annotations

from typing import Any

from otel_torch.rendering.page import grid_axes, plot_of, sentence
from otel_torch.show.grid import COUNTS, Grid

# Plot -> the field whose values are its rows.
ROW_FIELDS = {
    "heat": "module",
    "over-modules": "name",
    "histogram-modules": "name",
    "histogram-steps": "magnitude",
}

_FEW_COLUMNS = 12  # so few do not stretch to the width of the page
_TOOLTIP = {"field": "text", "type": "nominal"}
_NAMED_STATISTICS = 5

_CONTROLS = (
    '<div class="controls"><label>statistic <select id="statistic"></select></label>'
    '<label>of <select id="tensors"></select></label>'
    '<label>colored by <select id="colour">'
    "<option>value</option><option>times the module's median</option></select></label></div>"
)
_HEAT_MAP = [
    '<p class="faint" id="note"></p>',
    '<div class="plot" id="heat"></div>',
]
_SPREADS = [
    "<h2>Spread over the modules, step by step</h2>",
    '<p class="faint">The line is the median of all tensors; the dark band contains 80 % of '
    "them, the light one all.</p>",
    '<div class="plot" id="over-steps"></div>',
    "<h2>Spread over the steps, module by module</h2>",
    '<p class="faint">The tick is the median of all steps; the thick bar contains 80 % of '
    "them, the thin one all.</p>",
    '<div class="plot" id="over-modules"></div>',
]
_HISTOGRAMS = [
    '<div id="histograms"><h2>Magnitudes</h2>',
    '<p class="faint">The share of elements of each magnitude, in powers of two: of each module '
    "over all steps.</p>",
    '<div class="plot" id="histogram-modules"></div>',
    '<p class="faint">The same for each step, over all modules.</p>',
    '<div class="plot" id="histogram-steps"></div></div>',
]


def charts_section(grid: Grid) -> list[str]:
    """Return the HTML with the controls and an element for each plot."""
    lines = [
        "<h2>Module × step</h2>",
        f'<p class="faint">{sentence(" ".join(_notes(grid)))}</p>',
        _CONTROLS,
        *_HEAT_MAP,
        *_SPREADS,
    ]
    return lines + _HISTOGRAMS if grid.histograms else lines


def _notes(grid: Grid) -> list[str]:
    counts = ", ".join(f"`{name}`" for name in sorted(COUNTS))
    notes = ["Each cell is a module in a step. Red with a cross: NaN or Inf."]
    if grid.width > 1:
        notes.append(f"{len(grid.steps):,} steps are grouped by {grid.width}.")
    notes.append(
        "If a cell has several values (calls, grouped steps or modules), it shows the smallest "
        f"`min`, the largest `max`, the sum of {counts}, and otherwise the value with the largest "
        "magnitude."
    )
    if grid.left_out:
        names = ", ".join(list(grid.left_out)[:_NAMED_STATISTICS])
        notes.append(f"Left out: {len(grid.left_out):,} further statistics, such as {names}.")
    return notes


def templates(columns: int) -> dict[str, Any]:
    """Return the plots by id, without values. columns: how many steps the grid has."""
    width = _width(columns)
    return {
        "heat": heat_map(columns),
        "over-steps": _spread_over_modules_by_step(),
        "over-modules": _spread_over_steps_by_module(),
        "histogram-modules": _histogram_of_modules(),
        "histogram-steps": _histogram_of_steps(width),
    }


def _width(columns: int) -> dict[str, Any]:
    return {"width": {"step": 40}, "autosize": "pad"} if columns <= _FEW_COLUMNS else {}


def heat_map(columns: int) -> dict[str, Any]:
    """Return a map of modules by steps, without values."""
    x, y = grid_axes("step", "module", ("column", "row"))
    border = {"stroke": "var(--back)", "strokeWidth": 0.5}
    heat = {"field": "heat", "type": "quantitative"}
    finite_cells = {
        "transform": [{"filter": "!datum.bad"}],
        "mark": {"type": "rect", **border},
        "encoding": {"x": x, "y": y, "color": heat, "tooltip": _TOOLTIP},
    }
    bad_cells = {
        "transform": [{"filter": "datum.bad"}],
        "mark": {"type": "rect", "color": "var(--introduced)", **border},
        "encoding": {"x": x, "y": y, "tooltip": _TOOLTIP},
    }
    crosses = {
        "transform": [{"filter": "datum.bad"}],
        "mark": {
            "type": "point",
            "shape": "cross",
            "angle": 45,
            "filled": True,
            "color": "var(--back)",
            "size": 50,
            "opacity": 1,
            "tooltip": None,
        },
        "encoding": {"x": x, "y": y},
    }
    return plot_of(
        [], **_width(columns), height={"step": 15}, layer=[finite_cells, bad_cells, crosses]
    )


def _quantile(name: str) -> dict[str, Any]:
    return {"field": name, "type": "quantitative"}


def _spread_over_modules_by_step() -> dict[str, Any]:
    x, _ = grid_axes("name", "name", ("at", "at"))
    color = {"color": "var(--dtype)"}
    band = {"type": "area", **color, "tooltip": None}
    full_band = {
        "mark": {**band, "opacity": 0.18},
        "encoding": {"y": _quantile("least"), "x": x, "y2": {"field": "most"}},
    }
    main_band = {
        "mark": {**band, "opacity": 0.35},
        "encoding": {"y": _quantile("low"), "x": x, "y2": {"field": "high"}},
    }
    median_line = {
        "mark": {"type": "line", **color, "tooltip": None},
        "encoding": {"y": _quantile("middle"), "x": x},
    }
    median_points = {
        "mark": {"type": "point", "filled": True, **color, "size": 30, "opacity": 1},
        "encoding": {"y": _quantile("middle"), "x": x, "tooltip": _TOOLTIP},
    }
    layer = [full_band, main_band, median_line, median_points]
    return plot_of([], height=240, layer=layer)


def _spread_over_steps_by_module() -> dict[str, Any]:
    _, y = grid_axes("name", "name", ("at", "at"))
    bar = {"type": "rule", "color": "var(--dtype)", "strokeCap": "butt", "tooltip": None}
    full_bar = {
        "mark": {**bar, "strokeWidth": 2, "opacity": 0.45},
        "encoding": {"x": _quantile("least"), "y": y, "x2": {"field": "most"}},
    }
    main_bar = {
        "mark": {**bar, "strokeWidth": 7, "opacity": 0.6},
        "encoding": {"x": _quantile("low"), "y": y, "x2": {"field": "high"}},
    }
    median_tick = {
        "mark": {"type": "tick", "color": "var(--ink)", "thickness": 2, "size": 11},
        "encoding": {"x": _quantile("middle"), "y": y, "tooltip": _TOOLTIP},
    }
    return plot_of([], height={"step": 15}, layer=[full_bar, main_bar, median_tick])


_MAGNITUDE = {
    "field": "magnitude",
    "type": "nominal",
    "title": "magnitude",
    "sort": {"field": "bin"},
    "axis": {"labelAngle": 0, "labelOverlap": True},
}
_SHARE = {
    "field": "share",
    "type": "quantitative",
    "title": "share",
    "scale": {"type": "sqrt", "scheme": "viridis", "domainMin": 0},
    "legend": {"format": ".0%"},
}
_NAME = {
    "field": "name",
    "type": "nominal",
    "title": None,
    "sort": {"field": "row"},
    "axis": {"labelLimit": 360},
}
_CELL = {"type": "rect", "stroke": "var(--back)", "strokeWidth": 0.5}


def _histogram_of_modules() -> dict[str, Any]:
    encoding = {"x": _MAGNITUDE, "y": _NAME, "color": _SHARE, "tooltip": _TOOLTIP}
    return plot_of([], height={"step": 15}, mark=_CELL, encoding=encoding)


def _histogram_of_steps(width: dict[str, Any]) -> dict[str, Any]:
    steps = {**_NAME, "title": "step", "axis": {"labelAngle": 0, "labelOverlap": True}}
    large_on_top = {
        **_MAGNITUDE,
        "sort": {"field": "bin", "order": "descending"},
        "axis": {"labelOverlap": True},
    }
    encoding = {"x": steps, "y": large_on_top, "color": _SHARE, "tooltip": _TOOLTIP}
    return plot_of([], **width, height={"step": 9}, mark=_CELL, encoding=encoding)
