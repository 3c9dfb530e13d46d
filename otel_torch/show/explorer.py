"""The HTML of the explorer: its controls, and the elements that its scripts fill."""

from __future__ import annotations

from otel_torch.rendering.page import sentence
from otel_torch.show.explorer_data import MAX_TENSORS
from otel_torch.show.grid import COUNTS, Grid

_NAMED_STATISTICS = 5
_SELECTS = {
    "recording": "map of",
    "statistic": "statistic",
    "kind": "of",
    "model": "model",
    "phase": "phase",
    "sort": "sorted",
    "heat": "colored by",
    "scale": "scale",
}
_CONTROLS = (
    '<div class="controls"><label>module <input id="pattern" type="search" spellcheck="false" '
    'autocomplete="off" placeholder="regular expression ( / )" '
    'aria-describedby="pattern-error"></label>'
    + "".join(
        f'<label>{label} <select id="{id}"></select></label>' for id, label in _SELECTS.items()
    )
    + '<span id="count" class="faint" role="status"></span> '
    '<span id="pattern-error" class="introduced" role="alert"></span></div>'
)
_VIEWS = (
    '<div class="views"><div id="tree" class="tree-view" role="tree" tabindex="0" '
    'aria-label="modules"></div>'
    '<div class="details"><div id="map" class="map"></div>'
    '<div class="card"><p id="module-path" class="name"></p>'
    '<p id="module-facts" class="faint"></p><div id="module-curve" class="curve"></div>{more}</div>'
    "</div></div>"
)
_MODULE_MAGNITUDES = (
    '<p class="faint">Its magnitudes over all steps, in powers of two</p>'
    '<div id="module-magnitudes" class="curve"></div>'
)
_MAGNITUDES = [
    "<h2>Magnitudes</h2>",
    '<p class="faint">The share of elements of each magnitude, in powers of two: of each module '
    "over all steps.</p>",
    '<div id="magnitudes-modules" class="map"></div>',
    '<p class="faint">The same for each step, over all modules.</p>',
    '<div id="magnitudes-steps" class="map"></div>',
]


def explorer_section(grid: Grid) -> list[str]:
    has_histograms = bool(grid.histograms)
    return [
        '<section id="explorer">',
        "<h2>Module × step</h2>",
        f'<p class="faint">{sentence(" ".join(_notes(grid)))}</p>',
        _CONTROLS,
        _VIEWS.format(more=_MODULE_MAGNITUDES if has_histograms else ""),
        *(_MAGNITUDES if has_histograms else []),
        "</section>",
    ]


def _notes(grid: Grid) -> list[str]:
    counts = ", ".join(f"`{name}`" for name in sorted(COUNTS))
    notes = [
        "Choose a module in the tree or the map. Its bar goes from its least to its largest value, "
        "with a tick at the median. Red with a cross: NaN or Inf. Drag over the map to zoom, or "
        "press Shift and turn the wheel; a double click shows all. Keys: `/` searches, arrows "
        "move, `+` and `-` zoom, Enter chooses, Escape shows all."
    ]
    if grid.width > 1:
        notes.append(f"{len(grid.steps):,} steps are grouped by {grid.width}.")
    notes.append(
        "If a cell has several values (calls, grouped steps or modules), it shows the smallest "
        f"`min`, the largest `max`, the sum of {counts}, and otherwise the value with the largest "
        "magnitude."
    )
    if grid.left_out:
        names = ", ".join(list(grid.left_out)[:_NAMED_STATISTICS])
        notes.append(f"Left out: {len(grid.left_out):,} further statistics, such as {names}.")
    if len(grid.series) > MAX_TENSORS:
        left_out = len(grid.series) - MAX_TENSORS
        notes.append(f"Left out: {left_out:,} further tensors; --module selects some.")
    return notes
