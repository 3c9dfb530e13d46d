"""Regions and steps over time, as the page of a recording draws them: each span below what it lies
in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from otel_torch.rendering.page import plot_of, sentence
from otel_torch.rendering.table import escape
from otel_torch.show.traces import Span, lanes

SPANS = 2000  # of the timeline
DEEPEST = 24  # lines of the timeline
ATTRIBUTES, WIDEST = 12, 200  # of a span, and characters of each
_SPAN_COLOURS = {
    "step": "var(--dtype)",
    "forward": "var(--healed)",
    "region": "var(--layout)",
    "other": "var(--right)",
}


def timeline(spans: Sequence[Span], count: int) -> tuple[list[str], dict[str, Any]]:
    """Regions and steps over time: lines of HTML, and the plot. spans: at most SPANS of the `count`
    that there are.
    """
    if not spans:
        hint = (
            "A recording holds no times. To see here when each region and step began and ended, record with "
            "`OTEL_TORCH_OTLP_FILE=FOLDER` too, and give `--traces FOLDER`."
        )
        return ["<h2>Timeline</h2>", f'<p class="faint">{sentence(hint)}</p>'], {}
    start = min(span.start_ns for span in spans)
    kept = sorted(spans, key=lambda span: span.start_ns)
    placed = lanes(kept)
    depths: dict[int, int] = {}
    for lane, depth in placed:
        depths[lane] = max(depths.get(lane, 0), depth + 1)
    below = {lane: sum(depths[other] for other in depths if other < lane) for lane in depths}
    whole = max(max(span.end_ns for span in kept) - start, 1)
    values = [
        {
            "from": (span.start_ns - start) / 1e9,
            "to": (span.end_ns - start) / 1e9,
            "line": below[lane] + depth,
            "kind": span.kind(),
            "name": escape(span.title())
            if (span.end_ns - span.start_ns) / whole * 175 > len(span.title()) + 1
            else "",
            "failed": span.failed,
            "text": _span_text(span, start),
        }
        for span, (lane, depth) in zip(kept, placed, strict=True)
        if below[lane] + depth < DEEPEST
    ]
    marks = [
        {
            "at": (event.time_ns - start) / 1e9,
            "line": below[lane] + depth,
            "text": f"{escape(event.name)}\n{_details(event.attributes)}",
        }
        for span, (lane, depth) in zip(kept, placed, strict=True)
        for event in span.events
        if below[lane] + depth < DEEPEST
    ]
    said = [
        "Regions and steps of this process, each below what it lies in. Drag to move, shift and wheel to zoom."
    ]
    if len(values) < count:
        said.append(f"The {len(values):,} longest of {count:,} spans are drawn.")
    if len(marks) > SPANS:
        said.append(f"The first {SPANS:,} of {len(marks):,} events are drawn, as triangles.")
    legend = [
        f'<span><span style="color:{colour}">■</span> {kind}</span>'
        for kind, colour in _SPAN_COLOURS.items()
        if any(one["kind"] == kind for one in values)
    ]
    x = {"field": "from", "type": "quantitative", "title": "seconds", "scale": {"nice": False}}
    tooltip = {"field": "text", "type": "nominal"}
    y = {"field": "line", "type": "ordinal", "axis": None, "scale": {"paddingInner": 0.12}}
    colour = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": list(_SPAN_COLOURS), "range": list(_SPAN_COLOURS.values())},
        "legend": None,
    }
    plot = plot_of(
        values,
        height=24 * len({one["line"] for one in values}),
        layer=[
            {
                "mark": {"type": "rect", "cornerRadius": 2, "clip": True, "stroke": "var(--back)", "strokeWidth": 0.5},
                "encoding": {"x": x, "x2": {"field": "to"}, "y": y, "color": colour, "tooltip": tooltip},
                "params": [
                    {
                        "name": "shown",
                        "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
                        "bind": "scales",
                    }
                ],
            },
            {
                "transform": [{"filter": "datum.failed"}],
                "mark": {"type": "rect", "filled": False, "stroke": "var(--introduced)", "strokeWidth": 2, "clip": True},
                "encoding": {"x": x, "x2": {"field": "to"}, "y": y},
            },
            {
                "transform": [{"filter": "datum.name !== ''"}],
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "color": "var(--back)", "clip": True,
                         "tooltip": None},
                "encoding": {"x": x, "y": y, "text": {"field": "name"}},
            },
            {
                "data": {"values": marks[:SPANS]},
                "mark": {"type": "point", "shape": "triangle-down", "filled": True, "size": 45, "color": "var(--ink)",
                         "opacity": 1, "clip": True},
                "encoding": {"x": {**x, "field": "at"}, "y": y, "tooltip": tooltip},
            },
        ],
    )  # fmt: skip
    lines = [
        "<h2>Timeline</h2>",
        f'<p class="faint">{" ".join(said)}</p>',
        f'<p class="legend">{"".join(legend)}</p>',
        '<div class="plot" id="timeline"></div>',
    ]
    return lines, {"timeline": plot}


def _span_text(span: Span, start: int) -> str:
    """What the pointer shows of a span."""
    first = f"{escape(span.title())}{'  (failed)' if span.failed else ''}"
    when = f"from {(span.start_ns - start) / 1e9:.6g} s, for {(span.end_ns - span.start_ns) / 1e9:.4g} s"
    return "\n".join([first, when, *([_details(span.attributes)] if span.attributes else [])])


def _details(attributes: dict[str, Any]) -> str:
    """Attributes, a line each, as many and as much of each as fits beside a pointer."""
    return "\n".join(
        escape(f"{name} {value}"[:WIDEST]) for name, value in list(attributes.items())[:ATTRIBUTES]
    )
