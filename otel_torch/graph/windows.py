"""Pairs of near numbers in sorted columns, in pieces that memory can hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from otel_torch.graph.graph import Indices

# pairs whose distances are computed at a time, 128 MB of sketches, and values in which equal spaces
# are looked for: a bound on memory and on time only
PAIRS_AT_ONCE = 1 << 17


def in_windows(starts: Indices, ends: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Yield (row, position) for all positions from `starts[row]` to `ends[row]`, in pieces."""
    lengths = np.maximum(ends - starts, 0)
    total = np.cumsum(lengths)
    row = 0
    while row < len(starts):
        done = total[row - 1] if row else 0
        stop = max(int(np.searchsorted(total, done + PAIRS_AT_ONCE, side="right")), row + 1)
        rows = np.repeat(np.arange(row, stop), lengths[row:stop])
        offsets = np.arange(len(rows)) - np.repeat(
            total[row:stop] - lengths[row:stop] - done, lengths[row:stop]
        )
        yield rows, starts[rows] + offsets
        row = stop
