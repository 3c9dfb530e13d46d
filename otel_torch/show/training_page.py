"""The health of a training on the HTML page: curves over the steps, and maps of modules by steps.

Its size is bounded: neighboring steps share a point of a curve or a column of a map, and modules
share a row, as in the maps of activations.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any, NamedTuple

from otel_torch.rendering.page import escaped, html_table, plot_of
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import plural
from otel_torch.show.chart_data import column_name, map_cells, map_rows
from otel_torch.show.charts import heat_map
from otel_torch.show.grid import Grid
from otel_torch.show.training import Series, TrainingSeries, quantity_of
from otel_torch.show.training_table import table_of, title_of
from otel_torch.show.training_trouble import WORDS, troubles

MAX_POINTS = 300  # of a curve
MAX_CURVES = 8  # of a plot
_LOG_RANGE = 30.0  # a positive quantity that varies more has a logarithmic axis
_COLORS = ("dtype", "inherited", "healed", "layout", "heat4", "right", "heat2", "faint")


class _Curves(NamedTuple):
    """A plot of curves: its title, its quantities, and whether its axis is always logarithmic."""

    title: str
    quantities: tuple[str, ...]
    is_log: bool = False


# by the id of the plot's element
_CURVES = {
    "training-loss": _Curves("Loss", ("loss",)),
    "training-rate": _Curves("Learning rate", ("lr",)),
    "training-norms": _Curves(
        "Norms", ("grad_norm", "grad_norm_clipped", "param_norm", "update_ratio"), is_log=True
    ),
    "training-scale": _Curves("Loss scale", ("loss_scale",), is_log=True),
}
_MAPS = {
    "training-gradients": "grad_norm",
    "training-updates": "update_ratio",
    "training-dead": "dead",
}


class TrainingSection(NamedTuple):
    """The section of the page: its HTML, its curves by id, and its maps for the page's script."""

    lines: list[str]
    plots: dict[str, Any]
    maps: dict[str, Any]


def training_section(training: TrainingSeries, metadata: dict[str, Any]) -> TrainingSection:
    """Return the section; empty without rows of phase `train`."""
    if not training.rows:
        return TrainingSection([], {}, {})
    lines = ["<h2>Training</h2>"]
    lines += [f'<p class="introduced">! {escaped(trouble)}</p>' for trouble in troubles(training)]
    for model in training.models:
        header, table = table_of(training, model)
        rows = [[escaped(cell) for cell in line.cells] for line in table]
        lines.append(f'<p class="faint">{escaped(title_of(training, metadata, model))}</p>')
        lines.append(f'<div class="wide">{html_table(header, rows, numbers=len(header) - 1)}</div>')
    plots = {}
    for id, curves in _CURVES.items():
        chosen = _chosen(training, curves)
        if not chosen:
            continue
        plots[id] = _plot(training, dict(list(chosen.items())[:MAX_CURVES]), curves)
        note = plural(len(chosen) - MAX_CURVES, "further curve") if len(chosen) > MAX_CURVES else ""
        lines += _titled(id, curves.title, note and f"{note} left out.")
    maps = {}
    for id, label in _MAPS.items():
        if drawn := _map(training, label):
            maps[id] = drawn
            lines += _titled(id, f"{WORDS[label].capitalize()}, module × step", drawn.pop("note"))
    return TrainingSection(lines, plots, maps)


def _titled(id: str, title: str, note: str) -> list[str]:
    lines = [f"<h3>{title}</h3>", f'<p class="faint">{escaped(note)}</p>' if note else ""]
    return [*lines, f'<div class="plot" id="{id}"></div>']


# -- curves


def _chosen(training: TrainingSeries, curves: _Curves) -> dict[str, Series]:
    """Return the series of a plot by the name of their curve."""
    several = len(training.models) > 1
    return {
        escape(f"{model}: {label}" if several else label): series
        for model in training.models
        for label, series in training.totals(model).items()
        if quantity_of(label) in curves.quantities
    }


def _plot(training: TrainingSeries, chosen: dict[str, Series], curves: _Curves) -> dict[str, Any]:
    values = [point for name, series in chosen.items() for point in _points(training, name, series)]
    x = {
        "field": "at",
        "type": "quantitative",
        "title": "steps of all loops" if _has_loops(training) else "step",
        "scale": {"zero": False, "nice": False},
    }
    color, scale = _color(list(chosen)), _value_scale(values, curves)
    tooltip = {"field": "text", "type": "nominal"}
    finite = {"transform": [{"filter": "!datum.bad"}]}

    def y(field: str) -> dict[str, Any]:
        return {"field": field, "type": "quantitative", "title": None, "scale": scale}

    band = {
        **finite,
        "mark": {"type": "area", "opacity": 0.25, "tooltip": None},
        "encoding": {"x": x, "y": y("least"), "y2": {"field": "most"}, "color": color},
    }
    line = {
        **finite,
        "mark": {"type": "line", "strokeWidth": 1.5, "tooltip": None},
        "encoding": {"x": x, "y": y("middle"), "color": color},
    }
    points = {
        **finite,
        "mark": {"type": "point", "filled": True, "size": 12, "opacity": 1},
        "encoding": {"x": x, "y": y("middle"), "color": color, "tooltip": tooltip},
    }
    bad = {
        "transform": [{"filter": "datum.bad"}],
        "mark": {"type": "rule", "color": "var(--introduced)"},
        "encoding": {"x": x, "tooltip": tooltip},
    }
    return plot_of(values, height=200, layer=[band, line, points, bad])


def _color(names: list[str]) -> dict[str, Any]:
    colors = [f"var(--{color})" for color in _COLORS[: len(names)]]
    scale = {"domain": names, "range": colors}
    return {"field": "name", "type": "nominal", "title": None, "scale": scale}


def _value_scale(points: list[dict[str, Any]], curves: _Curves) -> dict[str, Any]:
    """Return the scale of the y axis. A norm of 0 has no place on a logarithmic one."""
    numbers = [point[key] for point in points if not point["bad"] for key in ("least", "most")]
    low, high = min(numbers, default=0), max(numbers, default=0)
    if low > 0 and (curves.is_log or high > _LOG_RANGE * low):
        return {"type": "log", "nice": False}
    magnitudes = [abs(number) for number in numbers if number]
    if curves.is_log and magnitudes:
        return {"type": "symlog", "constant": min(magnitudes)}
    return {"type": "linear", "zero": False}


def _points(training: TrainingSeries, name: str, series: Series) -> list[dict[str, Any]]:
    """Return the points of a curve: median, least and largest of neighboring values."""
    size = -(-len(series.values) // MAX_POINTS)
    by_position = _has_loops(training)
    points: list[dict[str, Any]] = []
    for start in range(0, len(series.values), size):
        values = series.values[start : start + size]
        indices = series.steps[start : start + size]
        steps = [training.steps[indices[0]], training.steps[indices[-1]]]
        at = indices[0] if by_position else steps[0].number
        text = f"{name}\nstep {column_name(steps)}\n"
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) < len(values):
            points.append({"name": name, "at": at, "bad": True, "text": f"{text}NaN or Inf"})
        if not finite:
            continue
        least, middle, most = (
            float(f"{value:.4g}") for value in (min(finite), median(finite), max(finite))
        )
        text += f"{middle:.4g}" if least == most else f"{middle:.4g} ({least:.4g} to {most:.4g})"
        point = {"name": name, "at": at, "bad": False, "text": text}
        points.append({**point, "least": least, "middle": middle, "most": most})
    return points


def _has_loops(training: TrainingSeries) -> bool:
    """Whether step numbers repeat or are unknown, so that a step's position takes their place."""
    return any(step.loop or step.number is None for step in training.steps)


# -- maps


def _map(training: TrainingSeries, label: str) -> dict[str, Any] | None:
    """Return names and cells of a map for the page's script; None without values of modules."""
    grid = Grid.of(training.module_rows(frozenset({label})))
    if not grid.series or "mean" not in grid.statistics:
        return None
    rows, note = map_rows(grid.series, set(grid.bad))
    columns = [column_name(steps) for steps in grid.columns]
    if grid.width > 1:
        note = f"{len(grid.steps):,} steps are grouped by {grid.width}. {note}".strip()
    return {
        "note": note,
        "columns": columns,
        "rows": list(rows),
        "title": WORDS[label],
        "cells": map_cells("mean", grid.statistics["mean"], rows),
        "template": heat_map(len(columns)),
    }
