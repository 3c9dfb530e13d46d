// Curves over a common axis, drawn by uPlot: lines, bands, bars, and what is not finite.

const UPLOT_SCALES = {linear: 1, log: 3, symlog: 4};
const MANY_POINTS = 60; // of a line: more are not drawn one by one
const FARTHEST = 1e150; // uPlot adds powers of ten to what it draws

// Replace what the host shows by a plot, which has
// - x: numbers in ascending order, called xName; xText(x) -> text, at the pointer, and on the axis
//   unless there is a tickText
// - lines: [{name, values, color, faint, bands: [{low, high}]}], with arrays as long as x, NaN for
//   no value; isBars draws them as bars
// - scale: "auto" or a kind; bad: the x of NaN or Inf; marks: other x to look at; at: the x whose
//   values are read until the pointer moves, -1 for none; height, in pixels
class Curves {
  constructor(host) {
    this.host = host;
    redrawn(host, () => this.draw());
  }

  show(plot) {
    this.plot = plot;
    this.draw();
  }

  draw() {
    if (!this.plot || !this.host.clientWidth) return;
    this.drawn?.destroy();
    this.drawn = null;
    const extent = extentOf(
      this.plot.lines.flatMap(({values, bands = []}) =>
        [values, ...bands.flatMap(({low, high}) => [low, high])].flatMap(numbers =>
          Array.from(numbers)
        )
      )
    );
    if (extent.low > extent.high) {
      this.host.textContent = "Nothing to draw: no finite values.";
      return;
    }
    this.host.replaceChildren();
    const kind = scaleKind(this.plot.scale, extent);
    const {at} = this.plot;
    const {series, bands, columns} = seriesOf(this.plot);
    const options = {
      width: this.host.clientWidth,
      height: this.plot.height || 220,
      series,
      bands,
      scales: {x: {time: false}, y: yScale(kind, extent)},
      axes: this.axes(kind),
      cursor: {y: false, points: {size: 7}},
      hooks: {
        drawClear: [plot => this.drawBad(plot)],
        ready: [plot => at >= 0 && plot.setCursor({left: plot.valToPos(at, "x"), top: 0})]
      }
    };
    this.drawn = new uPlot(options, [this.plot.x, ...columns], this.host);
  }

  axes(kind) {
    const axis = {
      stroke: color("--ink"),
      grid: {stroke: color("--line"), width: 1},
      ticks: {stroke: color("--line"), width: 1}
    };
    const {x, xText, tickText = xText} = this.plot;
    const whole = x.every(Number.isInteger);
    return [
      {
        ...axis,
        ...(whole
          ? {
              incrs: [
                1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7,
                1e9
              ]
            }
          : {}),
        values: (_, ticks) => ticks.map(tick => tickText(tick))
      },
      {
        ...axis,
        size: 64,
        grid: {
          ...axis.grid,
          filter: (_, ticks) => ticks.map(tick => (isLabelled(tick, kind) ? tick : null))
        },
        values: (_, ticks) => ticks.map(tick => (tick === null ? "" : numberText(tick)))
      }
    ];
  }

  // Mark where values are NaN or Inf, and below where something else is to be looked at.
  drawBad(plot) {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.fillStyle = color("--introduced");
    ctx.globalAlpha = 0.5;
    const draw = (x, top, height) => {
      const place = plot.valToPos(x, "x", true);
      if (place >= bbox.left && place <= bbox.left + bbox.width)
        ctx.fillRect(place - 1, top, 2, height);
    };
    for (const x of this.plot.bad || []) draw(x, bbox.top, bbox.height);
    const height = bbox.height / 12;
    for (const x of this.plot.marks || []) draw(x, bbox.top + bbox.height - height, height);
    ctx.restore();
  }
}

// Lines at the powers of ten are enough for a logarithmic axis.
function isLabelled(tick, kind) {
  return kind === "linear" || tick === 0 || Math.abs(Math.log10(Math.abs(tick)) % 1) < 1e-9;
}

function yScale(kind, extent) {
  const scale = {distr: UPLOT_SCALES[kind]};
  return kind === "symlog" ? {...scale, asinh: linearUpTo(extent)} : scale;
}

// uPlot's series, bands and columns of numbers, with null for no value.
function seriesOf({lines, xName, xText, isBars}) {
  const series = [{label: xName, value: (_, x) => (x === null ? "" : xText(x))}];
  const bands = [];
  const columns = [];
  const add = (values, more) => {
    columns.push(
      Array.from(values, value =>
        Number.isFinite(value) ? Math.min(Math.max(value, -FARTHEST), FARTHEST) : null
      )
    );
    series.push({
      spanGaps: true,
      value: (_, value) => (value === null ? "–" : numberText(value)),
      ...more
    });
    return columns.length;
  };
  for (const {name, values, color: variable, faint, bands: around = []} of lines) {
    const stroke = color(variable);
    for (const {low, high} of around) {
      const edge = {
        label: name,
        class: "edge",
        stroke: stroke + "30",
        width: 1,
        points: {show: false}
      };
      bands.push({series: [add(high, edge), add(low, edge)], fill: stroke + "28"});
    }
    const many = values.filter(Number.isFinite).length > MANY_POINTS;
    add(values, {
      label: name,
      stroke: faint ? stroke + "60" : stroke,
      width: faint ? 1 : 1.75,
      points: {show: !many && !faint, size: 5, fill: stroke},
      ...(isBars
        ? {paths: uPlot.paths.bars({size: [0.8, 60]}), fill: stroke + "90", points: {show: false}}
        : {})
    });
  }
  return {series, bands, columns};
}
