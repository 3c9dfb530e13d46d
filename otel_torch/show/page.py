"""A recording as one HTML page: the health of a training, NaN and Inf, a timeline, and every
statistic of modules by steps.

For files without a server: a cluster without a collector, a colleague's run, a bug report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from heapq import nlargest
from pathlib import Path
from typing import Any

from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.rendering.page import code, document, escaped, html_table, sentence
from otel_torch.rendering.scripts import LIBRARY, SHARED, read_assets, shared_assets
from otel_torch.rendering.table import escape
from otel_torch.rendering.words import plural
from otel_torch.show.explorer import explorer_section
from otel_torch.show.explorer_data import explorer_data, shown_rows
from otel_torch.show.grid import Grid
from otel_torch.show.loop_step import LoopStep
from otel_torch.show.selection import (
    Selection,
    describe_losses,
    describe_outcome,
    origin_of_nonfinite,
    row_location,
    run_warnings,
)
from otel_torch.show.timeline import MAX_SPANS, timeline
from otel_torch.show.traces import Span, find_traces, is_of_run, iterate_spans
from otel_torch.show.training_page import training_section
from otel_torch.show.training_trouble import first_nonfinite

OPEN_ROWS, MAX_ROWS = 10, 500  # of a table: seen at once, and in total

_SCRIPTS = (
    *("tensors.js", "tree_view.js", "magnitudes.js", "explorer.js"),
    *("training.js", "timeline.js"),
)


def write_page(
    selection: Selection, path: Path, given: Sequence[Path], progress: Callable[[str], None]
) -> str:
    """Write the page, of 0.1 to about 20 MB, and return a line about it and one a warning.

    Args:
        selection: The recording.
        path: The file to write.
        given: Files with the spans of the run; empty to search for them.
        progress: Called now and then with a short text.

    Raises:
        RecordingError: If the recording or the traces cannot be read, or nothing is selected.
        OSError: If the page cannot be written.
    """
    warnings: list[str] = []
    metadata = read_metadata(selection.path, warnings.append)
    grid = Grid.of(selection.rows(warnings.append, progress))
    if selection.is_empty:
        raise RecordingError(selection.nothing_selected())
    warnings += run_warnings(metadata)
    spans, span_count = _longest_spans(selection.path, metadata, given, warnings, progress)
    warnings = list(dict.fromkeys(warnings))
    progress(f"writing {path}")
    training = training_section(selection.training, metadata)
    timeline_lines, drawn_spans = timeline(spans, span_count)
    rows = shown_rows(grid)
    body = [
        *_header(selection, grid, metadata, warnings),
        *training.lines,
        *_nonfinite_section(grid, rows, origin_of_nonfinite(metadata)),
        *(explorer_section(grid) if grid.series else []),
        *timeline_lines,
        *_regions_section(metadata),
    ]
    name = Path(selection.path).name
    data = {
        "explorer": explorer_data(grid, name) if grid.series else None,
        "timeline": drawn_spans,
        "training": {"curves": training.curves, "maps": training.maps},
    }
    page = _document(f"{name}: {selection.selected:,} records", body, data)
    path.write_text(page, encoding="utf-8", newline="\n")
    health = selection.training.rows
    summary = (
        f"{path}: {f'{health:,} values of a training, ' if health else ''}"
        f"{selection.selected:,} records, {len(grid.series):,} tensors, "
        f"{span_count:,} spans, {len(page) / 1e6:.1f} MB"
    )
    return "\n".join(map(escape, [summary, *(f"! {warning}" for warning in warnings)]))


def _document(title: str, body: Sequence[str], data: dict[str, Any]) -> str:
    library = f"/*\n{shared_assets('uPlot.LICENSE')}*/\n{shared_assets(*LIBRARY)}"
    own = f"{shared_assets(*SHARED)}\n{read_assets('otel_torch.show', *_SCRIPTS)}"
    style = (
        f"{shared_assets('uPlot.min.css', 'plots.css')}{read_assets('otel_torch.show', 'show.css')}"
    )
    return document(title, body, data, [library, f'"use strict";\n{own}'], style=style)


def _longest_spans(
    recording: str,
    metadata: dict[str, Any],
    given: Sequence[Path],
    warnings: list[str],
    progress: Callable[[str], None],
) -> tuple[list[Span], int]:
    """Return the longest spans of the recording's process, and how many spans it has."""
    read = of_run = 0

    def spans_of_run() -> Iterator[Span]:
        nonlocal read, of_run
        for path in find_traces(recording, given):
            for span in iterate_spans(path, warnings.append, progress, activations=False):
                read += 1
                if is_of_run(span, metadata):
                    of_run += 1
                    yield span

    longest = nlargest(MAX_SPANS, spans_of_run(), key=lambda span: span.end_ns - span.start_ns)
    if read and not of_run:
        warnings.append("the traces are of another run or another rank: none are shown")
    return longest, of_run


# -- the run


def _header(
    selection: Selection, grid: Grid, metadata: dict[str, Any], warnings: Sequence[str]
) -> list[str]:
    """Return the card with the outcome, the warnings and the facts of the run."""
    badge, outcome = describe_outcome(metadata, _first_nonfinite(selection, grid))
    facts = [
        [escaped(name), escaped(text)] for name, text in _facts(selection, grid, metadata) if text
    ]
    return [
        '<header class="card">',
        f'<p><span class="badge {badge}">{escaped(outcome)}</span> '
        f'<span class="faint">{escaped(_summary(grid))}</span></p>',
        f"<h1>{code(selection.path)}</h1>",
        *(f'<p class="warning">! {sentence(warning)}</p>' for warning in warnings),
        "<details open><summary>the run</summary>"
        f'<div class="facts wide">{html_table(["", ""], facts)}</div></details></header>',
    ]


def _first_nonfinite(selection: Selection, grid: Grid) -> LoopStep | None:
    """Return the first step with NaN or Inf, of an activation or of the training."""
    first = next((tensor.first for tensor in grid.bad.values()), None)
    steps = [
        None if first is None else LoopStep(first.get("loop"), first["step"]),
        first_nonfinite(selection.training),
    ]
    known = [step for step in steps if step is not None]
    return min(known, key=lambda step: (step.loop or 0, step.number or 0), default=None)


def _summary(grid: Grid) -> str:
    if not grid.series:
        return "no activations"
    tensors, bad = len(grid.series), len(grid.bad)
    summary = f"{plural(tensors, 'tensor')} over {plural(len(grid.steps), 'step')}"
    if not bad:
        return f"{summary}, all values finite"
    count = f"all {bad:,}" if bad == tensors > 1 else f"{bad:,}"
    return f"{summary}, {count} with NaN or Inf values"


def _facts(selection: Selection, grid: Grid, metadata: dict[str, Any]) -> Iterable[tuple[str, str]]:
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


def _nonfinite_section(grid: Grid, shown: Sequence[int], origin: str) -> list[str]:
    """Return what produced the first NaN or Inf, and the tensors with one, in order.

    Args:
        grid: The recording.
        shown: The rows of the grid that the explorer has.
        origin: What the run itself said of its first NaN or Inf.
    """
    title = "<h2>NaN and Inf</h2>"
    lines = [title, f'<p class="introduced">{escaped(origin)}</p>'] if origin else []
    if not grid.bad:
        return lines
    tensors = list(grid.bad.values())
    columns = [
        name
        for name in ("model", "module", "tensor", "phase", "branch", "loop", "step", "call")
        if name in ("module", "step") or any(bad.first.get(name) is not None for bad in tensors)
    ]
    rows = []
    position_of = {row: position for position, row in enumerate(shown)}
    for row, (first, records) in list(grid.bad.items())[:MAX_ROWS]:
        location = [code(_location_cell(name, first.get(name))) for name in columns]
        location[columns.index("module")] = _tensor_link(
            location[columns.index("module")], position_of.get(row)
        )
        rows.append([*location, _count(first.get("nonfinite")), f"{records:,}"])
    header = [*columns, "elements", "records"]
    lines = lines or [title]
    lines += [
        f'<p class="introduced">First NaN or Inf: {escaped(row_location(tensors[0].first))}</p>',
        '<p class="faint">Each tensor with NaN or Inf, in the order of the recording, at its '
        "first such record. A module's name shows it below.</p>",
        f'<div class="wide">{html_table(header, rows[:OPEN_ROWS], numbers=2)}</div>',
    ]
    if len(rows) > OPEN_ROWS:
        lines.append(
            f"<details><summary>{len(tensors) - OPEN_ROWS:,} more</summary>"
            f'<div class="wide">{html_table(header, rows[OPEN_ROWS:], numbers=2)}</div></details>'
        )
    if len(tensors) > MAX_ROWS:
        lines.append(f'<p class="faint">{len(tensors) - MAX_ROWS:,} of them are left out.</p>')
    return lines


def _tensor_link(cell: str, position: int | None) -> str:
    """Return the cell as a button that shows the tensor in the explorer."""
    if position is None:
        return cell
    return f'<button type="button" class="link" data-tensor="{position}">{cell}</button>'


def _location_cell(name: str, value: Any) -> str:
    if name == "module" and value == "":
        return "(root)"
    return "–" if value is None else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


# -- regions

_HOST_TIMES = ("host_total_s", "host_longest_s")
_DEVICE_TIMES = ("device_total_s", "device_longest_s")


def _regions_section(metadata: dict[str, Any]) -> list[str]:
    """Return how often and how long regions ran, by the metadata."""
    regions = metadata.get("regions")
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.4g} s" if is_number else "–"
