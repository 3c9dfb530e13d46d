"""Recognize what the ranks hold of a tensor: all of it, a part, or a term of a sum.

Nothing names a layout. The reference has the whole tensor, and sketches add up, so each layout is
tried and the one that explains the reference best is taken:

    whole        each rank's sketch is the reference's
    sum, mean    the ranks' sketches add up to it
    parts        their sketches as parts, cut along one dimension, add up to it

A tensor that is wrong fits none of them; then its shape decides. On a mesh of ranks, several have
the same part, and the sketches do not say which one: `mesh_layout` compares statistics.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from otel_torch.parity.call_graph import Sketch
from otel_torch.parity.layouts.rank_rows import RankRow
from otel_torch.statistics.sketch_format import SIZE

Kind = Literal["whole", "sum", "parts"]
# relative errors up to which a layout explains the reference; those of a wrong tensor are larger
_EXPLAINED = {"torch.float32": 1e-3, "torch.float64": 1e-3}
_EXPLAINED_COARSE = 0.03
_EXPLAINED_EXACT = 1e-4  # a loss, a norm, or integers
# a sum has to explain a wrong tensor that much better than the layout of its shape
_SHAPE_DECIDES = 0.7
# an outlier is at least this many times as far off as any other copy, and this part of the limit
_APART, _SLIGHTLY_WRONG = 10.0, 0.02
# numbers of equal sketches are farther apart by rounding than the sketches at most by this factor
_ROUNDED = 1.01
# cosine of the error with the term of a rank that made it; with those of the others, at most this
# part of it, and what chance exceeds in 2 of 100 sketches
_MADE_IT, _INNOCENT, _CHANCE = 0.4, 0.6, 2.3 / SIZE**0.5


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How the ranks hold a tensor.

    Attributes:
        kind: Whether each rank has the whole, a term of a sum, or a part.
        error: Relative L2 distance of the whole from the reference; NaN without sketches.
        limit: The error up to which the two are the same.
        scale: What the terms or parts are multiplied by: 1 / ranks for a mean.
        dim: The dimension that is cut, None if it is not known.
        wrong: The index of the row that is wrong, if a single one is.
        agree: Whether all ranks hold the same numbers.
        has_sketches: Whether the sketches of the ranks add up to that of the whole.
    """

    kind: Kind
    error: float
    limit: float
    scale: float = 1.0
    dim: int | None = None
    wrong: int | None = None
    agree: bool = False
    has_sketches: bool = True

    @property
    def is_wrong(self) -> bool:
        """Whether the ranks together do not hold the reference."""
        return self.error > self.limit


def recognize(reference: RankRow, rows: Sequence[RankRow], can_add_up: bool = True) -> RankLayout:
    """Return the layout that explains the reference best.

    Args:
        rows: The rows of all ranks that have the tensor, at least one.
        can_add_up: Whether the ranks may have terms of a sum.
    """
    limit = limit_of(reference)
    whole = reference.sketch
    sketches = [row.sketch for row in rows if row.sketch is not None]
    if whole is None or len(sketches) < len(rows):
        return RankLayout(_kind_by_shape(reference, rows), math.nan, limit)
    scale = max(reference.l2, float(np.linalg.norm(whole)))
    # the terms of a sum differ: equal ones are a value that is too small
    agree = all(relative_distance(sketch, sketches[0], scale) <= limit for sketch in sketches)
    candidates = [
        RankLayout(
            kind,
            relative_distance(factor * add_up(terms), whole, scale),
            limit,
            factor,
            dim,
            agree=agree,
        )
        for kind, factor, dim, terms in _sums(reference, rows, sketches)
        if kind == "parts" or (can_add_up and (not agree or factor != 1))
    ]
    if _kind_by_shape(reference, rows) == "whole":
        errors = [relative_distance(sketch, whole, scale) for sketch in sketches]
        # what all ranks have is whole, even if it is zero and so a sum as well
        wrong = _outlier(errors, limit)
        candidates.insert(0, RankLayout("whole", max(errors), limit, wrong=wrong, agree=agree))
    if not candidates:
        return RankLayout("parts", math.nan, limit, agree=agree, has_sketches=False)
    for layout in candidates:
        if not layout.is_wrong:
            return layout
    if reference.row.get("phase") != "train":
        candidates = [layout for layout in candidates if layout.scale == 1]
    best = min(candidates, key=_wrongness)
    if best.kind == "whole":
        return best
    return replace(best, wrong=_culprit(whole, terms_of(best, rows)))


def _outlier(errors: Sequence[float], limit: float) -> int | None:
    """Return the copy of a whole that is wrong, if a single one is.

    One that is within the limit, but much farther off than all others, is wrong, too: a weight
    that one rank did not update differs by the size of a step.

    >>> _outlier([1e-8, 4e-4], limit=1e-3), _outlier([1e-6, 3e-6], limit=1e-3)
    (1, None)
    """
    if len(errors) < 2:
        return 0 if errors[0] > limit else None
    *_, second, first = sorted(errors)
    is_apart = first > max(_APART * second, _SLIGHTLY_WRONG * limit)
    return int(np.argmax(errors)) if second <= limit and (first > limit or is_apart) else None


def _wrongness(layout: RankLayout) -> float:
    """Return how badly a layout explains a wrong tensor; that of the shape comes first."""
    return layout.error if layout.kind == "sum" else _SHAPE_DECIDES * layout.error


def limit_of(reference: RankRow) -> float:
    """Return the relative error up to which a layout explains the reference."""
    if reference.row.get("phase") == "train" or reference.is_integer:
        return _EXPLAINED_EXACT
    return _EXPLAINED.get(str(reference.row.get("dtype")), _EXPLAINED_COARSE)


def holders(reference: RankRow, rows: Sequence[RankRow]) -> Sequence[RankRow]:
    """Return the rows that describe the tensor of the reference.

    The model's output on the first stage of a pipeline is another tensor than on the last one. Of
    several copies of a part, one counts. A rank may have an empty shard of a flat parameter.
    """
    if all("shard" in row.row for row in rows):
        if any(row.row["shard"]["partial"] for row in rows):
            return rows
        by_offset: dict[tuple[int, ...], RankRow] = {}
        for row in rows:
            by_offset.setdefault(tuple(row.row["shard"]["offset"]), row)
        return list(by_offset.values())
    alike = [row for row in rows if row.shape == reference.shape]
    return alike or [row for row in rows if row.numel] or rows


def terms_of(layout: RankLayout, rows: Sequence[RankRow]) -> list[Sketch] | None:
    """Return the sketches that add up to the whole; None where they are not known."""
    if all("shard" in row.row for row in rows):
        return [row.sketch for row in rows if row.sketch is not None]
    if not layout.has_sketches or (layout.kind == "parts" and layout.dim is None):
        return None
    terms = [row.as_part[layout.dim] if layout.dim is not None else row.sketch for row in rows]
    return [layout.scale * term for term in terms if term is not None]


def add_up(terms: list[Sketch]) -> Sketch:
    """Return the sketch of the sum of tensors."""
    total: Sketch = np.sum(terms, axis=0)
    return total


def _sums(
    reference: RankRow, rows: Sequence[RankRow], sketches: list[Sketch]
) -> Iterator[tuple[Kind, float, int | None, list[Sketch]]]:
    """Yield (kind, factor, dimension, sketches) of the layouts in which the ranks add up."""
    if all("shard" in row.row for row in rows):  # where they belong is recorded
        is_sum = any(row.row["shard"]["partial"] for row in rows)
        yield "sum" if is_sum else "parts", 1.0, None, sketches
        return
    if len(rows) == 1:
        return
    count, kind = len(rows), _kind_by_shape(reference, rows)
    # the gradient of a mean over the rows of one rank is larger than that over all; an optimizer
    # would use that of a part of a parameter as it is
    is_used = kind == "parts" and reference.is_parameter_gradient
    is_larger = reference.row.get("phase") in ("backward", "train") and not is_used
    factors = (1.0, 1 / count) if is_larger else (1.0,)
    for factor in factors:
        if kind == "whole":
            yield "sum", factor, None, sketches
            continue
        for dim in cuts(reference, rows):
            yield "parts", factor, dim, [row.as_part[dim] for row in rows]


def _kind_by_shape(reference: RankRow, rows: Sequence[RankRow]) -> Kind:
    if all("shard" in row.row for row in rows):
        return "parts"
    return "whole" if all(row.numel == reference.numel for row in rows) else "parts"


def cuts(reference: RankRow, rows: Sequence[RankRow]) -> list[int]:
    """Return the dimensions along which equal parts may be cut, one part for each row."""
    dimensions = range(min(len(row.as_part) for row in rows))
    return [dim for dim in dimensions if _is_cut(reference, rows, dim)]


def _is_cut(reference: RankRow, rows: Sequence[RankRow], dim: int) -> bool:
    """Return whether the shapes of equal parts allow a cut along a dimension."""
    shapes = {row.shape for row in rows}
    part = rows[0].shape
    if len(shapes) != 1 or part is None or rows[0].numel * len(rows) != reference.numel:
        return False
    whole = reference.shape
    if whole is None or len(whole) != len(part):
        return True
    return all(
        size == (part[index] * len(rows) if index == dim else part[index])
        for index, size in enumerate(whole)
    )


def _culprit(whole: Sketch, terms: list[Sketch] | None) -> int | None:
    """Return the row that is wrong: the error looks like its term, and not like the others."""
    if terms is None or len(terms) < 2:
        return None
    error = add_up(terms) - whole
    likeness = [_cosine(error, term) for term in terms]
    *_, second, first = sorted(likeness)
    is_alone = first > _MADE_IT and second < min(_INNOCENT * first, _CHANCE)
    return likeness.index(first) if is_alone else None


def _cosine(error: Sketch, term: Sketch) -> float:
    """Return |cos|; a rank without a contribution where the error is explains it, too."""
    norms = float(np.linalg.norm(error) * np.linalg.norm(term))
    return abs(float(error @ term)) / norms if norms else 1.0


def relative_distance(sketch: Sketch, whole: Sketch, scale: float) -> float:
    """Return the L2 distance of two tensors, relative to `scale`, the norm of the larger."""
    distance = float(np.linalg.norm(sketch - whole))
    if distance == 0:
        return 0.0
    return distance / scale if scale else math.inf


def group_alike(
    rows: Sequence[RankRow], limit: float, are_alike: Callable[[RankRow, RankRow], bool]
) -> list[list[RankRow]]:
    """Put each row into the first group whose first row is like it, or into a group of its own.

    The sketches of rows that are alike are not farther apart than `limit` times the larger norm,
    and their first numbers are not farther apart than they are. So only the groups near a row are
    asked: a thousand ranks would ask a million times for each tensor.
    """
    groups: list[list[RankRow]] = []
    in_order: list[tuple[float, int]] = []  # the first number of each group's sketch, its index
    reach = _ROUNDED * limit * max((row.l2 for row in rows), default=0.0)
    for row in rows:
        number = math.nan if row.sketch is None else float(row.sketch[0])
        start, end = 0, len(in_order)
        if math.isfinite(reach):
            start = bisect_left(in_order, (number - reach, 0))
            end = bisect_right(in_order, (number + reach, len(groups)))
        near = sorted(index for _, index in in_order[start:end])
        alike = next((index for index in near if are_alike(groups[index][0], row)), None)
        if alike is not None:
            groups[alike].append(row)
            continue
        if math.isfinite(number):  # others are like no row
            insort(in_order, (number, len(groups)))
        groups.append([row])
    return groups
