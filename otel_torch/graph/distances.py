"""The distance of two values, estimated from their linear sketches: the one place that does.

Equal sketches are found first, by their bytes; of others only pairs of near numbers are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.graph.graph import Floats, Indices

# pairs whose distances are computed at a time, 128 MB of sketches, and values in which equal spaces
# are looked for: a bound on memory and on time only
PAIRS_AT_ONCE = 1 << 17
# how many standard deviations an estimated distance may be off, or the mean of many roundings
DEVIATIONS = 4.0


def sketch_norms(sketches: Floats) -> Floats:
    """Return the L2 norms of sketches, shape (values, width) -> (values,)."""
    squares: Floats = np.einsum("ij,ij->i", sketches, sketches)
    return np.sqrt(squares)


def distinct(table: NDArray[Any]) -> tuple[Indices, Indices]:
    """Return the first row with each content, and the content of each row, of equal bytes.

    >>> first, content = distinct(np.array([[2, 1], [1, 2], [2, 1]]))
    >>> first[content].tolist()
    [0, 1, 0]
    """
    rows = np.ascontiguousarray(table)
    packed = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    _, first, content = np.unique(packed, return_index=True, return_inverse=True)
    return first, content


def relative_distances(reference: Floats, port: Floats) -> Floats:
    """Return the L2 distances of pairs of sketches, relative to the larger norm of the two.

    NaN where a sketch is unknown.

    >>> relative_distances(np.array([[3.0, 4.0], [0, 0]]), np.array([[3.0, 4.5], [0, 0]])).round(3)
    array([0.092, 0.   ])
    """
    with np.errstate(all="ignore"):
        distance = sketch_norms(reference - port)
        norm = np.maximum(sketch_norms(reference), sketch_norms(port))
        return np.where(distance == 0, 0.0, distance / np.where(norm > 0, norm, 1.0))


def distances_but_for_a_factor(reference: Floats, port: Floats) -> Floats:
    """Return the relative L2 distances of pairs of sketches that are left once the second of each
    is multiplied by what brings it closest to the first. NaN where a sketch is unknown.

    >>> first, second = np.array([[3.0, 4.0], [3, 4]]), np.array([[6.0, 8.0], [8, 6]])
    >>> distances_but_for_a_factor(first, second).round(2)
    array([0.  , 0.28])
    """
    with np.errstate(all="ignore"):
        squares = np.einsum("ij,ij->i", port, port)
        factor = np.einsum("ij,ij->i", reference, port) / np.where(squares > 0, squares, 1.0)
        return relative_distances(reference, factor[:, None] * port)


def most_of_estimate(width: int) -> float:
    """Return by what factor an estimate from sketches of some width may exceed the distance.

    >>> round(most_of_estimate(32), 2)
    1.5
    """
    return 1 + DEVIATIONS / math.sqrt(2 * width)


def in_windows(starts: Indices, ends: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Yield (row, position) for all positions from `starts[row]` to `ends[row]`, in pieces that
    memory can hold.
    """
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
