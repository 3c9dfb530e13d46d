"""The columns of a tensor's row. Imports no torch: settings and estimates of size need it too.

Every row begins with the scalar columns, in this order; a scalar that was not requested may be NaN.
The requested vector columns follow. A row for `std` and `histogram`, for instance:

    min max sum squares magnitudes nonfinite zeros | 64 counts
"""

from __future__ import annotations

from otel_torch.statistics.sketch_format import FREQUENCIES, SIZE

# of a complex tensor, `min`, `max` and `sum` are those of the magnitudes; no statistic uses them
SCALARS = ("min", "max", "sum", "squares", "magnitudes", "nonfinite", "zeros")
MIN, MAX, SUM, SQUARES, MAGNITUDES, NONFINITE, ZEROS = range(len(SCALARS))
BINS = 64  # of the histogram
HASH_PARTS, HASH_BITS = 3, 22  # a hash of 64 bits in parts that even a float32 holds exactly
# name and length
VECTORS = {"histogram": BINS, "sketch": SIZE, "row_sketch": 2 * FREQUENCIES, "hash": HASH_PARTS}
COLUMNS = (*SCALARS, *VECTORS)
