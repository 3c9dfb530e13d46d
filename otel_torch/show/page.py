"""Recordings as one HTML page: the health of a training, NaN and Inf, every statistic of modules by
steps, and a timeline. Several recordings are laid on each other.

For files without a server: a cluster without a collector, a colleague's run, a bug report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from importlib.resources import files
from pathlib import Path
from typing import Any

from otel_torch.process.console import as_given
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError
from otel_torch.rendering.page import document
from otel_torch.rendering.table import escape
from otel_torch.show.explorer import explorer_section
from otel_torch.show.explorer_data import explorer_data, shown_positions
from otel_torch.show.grid import Grid
from otel_torch.show.run_sections import Run, header, nonfinite_section, regions_section
from otel_torch.show.selection import Selection, run_warnings
from otel_torch.show.timeline import MAX_SPANS, timeline
from otel_torch.show.traces import Span, find_traces, is_of_run, iterate_spans
from otel_torch.show.training.page import training_section

_SHARED_SCRIPTS = ("page.js", "scales.js", "heat_map.js", "curves.js")
_SCRIPTS = (
    *("tensors.js", "tree_view.js", "magnitudes.js", "explorer.js"),
    *("training.js", "timeline.js"),
)


def write_page(
    selections: Sequence[Selection],
    path: Path,
    given: Sequence[Path],
    progress: Callable[[str], None],
) -> str:
    """Write the page, of 0.1 to about 20 MB, and return a line about it and one a warning.

    Args:
        selections: The recordings.
        path: The file to write.
        given: Files with the spans of the runs; empty to search for them.
        progress: Called now and then with a short text.

    Raises:
        RecordingError: If a recording or the traces cannot be read, or nothing is selected.
        OSError: If the page cannot be written.
    """
    names = _names([as_given(selection.path) for selection in selections])
    runs = [
        Run(name, number, selection)
        for number, (name, selection) in enumerate(zip(names, selections, strict=True))
    ]
    for run in runs:
        run.metadata = read_metadata(run.selection.path, run.warnings.append)
    grid = Grid.of(*(run.selection.rows(run.warnings.append, progress) for run in runs))
    for run in runs:
        _finish(run, given, progress)
    progress(f"writing {path}")
    training = training_section(runs)
    position_of = shown_positions(grid)
    timelines = _timelines(runs)
    body = [
        *(line for run in runs for line in header(run, grid)),
        *training.lines,
        *(line for run in runs for line in nonfinite_section(run, grid, position_of)),
        *(explorer_section(grid) if grid.series else []),
        *(line for lines, _ in timelines.values() for line in lines),
        *(line for run in runs for line in regions_section(run)),
    ]
    data = {
        "explorer": explorer_data(grid, names) if grid.series else None,
        "timelines": {id: drawn for id, (_, drawn) in timelines.items() if drawn},
        "training": {"curves": training.curves, "maps": training.maps},
    }
    records = sum(run.selection.selected for run in runs)
    page = _document(f"{', '.join(names)}: {records:,} records", body, data)
    path.write_text(page, encoding="utf-8", newline="\n")
    health = sum(run.selection.training.rows for run in runs)
    summary = (
        f"{path}: {f'{health:,} values of a training, ' if health else ''}"
        f"{records:,} records, {len(grid.series):,} tensors, "
        f"{sum(run.span_count for run in runs):,} spans, {len(page) / 1e6:.1f} MB"
    )
    warnings = dict.fromkeys(warning for run in runs for warning in run.warnings)
    return "\n".join(map(escape, [summary, *(f"! {warning}" for warning in warnings)]))


def _names(paths: Sequence[str]) -> list[str]:
    """Return what tells recordings apart: the names of their files, or their paths.

    >>> _names(["a/run.jsonl", "b/run.jsonl"]), _names(["a/run.jsonl"])
    (['a/run.jsonl', 'b/run.jsonl'], ['run.jsonl'])
    """
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def _finish(run: Run, given: Sequence[Path], progress: Callable[[str], None]) -> None:
    """Add spans and warnings to a run whose rows have been read."""
    if run.selection.is_empty:
        raise RecordingError(run.selection.nothing_selected())
    run.warnings += run_warnings(run.metadata)
    run.spans, run.span_count = _longest_spans(
        run.selection.path, run.metadata, given, run.warnings, progress
    )
    run.warnings = list(dict.fromkeys(run.warnings))


def _timelines(runs: Sequence[Run]) -> dict[str, tuple[list[str], dict[str, Any] | None]]:
    """Return HTML and JSON by the id of the element; without any span, how to get a timeline."""
    timed = [run for run in runs if run.spans] or runs[:1]
    name_of = {run.number: run.name if len(runs) > 1 else "" for run in timed}
    return {
        (id := f"timeline-{run.number}"): timeline(
            run.spans, run.span_count, id, name_of[run.number]
        )
        for run in timed
    }


def _document(title: str, body: Sequence[str], data: dict[str, Any]) -> str:
    license = _assets("rendering", "uPlot.LICENSE")
    library = f"/*\n{license}*/\n{_assets('rendering', 'uPlot.min.js')}"
    own = f"{_assets('rendering', *_SHARED_SCRIPTS)}\n{_assets('show', *_SCRIPTS)}"
    style = _assets("rendering", "uPlot.min.css", "plots.css") + _assets("show", "show.css")
    return document(title, body, data, [library, f'"use strict";\n{own}'], style=style)


def _assets(package: str, *names: str) -> str:
    """Return the files of a package's folder `assets`, one after the other."""
    folder = files(f"otel_torch.{package}").joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


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
