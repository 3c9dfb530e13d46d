"""The timeline of the HTML page: regions and steps over time, each span below its parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from otel_torch.rendering.page import code, sentence
from otel_torch.rendering.table import escape
from otel_torch.show.traces import Span, assign_lanes

MAX_SPANS = 2000
MAX_LINES = 24  # deeper spans are not drawn
_MAX_ATTRIBUTES, _MAX_ATTRIBUTE_LENGTH = 12, 200  # of a span, in the text at the pointer
_HINT = (
    "A recording has no timestamps. To see when each region and step began and ended, also set "
    "`OTEL_TORCH_OTLP_FILE=FOLDER` when you record, then pass `--traces FOLDER`."
)
_COLORS = {
    "step": "var(--dtype)",
    "forward": "var(--healed)",
    "region": "var(--layout)",
    "other": "var(--right)",
}


@dataclass(frozen=True, slots=True)
class _PlacedSpan:
    span: Span
    line: int


def timeline(
    spans: Sequence[Span], count: int, id: str, name: str = ""
) -> tuple[list[str], dict[str, Any] | None]:
    """Return the HTML of the section, and the JSON that its script draws.

    Args:
        spans: The spans to draw, at most `MAX_SPANS`.
        count: How many spans the run has.
        id: Of the element to draw in.
        name: Of the recording, where there are several.
    """
    if not spans:
        return ["<h2>Timeline</h2>", f'<p class="faint">{sentence(_HINT)}</p>'], None
    start = min(span.start_ns for span in spans)
    placed = [item for item in _place(spans) if item.line < MAX_LINES]
    values = _span_values(placed, start)
    marks = _event_marks(placed, start)
    notes = [
        "Regions and steps of this process, each below its parent. "
        "Drag to move, Shift and wheel to zoom; arrows, `+` and `-` do the same."
    ]
    if len(values) < count:
        notes.append(f"The {len(values):,} longest of {count:,} spans are drawn.")
    if len(marks) > MAX_SPANS:
        notes.append(f"The first {MAX_SPANS:,} of {len(marks):,} events are drawn, as triangles.")
    kinds = {value["kind"] for value in values}
    legend = "".join(
        f'<span><span style="color:{color}">■</span> {kind}</span>'
        for kind, color in _COLORS.items()
        if kind in kinds
    )
    lines = [
        f"<h2>Timeline{f' of {code(name)}' if name else ''}</h2>",
        f'<p class="faint">{sentence(" ".join(notes))}</p>',
        f'<p class="legend">{legend}</p>',
        f'<div class="map" id="{id}"></div>',
    ]
    return lines, {"spans": values, "events": marks[:MAX_SPANS]}


def _place(spans: Sequence[Span]) -> list[_PlacedSpan]:
    """Assign a line to each span; lanes follow each other from top to bottom."""
    ordered = sorted(spans, key=lambda span: span.start_ns)
    positions = assign_lanes(ordered)
    heights: dict[int, int] = {}
    for lane, depth in positions:
        heights[lane] = max(heights.get(lane, 0), depth + 1)
    first_line: dict[int, int] = {}
    next_line = 0
    for lane in sorted(heights):
        first_line[lane] = next_line
        next_line += heights[lane]
    return [
        _PlacedSpan(span, first_line[lane] + depth)
        for span, (lane, depth) in zip(ordered, positions, strict=True)
    ]


def _span_values(placed: Sequence[_PlacedSpan], start: int) -> list[dict[str, Any]]:
    return [
        {
            "from": (item.span.start_ns - start) / 1e9,
            "to": (item.span.end_ns - start) / 1e9,
            "line": item.line,
            "kind": item.span.kind(),
            "name": escape(item.span.title()),
            "failed": item.span.failed,
            "text": _hover_text(item.span, start),
        }
        for item in placed
    ]


def _event_marks(placed: Sequence[_PlacedSpan], start: int) -> list[dict[str, Any]]:
    return [
        {
            "at": (event.time_ns - start) / 1e9,
            "line": item.line,
            "text": f"{escape(event.name)}\n{_attribute_lines(event.attributes)}",
        }
        for item in placed
        for event in item.span.events
    ]


def _hover_text(span: Span, start: int) -> str:
    """Return what the pointer shows of a span."""
    begins, lasts = (span.start_ns - start) / 1e9, (span.end_ns - span.start_ns) / 1e9
    lines = [
        escape(span.title()) + ("  (failed)" if span.failed else ""),
        f"from {begins:.6g} s, for {lasts:.4g} s",
    ]
    if span.attributes:
        lines.append(_attribute_lines(span.attributes))
    return "\n".join(lines)


def _attribute_lines(attributes: dict[str, Any]) -> str:
    shown = list(attributes.items())[:_MAX_ATTRIBUTES]
    return "\n".join(escape(f"{name} {value}"[:_MAX_ATTRIBUTE_LENGTH]) for name, value in shown)
