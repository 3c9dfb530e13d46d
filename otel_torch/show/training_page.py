"""The health of a training on the HTML page: curves over the steps, and maps of modules by steps.

Its size is bounded: neighboring steps share a point of a curve or a column of a map.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any, NamedTuple

from otel_torch.rendering.page import escaped, html_table
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import plural
from otel_torch.show.explorer_data import column_name, shown_rows
from otel_torch.show.grid import Grid
from otel_torch.show.packed import pack
from otel_torch.show.training import Series, TrainingSeries, quantity_of
from otel_torch.show.training_table import table_of, title_of
from otel_torch.show.training_trouble import WORDS, troubles

MAX_POINTS = 300  # of a curve
MAX_CURVES = 8  # of a plot


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
    """The section of the page: its HTML, and the JSON of its curves and maps by id."""

    lines: list[str]
    curves: dict[str, Any]
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
    drawn_curves = {}
    for id, curves in _CURVES.items():
        chosen = _chosen(training, curves)
        if not chosen:
            continue
        drawn_curves[id] = _plot(training, dict(list(chosen.items())[:MAX_CURVES]), curves)
        note = plural(len(chosen) - MAX_CURVES, "further curve") if len(chosen) > MAX_CURVES else ""
        lines += _titled(id, "curve", curves.title, note and f"{note} left out.")
    maps = {}
    for id, label in _MAPS.items():
        if drawn := _map(training, label):
            maps[id] = drawn
            title = f"{WORDS[label].capitalize()}, module × step"
            lines += _titled(id, "map", title, drawn.pop("note"))
    return TrainingSection(lines, drawn_curves, maps)


def _titled(id: str, kind: str, title: str, note: str) -> list[str]:
    lines = [f"<h3>{title}</h3>", f'<p class="faint">{escaped(note)}</p>' if note else ""]
    return [*lines, f'<div class="{kind}" id="{id}"></div>']


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
    """Return a plot: lines over the positions `x`, null where a line has no point."""
    lines = {name: _points(training, series) for name, series in chosen.items()}
    names = {at: point.step for points in lines.values() for at, point in points.items()}
    x = sorted(names)
    return {
        "x": x,
        "steps": [names[at] for at in x],
        "scale": "log" if curves.is_log else "auto",
        "bad": [
            at for at in x if any(points[at].is_bad for points in lines.values() if at in points)
        ],
        "lines": [
            {"name": name}
            | {
                key: [getattr(points[at], key) if at in points else None for at in x]
                for key in ("least", "middle", "most")
            }
            for name, points in lines.items()
        ],
    }


class _Point(NamedTuple):
    """Neighboring values of a curve, and the steps they are of; None without a finite value."""

    step: str
    is_bad: bool
    least: float | None = None
    middle: float | None = None
    most: float | None = None


def _points(training: TrainingSeries, series: Series) -> dict[int, _Point]:
    """Return the points of a curve by their positions."""
    size = -(-len(series.values) // MAX_POINTS)
    by_position = _has_loops(training)
    points = {}
    for start in range(0, len(series.values), size):
        values = series.values[start : start + size]
        indices = series.steps[start : start + size]
        first, last = training.steps[indices[0]], training.steps[indices[-1]]
        finite = [value for value in values if math.isfinite(value)]
        numbers = (min(finite), median(finite), max(finite)) if finite else ()
        points[indices[0] if by_position else first.number or 0] = _Point(
            column_name([first, last]),
            len(finite) < len(values),
            *(float(f"{number:.4g}") for number in numbers),
        )
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
    rows = shown_rows(grid)
    several = len({series.model for series in grid.series}) > 1
    names = [
        escape(f"{series.model}: {series.module}" if several else series.module)
        for series in (grid.series[row] for row in rows)
    ]
    note = f"{len(grid.steps):,} steps are grouped by {grid.width}." if grid.width > 1 else ""
    return {
        "note": note,
        "columns": [column_name(steps) for steps in grid.columns],
        "rows": names,
        "title": WORDS[label],
        "cells": pack(grid.statistics["mean"][rows]),
    }
