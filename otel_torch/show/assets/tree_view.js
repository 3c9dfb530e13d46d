// The tree of modules as a list of which only what is in sight exists: each line has a bar from the
// least to the largest value, with a tick at the median.

const LINE_HEIGHT = 25;
const OPEN_LINES = 60;
const MARGIN_LINES = 8;

class TreeView {
  // choose: called with a node.
  constructor(host, choose) {
    this.host = host;
    this.choose = choose;
    this.isOpen = new Map(); // what a person folded or unfolded, by the key of the node
    this.lines = element("div", {class: "lines"});
    host.replaceChildren(this.lines);
    host.addEventListener("scroll", () => this.draw());
    host.addEventListener("keydown", event => this.key(event));
    redrawn(host, () => this.draw());
  }

  // position: from a value to 0..1. openAll: unfold what nobody folded.
  show(root, position, openAll) {
    Object.assign(this, {root, position});
    this.openDepth = openAll ? Infinity : openableDepth(root);
    this.layout();
  }

  layout() {
    this.visible = [];
    const visit = node => {
      this.visible.push(node);
      if (this.unfolded(node)) node.children.forEach(visit);
    };
    visit(this.root);
    this.lines.style.height = `${this.visible.length * LINE_HEIGHT}px`;
    this.draw();
  }

  unfolded(node) {
    return this.isOpen.get(node.key) ?? node.depth < this.openDepth;
  }

  fold(node, isOpen) {
    if (!node.children.length) return;
    this.isOpen.set(node.key, isOpen);
    this.layout();
  }

  // Mark a node, unfold what it is in, and bring it into sight.
  select(node) {
    this.selected = node;
    for (let above = node.parent; above; above = above.parent) this.isOpen.set(above.key, true);
    this.layout();
    const top = this.visible.indexOf(node) * LINE_HEIGHT;
    const {scrollTop, clientHeight} = this.host;
    if (top < scrollTop || top + LINE_HEIGHT > scrollTop + clientHeight)
      this.host.scrollTop = top - clientHeight / 2;
    this.draw();
  }

  draw() {
    if (!this.visible) return;
    const first = Math.max(Math.floor(this.host.scrollTop / LINE_HEIGHT) - MARGIN_LINES, 0);
    const count = Math.ceil(this.host.clientHeight / LINE_HEIGHT) + 2 * MARGIN_LINES;
    const shown = this.visible.slice(first, first + count);
    this.lines.replaceChildren(...shown.map((node, index) => this.line(node, first + index)));
    const selected = this.visible.indexOf(this.selected);
    if (selected >= first && selected < first + count)
      this.host.setAttribute("aria-activedescendant", `line-${selected}`);
    else this.host.removeAttribute("aria-activedescendant");
  }

  line(node, index) {
    const isGroup = node.children.length > 0;
    const line = element("div", {
      role: "treeitem",
      id: `line-${index}`,
      class: node === this.selected ? "line chosen" : "line",
      "aria-level": node.depth + 1,
      "aria-selected": String(node === this.selected),
      ...(isGroup ? {"aria-expanded": String(this.unfolded(node))} : {})
    });
    line.style.top = `${index * LINE_HEIGHT}px`;
    const twisty = element(
      "span",
      {class: "twisty"},
      isGroup ? (this.unfolded(node) ? "▾" : "▸") : ""
    );
    twisty.addEventListener("click", event => {
      event.stopPropagation();
      this.fold(node, !this.unfolded(node));
    });
    const name = element("span", {class: node.isBad ? "name introduced" : "name"}, node.name);
    if (isGroup)
      name.append(element("span", {class: "faint"}, ` ${node.count.toLocaleString("en")}`));
    name.style.paddingLeft = `${node.depth * 0.9}rem`;
    name.prepend(twisty, node.isBad ? "✕ " : "");
    line.append(
      name,
      this.bar(node),
      element("span", {class: "number"}, numberText(node.middle))
    );
    line.addEventListener("click", () => this.choose(node));
    line.addEventListener("pointermove", event => showTip(event, summaryText(node)));
    line.addEventListener("pointerleave", event => showTip(event, ""));
    return line;
  }

  bar(node) {
    const bar = element("span", {class: "bar"});
    if (Number.isNaN(node.least)) return bar;
    const [from, to, tick] = [node.least, node.most, node.middle].map(this.position);
    const range = element("i");
    const middle = element("b");
    range.style.left = `${100 * from}%`;
    range.style.width = `${100 * (to - from)}%`;
    middle.style.left = `${100 * tick}%`;
    bar.append(range, middle);
    return bar;
  }

  key(event) {
    const at = this.visible.indexOf(this.selected);
    const node = this.visible[at];
    const go = index =>
      this.choose(this.visible[Math.min(Math.max(index, 0), this.visible.length - 1)]);
    const page = Math.floor(this.host.clientHeight / LINE_HEIGHT);
    const acts = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      Home: () => go(0),
      End: () => go(this.visible.length - 1),
      PageDown: () => go(at + page),
      PageUp: () => go(at - page),
      ArrowRight: () => (node && !this.unfolded(node) ? this.fold(node, true) : go(at + 1)),
      ArrowLeft: () =>
        node?.children.length && this.unfolded(node)
          ? this.fold(node, false)
          : node?.parent && this.choose(node.parent)
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }
}

// How deep a tree can be open so that it fits a few screens.
function openableDepth(root) {
  let lines = 1;
  let nodes = [root];
  let depth = 0;
  while (nodes.length) {
    nodes = nodes.flatMap(node => node.children);
    lines += nodes.length;
    if (lines > OPEN_LINES && depth > 0) break;
    depth += 1;
  }
  return depth;
}

function summaryText(node) {
  const lines = [node.key || node.name];
  if (node.tensor === undefined) lines.push(plural(node.count, "tensor"));
  lines.push(
    `largest ${numberText(node.most)}`,
    `median ${numberText(node.middle)}`,
    `least ${numberText(node.least)}`
  );
  if (node.isBad) lines.push("has NaN or Inf");
  return lines.join("\n");
}
