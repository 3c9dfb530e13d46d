// From values to positions and colors: linear, logarithmic, or symmetric logarithmic, which is
// linear around 0 and has a place for negative values.

const MANY_TIMES = 30; // a range of positive values that is wider is drawn logarithmically

const VIRIDIS = [
  [68, 1, 84],
  [72, 40, 120],
  [62, 74, 137],
  [49, 104, 142],
  [38, 130, 142],
  [31, 158, 137],
  [53, 183, 121],
  [109, 205, 89],
  [180, 222, 44],
  [253, 231, 37]
];
const BLUE_ORANGE = [
  [19, 75, 118],
  [61, 135, 188],
  [149, 195, 220],
  [224, 224, 224],
  [253, 190, 120],
  [230, 130, 40],
  [150, 75, 10]
];

// The smallest, the largest, and the smallest magnitude above 0 of the finite values.
function extentOf(values) {
  let low = Infinity;
  let high = -Infinity;
  let least = Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
    const magnitude = Math.abs(value);
    if (magnitude > 0 && magnitude < least) least = magnitude;
  }
  return {low, high, least};
}

// The kind of a scale that suits the values; `wanted` is "auto" or a kind.
function scaleKind(wanted, {low, high, least}) {
  if (wanted === "log" && low <= 0) return "symlog";
  if (wanted !== "auto") return wanted;
  if (low > 0) return high > MANY_TIMES * low ? "log" : "linear";
  return Math.max(-low, high) > 1000 * least ? "symlog" : "linear";
}

// Where a symmetric logarithmic scale ceases to be linear.
function linearUpTo({low, high, least}) {
  return Math.max(least, Math.max(-low, high) / 1e6) || 1;
}

// Return a function from a value to 0..1. Logarithms come first: a range can exceed a double.
function positionOf(extent, wanted) {
  const kind = scaleKind(wanted, extent);
  const constant = linearUpTo(extent);
  const bend = {
    linear: value => value,
    log: Math.log,
    symlog: value => Math.sign(value) * Math.log1p(Math.abs(value) / constant)
  }[kind];
  const start = bend(extent.low) / 2;
  const length = bend(extent.high) / 2 - start;
  return value => (length > 0 ? Math.min(Math.max((bend(value) / 2 - start) / length, 0), 1) : 0.5);
}

// Return a function from 0..1 to [red, green, blue].
function colorRamp(stops) {
  return position => {
    const place = position * (stops.length - 1);
    const index = Math.min(Math.floor(place), stops.length - 2);
    const share = place - index;
    return stops[index].map((part, channel) =>
      Math.round(part + share * (stops[index + 1][channel] - part))
    );
  };
}

// The colors of values: from blue to orange around 0 (or around 1, if they are ratios).
function colorScale(extent, wanted, isRatio = false) {
  let {low, high} = extent;
  const least = extent.least;
  if (isRatio) {
    const far = Math.min(Math.max(high, 1 / least, 2), 1024);
    return {
      low: 1 / far,
      high: far,
      ramp: colorRamp(BLUE_ORANGE),
      position: positionOf({low: 1 / far, high: far, least}, "log")
    };
  }
  if (low < 0) {
    high = Math.max(-low, high);
    low = -high;
  }
  return {
    low,
    high,
    ramp: colorRamp(low < 0 ? BLUE_ORANGE : VIRIDIS),
    position: positionOf({low, high, least}, wanted)
  };
}
