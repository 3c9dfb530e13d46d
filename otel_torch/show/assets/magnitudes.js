// Histograms of magnitudes, where they were recorded: of modules, of steps, and of what is chosen.

class Magnitudes {
  // histograms: {bins, rows, steps}; of each recording, rows: shares by tensor and bin; steps: by
  // kind, bin and step.
  constructor(tensors, histograms) {
    Object.assign(this, {tensors, histograms});
    const {bins} = histograms;
    const text = (name, bin, share) => {
      const percent = `${(100 * share).toPrecision(3)} % of the elements`;
      return `${name}\nmagnitude ${bins[bin]}\n${Number.isNaN(share) ? "nothing" : percent}`;
    };
    this.modules = new HeatMap(byId("magnitudes-modules"), {
      label: "modules by magnitudes",
      hover: (row, bin) =>
        text(tensors.name(this.order[row]), bin, this.sharesOf(this.order[row])[bin])
    });
    this.steps = new HeatMap(byId("magnitudes-steps"), {
      label: "magnitudes by steps",
      hover: (row, step) => {
        const bin = bins.length - 1 - row; // large ones are on top
        const share = this.stepShares[bin * tensors.columns.length + step];
        return text(`step ${tensors.columns[step]}`, bin, share);
      }
    });
    this.curve = new Curves(byId("module-magnitudes"));
  }

  sharesOf(index) {
    const count = this.histograms.bins.length;
    return this.rows.subarray(index * count, (index + 1) * count);
  }

  async show(order, kind, recording) {
    const {tensors, histograms} = this;
    const bins = histograms.bins;
    this.rows = await unpack(histograms.rows[recording]);
    const drawn = order.filter(index => this.sharesOf(index).some(share => share > 0));
    this.order = drawn;
    this.modules.show(
      {
        values: this.rows,
        columns: bins.length,
        rows: drawn,
        rule: "max",
        rowName: row => tensors.name(drawn[row]),
        columnName: bin => bins[bin]
      },
      colorScale({low: 0, high: 1, least: 1e-3}, "symlog")
    );
    this.stepShares = histograms.steps[recording][kind]
      ? await unpack(histograms.steps[recording][kind])
      : new Float64Array(0);
    const largeOnTop = this.stepShares.length ? bins.map((_, bin) => bins.length - 1 - bin) : [];
    this.steps.show(
      {
        values: this.stepShares,
        columns: tensors.columns.length,
        rows: largeOnTop,
        rule: "max",
        rowName: row => bins[largeOnTop[row]],
        columnName: step => tensors.columns[step]
      },
      colorScale({low: 0, high: 1, least: 1e-3}, "symlog")
    );
    this.choose(this.chosen || drawn);
  }

  // The mean shares of the chosen tensors.
  choose(indices) {
    this.chosen = indices;
    if (!this.rows) return;
    const bins = this.histograms.bins;
    const recorded = indices
      .map(index => this.sharesOf(index))
      .filter(shares => shares.some(share => share > 0));
    const shares = bins.map(
      (_, bin) => recorded.reduce((sum, each) => sum + (each[bin] || 0), 0) / recorded.length
    );
    this.curve.show({
      x: bins.map((_, bin) => bin),
      xText: bin => bins[bin] ?? "",
      xName: "magnitude",
      isBars: true,
      scale: "linear",
      height: 150,
      lines: [{name: "share of the elements", values: shares, color: "--dtype"}]
    });
  }
}
