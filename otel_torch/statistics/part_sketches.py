"""Sketches of a tensor as one rank's part of a larger one.

Nothing on a plain tensor says that it is a part. So each rank adds the sketches that its tensor has
if it is this rank's part of a whole, cut into as many equal parts as there are ranks along the
first dimension, along the second, and so on. Where one of these is true, the sketches of the ranks
add up to the sketch of the whole, which is how `diff` recognizes the cut:

    whole          [[1, 2], [3, 4]]
    rank 0, [[1], [3]] cut along dimension 1: sketch of [[1, 0], [3, 0]]
    rank 1, [[2], [4]] likewise:              sketch of [[0, 2], [0, 4]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from otel_torch.statistics.sketch import sketch
from otel_torch.statistics.sketch_format import PART_DIMS
from otel_torch.torch_private import place_among_ranks


def part_sketches(values: Tensor) -> Tensor:
    """Compute the sketches of a tensor as this rank's part, without communicating.

    Args:
        values: strided, with at least one dimension.

    Returns:
        shape (4 * 64,), as `sketch`: cut along dimension 0 to 3; zeros for missing dimensions.
    """
    rank, count = place_among_ranks()
    parts = [
        _sketch_of_part(values, dim, rank, count) for dim in range(min(values.dim(), PART_DIMS))
    ]
    parts += [torch.zeros_like(parts[0])] * (PART_DIMS - len(parts))
    return torch.cat(parts)


def _sketch_of_part(values: Tensor, dim: int, rank: int, count: int) -> Tensor:
    """Compute the sketch of part `rank` of `count` along a dimension."""
    length = values.shape[dim]
    if not dim:
        return sketch(values, rank * values.numel())
    whole = values.new_zeros((*values.shape[:dim], count * length, *values.shape[dim + 1 :]))
    whole.narrow(dim, rank * length, length).copy_(values)
    return sketch(whole)
