"""A recording as one page to look around in: what is not finite, when things ran, and any statistic
of modules by steps.

For whoever has the files and no server: a cluster without a collector, a colleague's run, a bug
report. The page holds what fits on a screen, and says what it left out.
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
from otel_torch.rendering.table import escape
from otel_torch.show import charts
from otel_torch.show.grid import Grid
from otel_torch.show.selection import Selection, lost, place, troubles
from otel_torch.show.timeline import SPANS, timeline
from otel_torch.show.traces import Span, find_traces, is_of_run, iterate_spans
from otel_torch.show.values import values_of

FIRST, LISTED = 10, 500  # lines of a table that are seen at once, and at all

_STYLE = """
.badge.fine { background: var(--healed) } .badge.trouble { background: var(--introduced) }
.badge.unknown { background: var(--faint) }
.facts td:first-child { color: var(--faint); white-space: nowrap }
.controls { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; margin: .6rem 0; position: sticky; top: 0; z-index: 1;
  padding: .45rem 0; background: var(--back); border-bottom: 1px solid var(--line) }
.controls label { color: var(--faint) }
select { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .15rem .4rem }
"""


def write_page(
    selection: Selection, path: Path, given: Sequence[Path], progress: Callable[[str], None]
) -> str:
    """Write the page, of 1 to about 6 MB, and return what to say of it: a line, and one a warning.

    given: files with the run's spans; [] to look for them. Raises RecordingError,
    ModuleNotFoundError in one line without vl-convert-python, and OSError where the page cannot be
    written.
    """
    warnings: list[str] = []
    meta = read_metadata(selection.path, warnings.append)
    grid = Grid.of(selection.rows(warnings.append, progress))
    if not selection.selected:
        raise RecordingError(
            f"{selection.path}: none of its {selection.records} records is selected; {selection.hint()}"
        )
    warnings += troubles(meta)
    spans, count = _spans(selection.path, meta, given, warnings, progress)
    progress(f"putting the page together: {path}")
    data = values_of(grid)
    sections: list[tuple[list[str], dict[str, Any]]] = [
        (_header(selection, grid, meta, warnings), {}),
        (_not_finite(grid), {}),
        timeline(spans, count),
        (_regions(meta), {}),
        (charts.section(grid), {}),
    ]
    body = [line for lines, _ in sections for line in lines]
    plots = {id: plot for _, drawn in sections for id, plot in drawn.items()}
    page = document(
        f"{Path(selection.path).name}: {selection.selected:,} records",
        body,
        plots,
        style=_STYLE,
        script=charts.SCRIPT,
        data=data,
    )
    path.write_text(page, encoding="utf-8", newline="\n")
    said = f"{path}: {selection.selected:,} records, {len(grid.series):,} tensors, {count:,} spans, {len(page) / 1e6:.1f} MB"
    return "\n".join(
        escape(line) for line in (said, *(f"! {warning}" for warning in dict.fromkeys(warnings)))
    )


def _spans(
    recording: str,
    meta: dict[str, Any],
    given: Sequence[Path],
    warnings: list[str],
    progress: Callable[[str], None],
) -> tuple[list[Span], int]:
    """The longest spans of the recording's process, as many as are drawn, and how many it has."""
    found = count = 0

    def own() -> Iterator[Span]:
        nonlocal found, count
        for path in find_traces(recording, given):
            for span in iterate_spans(path, warnings.append, progress, activations=False):
                found += 1
                if is_of_run(span, meta):
                    count += 1
                    yield span

    longest = nlargest(SPANS, own(), key=lambda span: span.end_ns - span.start_ns)
    if found and not count:
        warnings.append(
            "the traces are of another run, or of another rank's process: nothing of them is shown"
        )
    return longest, count


# -- what the run was
# --------------------------------------------------------------------------------------------------


def _header(
    selection: Selection, grid: Grid, meta: dict[str, Any], warnings: Sequence[str]
) -> list[str]:
    """What is to be known before anything is looked at."""
    state, words = _end(meta)
    facts = [(name, text) for name, text in _facts(selection, grid, meta) if text]
    rows = [[escaped(name), escaped(text)] for name, text in facts]
    return [
        '<header class="card">',
        f'<p><span class="badge {state}">{escaped(words)}</span> <span class="faint">{escaped(_counted(grid))}</span></p>',
        f"<h1>{code(selection.path)}</h1>",
        *(f'<p class="warning">! {sentence(warning)}</p>' for warning in dict.fromkeys(warnings)),
        f'<details open><summary>the run</summary><div class="facts wide">{html_table(["", ""], rows)}</div></details></header>',
    ]


def _end(meta: dict[str, Any]) -> tuple[str, str]:
    """How the run ended, as a colour and in words."""
    if "ended_cleanly" not in meta:
        return "unknown", "no metadata"
    if not meta["ended_cleanly"]:
        return "trouble", "killed, or still going on"
    if meta.get("writing_ended"):
        return "trouble", "writing ended early"
    return "fine", "ended cleanly"


def _counted(grid: Grid) -> str:
    bad = (
        f"{len(grid.bad):,} tensors with values that are not finite"
        if grid.bad
        else "every recorded value is finite"
    )
    return f"{len(grid.series):,} tensors in {len(grid.steps):,} steps; {bad}"


def _facts(selection: Selection, grid: Grid, meta: dict[str, Any]) -> Iterable[tuple[str, str]]:
    shown = (
        ""
        if selection.selected == selection.records
        else f", of which {selection.selected:,} are shown"
    )
    yield "records", f"{selection.records:,} of {len(selection.seen_modules):,} modules{shown}"
    yield "lost", lost(meta)
    yield "run", str(meta.get("run_id", ""))
    if "rank" in meta:
        yield "rank", f"{meta['rank']} of {meta.get('world_size', '?')}"
    yield (
        "process",
        " on ".join(str(meta[name]) for name in ("pid", "host") if meta.get(name) is not None),
    )
    yield "time", _times(meta.get("start"), meta.get("end"))
    yield "trace", str(meta.get("trace_id") or "")
    yield "versions", _pairs(meta.get("versions"), " ")
    yield "kernels", str(meta.get("kernels") or "")
    models = meta.get("models")
    for name, model in models.items() if isinstance(models, dict) else ():
        said = (
            [f"{model[key]} {key}" for key in ("modules", "forwards") if key in model]
            if isinstance(model, dict)
            else []
        )
        yield f"model {name}", ", ".join(said)
    yield "settings", _pairs(meta.get("settings"), "=")


def _pairs(values: Any, between: str) -> str:
    return (
        ", ".join(f"{name}{between}{value}" for name, value in values.items())
        if isinstance(values, dict)
        else ""
    )


def _times(start: Any, end: Any) -> str:
    """From when to when, and how long.

    >>> _times("2026-11-21T10:24:28.1+00:00", "2026-11-21T10:24:29.6+00:00")
    '2026-11-21T10:24:28.1+00:00, 1.5 s'
    """
    try:
        return f"{start}, {(datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds():.3g} s"
    except (TypeError, ValueError):
        return str(start or "")


def _not_finite(grid: Grid) -> list[str]:
    """Where NaN or an infinity stands, in the order in which tensors began to have one."""
    if not grid.bad:
        return []
    found = list(grid.bad.values())
    columns = ["model", "module", "tensor", "phase", "branch", "loop", "step", "call"]
    columns = [
        name
        for name in columns
        if name in ("module", "step") or any(bad.first.get(name) is not None for bad in found)
    ]
    rows = [
        [
            *(code(_cell(name, bad.first.get(name))) for name in columns),
            _plain(bad.first.get("nonfinite")),
            f"{bad.records:,}",
        ]
        for bad in found[:LISTED]
    ]
    header = [*columns, "elements", "records"]
    lines = [
        "<h2>Not finite</h2>",
        f'<p class="introduced">The first NaN or infinity: {escaped(place(found[0].first))}</p>',
        '<p class="faint">Each tensor that had one, in the order of the recording, with the first of its records that did.</p>',
        f'<div class="wide">{html_table(header, rows[:FIRST], numbers=2)}</div>',
    ]
    if len(rows) > FIRST:
        rest = html_table(header, rows[FIRST:], numbers=2)
        lines.append(
            f'<details><summary>{len(found) - FIRST:,} more</summary><div class="wide">{rest}</div></details>'
        )
    if len(found) > LISTED:
        lines.append(f'<p class="faint">{len(found) - LISTED:,} of them are left out.</p>')
    return lines


def _cell(name: str, value: Any) -> str:
    if name == "module" and value == "":
        return "(root)"
    return "–" if value is None else str(value)


def _plain(value: Any) -> str:
    return "–" if not isinstance(value, int) else f"{value:,}"


# -- when things ran
# --------------------------------------------------------------------------------------------------


def _regions(meta: dict[str, Any]) -> list[str]:
    """How often regions ran and how long, by the metadata."""
    regions = meta.get("regions")
    rows = [
        [
            code(str(name)),
            *(_seconds(region.get(key)) for key in _REGION_TIMES),
            _plain(region.get("count")),
        ]
        for name, region in (regions.items() if isinstance(regions, dict) else ())
        if isinstance(region, dict)
    ]
    if not rows:
        return []
    device = any(cell != "–" for row in rows for cell in row[3:5])
    if not device:
        rows = [[*row[:3], row[-1]] for row in rows]
    header = [
        "region",
        "total",
        "longest",
        *(["on the device", "longest there"] if device else []),
        "count",
    ]
    rest = [f'<p class="faint">And {len(rows) - LISTED:,} more.</p>'] if len(rows) > LISTED else []
    return [
        "<h2>Regions</h2>",
        f'<div class="wide">{html_table(header, rows[:LISTED], numbers=len(header) - 1)}</div>',
        *rest,
    ]


_REGION_TIMES = ("host_total_s", "host_longest_s", "device_total_s", "device_longest_s")


def _seconds(value: Any) -> str:
    return (
        f"{value:.4g} s" if isinstance(value, int | float) and not isinstance(value, bool) else "–"
    )
