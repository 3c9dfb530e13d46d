// What was recorded: the names of tensors, and a table of tensors by steps for each statistic.
// Nothing here touches the page.

// Of a table: base64 of deflated bytes, the three highest bytes of each float64, one plane a byte.
// NaN is no value, Infinity stands for NaN and Inf.
const PLANES = 3;

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / PLANES;
  const bytes = new Uint8Array(8 * count);
  for (let plane = 0; plane < PLANES; plane++) {
    for (let index = 0; index < count; index++)
      bytes[8 * index + 7 - plane] = planes[plane * count + index];
  }
  return new Float64Array(bytes.buffer);
}

function median(values) {
  const sorted = Float64Array.from(values.filter(Number.isFinite)).sort();
  return quantile(sorted, 0.5);
}

// Of values in ascending order; NaN without any.
function quantile(sorted, share) {
  if (!sorted.length) return NaN;
  const place = share * (sorted.length - 1);
  const index = Math.floor(place);
  if (index + 1 >= sorted.length) return sorted[index];
  return sorted[index] * (1 - (place - index)) + sorted[index + 1] * (place - index);
}

class Tensors {
  // recorded: the JSON that show/explorer_data.py writes.
  constructor(recorded) {
    this.recorded = recorded;
    this.columns = recorded.columns;
    this.count = recorded.tensors.module.of.length;
    this.recordings = recorded.recordings;
    this.statistics = new Map(recorded.statistics.map(statistic => [statistic.name, statistic]));
    this.bad = new Set(recorded.bad);
    this.severalModels = recorded.tensors.model.names.length > 1;
    this.unpacked = new Map();
    this.summarized = new WeakMap();
    this.tensorsOf = new Map(); // module -> how many of its tensors were selected last
  }

  // A field of a tensor: model, module, tensor, phase, branch or kind.
  field(name, index) {
    const {names, of} = this.recorded.tensors[name];
    return names[of[index]];
  }

  names(field) {
    return this.recorded.tensors[field].names;
  }

  moduleKey(index) {
    const {model, module} = this.recorded.tensors;
    return model.of[index] + " " + module.of[index];
  }

  // What tells a tensor from the others of its module.
  label(index) {
    const parts = [this.field("tensor", index)];
    for (const field of ["phase", "branch"])
      if (this.names(field).length > 1) parts.push(this.field(field, index));
    return parts.filter(Boolean).join(" ");
  }

  name(index) {
    const parts = [
      this.severalModels ? `${this.field("model", index)}:` : "",
      this.field("module", index) || "(root)"
    ];
    if (this.tensorsOf.get(this.moduleKey(index)) > 1) parts.push(this.label(index));
    return parts.filter(Boolean).join(" ");
  }

  // The table of a statistic, unpacked when it is first needed.
  values(statistic, recording) {
    const key = `${recording} ${statistic}`;
    if (!this.unpacked.has(key))
      this.unpacked.set(key, unpack(this.statistics.get(statistic).cells[recording]));
    return this.unpacked.get(key);
  }

  row(values, index) {
    return values.subarray(index * this.columns.length, (index + 1) * this.columns.length);
  }

  // Over the steps of each tensor: least, median and largest finite value, and whether any is not.
  summaries(values) {
    if (!this.summarized.has(values)) this.summarized.set(values, this.summarize(values));
    return this.summarized.get(values);
  }

  summarize(values) {
    const [least, middle, most] = [0, 1, 2].map(() => new Float64Array(this.count).fill(NaN));
    const isBad = new Uint8Array(this.count);
    for (let index = 0; index < this.count; index++) {
      const row = this.row(values, index);
      const sorted = row.filter(Number.isFinite).sort();
      least[index] = quantile(sorted, 0);
      middle[index] = quantile(sorted, 0.5);
      most[index] = quantile(sorted, 1);
      isBad[index] = this.bad.has(index) || row.includes(Infinity) ? 1 : 0;
    }
    return {least, middle, most, isBad};
  }

  // Select the tensors that a filter leaves: {pattern, model, phase, kind}; "" selects all.
  select({pattern, model, phase, kind}) {
    const matches = this.names("module").map(name => !pattern || pattern.test(name));
    const wanted = Object.entries({model, phase, kind}).filter(([, name]) => name !== "");
    const chosen = [];
    for (let index = 0; index < this.count; index++) {
      if (!matches[this.recorded.tensors.module.of[index]]) continue;
      if (wanted.every(([field, name]) => this.field(field, index) === name)) chosen.push(index);
    }
    this.tensorsOf.clear();
    for (const index of chosen) {
      const key = this.moduleKey(index);
      this.tensorsOf.set(key, (this.tensorsOf.get(key) || 0) + 1);
    }
    return chosen;
  }
}

// -- the tree of modules

const SORTS = {
  "as recorded": null,
  "by name": (a, b) => a.name.localeCompare(b.name, "en", {numeric: true}),
  "largest first": (a, b) => magnitude(b) - magnitude(a),
  "smallest first": (a, b) => magnitude(a) - magnitude(b),
  "most changed first": (a, b) => change(b) - change(a),
  "NaN and Inf first": (a, b) => b.isBad - a.isBad
};

function magnitude({least, most}) {
  return Math.max(Math.abs(least), Math.abs(most)) || 0;
}

// How many times its median a module came to.
function change(node) {
  return node.middle ? magnitude(node) / Math.abs(node.middle) || 0 : 0;
}

// The key of a node is its path: "blocks.3.q", and of one of several tensors "blocks.3.q out".
function makeNode(name, parent, joint = ".") {
  return {
    name,
    key: parent?.parent ? parent.key + joint + name : parent ? name : "",
    parent,
    depth: parent ? parent.depth + 1 : 0,
    children: [],
    childOf: new Map(),
    own: []
  };
}

function childNamed(node, name) {
  if (!node.childOf.has(name)) {
    const child = makeNode(name, node);
    node.childOf.set(name, child);
    node.children.push(child);
  }
  return node.childOf.get(name);
}

// The tree of the chosen tensors. A node has the summary of its tensors, which are
// `order.slice(start, end)`; a leaf is one tensor.
function moduleTree(tensors, chosen, summaries, sort) {
  const root = makeNode("all modules", null);
  for (const index of chosen) {
    let node = tensors.severalModels ? childNamed(root, tensors.field("model", index)) : root;
    for (const part of (tensors.field("module", index) || "(root)").split("."))
      node = childNamed(node, part);
    node.own.push(index);
  }
  finish(root, tensors, summaries);
  const order = [];
  arrange(root, SORTS[sort], order);
  return {root, order};
}

// Add leaves for the tensors of modules, and summaries. Returns the tensors of the node.
function finish(node, tensors, summaries) {
  if (node.own.length === 1 && !node.children.length) node.tensor = node.own[0];
  else node.children.unshift(...node.own.map(index => tensorLeaf(tensors, index, node)));
  const below =
    node.tensor !== undefined
      ? [node.tensor]
      : node.children.flatMap(child => finish(child, tensors, summaries));
  Object.assign(node, summaryOf(below, summaries));
  return below;
}

function tensorLeaf(tensors, index, parent) {
  return Object.assign(makeNode(tensors.label(index), parent, " "), {tensor: index});
}

function summaryOf(indices, {least, middle, most, isBad}) {
  const {low, high} = extentOf(indices.flatMap(index => [least[index], most[index]]));
  const isEmpty = low > high;
  return {
    least: isEmpty ? NaN : low,
    most: isEmpty ? NaN : high,
    middle: median(indices.map(index => middle[index])),
    isBad: indices.some(index => isBad[index]) ? 1 : 0,
    count: indices.length
  };
}

function arrange(node, compare, order) {
  if (compare) node.children.sort(compare);
  node.start = order.length;
  if (node.tensor !== undefined) order.push(node.tensor);
  for (const child of node.children) arrange(child, compare, order);
  node.end = order.length;
}
