"""The sections of the HTML page about one run: its outcome and facts, NaN and Inf, regions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from otel_torch.process.console import as_given
from otel_torch.records import LoopStep
from otel_torch.rendering.page import code, escaped, html_table, sentence
from otel_torch.rendering.words import plural
from otel_torch.show.combined import is_number
from otel_torch.show.grid import Grid, NonfiniteRecords
from otel_torch.show.selection import (
    Selection,
    describe_losses,
    describe_outcome,
    origin_of_nonfinite,
)
from otel_torch.show.traces import Span
from otel_torch.show.training.trouble import first_nonfinite

FIRST_BAD, MAX_ROWS = 10, 500  # tensors with NaN or Inf, and rows of another table


@dataclass(slots=True)
class Run:
    """A recording as read for a page.

    Attributes:
        name: What tells it from the other recordings of the page.
        number: Its position among them.
        selection: Its rows, which have been read.
        spans: The longest spans, of `span_count`.
    """

    name: str
    number: int
    selection: Selection
    metadata: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    span_count: int = 0

    def tensors(self, grid: Grid) -> int:
        return sum(series.recording == self.number for series in grid.series)

    def bad(self, grid: Grid) -> dict[int, NonfiniteRecords]:
        """Return the tensors of this run with NaN or Inf."""
        return {
            row: records
            for row, records in grid.bad.items()
            if grid.series[row].recording == self.number
        }


def header(run: Run, grid: Grid) -> list[str]:
    """Return the card with the outcome, what produced the first NaN or Inf, and the facts."""
    badge, outcome = describe_outcome(run.metadata, _first_nonfinite(run, grid))
    facts = [
        [escaped(name), escaped(text)] for name, text in _facts(run.selection, run.metadata) if text
    ]
    origin = origin_of_nonfinite(run.metadata)
    return [
        '<header class="card">',
        f'<p><span class="badge {badge}">{escaped(outcome)}</span> '
        f'<span class="faint">{escaped(_summary(run, grid))}</span></p>',
        f"<h1>{code(as_given(run.selection.path))}</h1>",
        *([f'<p class="introduced">{sentence(origin)}</p>'] if origin else []),
        *(f'<p class="warning">! {sentence(warning)}</p>' for warning in run.warnings),
        "<details><summary>the run: versions, settings and other facts</summary>"
        f'<div class="facts wide">{html_table(["", ""], facts)}</div></details></header>',
    ]


def _first_nonfinite(run: Run, grid: Grid) -> LoopStep | None:
    """Return the first step with NaN or Inf, of an activation or of the training."""
    first = next((tensor.first for tensor in run.bad(grid).values()), None)
    steps = [
        None if first is None else LoopStep(first.get("loop"), first["step"]),
        first_nonfinite(run.selection.training),
    ]
    known = [step for step in steps if step is not None]
    return min(known, key=lambda step: (step.loop or 0, step.number or 0), default=None)


def _summary(run: Run, grid: Grid) -> str:
    tensors, bad = run.tensors(grid), len(run.bad(grid))
    if not tensors:
        return "no activations"
    summary = plural(tensors, "tensor")
    if tensors == len(grid.series):
        summary += f" over {plural(len(grid.steps), 'step')}"
    if not bad:
        return f"{summary}, all values finite"
    count = f"all {bad:,}" if bad == tensors > 1 else f"{bad:,}"
    return f"{summary}, {count} with NaN or Inf values"


def _facts(selection: Selection, metadata: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield (name, text) of the facts about a run; the text is empty for what is unknown."""
    records = f"{selection.records:,} of {len(selection.seen_modules):,} modules"
    if selection.selected != selection.records:
        records += f", {selection.selected:,} of them shown"
    yield "records", records if selection.records else ""
    health = selection.training.rows
    yield "training", plural(health, "value") if health else ""
    yield "lost", describe_losses(metadata)
    yield "run", str(metadata.get("run_id", ""))
    if "rank" in metadata:
        yield "rank", f"{metadata['rank']} of {metadata.get('world_size', '?')}"
    process = [str(metadata[key]) for key in ("pid", "host") if metadata.get(key) is not None]
    yield "process", " on ".join(process)
    yield "time", _start_and_duration(metadata.get("start"), metadata.get("end"))
    yield "trace", str(metadata.get("trace_id") or "")
    yield "versions", _join_items(metadata.get("versions"), " ")
    yield "kernels", str(metadata.get("kernels") or "")
    models = metadata.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        counts = []
        if isinstance(model, dict):
            counts = [f"{model[key]} {key}" for key in ("modules", "forwards") if key in model]
        yield f"model {name}", ", ".join(counts)
    yield "settings", _join_items(metadata.get("settings"), "=")


def _join_items(values: Any, separator: str) -> str:
    if not isinstance(values, dict):
        return ""
    return ", ".join(f"{name}{separator}{value}" for name, value in values.items())


def _start_and_duration(start: Any, end: Any) -> str:
    """Return when a run began and how long it took.

    >>> _start_and_duration("2026-11-21T10:24:28.1+00:00", "2026-11-21T10:24:29.6+00:00")
    '2026-11-21T10:24:28.1+00:00, 1.5 s'
    """
    try:
        duration = datetime.fromisoformat(end) - datetime.fromisoformat(start)
    except (TypeError, ValueError):
        return str(start or "")
    return f"{start}, {duration.total_seconds():.3g} s"


def nonfinite_section(run: Run, grid: Grid, position_of: dict[int, int]) -> list[str]:
    """Return the tensors with NaN or Inf, in order.

    Args:
        run: The run.
        grid: All recordings.
        position_of: Row of the grid -> position of its tensor in the explorer.
    """
    bad = run.bad(grid)
    if not bad:
        return []
    of = f" in {code(run.name)}" if run.tensors(grid) < len(grid.series) else ""
    tensors = list(bad.values())
    columns = [
        name
        for name in ("model", "module", "tensor", "phase", "branch", "loop", "step", "call")
        if name in ("module", "step")
        or any(bad.first.get(name) not in (None, 0, "forward") for bad in tensors)
    ]
    rows = []
    for row, (first, records) in list(bad.items())[:FIRST_BAD]:
        location = [code(_location_cell(name, first.get(name))) for name in columns]
        location[columns.index("module")] = _tensor_link(
            location[columns.index("module")], position_of.get(row), run.number
        )
        rows.append([*location, _count(first.get("nonfinite")), f"{records:,}"])
    header = [*columns, "elements", "records"]
    lines = [
        f"<h2>NaN and Inf{of}</h2>",
        '<p class="faint">The tensors with NaN or Inf, in the order of the recording, at their '
        "first such record. A module's name shows it below.</p>",
        f'<div class="wide">{html_table(header, rows, numbers=2)}</div>',
    ]
    if more := len(tensors) - len(rows):
        lines.append(f'<p class="faint">{more:,} more have a cross below.</p>')
    return lines


def _tensor_link(cell: str, position: int | None, recording: int) -> str:
    """Return the cell as a button that shows the tensor in the explorer."""
    if position is None:
        return cell
    target = f'data-tensor="{position}" data-recording="{recording}"'
    return f'<button type="button" class="link" {target}>{cell}</button>'


def _location_cell(name: str, value: Any) -> str:
    if name == "module" and value == "":
        return "(root)"
    return "–" if value is None else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


# -- regions

_HOST_TIMES = ("host_total_s", "host_longest_s")
_DEVICE_TIMES = ("device_total_s", "device_longest_s")


def regions_section(run: Run) -> list[str]:
    """Return how often and how long regions ran, by the metadata."""
    regions = run.metadata.get("regions")
    items = regions.items() if isinstance(regions, dict) else ()
    timed = [(str(name), region) for name, region in items if isinstance(region, dict)]
    if not timed:
        return []
    has_device_times = any(
        _seconds(region.get(key)) != "–" for _, region in timed for key in _DEVICE_TIMES
    )
    header, times = ["region", "total", "longest"], [*_HOST_TIMES]
    if has_device_times:
        header += ["on the device", "longest there"]
        times += _DEVICE_TIMES
    header.append("count")
    rows = [
        [code(name), *(_seconds(region.get(key)) for key in times), _count(region.get("count"))]
        for name, region in timed
    ]
    lines = [
        "<h2>Regions</h2>",
        f'<div class="wide">{html_table(header, rows[:MAX_ROWS], numbers=len(header) - 1)}</div>',
    ]
    if len(rows) > MAX_ROWS:
        lines.append(f'<p class="faint">And {len(rows) - MAX_ROWS:,} more.</p>')
    return lines


def _seconds(value: Any) -> str:
    return f"{value:.4g} s" if is_number(value) else "–"
