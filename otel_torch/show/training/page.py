"""The health of a training on the HTML page: curves over the steps, and maps of modules by steps.

Its size is bounded: neighboring steps share a point of a curve or a column of a map.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from otel_torch.laws.series import Series, TrainingSeries, quantity_of
from otel_torch.laws.table import broken_laws
from otel_torch.rendering.page import escaped, html_table
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import plural
from otel_torch.show.explorer_data import column_name, shown_positions
from otel_torch.show.grid import Grid
from otel_torch.show.packed import pack
from otel_torch.show.run_sections import Run
from otel_torch.show.training.table import table_of, title_of, verdict_lines
from otel_torch.show.training.trouble import WORDS, troubles
from otel_torch.training_quantities import OF_LAWS

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


def training_section(runs: Sequence[Run]) -> TrainingSection:
    """Return the section; empty without rows of phase `train`. Curves of runs share a plot."""
    trained = [run for run in runs if run.selection.training.rows]
    if not trained:
        return TrainingSection([], {}, {})
    lines = ["<h2>Training</h2>"]
    for run in trained:
        lines += _tables(run, f"{run.name}: " if len(runs) > 1 else "")
    drawn_curves = {}
    for id, curves in _CURVES.items():
        chosen = _chosen(trained, curves)
        if not chosen:
            continue
        drawn_curves[id] = _plot(dict(list(chosen.items())[:MAX_CURVES]), curves)
        note = plural(len(chosen) - MAX_CURVES, "further curve") if len(chosen) > MAX_CURVES else ""
        lines += _titled(id, "curve", curves.title, note and f"{note} left out.")
    maps = {}
    for run in trained:
        for name, label in _MAPS.items():
            if drawn := _map(run.selection.training, label):
                id = f"{name}-{run.number}" if run.number else name
                maps[id] = drawn
                title = f"{WORDS[label].capitalize()}, module × step"
                title += f", {run.name}" if len(runs) > 1 else ""
                lines += _titled(id, "map", title, drawn.pop("note"))
    return TrainingSection(lines, drawn_curves, maps)


def _tables(run: Run, name: str) -> list[str]:
    """Return what points at trouble in a run, and a table for each model."""
    training = run.selection.training
    laws = broken_laws(training, run.metadata, run.selection.seen_modules)
    lines = [
        f'<p><span class="badge {verdict.kind}">{escaped(name + verdict.text)}</span></p>'
        for verdict in verdict_lines(training, run.metadata, laws)
    ]
    found = troubles(training, laws)
    lines += [f'<p class="introduced">! {escaped(name + trouble)}</p>' for trouble in found]
    for model in training.models:
        header, table = table_of(training, model)
        rows = [[escaped(cell) for cell in line.cells] for line in table]
        title = escaped(name + title_of(training, run.metadata, model))
        lines.append(f'<p class="faint">{title}</p>')
        lines.append(f'<div class="wide">{html_table(header, rows, numbers=len(header) - 1)}</div>')
    return lines


def _titled(id: str, kind: str, title: str, note: str) -> list[str]:
    lines = [f"<h3>{escaped(title)}</h3>", f'<p class="faint">{escaped(note)}</p>' if note else ""]
    return [*lines, f'<div class="{kind}" id="{id}"></div>']


# -- curves


class _Curve(NamedTuple):
    """A series, and the training whose steps it is over."""

    training: TrainingSeries
    series: Series


def _chosen(runs: Sequence[Run], curves: _Curves) -> dict[str, _Curve]:
    """Return the curves of a plot by name."""
    chosen = {}
    for run in runs:
        training = run.selection.training
        for model in training.models:
            parts = [run.name] * (len(runs) > 1) + [model] * (len(training.models) > 1)
            for label, series in training.totals(model).items():
                if quantity_of(label) in curves.quantities:
                    chosen[escape(": ".join([*parts, label]))] = _Curve(training, series)
    return chosen


def _plot(chosen: dict[str, _Curve], curves: _Curves) -> dict[str, Any]:
    """Return a plot: lines over the positions `x`, null where a line has no point."""
    by_position = any(_has_loops(curve.training) for curve in chosen.values())
    lines = {name: _points(*curve, by_position) for name, curve in chosen.items()}
    names = {at: point.step for points in lines.values() for at, point in points.items()}
    x = sorted(names)
    return {
        "x": x,
        "steps": [names[at] for at in x],
        "scale": "log" if curves.is_log else "auto",
        "bad": [
            at for at in x if any(points[at].is_bad for points in lines.values() if at in points)
        ],
        "marks": sorted({at for curve in chosen.values() for at in _marks(curve, by_position, x)}),
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


def _points(training: TrainingSeries, series: Series, by_position: bool) -> dict[int, _Point]:
    """Return the points of a curve by their steps, or by the positions of their steps."""
    size = -(-len(series.values) // MAX_POINTS)
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


def _marks(curve: _Curve, by_position: bool, x: Sequence[int]) -> Iterator[int]:
    """Yield the positions of the steps in which a law was broken, as far as rows tell."""
    training = curve.training
    for name, series in training.series.items():
        if quantity_of(name.label) in OF_LAWS and not name.module:
            for index, value in zip(series.steps, series.values, strict=True):
                position = index if by_position else training.steps[index].number or 0
                if value and (before := bisect_right(x, position)):
                    yield x[before - 1]


def _has_loops(training: TrainingSeries) -> bool:
    """Whether step numbers repeat or are unknown, so that a step's position takes their place."""
    return any(step.loop or step.number is None for step in training.steps)


# -- maps


def _map(training: TrainingSeries, label: str) -> dict[str, Any] | None:
    """Return names and cells of a map for the page's script; None without values of modules."""
    grid = Grid.of(training.module_rows(frozenset({label})))
    if not grid.series or "mean" not in grid.statistics:
        return None
    rows = list(shown_positions(grid))
    several = len({series.model for series in grid.series}) > 1
    names = [
        escape(f"{series.model}: {series.module}" if several else series.module)
        for series in (grid.series[row] for row in rows)
    ]
    few = len(grid.steps) < len(training.steps)
    note = f"Recorded in {len(grid.steps):,} of {len(training.steps):,} steps. " if few else ""
    note += f"{len(grid.steps):,} steps are grouped by {grid.width}." if grid.width > 1 else ""
    return {
        "note": note,
        "columns": [column_name(steps) for steps in grid.columns],
        "rows": names,
        "title": WORDS[label],
        "cells": pack(grid.statistics["mean"][rows]),
    }
