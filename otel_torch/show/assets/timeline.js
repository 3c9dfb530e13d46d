// The timeline: spans as bars over time, each below its parent, events as triangles.

const SPAN_HEIGHT = 24;
const TIME_AXIS = 22;
const SPAN_COLORS = {step: "--dtype", forward: "--healed", region: "--layout", other: "--right"};

class Timeline {
  // recorded: {spans: [{from, to, line, kind, name, failed, text}], events: [{at, line, text}]},
  // in seconds.
  constructor(host, {spans, events}) {
    Object.assign(this, {host, spans, events});
    this.lines = 1 + spans.reduce((most, span) => Math.max(most, span.line), 0);
    this.end = spans.reduce((last, span) => Math.max(last, span.to), 1e-9);
    this.view = [0, this.end];
    this.canvas = element("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": "timeline: arrows move, + and - zoom"
    });
    host.replaceChildren(this.canvas);
    this.listen();
    redrawn(host, () => this.draw());
  }

  xOf(time) {
    return ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  timeAt(x) {
    return this.view[0] + (x / this.width) * (this.view[1] - this.view[0]);
  }

  draw() {
    this.width = this.host.clientWidth;
    const context = sizedContext(this.canvas, this.width, this.lines * SPAN_HEIGHT + TIME_AXIS);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const span of this.spans) this.drawSpan(context, span);
    context.fillStyle = color("--ink");
    for (const {at, line} of this.events) {
      const x = this.xOf(at);
      const y = line * SPAN_HEIGHT + 3;
      context.beginPath();
      context.moveTo(x - 4, y);
      context.lineTo(x + 4, y);
      context.lineTo(x, y + 7);
      context.fill();
    }
    this.drawAxis(context);
  }

  drawSpan(context, {from, to, line, kind, name, failed}) {
    const x = Math.max(this.xOf(from), -2);
    const end = Math.min(this.xOf(to), this.width + 2);
    if (end < 0 || x > this.width) return;
    const y = line * SPAN_HEIGHT + 1;
    const width = Math.max(end - x - 0.5, 1);
    context.fillStyle = color(SPAN_COLORS[kind]);
    context.fillRect(x, y, width, SPAN_HEIGHT - 3);
    if (failed) {
      context.strokeStyle = color("--introduced");
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, Math.max(width - 2, 1), SPAN_HEIGHT - 5);
    }
    if (width < 24 || context.measureText(name).width > width - 8) return;
    context.fillStyle = color("--back");
    context.fillText(name, Math.max(x, 0) + 4, y + SPAN_HEIGHT / 2 - 1);
  }

  drawAxis(context) {
    const span = this.view[1] - this.view[0];
    const tens = 10 ** Math.floor(Math.log10(span / 6));
    const every = [1, 2, 5, 10].map(times => times * tens).find(each => span / each <= 8);
    const y = this.lines * SPAN_HEIGHT + TIME_AXIS / 2;
    context.fillStyle = color("--ink");
    context.textAlign = "center";
    for (let tick = Math.ceil(this.view[0] / every); tick * every < this.view[1]; tick++) {
      const x = this.xOf(tick * every);
      const text = `${Number((tick * every).toPrecision(6))} s`;
      const half = context.measureText(text).width / 2;
      if (x >= half && x + half <= this.width) context.fillText(text, x, y);
    }
    context.textAlign = "left";
  }

  zoomBy(factor, time) {
    const [start, end] = this.view;
    this.move(time - (time - start) * factor, time + (end - time) * factor);
  }

  move(start, end) {
    const span = Math.min(Math.max(end - start, 1e-9), this.end);
    const first = Math.min(Math.max(start, 0), this.end - span);
    this.view = [first, first + span];
    this.draw();
  }

  // The text of what is at a pixel: an event, else the last span drawn there.
  textAt(x, y) {
    const line = Math.floor(y / SPAN_HEIGHT);
    const event = this.events.find(
      each => each.line === line && Math.abs(this.xOf(each.at) - x) < 5
    );
    if (event) return event.text;
    return this.spans.findLast(
      span =>
        span.line === line &&
        this.xOf(span.from) <= x &&
        Math.max(this.xOf(span.to), this.xOf(span.from) + 2) >= x
    )?.text;
  }

  listen() {
    const {canvas} = this;
    let held = null;
    canvas.addEventListener("pointerdown", event => {
      held = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => (held = null));
    canvas.addEventListener("pointermove", event => {
      if (held === null) return showTip(event, this.textAt(event.offsetX, event.offsetY));
      const moved = this.timeAt(held) - this.timeAt(event.offsetX);
      held = event.offsetX;
      this.move(this.view[0] + moved, this.view[1] + moved);
    });
    canvas.addEventListener("pointerleave", event => showTip(event, ""));
    canvas.addEventListener("dblclick", () => this.move(0, this.end));
    canvas.addEventListener(
      "wheel",
      event => {
        if (!event.shiftKey && !event.ctrlKey) return;
        event.preventDefault();
        this.zoomBy(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
      },
      {passive: false}
    );
    canvas.addEventListener("keydown", event => this.key(event));
  }

  key(event) {
    const [start, end] = this.view;
    const aside = (end - start) / 8;
    const middle = (start + end) / 2;
    const acts = {
      ArrowLeft: () => this.move(start - aside, end - aside),
      ArrowRight: () => this.move(start + aside, end + aside),
      "+": () => this.zoomBy(0.6, middle),
      "-": () => this.zoomBy(1.6, middle),
      Escape: () => this.move(0, this.end)
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }
}

const timelines = Object.entries(data.timelines).map(
  ([id, recorded]) => new Timeline(byId(id), recorded)
);
