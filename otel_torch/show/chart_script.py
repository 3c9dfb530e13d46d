"""The script of the HTML page: fills the plot templates with the chosen statistic.

It sees `options` of `rendering.page`, and the JSON of `chart_data` in the element `data`.
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const chosen = Object.fromEntries(
  ["statistic", "tensors", "colour"].map(id => [id, document.getElementById(id)]));
const shown = new Map();
const isBad = value => value === "!";
// Vega fails on a name that every object has, such as `constructor`.
const titled = name => name in {} ? `${name} ` : name;
const text = value => isBad(value) ? "NaN or Inf" : String(value);

function fill(select, names) {
  const before = select.value;
  select.replaceChildren(...names.map(name => new Option(name, name)));
  if (names.includes(before)) select.value = before;
}
function draw(id, values, change) {
  const plot = structuredClone(data.templates[id]);
  plot.data.values = values;
  // Vega-Lite warns of a height by step in a plot that fits the width of the page: use a number.
  if (plot.height.step) {
    const rows = new Set(values.map(value => value[data.lines[id]]));
    plot.height = plot.height.step * rows.size;
  }
  if (change) change(plot);
  if (shown.has(id)) shown.get(id).then(result => result.finalize());
  const element = document.getElementById(id);
  if (values.length) shown.set(id, vegaEmbed(element, plot, options));
  else {
    shown.delete(id);
    element.textContent = "Nothing to draw: no values, or the median to compare with is 0.";
  }
}
function colorScale(values) {
  const low = Math.min(...values), high = Math.max(...values);
  if (low < 0) {
    const far = Math.max(-low, high);
    const domain = [-far, far];
    return {type: "symlog", constant: far / 100, domain, domainMid: 0, scheme: "blueorange"};
  }
  const domain = [low, high];
  if (low > 0 && high > 30 * low) return {type: "log", domain, scheme: "viridis"};
  const least = Math.min(...values.filter(value => value > 0));
  if (high > 30 * least) {
    const constant = Math.max(least, high / 1e6);
    return {type: "symlog", constant, domain, scheme: "viridis"};
  }
  return {type: "linear", domain, zero: false, scheme: "viridis"};
}
function axisScale(values) {
  const finite = values.filter(Number.isFinite);
  const low = Math.min(...finite), high = Math.max(...finite);
  if (low > 0 && high > 30 * low) return {type: "log", nice: false};
  const largest = Math.max(-low, high);
  const least = Math.min(...finite.map(Math.abs).filter(value => value > 0));
  if (largest > 1000 * least) {
    return {type: "symlog", constant: Math.max(least, largest / 1e4)};
  }
  return {type: "linear", zero: false};
}
function median(values) {
  const sorted = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}
function heatText(group, row, column, statistic, value, heat) {
  const lines = [group.rows[row], `step ${data.columns[column]}`, `${statistic} ${text(value)}`];
  if (chosen.colour.value !== "value" && heat !== null) {
    lines.push(`${heat.toPrecision(3)} times the module's median`);
  }
  return lines.join("\\n");
}
function drawTrainingMap(id, {rows, columns, cells, title, template}) {
  data.templates[id] = template;
  data.lines[id] = "module";
  const values = cells.flatMap((line, row) => line.map((value, column) => ({
    row, module: rows[row], column, step: columns[column], heat: isBad(value) ? null : value,
    bad: isBad(value), text: `${rows[row]}\\nstep ${columns[column]}\\n${title} ${text(value)}`
  }))).filter(cell => cell.bad || cell.heat !== null);
  const heats = values.map(value => value.heat).filter(heat => heat !== null);
  draw(id, values, plot => {
    const color = plot.layer[0].encoding.color;
    Object.assign(color, {title, scale: colorScale(heats)});
    if (!heats.length) delete plot.layer[0].encoding.color;
  });
}
function drawHeat(group, statistic) {
  const isRelative = chosen.colour.value !== "value";
  const values = [];
  group.statistics[statistic].cells.forEach((cells, row) => {
    const middle = isRelative ? median(cells) : 0;
    cells.forEach((value, column) => {
      if (value === null || (isRelative && !isBad(value) && !(middle > 0))) return;
      let heat = value;
      if (isBad(value)) heat = null;
      else if (isRelative) heat = Math.max(Math.abs(value) / middle, 1 / 1024);
      values.push({
        row, module: group.rows[row], column, step: data.columns[column], heat, bad: isBad(value),
        text: heatText(group, row, column, statistic, value, heat)
      });
    });
  });
  const heats = values.map(value => value.heat).filter(heat => heat !== null);
  draw("heat", values, plot => {
    const color = plot.layer[0].encoding.color;
    color.title = isRelative ? "times the median" : titled(statistic);
    if (!heats.length) delete plot.layer[0].encoding.color;
    else if (!isRelative) color.scale = colorScale(heats);
    else {
      const far = Math.min(Math.max(...heats, ...heats.map(heat => 1 / heat), 2), 1024);
      const domain = [1 / far, far];
      color.scale = {type: "log", domain, domainMid: 1, clamp: true, scheme: "blueorange"};
    }
  });
}
function drawSpread(id, names, quantiles, label, axis, domain) {
  const values = [];
  quantiles.forEach((five, index) => {
    if (five === null) return;
    const [least, low, middle, high, most] = five;
    const lines = [
      `${label}${names[index]}`, `largest ${most}`, `90 % ${high}`, `median ${middle}`,
      `10 % ${low}`, `smallest ${least}`];
    const text = lines.join("\\n");
    values.push({at: index, name: names[index], least, low, middle, high, most, text});
  });
  draw(id, values, plot => {
    const all = values.flatMap(item => [item.least, item.low, item.middle, item.high, item.most]);
    const scale = axisScale(all), title = titled(chosen.statistic.value);
    for (const {encoding} of plot.layer) {
      Object.assign(encoding[axis], {scale, title});
      if (domain) encoding.x.scale = {domain};
    }
  });
}
function drawHistograms(group) {
  const section = document.getElementById("histograms");
  if (!section) return;
  section.hidden = !group.histograms;
  if (!group.histograms) return;
  const {first, bins, rows, steps} = group.histograms;
  const flatten = (table, names, label) => table.flatMap((shares, row) =>
    (shares || []).map((share, bin) => ({
      row, name: names[row], bin: first + bin, magnitude: bins[bin], share,
      text: `${label}${names[row]}\\nmagnitude ${bins[bin]}\\n`
        + `${(100 * share).toPrecision(3)} % of the elements`
    }))).filter(value => value.share > 0);
  draw("histogram-modules", flatten(rows, group.rows, ""));
  draw("histogram-steps", flatten(steps, data.columns, "step "));
}
function update() {
  const group = data.groups[chosen.tensors.value];
  const names = Object.keys(group.statistics);
  fill(chosen.statistic, names);
  document.getElementById("note").textContent = group.note;
  if (names.length) {
    const statistic = group.statistics[chosen.statistic.value];
    drawHeat(group, chosen.statistic.value);
    // A step without a finite value keeps its place.
    const recorded = data.columns.filter(
      (_, index) => statistic.cells.some(row => row[index] !== null));
    drawSpread("over-steps", data.columns, statistic.over_steps, "step ", "y", recorded);
    drawSpread("over-modules", group.rows, statistic.over_modules, "", "x");
  } else for (const id of ["heat", "over-steps", "over-modules"]) draw(id, []);
  drawHistograms(group);
}
for (const [id, map] of Object.entries(data.training)) drawTrainingMap(id, map);
if (chosen.tensors) {
  fill(chosen.tensors, Object.keys(data.groups));
  for (const select of Object.values(chosen)) select.addEventListener("change", update);
  update();
}
"""
