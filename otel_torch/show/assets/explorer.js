// The explorer: filters, the tree of modules, the map of modules by steps, and what is known of the
// chosen module. One state, and every view follows it.

const NEIGHBOURS = 3;
const LINE_COLORS = ["--dtype", "--inherited", "--healed", "--layout", "--heat4", "--right"];
const HEATS = ["value", "times its median", "times the first recording"];
const CONTROLS = ["recording", "statistic", "kind", "model", "phase", "sort", "heat", "scale"];
const ADDRESS_DELAY = 200; // milliseconds: browsers refuse many changes of an address at once

class Explorer {
  constructor(recorded) {
    this.tensors = new Tensors(recorded);
    this.control = Object.fromEntries(["pattern", ...CONTROLS].map(id => [id, byId(id)]));
    this.tree = new TreeView(byId("tree"), node => this.choose(node));
    this.map = new HeatMap(byId("map"), {
      label: "modules by steps",
      hover: (row, column) => this.cellText(row, column),
      choose: (row, column) => this.choose(leafAt(this.root, row), column)
    });
    this.curve = new Curves(byId("module-curve"));
    this.histogram = recorded.histograms && new Magnitudes(this.tensors, recorded.histograms);
    this.fillControls();
    this.listen();
  }

  fillControls() {
    const {tensors, control} = this;
    fill(control.recording, tensors.recordings);
    fill(control.statistic, tensors.statistics.keys());
    fill(control.kind, tensors.names("kind"), "all tensors");
    if (tensors.names("kind").length > 1) control.kind.selectedIndex = 1;
    fill(control.model, tensors.names("model"), "all models");
    fill(control.phase, tensors.names("phase"), "all phases");
    fill(control.sort, Object.keys(SORTS));
    fill(control.heat, HEATS.slice(0, tensors.recordings.length > 1 ? 3 : 2));
    fill(control.scale, ["auto", "linear", "log", "symlog"]);
    for (const [id, least] of Object.entries({recording: 2, model: 3, phase: 3, kind: 3})) {
      control[id].closest("label").hidden = control[id].options.length < least;
    }
    this.usual = Object.entries(control).map(([id, {value}]) => [id, value]);
  }

  listen() {
    for (const id of CONTROLS) this.control[id].addEventListener("change", () => this.update());
    this.control.pattern.addEventListener("input", () => this.update());
    addEventListener("hashchange", () => this.follow());
    document.addEventListener("keydown", event => {
      if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      event.preventDefault();
      this.control.pattern.focus();
    });
    for (const link of document.querySelectorAll("[data-tensor]")) {
      link.addEventListener("click", () =>
        this.find(Number(link.dataset.tensor), Number(link.dataset.recording))
      );
    }
  }

  // Show what the address names: choices, a module and a step. What it does not name is as usual.
  follow() {
    const named = new URLSearchParams(location.hash.slice(1));
    for (const [id, usual] of this.usual) {
      const control = this.control[id];
      control.value = named.get(id) ?? usual;
      if (control.selectedIndex < 0) control.value = usual;
    }
    if (!this.pattern()) this.control.pattern.value = "";
    this.chosen = named.get("module") ?? "";
    this.column = this.tensors.columns.indexOf(named.get("step"));
    if (named.size) byId("explorer").scrollIntoView();
    return this.update();
  }

  // Name in the address what is shown, so that it can be sent to others.
  tell() {
    clearTimeout(this.telling);
    this.telling = setTimeout(() => {
      const named = new URLSearchParams();
      for (const [id, usual] of this.usual) {
        if (this.control[id].value !== usual) named.set(id, this.control[id].value);
      }
      if (this.chosen) named.set("module", this.chosen);
      if (this.column >= 0) named.set("step", this.tensors.columns[this.column]);
      const address = new URL(location);
      address.hash = named;
      history.replaceState(null, "", address);
    }, ADDRESS_DELAY);
  }

  pattern() {
    const {pattern} = this.control;
    const error = byId("pattern-error");
    try {
      error.textContent = "";
      return new RegExp(pattern.value);
    } catch {
      error.textContent = "not a regular expression";
      return null;
    }
  }

  // Read the controls, and draw everything. Returns a promise, which `drawing` keeps.
  update() {
    return (this.drawing = this.redraw());
  }

  async redraw() {
    const {tensors, control} = this;
    const pattern = this.pattern();
    if (!pattern) return;
    const turn = (this.turn = (this.turn || 0) + 1);
    const statistic = control.statistic.value;
    const recording = control.recording.selectedIndex;
    const tables = statistic
      ? await Promise.all(tensors.recordings.map((_, index) => tensors.values(statistic, index)))
      : [];
    if (turn !== this.turn) return; // a later choice overtook this one
    const values = tables[recording] || new Float64Array(0);
    const filter = {
      pattern,
      model: control.model.value,
      phase: control.phase.value,
      kind: control.kind.value
    };
    const chosen = tensors.select(filter);
    Object.assign(this, {
      statistic,
      recording,
      tables,
      values,
      summaries: tensors.summaries(values)
    });
    Object.assign(this, moduleTree(tensors, chosen, this.summaries, control.sort.value));
    byId("count").textContent =
      `${chosen.length.toLocaleString("en")} of ${plural(tensors.count, "tensor")}`;
    this.tree.show(this.root, this.barPosition(), pattern.source !== "(?:)" && chosen.length < 500);
    this.drawMap();
    await this.histogram?.show(this.order, control.kind.value, recording);
    this.choose(nodeWithKey(this.root, this.chosen) || this.root);
  }

  // Of the finite values of all chosen tensors.
  extent() {
    const {least, most} = this.summaries;
    return extentOf(this.order.flatMap(index => [least[index], most[index]]));
  }

  barPosition() {
    const {least, most} = this.root;
    return Number.isNaN(least + most)
      ? () => 0
      : positionOf(this.extent(), this.control.scale.value);
  }

  // -- the map

  drawMap() {
    const {tensors, order, control} = this;
    const heat = control.heat.selectedIndex;
    this.heats = heat ? this.ratios(heat) : this.values;
    const columns = tensors.columns.length;
    const rule = heat ? "magnitude" : tensors.statistics.get(this.statistic)?.rule;
    const extent = heat
      ? extentOf(order.flatMap(index => Array.from(tensors.row(this.heats, index))))
      : this.extent();
    const some =
      extent.low <= extent.high ||
      order.some(index => tensors.row(this.heats, index).includes(Infinity));
    const matrix = {
      values: this.heats,
      columns,
      rows: some ? order : [],
      rule,
      rowName: row => tensors.name(order[row]),
      columnName: column => tensors.columns[column]
    };
    this.map.show(matrix, colorScale(extent, control.scale.value, heat > 0));
  }

  // Magnitudes relative to the tensor's median, or to the first recording.
  ratios(heat) {
    const {tensors, values, tables, summaries} = this;
    const columns = tensors.columns.length;
    return values.map((value, position) => {
      const base =
        heat === 1 ? summaries.middle[Math.floor(position / columns)] : tables[0][position];
      if (!Number.isFinite(value)) return value;
      return Number.isFinite(base) && base ? Math.max(Math.abs(value / base), 1 / 1024) : NaN;
    });
  }

  cellText(row, column) {
    const {tensors, order, values} = this;
    const index = order[row];
    const position = index * tensors.columns.length + column;
    const lines = [
      tensors.name(index),
      `step ${tensors.columns[column]}`,
      `${this.statistic} ${numberText(values[position])}`
    ];
    const heat = this.control.heat;
    if (heat.selectedIndex && Number.isFinite(this.heats[position]))
      lines.push(`${this.heats[position].toPrecision(3)} ${heat.value}`);
    return lines.join("\n");
  }

  // -- the chosen module

  // Show a node in every view, and a step if one was chosen.
  choose(node, column = this.column) {
    this.chosen = node.key;
    this.column = column;
    this.tree.select(node);
    this.map.mark(node === this.root ? null : [node.start, node.end], column);
    this.describe(node);
    this.drawCurve(node);
    this.histogram?.choose(this.order.slice(node.start, node.end));
    this.tell();
  }

  // Show a tensor of a recording where it ceases to be finite, whatever is filtered now.
  async find(index, recording) {
    const {control, tensors} = this;
    control.pattern.value = control.model.value = control.phase.value = "";
    control.kind.value = tensors.field("kind", index);
    control.recording.selectedIndex = recording;
    await this.update();
    const column = tensors.row(this.values, index).indexOf(Infinity);
    this.choose(leafAt(this.root, this.order.indexOf(index)), column);
    byId("explorer").scrollIntoView({block: "start"});
    byId("tree").focus({preventScroll: true});
  }

  describe(node) {
    const path = [];
    for (let above = node; above; above = above.parent) path.unshift(above);
    const crumbs = path.flatMap((each, index) => [
      ...(index ? [" › "] : []),
      this.link(each.name, each)
    ]);
    const before = leafAt(this.root, node.start - 1);
    const after = leafAt(this.root, node.end);
    byId("module-path").replaceChildren(...crumbs);
    byId("module-facts").replaceChildren(
      ...this.facts(node),
      ...(before ? [" · ", this.link(`‹ ${before.name}`, before)] : []),
      ...(after ? [" · ", this.link(`${after.name} ›`, after)] : [])
    );
  }

  facts(node) {
    const bad = node.isBad ? [" ", element("span", {class: "introduced"}, "Has NaN or Inf.")] : [];
    if (node.tensor === undefined) {
      const tensors = plural(node.count, "tensor");
      return [`${tensors}; the line is their median, the bands 80 % and all of them.`, ...bad];
    }
    const [least, most, middle] = [node.least, node.most, node.middle].map(numberText);
    const tensor = this.tensors.field("tensor", node.tensor);
    const there = this.tensors.row(this.values, node.tensor)[this.column];
    const at = this.tensors.columns[this.column];
    const step = at ? `, ${numberText(there)} at step ${at}` : "";
    return [
      `${tensor}; ${this.statistic} from ${least} to ${most}, median ${middle}${step}.`,
      ...bad
    ];
  }

  link(text, node) {
    const made = element("button", {type: "button", class: "link"}, text);
    made.addEventListener("click", () => this.choose(node));
    return made;
  }

  drawCurve(node) {
    const {tensors, order, tables} = this;
    const columns = tensors.columns;
    const indices = order.slice(node.start, node.end);
    const bad = [];
    const lines = tables.map((values, recording) => {
      const name = tables.length > 1 ? tensors.recordings[recording] : this.statistic;
      return {
        name,
        color: LINE_COLORS[recording % LINE_COLORS.length],
        ...spread(tensors, values, indices)
      };
    });
    if (node.tensor !== undefined && tables.length === 1) lines.push(...this.neighbourLines(node));
    columns.forEach((_, column) => {
      if (
        indices.some(index =>
          tables.some(values => values[index * columns.length + column] === Infinity)
        )
      )
        bad.push(column);
    });
    this.curve.show({
      xName: "step",
      x: columns.map((_, column) => column),
      xText: x => columns[x] ?? "",
      lines,
      bad,
      at: this.column,
      scale: this.control.scale.value
    });
  }

  // The curves of the other tensors in the same module, faint.
  neighbourLines(node) {
    const at = node.parent.children.indexOf(node);
    return node.parent.children
      .slice(Math.max(at - NEIGHBOURS, 0), at + NEIGHBOURS + 1)
      .filter(each => each !== node && each.tensor !== undefined)
      .map((each, index) => ({
        name: each.name,
        color: LINE_COLORS[1 + (index % (LINE_COLORS.length - 1))],
        faint: true,
        values: this.tensors.row(this.values, each.tensor)
      }));
  }
}

// Of tensors in each step: the median, and from several on the bands of 80 % and of all.
function spread(tensors, values, indices) {
  if (indices.length === 1) return {values: tensors.row(values, indices[0])};
  const columns = tensors.columns.length;
  const [middle, low, high, least, most] = Array.from({length: 5}, () =>
    new Float64Array(columns).fill(NaN)
  );
  for (let column = 0; column < columns; column++) {
    const sorted = Float64Array.from(indices, index => values[index * columns + column])
      .filter(Number.isFinite)
      .sort();
    [middle, low, high, least, most].forEach((line, which) => {
      line[column] = quantile(sorted, [0.5, 0.1, 0.9, 0, 1][which]);
    });
  }
  return {
    values: middle,
    bands: [
      {low: least, high: most},
      {low, high}
    ]
  };
}

// The leaf that shows a row of the map; undefined outside.
function leafAt(node, row) {
  if (row < node.start || row >= node.end) return undefined;
  return node.children.length
    ? leafAt(
        node.children.find(child => row < child.end),
        row
      )
    : node;
}

function nodeWithKey(node, key) {
  if (node.key === key) return node;
  for (const child of node.children) {
    const found = key.startsWith(child.key) && nodeWithKey(child, key);
    if (found) return found;
  }
  return null;
}

function fill(select, names, all) {
  select.replaceChildren(
    ...(all ? [new Option(all, "")] : []),
    ...Array.from(names, name => new Option(name ?? "none", name ?? ""))
  );
}

const explorer = data.explorer && new Explorer(data.explorer);
explorer?.follow();
