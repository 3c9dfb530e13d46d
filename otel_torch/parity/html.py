"""A comparison as one page to look around in and to send on: error by depth, modules by steps, the
tree of modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_torch.parity.finding import ComparedPair, Finding, Report, State, UncomparedTensor
from otel_torch.parity.report import (
    CURVE,
    MARKS,
    WEAKER,
    advice,
    apart,
    at_the_finding,
    binned,
    counts,
    excess,
    harm,
    headline,
    name,
    nearest,
    number,
    pair_of,
    place,
    size,
    step_name,
    why,
    worst,
)
from otel_torch.rendering.page import (
    code,
    document,
    escaped,
    grid_axes,
    html_table,
    plot_of,
    sentence,
)
from otel_torch.rendering.table import escape

POINTS = 1000  # of the curve: of more pairs, neighbours are put together
ROWS, COLUMNS = 120, 60  # of the heat map, likewise
MODULES = 5000  # of the tree: of more, branches without a finding in them are one line
DEEPEST = 50  # components of a module's name that become branches of their own
NEIGHBOURS = 3  # pairs before and after the finding whose statistics are shown
LISTED = 2000  # entries of a list

# from harmless to guilty: what a module, or a group of pairs, is coloured by
_STATES: tuple[State, ...] = ("right", "healed", "layout", "dtype", "inherited", "introduced")
_RANKS = {state: rank for rank, state in enumerate(_STATES)}
_HEAT = (
    "within its floor",
    "up to 10 times",
    "up to 1,000 times",
    "up to 100,000 times",
    "more",
    "not finite",
)
_GUILTY = {"filter": "datum.state === 'introduced'"}
_HIDDEN_STATISTICS = ("sketch", "histogram")


def write_html(report: Report, path: Path) -> None:
    """Write the report as one page, about 1 MB; folders are made.

    Raises ModuleNotFoundError, in one line, without vl-convert-python, and OSError where the file
    cannot be written.
    """
    page = _page(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")


def _page(report: Report) -> str:
    sections = {"curve": _curve(report), "heat": _heat(report)}
    body = [
        *_summary(report),
        *_chain(report),
        *(line for id, drawn in sections.items() if drawn is not None for line in drawn.lines(id)),
        *_tree_section(report),
        *_statistics_section(report),
        *_lists(report),
    ]
    plots = {id: drawn.plot for id, drawn in sections.items() if drawn is not None}
    return document(f"{report.verdict}: {report.reference} against {report.port}", body, plots)


def _summary(report: Report) -> list[str]:
    """The verdict and the finding."""
    parts = [
        '<header class="card">',
        f'<p><span class="badge {report.verdict}">{report.verdict}</span> <span class="faint">{counts(report)}</span></p>',
    ]
    first = report.first
    if first is not None:
        parts += [
            f"<h1>{sentence(headline(first))}</h1>",
            _places(first),
            f"<p>{escaped(size(first))} {escaped(why(first))}</p>",
        ]
        advised, environments = advice(first, report.chain)
        parts.append(f"<p>{escaped(advised)}</p>")
        parts += [
            f'<p class="faint">{program}</p><pre>{escaped(values)}</pre>'
            for program, values in environments
        ]
        if said := apart(report):
            parts.append(f"<p>{escaped(said)}</p>")
    elif report.verdict == "match":
        parts.append(
            f"<h1>The port computes what the reference computes.</h1><p>{sentence(nearest(report))}</p>"
        )
    else:
        parts.append(
            f"<h1>These recordings cannot be compared.</h1><p>{escaped(report.reason or '')}</p>"
        )
    if report.weaker:
        parts.append(f'<p class="warning">{escaped(WEAKER)}</p>')
    parts.append(
        f'<p class="faint">reference {code(report.reference)} · port {code(report.port)}</p></header>'
    )
    return parts


def _places(finding: Finding) -> str:
    """A finding's place in both programs' names."""
    rows = [
        ("reference", finding.model, finding.module, finding.tensor, finding.side, finding.loop, finding.step, finding.call),
        ("port", finding.port_model, finding.port_module, finding.port_tensor, finding.port_side, finding.port_loop,
         finding.port_step, finding.port_call),
    ]  # fmt: skip
    cells = [
        [
            row[0],
            escaped(row[1] or "–"),
            code(name(row[2])),
            code(row[3] or "–"),
            *("–" if one is None else str(one) for one in row[4:]),
        ]
        for row in rows
    ]
    return html_table(["", "model", "module", "tensor", "side", "loop", "step", "call"], cells)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A plot, what it is called, and what a person must know to read it."""

    title: str
    said: Sequence[str]
    legend: Sequence[str]
    plot: dict[str, Any]

    def lines(self, id: str) -> list[str]:
        """Its section, in which the page's script draws it."""
        return [
            f"<h2>{self.title}</h2>",
            f'<p class="faint">{" ".join(self.said)}</p>',
            f'<p class="legend">{"".join(self.legend)}</p>',
            f'<div class="plot" id="{id}"></div>',
        ]


def _chain(report: Report) -> list[str]:
    """From the inputs to the finding."""
    if not report.chain:
        return []
    shown = report.chain[-LISTED:]
    rows = [
        [
            f'<span class="{pair.state}">{MARKS[pair.state]} {pair.state}</span>',
            *(
                code(one)
                for one in (
                    name(pair.module),
                    pair.tensor,
                    name(pair.port_module),
                    pair.port_tensor,
                )
            ),
            number(pair.error),
            number(pair.floor),
        ]
        for pair in shown
    ]
    header = ["", "reference", "tensor", "port", "tensor", "error", "floor"]
    return [
        "<h2>From the inputs to the finding</h2>",
        f"<details{' open' if len(rows) <= 20 else ''}><summary>{len(rows):,} pairs</summary>",
        f"<div class=wide>{html_table(header, rows, numbers=2)}</div></details>",
    ]


def _curve(report: Report) -> _Drawn | None:
    """The error and the floor of each pair over the reference's order."""
    pairs = at_the_finding(report)
    tops = [top for group in binned(pairs, POINTS) if (top := worst(group)) is not None]
    sizes = [
        size for pair in tops for size in (pair.error, pair.floor) if size and math.isfinite(size)
    ]
    if not sizes:
        return None
    first = report.first
    step = (
        "all steps" if first is None or first.step is None else step_name((first.loop, first.step))
    )
    said = [
        f"{len(pairs):,} pairs of {step}, in the reference's order. The grey ground is the floor."
    ]
    if len(pairs) > len(tops):
        said.append(
            f"Neighbours are put together in {len(tops):,} groups, of each of which the worst pair is drawn."
        )
    said.append("Drag to move, shift and wheel to zoom.")
    legend = [f'<span class="{state}">● {state}</span>' for state in CURVE]
    low, high = min(sizes) / 3, max(sizes) * 3
    powers = [
        10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    ]
    values = [
        {
            "depth": pair.depth,
            # an error of zero has no logarithm and an infinite one no place: they lie on the lower
            # and upper edge
            "error": low
            if not pair.error
            else min(pair.error, high)
            if math.isfinite(pair.error)
            else high,
            "floor": max(pair.floor, low),
            "base": low,
            "state": pair.state,
            "text": _hover(pair),
        }
        for pair in tops
    ]
    depth = {
        "field": "depth",
        "type": "quantitative",
        "title": "depth: place in the reference's order",
        "scale": {"nice": False},
        "axis": {"tickMinStep": 1},
    }
    error = {
        "field": "error",
        "type": "quantitative",
        "title": "error (relative L2)",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {"format": ".0e", "values": powers},
    }
    colour = {
        "field": "state",
        "type": "nominal",
        "scale": {"domain": list(_STATES), "range": [f"var(--{state})" for state in _STATES]},
        "legend": None,
    }
    plot = plot_of(
        values,
        height=320,
        layer=[
            {
                "mark": {
                    "type": "area",
                    "color": "var(--floor)",
                    "opacity": 0.55,
                    "interpolate": "step",
                    "tooltip": None,
                },
                "encoding": {"x": depth, "y": {**error, "field": "floor"}, "y2": {"field": "base"}},
            },
            {
                "mark": {
                    "type": "line",
                    "color": "var(--faint)",
                    "strokeWidth": 1,
                    "opacity": 0.3,
                    "tooltip": None,
                },
                "encoding": {"x": depth, "y": error},
                "params": [
                    {
                        "name": "shown",
                        "select": {
                            "type": "interval",
                            "encodings": ["x"],
                            "zoom": "wheel![event.shiftKey]",
                        },
                        "bind": "scales",
                    }
                ],
            },
            {
                "transform": [_GUILTY],
                "mark": {
                    "type": "rule",
                    "color": "var(--introduced)",
                    "strokeDash": [4, 3],
                    "tooltip": None,
                },
                "encoding": {"x": depth},
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 1, "clip": True},
                "encoding": {
                    "x": depth,
                    "y": error,
                    "color": colour,
                    "size": {"condition": {"test": _GUILTY["filter"], "value": 140}, "value": 36},
                    "shape": {
                        "condition": {"test": _GUILTY["filter"], "value": "diamond"},
                        "value": "circle",
                    },
                    "tooltip": {"field": "text", "type": "nominal"},
                },
            },
        ],
    )
    return _Drawn("Error by depth", said, legend, plot)


def _heat(report: Report) -> _Drawn | None:
    """Error over floor of modules by step."""
    rows, columns, cells = _cells(report)
    if not cells:
        return None
    said = [
        "Each cell is the worst error over floor of a module in a step; ◆ is where an error was introduced."
    ]
    if len(rows) < len({(pair.model, pair.module) for pair in report.compared}):
        said.append(f"The worst of modules put together under {len(rows):,} names.")
    if len(columns) < len({(pair.loop, pair.step) for pair in report.compared}):
        said.append(f"Steps are put together in {len(columns):,} groups.")
    if report.compared_left_out:
        said.append(
            f"{report.compared_left_out:,} pairs of steps without a difference are left out."
        )
    legend = [
        f'<span><span style="color:var(--heat{at})">■</span> {words}</span>'
        for at, words in enumerate(_HEAT)
    ]
    values = [
        {
            "row": row,
            "module": rows[row],
            "column": column,
            "step": columns[column],
            "heat": _HEAT[_warmth(pair)],
            "state": pair.state,
            "text": _hover(pair),
        }
        for (row, column), pair in cells.items()
    ]
    x, y = grid_axes("step", "module", ("column", "row"))
    tooltip = {"field": "text", "type": "nominal"}
    colour = {
        "field": "heat",
        "type": "nominal",
        "scale": {"domain": list(_HEAT), "range": [f"var(--heat{at})" for at in range(len(_HEAT))]},
        "legend": None,
    }
    # few steps are no reason for cells as wide as the page
    wide = {} if len(columns) > 12 else {"width": {"step": 60}, "autosize": "pad"}
    plot = plot_of(
        values,
        **wide,
        height=15 * len(rows),  # as a step it would be warned of in the console
        layer=[
            {
                "mark": {"type": "rect", "stroke": "var(--back)", "strokeWidth": 1},
                "encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip},
            },
            {
                "transform": [_GUILTY],
                "mark": {
                    "type": "point",
                    "shape": "diamond",
                    "filled": True,
                    "color": "var(--back)",
                    "size": 70,
                    "opacity": 1,
                },
                "encoding": {"x": x, "y": y, "tooltip": tooltip},
            },
        ],
    )
    return _Drawn("Module × step", said, legend, plot)


def _cells(report: Report) -> tuple[list[str], list[str], dict[tuple[int, int], ComparedPair]]:
    """Names of rows (modules) and columns (steps), and the worst pair of each cell."""
    models = {pair.model for pair in report.compared}
    labels = {
        (pair.model, pair.module): (f"{escape(pair.model)}: " if len(models) > 1 else "")
        + name(pair.module)
        for pair in report.compared
    }
    parts = max((label.count(".") + 1 for label in labels.values()), default=0)
    short = labels
    while (
        parts > 1 and len(set(short.values())) > ROWS
    ):  # a shorter beginning of the names puts more modules together
        parts -= 1
        short = {key: ".".join(label.split(".")[:parts]) for key, label in labels.items()}
    found = {(pair.loop, pair.step) for pair in report.compared}
    steps = sorted(found, key=lambda step: tuple(-1 if part is None else part for part in step))
    groups = binned(steps, COLUMNS)
    columns = [
        _step_label(group[0])
        if len(group) == 1
        else f"{_step_label(group[0])}–{_step_label(group[-1])}"
        for group in groups
    ]
    column_of = {step: at for at, group in enumerate(groups) for step in group}
    cells: dict[tuple[str, int], ComparedPair] = {}
    for pair in report.compared:
        cell = (short[pair.model, pair.module], column_of[pair.loop, pair.step])
        cells[cell] = pair if cell not in cells else worst((cells[cell], pair)) or pair
    rows = list(dict.fromkeys(row for row, _ in cells))
    if len(rows) > ROWS:  # nothing in common to shorten: the worst ones, in their order
        warmth = dict.fromkeys(rows, -1.0)
        for (row, _), pair in cells.items():
            warmth[row] = max(warmth[row], math.inf if pair.state == "introduced" else excess(pair))
        warmest = set(sorted(rows, key=warmth.__getitem__, reverse=True)[:ROWS])
        rows = [row for row in rows if row in warmest]
    row_of = {row: at for at, row in enumerate(rows)}
    return (
        rows,
        columns,
        {(row_of[row], column): pair for (row, column), pair in cells.items() if row in row_of},
    )


def _step_label(step: tuple[int | None, int | None]) -> str:
    loop, number = step
    return ("none" if number is None else str(number)) + (f" (loop {loop})" if loop else "")


def _warmth(pair: ComparedPair) -> int:
    """Which colour of the heat map a pair has."""
    if pair.error is not None and not math.isfinite(pair.error):
        return 5
    if pair.state not in ("inherited", "introduced"):
        return 0
    return next((at for at, most in ((1, 10.0), (2, 1e3), (3, 1e5)) if excess(pair) <= most), 4)


def _hover(pair: ComparedPair) -> str:
    """What the pointer shows of a pair."""
    call = f", call {pair.call}" if pair.call else ""
    return (
        f"{MARKS[pair.state]} {pair.state}\n"
        f"reference  {name(pair.module)}  {escape(pair.tensor)}\n"
        f"port       {name(pair.port_module)}  {escape(pair.port_tensor)}\n"
        f"error {number(pair.error)}, floor {number(pair.floor)}, {step_name((pair.loop, pair.step))}{call}"
    )


@dataclass(slots=True)
class _Branch:
    """A module in the tree: the worst pair of each side of it, the modules in it, and the worst
    state in all of that.
    """

    children: dict[str, _Branch] = field(default_factory=dict)
    worst: dict[str, ComparedPair] = field(default_factory=dict)
    state: State = "right"
    size: int = 0  # modules at and below it

    def add(self, parts: Sequence[str], pair: ComparedPair) -> None:
        """Take the worst pair of a side in, at the module with that path below this one."""
        branch = self
        for part in parts:
            branch.state = max(branch.state, pair.state, key=_RANKS.__getitem__)
            branch = branch.children.setdefault(part, _Branch())
        branch.state = max(branch.state, pair.state, key=_RANKS.__getitem__)
        branch.worst[pair.side] = pair

    def count(self) -> int:
        """How many modules these are; kept in `size`."""
        self.size = 1 + sum(child.count() for child in self.children.values())
        return self.size


def _tree_section(report: Report) -> list[str]:
    if not report.compared:
        return []
    sides: dict[tuple[str, str, str], ComparedPair] = {}
    for pair in report.compared:
        held = sides.setdefault((pair.model, pair.module, pair.side), pair)
        if held is not pair and (_RANKS[pair.state], excess(pair)) > (
            _RANKS[held.state],
            excess(held),
        ):
            sides[pair.model, pair.module, pair.side] = pair
    roots: dict[str, _Branch] = {}
    for pair in sides.values():
        roots.setdefault(pair.model, _Branch()).add(
            pair.module.split(".", DEEPEST) if pair.module else [], pair
        )
    whole = sum(root.count() for root in roots.values()) <= MODULES
    said = "The reference's modules, each with the worst of its inputs and outputs over all steps; ✗ leads to a finding."
    if not whole:
        said += f" Of more than {MODULES:,} modules, those beside the way to a finding are counted only."
    tree = [line for model, root in roots.items() for line in _branch(model, root, whole)]
    return [
        "<h2>Modules</h2>",
        f'<p class="faint">{said}</p>',
        '<div class="tree name">',
        *tree,
        "</div>",
    ]


def _branch(label: str, branch: _Branch, whole: bool) -> Iterator[str]:
    """A module as a line, and as a fold where modules are in it: open where something is
    introduced.
    """
    line = f'<span class="{branch.state}">{MARKS[branch.state]} {escaped(label)}</span>'
    port = next((pair for pair in branch.worst.values() if pair.port_module != pair.module), None)
    if port is not None:
        line += f' <span class="faint">= {escaped(name(port.port_module))}</span>'
    for side in ("parameter", "input", "output"):
        if (pair := branch.worst.get(side)) is not None and pair.state != "right":
            line += f' <span class="{pair.state}" title="{escaped(_hover(pair))}">{side} {pair.state} {number(pair.error)}</span>'
    if not branch.children:
        yield f"<div>{line}</div>"
    elif branch.state != "introduced" and not whole:
        yield f'<div>{line} <span class="faint">and {branch.size - 1:,} modules in it</span></div>'
    else:
        yield f"<details{' open' if branch.state == 'introduced' else ''}><summary>{line}</summary>"
        for child_label, child in branch.children.items():
            yield from _branch(child_label, child, whole)
        yield "</details>"


def _statistics_section(report: Report) -> list[str]:
    """The numbers of the finding's tensor and of its neighbours', the two programs side by side."""
    found = pair_of(report, report.first)
    middle = found or worst(report.compared)
    if middle is None:
        return []
    step = sorted(
        (pair for pair in report.compared if (pair.loop, pair.step) == (middle.loop, middle.step)),
        key=lambda one: one.depth,
    )
    at = next(position for position, pair in enumerate(step) if pair is middle)
    shown = [
        pair
        for pair in step[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1]
        if pair is middle or pair.statistics or pair.port_statistics
    ]
    title = "finding" if found else "pair that is furthest from its floor"
    return [
        f"<h2>Statistics of the {title} and of its neighbours</h2>",
        *(line for pair in shown for line in _statistics(pair, pair is middle)),
    ]


def _statistics(pair: ComparedPair, whole: bool) -> Iterator[str]:
    names = [
        key
        for key in dict.fromkeys((*pair.statistics, *pair.port_statistics))
        if key not in _HIDDEN_STATISTICS
    ]
    rows = [(key, pair.statistics.get(key), pair.port_statistics.get(key)) for key in names]
    yield (
        f"<details{' open' if whole else ''}><summary><span class='{pair.state}'>{MARKS[pair.state]} {pair.state}</span> "
        f"{code(name(pair.module))} {code(pair.tensor)} <span class='faint'>= {code(name(pair.port_module))} "
        f"{code(pair.port_tensor)}, error {number(pair.error)}, floor {number(pair.floor)}</span></summary><div class='wide'>"
    )
    yield html_table(
        ["statistic", "reference", "port", "relative difference"],
        [
            [
                escaped(key),
                escaped(_statistic(one)),
                escaped(_statistic(other)),
                _difference(one, other),
            ]
            for key, one, other in rows
        ],
        numbers=3,
    )
    yield "</div></details>"


def _statistic(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.7g}"
    return (
        "×".join(map(str, value)) or "scalar"
        if isinstance(value, list)
        else str(value).removeprefix("torch.")
    )


def _difference(one: Any, other: Any) -> str:
    """How much two statistics differ, relative to the larger one.

    >>> _difference(1.0, 2.0), _difference(3, 3), _difference([2], [3]), _difference(None, 1.0), _difference(0, 0)
    ('0.5', '0', 'differs', '–', '0')
    """
    if one is None or other is None:
        return "–"
    if one == other or (one != one and other != other):
        return "0" if _is_number(one) else "equal"
    if not (_is_number(one) and _is_number(other) and math.isfinite(one) and math.isfinite(other)):
        return "differs"
    return number(abs(one - other) / max(abs(one), abs(other)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lists(report: Report) -> list[str]:
    """All that was found, and all that was not compared."""
    sections: list[tuple[str, list[str]]] = [
        (
            "Findings, each with a cause of its own",
            [_finding_line(one) for one in report.introduced],
        ),
        ("Harmless differences", [f"{harm(one)}: {_finding_line(one)}" for one in report.harmless]),
        ("Only in the reference", list(map(_module_line, report.unpaired.get("reference", [])))),
        ("Only in the port", list(map(_module_line, report.unpaired.get("port", [])))),
        ("Not told apart", list(map(_module_line, report.ambiguous))),
        ("Warnings", list(map(escaped, report.warnings))),
    ]
    return [line for title, entries in sections if entries for line in _list(title, entries)]


def _list(title: str, entries: Sequence[str]) -> Iterator[str]:
    yield f"<h2>{title}: {len(entries):,}</h2><details{' open' if len(entries) <= 20 else ''}><summary>all of them</summary><ul>"
    yield from (f"<li>{entry}</li>" for entry in entries[:LISTED])
    if len(entries) > LISTED:
        yield f"<li>and {len(entries) - LISTED:,} more, which `--json` names</li>"
    yield "</ul></details>"


def _finding_line(finding: Finding) -> str:
    sizes = (
        ""
        if finding.error is None
        else f", error {number(finding.error)}, floor {number(finding.floor)}"
    )
    in_reference = finding.module is not None
    step = (finding.loop, finding.step) if in_reference else (finding.port_loop, finding.port_step)
    port = "nothing" if finding.port_module is None else name(finding.port_module)
    tensor = (finding.tensor if in_reference else finding.port_tensor) or "–"
    return (
        f"{code(place(finding))} {code(tensor)}, {finding.kind}, {step_name(step)}{sizes}; in the port {code(port)}. "
        f"{escaped(finding.explanation)}"
    )


def _module_line(module: UncomparedTensor) -> str:
    return f"{escaped(module.model)} {code(name(module.module))} {code(module.tensor)}"
