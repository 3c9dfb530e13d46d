"""Recognize what the ranks of a mesh hold of a tensor that is not cut once over all ranks.

With tensor and data parallelism together, each part of a tensor is on several ranks, or the parts
are cut along two dimensions. The sketches as parts, of as many parts as there are ranks, are of no
use then. What does not depend on the order of the elements decides: of each part one copy counts,
and together they have the norm of the whole. So it does for parts of another order: with context
parallelism, a rank often has a chunk from the beginning and one from the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from otel_torch.parity.layouts.rank_layout import (
    RankLayout,
    cuts,
    group_alike,
    limit_of,
    relative_distance,
)
from otel_torch.parity.layouts.rank_rows import RankRow
from otel_torch.statistics.rank_cuts import mesh_sizes

Rows = Sequence[RankRow]
# how far sums may be apart, in limits, of the largest sum that a tensor of this norm can have
_SUM = 0.01
_ROUNDING = 0.03  # how far norms, sums and extremes of the same numbers are apart, in limits


def is_on_mesh(reference: RankRow, rows: Rows, count: int) -> bool:
    """Return whether equal parts of a tensor are not cut once over all ranks.

    Args:
        count: The number of all ranks.
    """
    sizes = [row.numel for row in rows]
    if not min(sizes) > 0 or not max(sizes) < reference.numel:
        return False
    if any("shard" in row.row or row.sketch is None for row in rows):
        return False
    held = sum(sizes)
    if held % reference.numel:
        return False
    if len(set(sizes)) > 1:  # the shards of flat parameters, which have copies only on a mesh
        return held > reference.numel or not str(reference.row.get("tensor")).startswith("param")
    return held > reference.numel or len(rows) < count or not cuts(reference, rows)


def is_reordered(reference: RankRow, rows: Rows) -> bool:
    """Return whether parts make up the whole in another order than that of the ranks.

    The same numbers have the same norm, sum, and extremes, except for rounding.
    """
    if sum(row.numel for row in rows) != reference.numel:
        return False
    tolerance = _ROUNDING * limit_of(reference)
    extremes = {"min": min, "max": max}
    magnitude = max(abs(reference.number(name)) for name in extremes)
    distances = [
        abs(pick(row.number(name) for row in rows) - reference.number(name))
        for name, pick in extremes.items()
    ]
    if not max(distances) <= tolerance * magnitude:
        return False
    return max(_error(reference, rows, 1.0), _sum_error(reference, rows, 1.0)) <= tolerance


def recognize_on_mesh(reference: RankRow, rows: Rows, count: int) -> tuple[Rows, RankLayout]:
    """Return the rows that make up the whole, and their layout."""
    scales = [1.0]
    if reference.row.get("phase") == "backward":
        # the gradient of a mean over a part of the batch is larger than that over all
        scales += [1 / size for size in mesh_sizes(count)]
    limit = limit_of(reference)
    copies = sum(row.numel for row in rows) // reference.numel
    parts = _distinct_parts(rows, copies, limit)
    if parts is not None:
        # an optimizer would use that of a part of a parameter as it is
        possible = scales[:1] if reference.is_parameter_gradient else scales
        scale = min(possible, key=lambda scale: _error(reference, parts, scale))
        return parts, _layout("parts", _error(reference, parts, scale), limit, scale)
    scale = min(scales, key=lambda scale: _sum_error(reference, rows, scale))
    error = _sum_error(reference, rows, scale) / _SUM
    if error <= limit:
        return rows, _layout("sum", error, limit, scale)
    return _different_copies(reference, rows, copies, limit)


def _layout(kind: Literal["parts", "sum"], error: float, limit: float, scale: float) -> RankLayout:
    return RankLayout(kind, error, limit, scale, has_sketches=False)


def _distinct_parts(rows: Rows, copies: int, limit: float) -> Rows | None:
    """Return one row of each part; None if the copies of a part differ."""
    groups = group_alike(rows, limit, lambda first, row: _are_copies(first, row, limit))
    if any(len(group) % copies for group in groups):
        return None
    return [row for group in groups for row in group[: len(group) // copies]]


def _are_copies(first: RankRow, second: RankRow, limit: float) -> bool:
    if first.numel != second.numel or first.sketch is None or second.sketch is None:
        return False
    return relative_distance(first.sketch, second.sketch, max(first.l2, second.l2)) <= limit


def _different_copies(
    reference: RankRow, rows: Rows, copies: int, limit: float
) -> tuple[Rows, RankLayout]:
    """Return the copies of all parts that are farthest from the whole, and which one is wrong.

    The copies of a part are next to each other, or all parts come one after the other.
    """
    size = len(rows) // copies
    meshes = (
        [rows[first::copies] for first in range(copies)],
        [rows[first * size :][:size] for first in range(copies)],
    )
    errors = [[_error(reference, parts, 1.0) for parts in mesh] for mesh in meshes]
    mesh, mesh_errors = min(zip(meshes, errors, strict=True), key=lambda item: min(item[1]))
    right, worst = mesh[int(np.argmin(mesh_errors))], mesh[int(np.argmax(mesh_errors))]
    wrong = [
        index
        for index, (copy, other) in enumerate(zip(worst, right, strict=True))
        if not _are_copies(copy, other, limit)
    ]
    is_known = min(mesh_errors) <= limit and len(wrong) == 1
    layout = _layout("parts", max(mesh_errors), limit, 1.0)
    return worst, replace(layout, wrong=wrong[0] if is_known else None)


def _error(reference: RankRow, parts: Rows, scale: float) -> float:
    """Return how far the norm of the parts is from that of the whole, NaN if it is not known."""
    norm, whole = scale * math.hypot(*(part.number("l2") for part in parts)), reference.number("l2")
    return abs(norm - whole) / max(norm, whole) if max(norm, whole) else 0.0


def _sum_error(reference: RankRow, rows: Rows, scale: float) -> float:
    bound = reference.number("l2") * math.sqrt(reference.numel)
    total = scale * sum(row.number("sum") for row in rows)
    return abs(total - reference.number("sum")) / bound if bound else math.inf
