"""The numeric rules of a comparison, on arrays with one entry per pair of tensors.

A full analysis compares one pair at a time and passes arrays of length 1; `cached_comparison`
passes all pairs of a forward at once. Both get the same bits. Unknown numbers are NaN, in and out.

>>> import numpy as np
>>> reference, port = np.array([[3.0, 4.0]]), np.array([[3.0, 4.5]])
>>> error = sketch_errors(reference, port, norms=np.array([5.0]))
>>> limit = limits_under_noise(base=np.array([0.012]), floor=np.array([0.08]), factor=1.5)
>>> float(error[0]), float(limit[0]), bool(error[0] <= limit[0])
(0.1, 0.12, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.tolerance import LOWERED, SHOWN, SINGLE

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

# order-independent statistics, in the order of the arrays
ORDER_BLIND = ("abs_mean", "mean", "std", "rms", "sum", "l2")
_ABS_MEAN, _MEAN, _RMS, _SUM, _L2 = (
    ORDER_BLIND.index(name) for name in ("abs_mean", "mean", "rms", "sum", "l2")
)

# how far error may grow downstream without recorded noise, as a multiple of the largest legal
# error upstream
GROWTH = 1.5


def _norms(vectors: Floats) -> Floats:
    """Return the L2 norms of the rows of an array."""
    squares: Floats = np.matmul(vectors[:, None, :], vectors[:, :, None])[:, 0, 0]
    return np.sqrt(squares)


@np.errstate(all="ignore")
def sketch_errors(reference: Floats, port: Floats, norms: Floats) -> Floats:
    """Return the estimated relative L2 distances of pairs of tensors.

    Args:
        reference: Sketches, shape (pairs, 64).
        port: Sketches, shape (pairs, 64).
        norms: L2 norms of the reference's tensors, shape (pairs,). Where one is NaN, the norm of
            the sketch replaces it.

    Returns:
        Shape (pairs,): inf where only the reference is zero, NaN where a distance overflows.
    """
    distance = _norms(reference - port)
    unknown = np.isnan(norms)
    if unknown.any():
        norms = np.where(unknown, _norms(reference), norms)
    error = np.where(norms > 0, distance / norms, np.inf)
    error = np.where(distance == 0, 0.0, error)
    return np.where(np.isfinite(distance), error, np.nan)


@np.errstate(all="ignore")
def statistics_errors(reference: Floats, port: Floats, numel: Floats) -> Floats:
    """Return the largest relative difference of the order-blind statistics of each pair.

    Differences are relative to the magnitude of the tensors (the larger abs_mean or rms), so that a
    mean or sum near zero does not count as far off.

    Args:
        reference: Shape (len(ORDER_BLIND), pairs); further rows are ignored.
        port: Likewise.
        numel: Elements of each tensor, shape (pairs,), -1 where unknown.

    Returns:
        Shape (pairs,): NaN where the two have no finite statistic in common.

    >>> column = np.array([[1.0], [0.0], [1.0], [1.0], [0.0], [2.0]])
    >>> off = column + np.array([[0.1], [0], [0], [0], [0], [0]])
    >>> statistics_errors(column, off, np.array([4.0])).round(4)
    array([0.0909])

    FastVideo's own trace has no sizes: a sum of rounding errors is as large as the tensor is.

    >>> column = np.array([[0.25], [0.1], [np.nan], [np.nan], [5000.0], [np.nan]])
    >>> off = column + np.array([[0], [0], [0], [0], [1e-3], [0]])
    >>> statistics_errors(column, off, np.array([-1.0])).round(10)
    array([8.e-08])
    """
    count = len(ORDER_BLIND)
    reference, port = reference[:count], port[:count]
    units = np.ones(reference.shape)
    units[_SUM] = _sizes(reference, numel)
    units[_L2] = np.sqrt(units[_SUM])
    magnitudes = np.abs(np.concatenate([side[[_ABS_MEAN, _RMS]] for side in (reference, port)]))
    scale = np.where(np.isfinite(magnitudes), magnitudes, 0.0).max(axis=0)
    distance = np.abs(reference - port) / units
    size = np.where(scale > 0, scale, np.maximum(np.abs(reference), np.abs(port)) / units)
    errors = np.where(size > 0, distance / size, np.inf)
    errors = np.where(distance == 0, 0.0, errors)
    is_known = np.isfinite(reference) & np.isfinite(port)
    largest = np.where(is_known, errors, -1.0).max(axis=0)
    return np.where(largest < 0, np.nan, largest)


@np.errstate(all="ignore")
def _sizes(statistics: Floats, numel: Floats) -> Floats:
    """Return the elements of each tensor, 1 at least; where unknown, what its sum implies."""
    ratios = np.abs(statistics[_SUM] / statistics[[_ABS_MEAN, _MEAN]])
    implied = np.where(np.isfinite(ratios), ratios, 1.0).max(axis=0)
    return np.maximum(np.where(numel < 0, implied, numel), 1.0)


@np.errstate(all="ignore")
def limits_under_noise(base: Floats, floor: Floats, factor: float) -> Floats:
    """Return the limits of tensors whose error under noise is known.

    Noise of at least a tenth of the dtype's constant shows what that dtype does; the constant is
    then only a lower bound, half as large.

    Args:
        base: Limits without noise.
        floor: Errors under noise, NaN where not recorded.
        factor: How far beyond its floor an error is still chance.

    >>> base, floor = np.full(3, 0.012), np.array([0.03, np.nan, 1e-7])
    >>> limits_under_noise(base, floor, 1.5)
    array([0.045, 0.012, 0.012])
    """
    is_lowered = (base > SINGLE) & (floor >= SHOWN * base)
    limit = np.maximum(np.where(is_lowered, base * LOWERED, base), factor * floor)
    return np.where(np.isnan(floor), base, limit)


def largest_errors(error: Floats, values: Indices, count: int) -> Floats:
    """Return the largest error of each of `count` values, NaN where none is known.

    Args:
        error: One entry per tensor.
        values: The value that each tensor holds.
    """
    largest = np.full(count, np.nan)
    np.fmax.at(largest, values, error)
    return largest


@np.errstate(all="ignore")
def sum_errors(whole: Floats, parts: Floats) -> Floats:
    """Return the relative L2 distances between tensors and sums of others.

    Args:
        whole: Sketches, shape (pairs, 64).
        parts: Sketches, shape (parts, pairs, 64).
    """
    size = _norms(whole)
    return np.where(size > 0, _norms(whole - parts.sum(axis=0)) / size, np.inf)


@np.errstate(all="ignore")
def fused_errors(whole: Floats, parts: Floats, whole_numel: Floats, part_numel: Floats) -> Floats:
    """Return how far the parts of fused tensors are from adding up to the whole.

    Only sums that do not depend on the layout of the parts are compared: of squares, of absolute
    values and of values.

    Args:
        whole: Statistics, shape (len(ORDER_BLIND), pairs), 0 where absent; further rows are
            ignored.
        parts: Likewise, shape (len(ORDER_BLIND), parts, pairs).
        whole_numel: Elements, shape (pairs,).
        part_numel: Elements, shape (parts, pairs).

    Returns:
        Shape (pairs,): NaN where the numbers of elements do not add up.
    """
    total, scale = whole[_L2] ** 2, whole[_ABS_MEAN] * whole_numel
    squares = (parts[_L2] ** 2).sum(axis=0)
    error = np.where(total != 0, np.abs(squares - total) / total, 0.0)
    for part_sum, whole_sum in (
        ((parts[_ABS_MEAN] * part_numel).sum(axis=0), scale),
        (parts[_SUM].sum(axis=0), whole[_SUM]),
    ):
        difference = np.abs(part_sum - whole_sum) / scale
        error = np.where(scale != 0, np.maximum(error, difference), error)
    return np.where(part_numel.sum(axis=0) == whole_numel, error, np.nan)


def grow_limits(
    error: Floats,
    limit: Floats,
    right: Flags,
    can_grow: Flags,
    is_different: Callable[[int], bool] = lambda index: True,
) -> Iterator[tuple[int, float]]:
    """Yield the pairs whose limit grows to hold their error, with their new limits.

    Without recorded noise, existing error may grow downstream. The largest legal error so far,
    times `GROWTH`, adds to a tensor's limit.

    Args:
        error: In the reference's order, NaN where unknown.
        limit: Limits so far; integers, whose limit is 0, never grow.
        right: Pairs within their limits.
        can_grow: Pairs that differ in their numbers and have no recorded noise.
        is_different: Checked last, because it is expensive.

    >>> error, limit = np.array([0.01, 0.024, 0.1]), np.array([0.012, 0.012, 0.012])
    >>> right = error <= limit
    >>> [(index, round(grown, 4)) for index, grown in grow_limits(error, limit, right, ~right)]
    [(1, 0.027)]
    """
    counts = np.isfinite(error) & (limit != 0)
    candidates = np.flatnonzero(~right & can_grow & counts)
    if not len(candidates):
        return
    largest = np.maximum.accumulate(np.where(right & counts, error, 0.0))
    largest_grown = 0.0
    for index in candidates.tolist():
        grown = float(limit[index] + GROWTH * max(largest[index], largest_grown))
        if error[index] <= grown and is_different(index):
            largest_grown = max(largest_grown, float(error[index]))
            yield index, grown


@np.errstate(all="ignore")
def right_at_the_end(right: Flags, error: Floats, end_limit: Floats, has_floor: Flags) -> Flags:
    """Return which final outputs are right.

    Where noise was recorded, a final output must stay within the tighter `end_limit`:
    rounding errors from upstream average out there.
    """
    return right & ~(has_floor & (error > end_limit))
