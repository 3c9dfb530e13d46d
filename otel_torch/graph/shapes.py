"""Which shapes hold the same elements in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul


def have_same_order(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether one shape is the other with neighboring axes merged.

    The order of elements is then the same.

    >>> have_same_order((2, 6, 8), (1, 2, 48)), have_same_order((2, 6, 8), (6, 2, 8))
    (True, False)
    """
    products, others = _partial_products(shape), _partial_products(other)
    return prod(shape) == prod(other) and (products <= others or others <= products)


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that have more than one place.

    >>> without_ones((3, 1, 8))
    (3, 8)
    """
    return tuple(size for size in shape if size != 1)


def has_twins(shape: Sequence[int]) -> bool:
    """Return whether two axes have one size: their order does not show.

    >>> has_twins((2, 8, 8)), has_twins((1, 1, 8))
    (True, False)
    """
    sizes = [size for size in shape if size > 1]
    return len(set(sizes)) < len(sizes)


def _partial_products(shape: Sequence[int]) -> set[int]:
    """Return the products of the first axes: those after which a merged axis may end."""
    return set(accumulate(without_ones(shape), mul))
