"""The columns of a tensor's row. Imports no torch: settings and estimates of size need it too.

Every row begins with the scalar columns, in this order; a scalar that was not requested may be NaN.
The requested vector columns follow. A row for `std` and `histogram`, for instance:

    min max sum squares magnitudes nonfinite zeros | 64 counts
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from otel_torch.statistics.sketch_format import FREQUENCIES, PART_DIMS, SIZE

# of a complex tensor, `min`, `max` and `sum` are those of the magnitudes; no statistic uses them
SCALARS = ("min", "max", "sum", "squares", "magnitudes", "nonfinite", "zeros")
MIN, MAX, SUM, SQUARES, MAGNITUDES, NONFINITE, ZEROS = range(len(SCALARS))
BINS = 64  # of the histogram
HASH_PARTS, HASH_BITS = 3, 22  # a hash of 64 bits in parts that even a float32 holds exactly
# of so many rows along the last dimension of a tensor there is a sketch each
ROWS_MAX, ROW_NUMBERS = 4096, 9
# name and length. `rows` is the last column, because it takes its length for each of the rows
VECTORS = {
    "histogram": BINS,
    "sketch": SIZE,
    "part_sketches": PART_DIMS * SIZE,
    "row_sketch": 2 * FREQUENCIES,
    "hash": HASH_PARTS,
    "rows": ROW_NUMBERS,
}
COLUMNS = (*SCALARS, *VECTORS)
# what shows whether a tensor is finite, and how large its elements are
RANGE = ("min", "max", "nonfinite")


def join_parts(parts: Sequence[float]) -> int:
    """Return the integer, from 0 to 2**64, of which these are the `HASH_PARTS` parts.

    >>> join_parts([1.0, 1.0, 0.0])
    4194305
    """
    return sum(int(part) << HASH_BITS * index for index, part in enumerate(parts)) % 2**64


def nonfinite_kind(row: Sequence[float]) -> str | None:
    """Return the worst kind of element in a row's tensor; None if all are finite.

    `-Inf` alone is a kind of its own, because masks have it by construction.

    >>> nonfinite_kind([-math.inf, 2.0, 0.0, 0.0, 0.0, 1, 0]), nonfinite_kind([0.0] * 7)
    ('-Inf', None)
    """
    if not row[NONFINITE]:
        return None
    low, high = row[MIN], row[MAX]
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return "Inf" if high == math.inf else "-Inf"


def largest_magnitude(row: Sequence[float]) -> float:
    """Return the largest |x| of a row's tensor.

    >>> largest_magnitude([-3.0, 2.0, 0.0, 0.0, 0.0, 0, 0])
    3.0
    """
    return max(abs(row[MIN]), abs(row[MAX]))
