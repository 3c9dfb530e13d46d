"""The layout of a tensor's row: which numbers statistics are computed from, and where in the row
each stands.
"""

from __future__ import annotations

from otel_torch.statistics.frequencies import FREQUENCIES
from otel_torch.statistics.histogram import BINS
from otel_torch.statistics.sketch import SIZE

# every row begins with these, NaN where one was not asked for; of a complex tensor min, max and sum
# are those of the magnitudes and mean nothing
SUMS = ("min", "max", "sum", "squares", "magnitudes", "nonfinite", "zeros")
MIN, MAX, SUM, SQUARES, MAGNITUDES, NONFINITE, ZEROS = range(len(SUMS))
# ... and behind them, where asked for, what takes several numbers, and how many
WIDE = {"histogram": BINS, "sketch": SIZE, "row_sketch": 2 * FREQUENCIES}
PRIMITIVES = (*SUMS, *WIDE)
