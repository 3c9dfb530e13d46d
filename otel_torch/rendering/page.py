"""A self-contained HTML page, shared by `diff --html` and `show --html`.

The page opens from disk and loads nothing. The plots of `diff` are Vega-Lite, whose scripts
`vl-convert-python` ships: 0.9 MB a page, against 1.3 MB for bokeh and 4.8 MB for plotly. They are
drawn as SVG, so the colors of the page, light or dark, apply to them. `show` draws on canvas.

Recordings can hold any name. A name enters the page only as escaped text or as JSON data, and the
Content-Security-Policy allows only the scripts whose hashes it lists.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape as escape_html
from typing import Any

from otel_torch.rendering.table import as_given, escape

_STYLE = """
:root {
  color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1c2330; --faint: #667085;
  --line: #d9dee7; --right: #7d93b8; --healed: #2a9d8f; --layout: #8e6bbf; --dtype: #3d8bd9;
  --inherited: #e0a030; --introduced: #d6293e; --floor: #c3cbd9; --heat0: #e6ebf3;
  --heat1: #fbe3a8; --heat2: #f5b461; --heat3: #e9763f; --heat4: #c5283d; --heat5: #6a0f49;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12161d; --card: #1b212b; --ink: #e4e9f2; --faint: #94a0b4; --line: #323b4a;
    --right: #7187ad; --healed: #45c4b4; --layout: #b795ea; --dtype: #67aef2;
    --inherited: #f0b84a; --introduced: #ff5c70; --floor: #3a4556; --heat0: #232b38;
    --heat1: #5d4a1c; --heat2: #94621f; --heat3: #cc5f2b; --heat4: #f04a5d; --heat5: #e88bd6;
  }
}
* { box-sizing: border-box }
body {
  margin: 0 auto; max-width: 76rem; padding: 2rem 1.5rem 4rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.35rem; line-height: 1.35; margin: .4rem 0 1rem }
h2 { font-size: 1.05rem; margin: 2.6rem 0 .4rem }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem }
p { margin: .4rem 0 }
.faint { color: var(--faint) }
.warning { color: var(--inherited) }
code, .name, pre {
  font: .92em/1.45 ui-monospace, "Cascadia Code", Menlo, Consolas, monospace;
  overflow-wrap: anywhere;
}
pre {
  margin: .3rem 0; padding: .6rem .8rem; background: var(--back); border: 1px solid var(--line);
  border-radius: 6px; white-space: pre-wrap;
}
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.3rem;
}
.badge {
  display: inline-block; padding: .1rem .7rem; border-radius: 1rem; font-weight: 600;
  color: var(--back);
}
.badge.match { background: var(--healed) }
.badge.diverged { background: var(--introduced) }
.badge.incomparable, .badge.partial { background: var(--inherited) }
table { border-collapse: collapse; margin: .4rem 0 }
.wide { overflow-x: auto }
th, td {
  text-align: left; padding: .18rem 1.1rem .18rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top;
}
th { font-weight: 600; color: var(--faint); font-size: .88em }
.number { text-align: right; font-variant-numeric: tabular-nums }
.right { color: var(--faint) }
.healed { color: var(--healed) }
.layout { color: var(--layout) }
.dtype { color: var(--dtype) }
.inherited { color: var(--inherited) }
.introduced { color: var(--introduced); font-weight: 600 }
.legend span { margin-right: 1.1rem; white-space: nowrap }
.plot { width: 100%; min-height: 3rem }
.plot svg { max-width: 100% }
.tree details, .tree div { margin-left: 1.15rem }
.tree > details { margin-left: 0 }
.tree div { padding-left: 1rem }
.tree summary { cursor: pointer }
.tree summary:hover { background: var(--card) }
#tip {
  position: fixed; z-index: 1; max-width: 40rem; padding: .45rem .7rem; background: var(--ink);
  color: var(--back); border-radius: 6px;
  font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  pointer-events: none; overflow-wrap: anywhere;
}
#tip[hidden] { display: none }
@media print { body { max-width: none } }
"""

_SCRIPT = """
"use strict";
const tip = document.getElementById("tip");
function hover(handler, event, item, value) {
  tip.hidden = value === undefined || value === null || value === "";
  if (tip.hidden) return;
  tip.textContent = String(value);
  const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 16;
  const fits = below + tip.offsetHeight <= window.innerHeight;
  const y = fits ? below : event.clientY - tip.offsetHeight - 10;
  tip.style.left = Math.max(x, 8) + "px";
  tip.style.top = Math.max(y, 8) + "px";
}
const plots = JSON.parse(document.getElementById("data").textContent);
const options = {
  mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false,
  tooltip: hover, logLevel: 1
};
for (const [id, plot] of Object.entries(plots)) {
  vegaEmbed(document.getElementById(id), plot, options);
}
"""


@functools.cache
def plot_library() -> str:
    """Return the scripts of Vega; building them takes seconds.

    Raises:
        ModuleNotFoundError: Without vl-convert-python; the message is one line.
    """
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--html needs vl-convert-python: pip install 'otel-torch[html]'"
        ) from None
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def plotted(title: str, body: Iterable[str], plots: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a whole page with Vega-Lite plots, which need seconds and vl-convert-python.

    Args:
        title: Plain text.
        body: Lines of HTML, with one element for the id of each plot.
        plots: Element id -> Vega-Lite plot, drawn when the page opens.
    """
    scripts = (plot_library(), _SCRIPT) if plots else ()
    return document(title, body, plots, scripts)


def document(
    title: str, body: Iterable[str], data: Any, scripts: Sequence[str], *, style: str = ""
) -> str:
    """Return a whole page.

    Args:
        title: Plain text.
        body: Lines of HTML.
        data: JSON for the element `data`.
        scripts: JavaScript, run in this order when the page opens.
        style: More CSS.
    """
    embedded = [_embeddable(script) for script in scripts]
    page = "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            f'content="{escape_html(_security_policy(embedded))}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title)}</title>",
            f"<style>{_STYLE}{style}</style></head><body>",
            *body,
            '<div id="tip" hidden></div>'
            f'<script type="application/json" id="data">{_json(data)}</script>',
            *(f"<script>{script}</script>" for script in embedded),
            "</body></html>",
            "",
        ]
    )
    return as_given(page)


def _embeddable(script: str) -> str:
    """Return a script that survives the HTML parser.

    A script element ends at the first `</script`, even inside a string, and the parser drops
    carriage returns, which would change the hash.
    """
    return script.replace("\r", "").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _security_policy(scripts: Sequence[str]) -> str:
    """Return the policy that loads nothing and runs only these scripts.

    Vega interprets its expressions (the option `ast`) and so needs no `unsafe-eval`.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in scripts)
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    allowed = " ".join(hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def plot_of(values: Sequence[Mapping[str, Any]], **parts: Any) -> dict[str, Any]:
    """Return a Vega-Lite plot of the values, as wide as the page and in its colors."""
    axis = {
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "gridColor": "var(--line)",
        "gridOpacity": 0.6,
        "labelColor": "var(--ink)",
        "titleColor": "var(--faint)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",  # a version, never loaded
        "data": {"values": values},
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        "config": {
            "view": {"stroke": None},
            "axis": axis,
            "legend": {"labelColor": "var(--ink)", "titleColor": "var(--faint)"},
            "font": "system-ui, sans-serif",
        },
        **parts,
    }


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> str:
    """Return a table whose cells are HTML already; the last `numbers` columns are right-aligned."""

    def line(cells: Sequence[str], tag: str) -> str:
        first_number = len(cells) - numbers
        return "".join(
            f"<{tag}{' class=number' if index >= first_number else ''}>{cell}</{tag}>"
            for index, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(header, 'th')}</tr>{body}</table>"


def escaped(text: str) -> str:
    """Return the text as HTML, with non-printable characters spelled out.

    >>> escaped("<b>\\x07")
    '&lt;b&gt;\\\\x07'
    """
    return escape_html("\n".join(map(escape, text.split("\n"))))


def code(text: str) -> str:
    """Return a name as an HTML code element."""
    return f"<code>{escaped(text)}</code>"


def sentence(text: str) -> str:
    """Return the text as HTML, with code elements for the parts in backquotes."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a name that contains a backquote
        return escaped(text)
    return "".join(code(part) if index % 2 else escaped(part) for index, part in enumerate(parts))


def _json(value: Any) -> str:
    """Return JSON that is safe in a script element: ASCII without `<` and `>`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e")
