"""Recognize parts that are padded to equal sizes, such as those of a vocabulary.

    one process   22 words
    two ranks     12 rows | 12 rows, of which 2 are no words

Padded rows (dimension 0) leave the positions of the other elements as they are, so that the
sketches of the ranks add up to that of the whole where the padding is zero: in most weights, and in
the gradients of a right program, which are compared by their norm and sum otherwise. Nothing else
can be compared: the padding of logits may have any value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from otel_torch.parity.layouts.mesh_layout import recognize_on_mesh
from otel_torch.parity.layouts.rank_layout import (
    RankLayout,
    add_up,
    limit_of,
    relative_distance,
)
from otel_torch.parity.layouts.rank_rows import RankRow


def is_padded(reference: RankRow, rows: Sequence[RankRow]) -> bool:
    """Return whether equal parts together are longer than the whole, by less than one part."""
    whole, part = reference.shape, rows[0].shape
    if not whole or not part or len(whole) != len(part) or any("shard" in row.row for row in rows):
        return False
    if any(row.shape != part for row in rows):
        return False
    sizes = list(zip(whole, part, strict=True))
    uneven = [(size, own) for size, own in sizes if own and size % own]
    return (
        len(uneven) == 1
        and all(own < size for size, own in uneven)
        and all(-(-size // own) <= len(rows) for size, own in uneven)
        and all(own and own <= size for size, own in sizes)
    )


def recognize_padded(
    reference: RankRow, rows: Sequence[RankRow], count: int
) -> tuple[Sequence[RankRow], RankLayout]:
    """Return the rows that make up the whole, and their layout.

    Its error is NaN where they cannot be compared.

    Args:
        count: The number of all ranks.
    """
    limit = limit_of(reference)
    part, sketches = rows[0].shape or (), [row.as_part[0] for row in rows if row.as_part]
    size = (reference.shape or (0,))[0]
    is_cut_into_ranks = part[0] * (len(rows) - 1) < size < part[0] * len(rows)
    if reference.sketch is not None and len(sketches) == len(rows) and is_cut_into_ranks:
        error = relative_distance(add_up(sketches), reference.sketch, reference.l2)
        if error <= limit:
            return rows, RankLayout("parts", error, limit, dim=0)
    if reference.row.get("phase") == "backward":
        return recognize_on_mesh(reference, rows, count)
    return rows, RankLayout("parts", math.nan, limit, has_sketches=False)
