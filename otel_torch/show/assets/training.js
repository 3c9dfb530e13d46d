// The health of a training: curves over the steps, and maps of modules by steps.

const CURVE_COLORS = [
  "--dtype",
  "--inherited",
  "--healed",
  "--layout",
  "--heat4",
  "--right",
  "--heat2",
  "--faint"
];

// An array of numbers from JSON, where null is no value.
function numbersOf(values) {
  return values.map(value => value ?? NaN);
}

function drawTrainingCurves(id, {x, steps, scale, lines, bad, marks}) {
  const nameOf = new Map(x.map((at, index) => [at, steps[index]]));
  const curves = new Curves(byId(id));
  curves.show({
    x,
    xName: "step",
    scale,
    bad,
    marks,
    xText: at => nameOf.get(at) ?? String(at),
    tickText: String,
    lines: lines.map(({name, middle, least, most}, index) => ({
      name,
      color: CURVE_COLORS[index],
      values: numbersOf(middle),
      bands: [{low: numbersOf(least), high: numbersOf(most)}]
    }))
  });
  return curves;
}

async function drawTrainingMap(id, {title, rows, columns, cells}) {
  const values = await unpack(cells);
  const valueText = (row, column) => numberText(values[row * columns.length + column]);
  const all = rows.map((_, row) => row);
  const map = new HeatMap(byId(id), {
    label: title,
    hover: (row, column) =>
      [rows[row], `step ${columns[column]}`, `${title} ${valueText(row, column)}`].join("\n")
  });
  map.show(
    {
      values,
      columns: columns.length,
      rows: all,
      rule: "magnitude",
      rowName: row => rows[row],
      columnName: column => columns[column]
    },
    colorScale(extentOf(values), "auto")
  );
  return map;
}

const trainingCurves = new Map(
  Object.entries(data.training.curves).map(([id, plot]) => [id, drawTrainingCurves(id, plot)])
);
const trainingMaps = new Map(
  Object.entries(data.training.maps).map(([id, map]) => [id, drawTrainingMap(id, map)])
);
