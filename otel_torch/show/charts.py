"""What the page of a recording draws of its numbers, and the script that draws it when something
else is chosen.

Everything is drawn by one of five plots without values, into which the script puts those of the
statistic that was chosen.
"""

from __future__ import annotations

from typing import Any

from otel_torch.rendering.page import grid_axes, plot_of, sentence
from otel_torch.show.grid import COUNTS, Grid

# the field of a plot that has a line for each of its values
LINES = {
    "heat": "module",
    "over-modules": "name",
    "histogram-modules": "name",
    "histogram-steps": "magnitude",
}

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = Object.fromEntries(["statistic", "tensors", "colour"].map(id => [id, document.getElementById(id)]));
const shown = new Map();
const bad = value => value === "!";
// Vega trips over a text that is a name of every object, such as `constructor`
const titled = name => name in {} ? `${name} ` : name;
const text = value => bad(value) ? "not finite" : String(value);

function fill(select, names) {
  const before = select.value;
  select.replaceChildren(...names.map(name => new Option(name, name)));
  if (names.includes(before)) select.value = before;
}
function draw(id, values, change) {
  const plot = structuredClone(data.templates[id]);
  plot.data.values = values;
  // as a number: Vega-Lite warns of steps in a plot that fits the page's width
  if (plot.height.step) plot.height = plot.height.step * new Set(values.map(one => one[data.lines[id]])).size;
  if (change) change(plot);
  if (shown.has(id)) shown.get(id).then(result => result.finalize());
  const at = document.getElementById(id);
  if (values.length) shown.set(id, vegaEmbed(at, plot, options));
  else {
    shown.delete(id);
    at.textContent = "Nothing to draw: there is no such value, or the median that it would be measured by is 0.";
  }
}
function scale(values) {
  const low = Math.min(...values), high = Math.max(...values);
  if (low < 0) {
    const far = Math.max(-low, high);
    return {type: "symlog", constant: far / 100, domain: [-far, far], domainMid: 0, scheme: "blueorange"};
  }
  if (low > 0 && high > 30 * low) return {type: "log", domain: [low, high], scheme: "viridis"};
  const least = Math.min(...values.filter(value => value > 0));
  if (high > 30 * least) return {type: "symlog", constant: Math.max(least, high / 1e6), domain: [low, high], scheme: "viridis"};
  return {type: "linear", domain: [low, high], zero: false, scheme: "viridis"};
}
function axis(values) {
  const all = values.filter(Number.isFinite);
  const low = Math.min(...all), high = Math.max(...all);
  if (low > 0 && high > 30 * low) return {type: "log", nice: false};
  const steepest = Math.max(-low, high), least = Math.min(...all.map(Math.abs).filter(value => value > 0));
  if (steepest > 1000 * least) return {type: "symlog", constant: Math.max(least, steepest / 1e4)};
  return {type: "linear", zero: false};
}
function median(values) {
  const sorted = values.filter(Number.isFinite).map(Math.abs).sort((one, other) => one - other);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}
function drawHeat(group, statistic) {
  const cells = group.statistics[statistic].cells;
  const relative = chosen.colour.value !== "value";
  const values = [];
  cells.forEach((row, at) => {
    const middle = relative ? median(row) : 0;
    row.forEach((value, column) => {
      if (value === null || (relative && !bad(value) && !(middle > 0))) return;
      const heat = bad(value) ? null : relative ? Math.max(Math.abs(value) / middle, 1 / 1024) : value;
      values.push({row: at, module: group.rows[at], column, step: data.columns[column], heat, bad: bad(value),
        text: `${group.rows[at]}\\nstep ${data.columns[column]}\\n${statistic} ${text(value)}`
          + (relative && heat !== null ? `\\n${heat.toPrecision(3)} times the module's median` : "")});
    });
  });
  const heats = values.map(one => one.heat).filter(heat => heat !== null);
  draw("heat", values, plot => {
    const colour = plot.layer[0].encoding.color;
    colour.title = relative ? "times the median" : titled(statistic);
    if (!heats.length) delete plot.layer[0].encoding.color;
    else if (!relative) colour.scale = scale(heats);
    else {
      const far = Math.min(Math.max(...heats, ...heats.map(heat => 1 / heat), 2), 1024);
      colour.scale = {type: "log", domain: [1 / far, far], domainMid: 1, clamp: true, scheme: "blueorange"};
    }
  });
}
function drawSpread(id, names, quantiles, label, order, all) {
  const values = [];
  quantiles.forEach((five, at) => {
    if (five === null) return;
    const [least, low, middle, high, most] = five;
    values.push({at, name: names[at], least, low, middle, high, most,
      text: `${label}${names[at]}\\nlargest ${most}\\n90 % ${high}\\nmedian ${middle}\\n10 % ${low}\\nsmallest ${least}`});
  });
  draw(id, values, plot => {
    const numbers = axis(values.flatMap(one => [one.least, one.low, one.middle, one.high, one.most]));
    for (const {encoding} of plot.layer) {
      Object.assign(encoding[order], {scale: numbers, title: titled(chosen.statistic.value)});
      if (all) encoding.x.scale = {domain: all};
    }
  });
}
function drawHistograms(group) {
  const parts = document.getElementById("histograms");
  if (!parts) return;
  parts.hidden = !group.histograms;
  if (!group.histograms) return;
  const {first, bins, rows, steps} = group.histograms;
  const flat = (table, names, what) => table.flatMap((shares, at) => (shares || []).map((share, bin) => ({
    row: at, name: names[at], bin: first + bin, magnitude: bins[bin], share,
    text: `${what}${names[at]}\\nmagnitude ${bins[bin]}\\n${(100 * share).toPrecision(3)} % of the elements`
  }))).filter(one => one.share > 0);
  draw("histogram-modules", flat(rows, group.rows, ""));
  draw("histogram-steps", flat(steps, data.columns, "step "));
}
function update() {
  const group = data.groups[chosen.tensors.value];
  const names = Object.keys(group.statistics);
  fill(chosen.statistic, names);
  document.getElementById("said").textContent = group.said;
  if (names.length) {
    const statistic = group.statistics[chosen.statistic.value];
    drawHeat(group, chosen.statistic.value);
    // a step in which nothing is finite has its place all the same
    const recorded = data.columns.filter((_, at) => statistic.cells.some(row => row[at] !== null));
    drawSpread("over-steps", data.columns, statistic.over_steps, "step ", "y", recorded);
    drawSpread("over-modules", group.rows, statistic.over_modules, "", "x");
  } else for (const id of ["heat", "over-steps", "over-modules"]) draw(id, []);
  drawHistograms(group);
}
fill(chosen.tensors, Object.keys(data.groups));
for (const select of Object.values(chosen)) select.addEventListener("change", update);
update();
"""


def section(grid: Grid) -> list[str]:
    """Where the page draws what is chosen in it."""
    said = ["Each cell is a module in a step. Red with a cross: not finite."]
    if grid.width > 1:
        said.append(f"{len(grid.steps):,} steps are put together in groups of {grid.width}.")
    said.append(
        "Of several values in a cell (calls, steps put together, modules put together) the smallest `min` and the largest `max` "
        f"are shown, the sum of {', '.join(f'`{name}`' for name in sorted(COUNTS))}, and of all else the largest in magnitude."
    )
    if grid.left_out:
        said.append(
            f"Left out: {len(grid.left_out):,} further statistics, {', '.join(list(grid.left_out)[:5])} among them."
        )
    lines = [
        "<h2>Module × step</h2>",
        f'<p class="faint">{sentence(" ".join(said))}</p>',
        '<div class="controls"><label>statistic <select id="statistic"></select></label>'
        '<label>of <select id="tensors"></select></label><label>coloured by <select id="colour">'
        "<option>value</option><option>times the module's median</option></select></label></div>",
        '<p class="faint" id="said"></p>',
        '<div class="plot" id="heat"></div>',
        "<h2>Spread over the modules, step by step</h2>",
        '<p class="faint">The line is the median of all tensors, the dark band holds eight of ten, the light one all.</p>',
        '<div class="plot" id="over-steps"></div>',
        "<h2>Spread over the steps, module by module</h2>",
        '<p class="faint">The tick is the median of all steps, the thick bar holds eight of ten, the thin one all.</p>',
        '<div class="plot" id="over-modules"></div>',
    ]
    if grid.histograms:
        lines += [
            '<div id="histograms"><h2>Magnitudes</h2>',
            '<p class="faint">The share of elements of each magnitude, by powers of two: of each module over all steps.</p>',
            '<div class="plot" id="histogram-modules"></div>',
            '<p class="faint">The same of each step over all modules.</p>',
            '<div class="plot" id="histogram-steps"></div></div>',
        ]
    return lines


def templates(columns: int) -> dict[str, Any]:
    """The plots without their values, which the script puts in."""
    step, module = grid_axes("step", "module", ("column", "row"))
    tooltip = {"field": "text", "type": "nominal"}
    # few steps are no reason for cells as wide as the page
    narrow = {"width": {"step": 40}, "autosize": "pad"} if columns <= 12 else {}
    heat = plot_of(
        [],
        **narrow,
        height={"step": 15},
        layer=[
            {
                "transform": [{"filter": "!datum.bad"}],
                "mark": {"type": "rect", "stroke": "var(--back)", "strokeWidth": 0.5},
                "encoding": {"x": step, "y": module, "color": {"field": "heat", "type": "quantitative"}, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "datum.bad"}],
                "mark": {"type": "rect", "color": "var(--introduced)", "stroke": "var(--back)", "strokeWidth": 0.5},
                "encoding": {"x": step, "y": module, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "datum.bad"}],
                "mark": {"type": "point", "shape": "cross", "angle": 45, "filled": True, "color": "var(--back)", "size": 50,
                         "opacity": 1, "tooltip": None},
                "encoding": {"x": step, "y": module},
            },
        ],
    )  # fmt: skip
    at_step, at_module = grid_axes("name", "name", ("at", "at"))

    def spread(position: str, name: str, **along: Any) -> dict[str, Any]:
        return {position: {"field": name, "type": "quantitative"}, **along}

    band = {"type": "area", "color": "var(--dtype)", "tooltip": None}
    bar = {"type": "rule", "color": "var(--dtype)", "strokeCap": "butt", "tooltip": None}
    over_steps = plot_of(
        [],
        height=240,
        layer=[
            {
                "mark": {**band, "opacity": 0.18},
                "encoding": spread("y", "least", x=at_step, y2={"field": "most"}),
            },
            {
                "mark": {**band, "opacity": 0.35},
                "encoding": spread("y", "low", x=at_step, y2={"field": "high"}),
            },
            {
                "mark": {"type": "line", "color": "var(--dtype)", "tooltip": None},
                "encoding": spread("y", "middle", x=at_step),
            },
            {
                "mark": {
                    "type": "point",
                    "filled": True,
                    "color": "var(--dtype)",
                    "size": 30,
                    "opacity": 1,
                },
                "encoding": spread("y", "middle", x=at_step, tooltip=tooltip),
            },
        ],
    )
    over_modules = plot_of(
        [],
        height={"step": 15},
        layer=[
            {
                "mark": {**bar, "strokeWidth": 2, "opacity": 0.45},
                "encoding": spread("x", "least", y=at_module, x2={"field": "most"}),
            },
            {
                "mark": {**bar, "strokeWidth": 7, "opacity": 0.6},
                "encoding": spread("x", "low", y=at_module, x2={"field": "high"}),
            },
            {
                "mark": {"type": "tick", "color": "var(--ink)", "thickness": 2, "size": 11},
                "encoding": spread("x", "middle", y=at_module, tooltip=tooltip),
            },
        ],
    )
    magnitude = {
        "field": "magnitude",
        "type": "nominal",
        "title": "magnitude",
        "sort": {"field": "bin"},
        "axis": {"labelAngle": 0, "labelOverlap": True},
    }
    share = {
        "field": "share",
        "type": "quantitative",
        "title": "share",
        "scale": {"type": "sqrt", "scheme": "viridis", "domainMin": 0},
        "legend": {"format": ".0%"},
    }
    name = {
        "field": "name",
        "type": "nominal",
        "title": None,
        "sort": {"field": "row"},
        "axis": {"labelLimit": 360},
    }
    cell = {"type": "rect", "stroke": "var(--back)", "strokeWidth": 0.5}
    of_modules = plot_of(
        [],
        height={"step": 15},
        mark=cell,
        encoding={"x": magnitude, "y": name, "color": share, "tooltip": tooltip},
    )
    upside = {
        **magnitude,
        "sort": {"field": "bin", "order": "descending"},
        "axis": {"labelOverlap": True},
    }
    of_steps = plot_of(
        [],
        **narrow,
        height={"step": 9},
        mark=cell,
        encoding={
            "x": {**name, "title": "step", "axis": {"labelAngle": 0, "labelOverlap": True}},
            "y": upside,
            "color": share,
            "tooltip": tooltip,
        },
    )
    return {
        "heat": heat,
        "over-steps": over_steps,
        "over-modules": over_modules,
        "histogram-modules": of_modules,
        "histogram-steps": of_steps,
    }
