// A map of rows by columns on a canvas, which zooms: one color a cell, or one a pixel where there
// are more cells than pixels.
//
// A matrix is {values, columns, rows, rule, rowName, columnName}: `values` holds the row `rows[i]`
// from `rows[i] * columns` on. NaN is no value, Infinity stands for NaN and Inf.

const ROW_HEIGHT = 15;
const LABEL_HEIGHT = 11;
const FONT = `${LABEL_HEIGHT}px system-ui, sans-serif`;
const MAX_HEIGHT = 460;
const AXIS_HEIGHT = 20;
const CROSS_SIZE = 7;
const MAX_LABEL_SHARE = 0.38;
const COLUMN_WIDTH = 48;
const MIN_DRAG = 5;

// Of two values in a place, the one that remains. NaN is no value; Infinity always remains.
const COMBINE = {
  sum: (before, value) => before + value,
  min: Math.min,
  max: Math.max,
  magnitude: (before, value) => (Math.abs(value) > Math.abs(before) ? value : before)
};
function combine(rule, before, value) {
  if (Number.isNaN(before)) return value;
  if (Number.isNaN(value)) return before;
  if (!Number.isFinite(before) || !Number.isFinite(value)) return Infinity;
  return COMBINE[rule](before, value);
}

class HeatMap {
  // hover: (row, column) -> text; choose: called with the row and the column that were clicked.
  constructor(host, {label, hover, choose = () => {}}) {
    this.host = host;
    this.hover = hover;
    this.choose = choose;
    this.canvas = element("canvas", {tabindex: 0, role: "application", "aria-label": label});
    this.legend = element("div", {class: "map-legend faint"});
    this.said = element("div", {class: "spoken", "aria-live": "polite"});
    host.replaceChildren(this.legend, this.canvas, this.said);
    this.listen();
    redrawn(host, () => this.draw());
  }

  // colors: of `colorScale`. marked: [first, end) of the rows to mark.
  show(matrix, colors, marked = null) {
    const sameShape =
      this.matrix &&
      this.matrix.rows.length === matrix.rows.length &&
      this.matrix.columns === matrix.columns;
    Object.assign(this, {matrix, colors, marked});
    if (!sameShape) this.view = this.everything();
    this.cursor = null;
    this.draw();
  }

  // Mark rows, null for all, and a column of them, -1 for none. Moves what is shown to where the
  // rows begin.
  mark(marked, column) {
    this.marked = marked;
    this.markedColumn = column;
    if (!this.matrix.rows.length) return;
    const {top, bottom, left, right} = this.view;
    const span = bottom - top;
    const isSeen = !marked || (marked[0] >= top && marked[0] < bottom);
    const first = isSeen ? top : Math.round(marked[0] - span / 2);
    this.zoomTo({top: first, bottom: first + span, left, right});
  }

  everything() {
    return {top: 0, bottom: this.matrix.rows.length, left: 0, right: this.matrix.columns};
  }

  zoomTo(view) {
    const {rows, columns} = this.matrix;
    const fit = (low, high, size) => {
      const span = Math.min(Math.max(high - low, 1), size);
      const start = Math.min(Math.max(low, 0), size - span);
      return [start, start + span];
    };
    const [top, bottom] = fit(view.top, view.bottom, rows.length);
    const [left, right] = fit(view.left, view.right, columns);
    this.view = {top, bottom, left, right};
    this.draw();
  }

  // Zoom around a place; a factor below 1 shows less.
  zoomBy(factor, row, column) {
    const {top, bottom, left, right} = this.view;
    this.zoomTo({
      top: row - (row - top) * factor,
      bottom: row + (bottom - row) * factor,
      left: column - (column - left) * factor,
      right: column + (right - column) * factor
    });
  }

  zoomMiddle(factor) {
    const {top, bottom, left, right} = this.view;
    this.zoomBy(factor, (top + bottom) / 2, (left + right) / 2);
  }

  // -- drawing

  layout() {
    const width = this.host.clientWidth;
    const shown = this.view.bottom - this.view.top;
    const height = Math.min(Math.max(shown, 1) * ROW_HEIGHT, MAX_HEIGHT);
    const context = this.canvas.getContext("2d");
    context.font = FONT;
    const every = Math.ceil((ROW_HEIGHT * shown) / height);
    const named = [];
    for (let row = Math.floor(this.view.top); row < this.view.bottom; row++) {
      if (row % every === every >> 1) named.push(row);
    }
    const widths = named.map(row => context.measureText(this.matrix.rowName(row)).width + 8);
    const labels = Math.min(Math.max(0, ...widths), width * MAX_LABEL_SHARE);
    return {width, height, labels, named, plotWidth: Math.max(width - labels, 1)};
  }

  draw() {
    if (!this.matrix || !this.host.clientWidth) return;
    if (!this.matrix.rows.length) {
      this.legend.textContent = "Nothing to draw: no values.";
      this.canvas.hidden = true;
      return;
    }
    this.canvas.hidden = false;
    this.box = this.layout();
    const {width, height, labels, plotWidth} = this.box;
    const context = sizedContext(this.canvas, width, height + AXIS_HEIGHT);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells(), labels, 0, plotWidth, height);
    this.drawCrosses(context);
    this.drawNames(context);
    this.drawMarks(context);
    this.drawLegend();
  }

  // The pixels: one a cell, fewer where the canvas has fewer.
  cells() {
    const {top, bottom, left, right} = this.view;
    const {height, plotWidth} = this.box;
    const tall = Math.min(Math.round(height * devicePixelRatio), zoomedPixels(top, bottom));
    const wide = Math.min(Math.round(plotWidth * devicePixelRatio), zoomedPixels(left, right));
    const image = new ImageData(wide, tall);
    const bad = hexColor(color("--introduced"));
    for (let y = 0; y < tall; y++) {
      const [firstRow, endRow] = cellsOf(y, tall, top, bottom);
      for (let x = 0; x < wide; x++) {
        const [firstColumn, endColumn] = cellsOf(x, wide, left, right);
        const value = this.combined(firstRow, endRow, firstColumn, endColumn);
        if (Number.isNaN(value)) continue;
        const {ramp, position} = this.colors;
        const [red, green, blue] = Number.isFinite(value) ? ramp(position(value)) : bad;
        image.data.set([red, green, blue, 255], 4 * (y * wide + x));
      }
    }
    const canvas = new OffscreenCanvas(wide, tall);
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  combined(firstRow, endRow, firstColumn, endColumn) {
    const {values, columns, rows, rule} = this.matrix;
    let result = NaN;
    for (let row = firstRow; row < endRow; row++) {
      const start = rows[row] * columns;
      for (let column = firstColumn; column < endColumn; column++) {
        result = combine(rule, result, values[start + column]);
      }
    }
    return result;
  }

  drawCrosses(context) {
    const {top, bottom, left, right} = this.view;
    const {height, plotWidth} = this.box;
    if (height / (bottom - top) < CROSS_SIZE || plotWidth / (right - left) < CROSS_SIZE) return;
    context.strokeStyle = color("--back");
    context.lineWidth = 1.5;
    context.beginPath();
    for (let row = Math.floor(top); row < bottom; row++) {
      for (let column = Math.floor(left); column < right; column++) {
        if (Math.abs(this.combined(row, row + 1, column, column + 1)) !== Infinity) continue;
        const [x, y] = this.placeOf(row + 0.5, column + 0.5);
        context.moveTo(x - 3, y - 3);
        context.lineTo(x + 3, y + 3);
        context.moveTo(x - 3, y + 3);
        context.lineTo(x + 3, y - 3);
      }
    }
    context.stroke();
  }

  drawNames(context) {
    const {left, right} = this.view;
    const {height, labels, named, plotWidth, width} = this.box;
    context.fillStyle = color("--ink");
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const row of named) {
      const y = this.placeOf(row + 0.5, 0)[1];
      if (y > LABEL_HEIGHT / 2 && y < height)
        context.fillText(shortened(context, this.matrix.rowName(row), labels - 8), labels - 6, y);
    }
    context.textAlign = "center";
    const every = Math.max(1, Math.ceil(COLUMN_WIDTH / (plotWidth / (right - left))));
    for (let column = Math.ceil(left / every) * every; column < right; column += every) {
      const x = this.placeOf(0, column + 0.5)[0];
      const name = this.matrix.columnName(column);
      const half = context.measureText(name).width / 2;
      if (x - half > labels - 4 && x + half < width)
        context.fillText(name, x, height + AXIS_HEIGHT / 2 + 1);
    }
  }

  drawMarks(context) {
    const {rows, columns} = this.matrix;
    const {height, labels, plotWidth} = this.box;
    const frame = ([first, end], [left, right], least) => {
      const [x, y] = this.placeOf(first, left);
      const [endX, endY] = this.placeOf(end, right);
      const [wide, tall] = [Math.max(endX - x, least), Math.max(endY - y, least)];
      context.strokeRect((x + endX - wide) / 2 + 1, (y + endY - tall) / 2 + 1, wide - 2, tall - 2);
    };
    context.save();
    context.beginPath();
    context.rect(labels, 0, plotWidth, height);
    context.clip();
    context.strokeStyle = color("--ink");
    context.lineWidth = 2;
    const marked = this.marked ?? [0, rows.length];
    if (this.marked) frame(marked, [0, columns], 2);
    if (this.markedColumn >= 0) frame(marked, [this.markedColumn, this.markedColumn + 1], 12);
    if (this.cursor) {
      const [row, column] = this.cursor;
      context.strokeStyle = color("--introduced");
      frame([row, row + 1], [column, column + 1], 5);
    }
    context.restore();
    if (this.drag) {
      context.strokeStyle = color("--ink");
      const {startX, startY, x, y} = this.drag;
      context.setLineDash([4, 3]);
      context.strokeRect(
        Math.min(startX, x),
        Math.min(startY, y),
        Math.abs(x - startX),
        Math.abs(y - startY)
      );
      context.setLineDash([]);
    }
  }

  drawLegend() {
    const {low, high, ramp} = this.colors;
    const {rows, columns} = this.matrix;
    const {top, bottom, left, right} = this.view;
    const stops = Array.from({length: 9}, (_, index) => `rgb(${ramp(index / 8).join(" ")})`);
    const bar = element("span", {class: "ramp"});
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const parts = low <= high ? [`${numberText(low)} `, bar, ` ${numberText(high)}`] : [];
    const isAll = bottom - top >= rows.length && right - left >= columns;
    const [tall, wide] = [Math.ceil(bottom - top), Math.ceil(right - left)];
    const shown = `${plural(tall, "row")} × ${plural(wide, "column")}`;
    const button = (text, title, act) => {
      const made = element("button", {type: "button", title, "aria-label": title}, text);
      made.addEventListener("click", act);
      return made;
    };
    this.legend.replaceChildren(
      ...parts,
      element("span", {class: "space"}),
      isAll
        ? shown
        : `${shown} of ${rows.length.toLocaleString("en")} × ${columns.toLocaleString("en")}`,
      " ",
      button("+", "zoom in", () => this.zoomMiddle(0.5)),
      button("−", "zoom out", () => this.zoomMiddle(2)),
      button("all", "show all", () => this.zoomTo(this.everything()))
    );
  }

  // -- pointer and keyboard

  placeOf(row, column) {
    const {top, bottom, left, right} = this.view;
    const {height, labels, plotWidth} = this.box;
    return [
      labels + ((column - left) / (right - left)) * plotWidth,
      ((row - top) / (bottom - top)) * height
    ];
  }

  // The cell at a pixel, as fractions; null outside.
  cellAt(x, y) {
    const {top, bottom, left, right} = this.view;
    const {height, labels, plotWidth} = this.box;
    if (y < 0 || y >= height || x >= labels + plotWidth) return null;
    return [
      top + (y / height) * (bottom - top),
      left + (Math.max(x - labels, 0) / plotWidth) * (right - left)
    ];
  }

  listen() {
    const {canvas} = this;
    canvas.addEventListener("pointermove", event => this.pointAt(event));
    canvas.addEventListener("pointerleave", event => showTip(event, ""));
    canvas.addEventListener("pointerdown", event => {
      if (event.pointerType === "touch") return;
      this.drag = {
        startX: event.offsetX,
        startY: event.offsetY,
        x: event.offsetX,
        y: event.offsetY
      };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", event => this.release(event));
    canvas.addEventListener("dblclick", () => this.zoomTo(this.everything()));
    canvas.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener(
      "wheel",
      event => {
        const place = this.cellAt(event.offsetX, event.offsetY);
        if (!place || !(event.shiftKey || event.ctrlKey)) return;
        event.preventDefault();
        this.zoomBy(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, ...place);
      },
      {passive: false}
    );
  }

  pointAt(event) {
    if (this.drag) {
      Object.assign(this.drag, {x: event.offsetX, y: event.offsetY});
      showTip(event, "");
      this.draw();
      return;
    }
    const place = this.cellAt(event.offsetX, event.offsetY);
    showTip(event, place ? this.hover(...place.map(Math.floor)) : "");
  }

  release(event) {
    const {startX, startY} = this.drag || {startX: event.offsetX, startY: event.offsetY};
    this.drag = null;
    const isDrag =
      Math.abs(event.offsetX - startX) > MIN_DRAG && Math.abs(event.offsetY - startY) > MIN_DRAG;
    const limit = (value, most) => Math.min(Math.max(value, 0), most - 0.01);
    const {width, height} = this.box;
    const place = this.cellAt(limit(event.offsetX, width), limit(event.offsetY, height));
    if (isDrag) {
      const [startRow, startColumn] = this.cellAt(limit(startX, width), limit(startY, height));
      this.zoomTo({
        top: Math.floor(Math.min(startRow, place[0])),
        bottom: Math.ceil(Math.max(startRow, place[0])),
        left: Math.floor(Math.min(startColumn, place[1])),
        right: Math.ceil(Math.max(startColumn, place[1]))
      });
    } else {
      this.draw();
      if (this.cellAt(event.offsetX, event.offsetY)) this.choose(...place.map(Math.floor));
    }
  }

  key(event) {
    const {rows, columns} = this.matrix;
    const [row, column] = this.cursor || [Math.floor(this.view.top), Math.floor(this.view.left)];
    const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
    const acts = {
      "+": () => this.zoomBy(0.5, row, column),
      "-": () => this.zoomBy(2, row, column),
      Escape: () => this.zoomTo(this.everything()),
      Enter: () => this.choose(row, column)
    };
    if (event.key in acts) acts[event.key]();
    else if (event.key in moves) {
      const [down, right] = this.cursor ? moves[event.key] : [0, 0];
      this.moveTo(
        Math.min(Math.max(row + down, 0), rows.length - 1),
        Math.min(Math.max(column + right, 0), columns - 1)
      );
    } else return;
    event.preventDefault();
  }

  // Move the cursor of the keyboard, and say what is there.
  moveTo(row, column) {
    const {top, bottom, left, right} = this.view;
    this.cursor = [row, column];
    const down = row < top ? row - top : Math.max(row + 1 - bottom, 0);
    const aside = column < left ? column - left : Math.max(column + 1 - right, 0);
    this.zoomTo({top: top + down, bottom: bottom + down, left: left + aside, right: right + aside});
    this.said.textContent = this.hover(row, column);
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.placeOf(row + 1, column + 1);
    showTip({clientX: box.x + x, clientY: box.y + y}, this.hover(row, column));
  }
}

// How many pixels of an image a stretch of cells needs: whole ones, or more where it begins or ends
// within a cell.
function zoomedPixels(start, end) {
  return Number.isInteger(start) && Number.isInteger(end) ? end - start : Infinity;
}

// The cells [first, end) that a pixel shows.
function cellsOf(pixel, pixels, start, end) {
  const first = start + (pixel / pixels) * (end - start);
  const next = start + ((pixel + 1) / pixels) * (end - start);
  return [
    Math.floor(first),
    Math.max(Math.floor(first) + 1, Math.min(Math.round(next), Math.ceil(end)))
  ];
}

function hexColor(text) {
  const digits =
    text.length === 4 ? [...text.slice(1)].map(digit => digit + digit).join("") : text.slice(1);
  return [0, 2, 4].map(start => parseInt(digits.slice(start, start + 2), 16));
}

// The end of a name that fits: modules differ at their ends.
function shortened(context, name, width) {
  if (context.measureText(name).width <= width) return name;
  let kept = name;
  while (kept && context.measureText(`…${kept}`).width > width) kept = kept.slice(1);
  return `…${kept}`;
}
