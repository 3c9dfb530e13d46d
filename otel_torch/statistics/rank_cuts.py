"""Into which parts ranks may cut a tensor: rows, columns, or both on a mesh of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

# the operation of a part of a value: the program makes none, ranks of another program may have it
PART = "otel_torch.part"


def mesh_sizes(ranks: int) -> list[int]:
    """Return how many ranks a dimension of their mesh may have.

    >>> mesh_sizes(4), mesh_sizes(1)
    ([2, 4], [])
    """
    return [size for size in range(2, ranks + 1) if ranks % size == 0]


def cuts_of(shape: Sequence[int], ranks: int) -> Iterator[dict[int, int]]:
    """Yield how a tensor may be cut: the number of parts by axis.

    Along one axis into as many parts as there are ranks, or as a dimension of their mesh has; along
    two axes into as many as there are ranks.

    >>> list(cuts_of((4, 1, 6), 2))
    [{0: 2}, {2: 2}]
    >>> list(cuts_of((4, 6), 4))
    [{0: 2}, {0: 4}, {1: 2}, {1: 4}, {0: 2, 1: 2}]
    """
    counts = mesh_sizes(ranks)
    for axis, size in enumerate(shape):
        yield from ({axis: count} for count in counts if size >= count)
    for first, second in combinations(range(len(shape)), 2):
        for count in counts[:-1]:
            if shape[first] >= count and shape[second] >= ranks // count:
                yield {first: count, second: ranks // count}
