"""Which contents the values of two programs have, and which of these are equal.

Many values have one content: a view, a copy, a tensor that is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from otel_torch.graph.distances import distinct, in_windows, relative_distances, sketch_norms
from otel_torch.graph.graph import Flags, Floats, Indices, Values


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The distinct contents of a program's values.

    Attributes:
        first: The first value with each content.
        content: The content of each value.
        limit: The largest limit of the values with each content.
    """

    values: Values
    first: Indices
    content: Indices
    limit: Floats


def distinct_contents(values: Values, limits: Floats) -> Contents:
    keys = np.concatenate(
        [values.numel[:, None], values.nonfinite[:, None], values.sketch.view(np.int64)], axis=1
    )
    first, content = distinct(keys)
    limit = np.zeros(len(first))
    np.maximum.at(limit, content, limits)
    return Contents(values, first, content, limit)


@dataclass(frozen=True, slots=True, eq=False)
class ContentPairs:
    """Contents of reference and port that are equal.

    Attributes:
        left, right: The contents of each pair.
        errors: The relative distance of each pair.
    """

    left: Indices
    right: Indices
    errors: Floats

    @classmethod
    def of(cls, pairs: Iterable[tuple[Indices, Indices, Floats]]) -> ContentPairs:
        """Join lists of pairs."""
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        left, right, errors = map(np.concatenate, zip(nothing, *pairs, strict=True))
        return cls(left, right, errors)

    def among(self, flags: tuple[Flags, Flags]) -> ContentPairs:
        """Return the pairs whose contents are both flagged."""
        chosen = flags[0][self.left] & flags[1][self.right]
        return ContentPairs(self.left[chosen], self.right[chosen], self.errors[chosen])


def equal_pairs(reference: Contents, port: Contents) -> Iterator[tuple[Indices, Indices, Floats]]:
    """Yield pairs of contents that are equal, with their errors.

    Two norms differ by no more than the distance, so that only contents of almost the same norm are
    compared.
    """
    kinds = [
        np.stack([side.values.numel[side.first], side.values.nonfinite[side.first]], axis=1)
        for side in (reference, port)
    ]
    norms = [sketch_norms(side.values.sketch[side.first]) for side in (reference, port)]
    for left, right in same_kind(kinds[0], kinds[1]):
        left = left[np.argsort(norms[0][left])]
        span = np.sqrt(reference.limit[left].max() ** 2 + port.limit[right] ** 2)
        span = np.minimum(span, 1.0) * 1.01  # both norms are relative to the larger one
        starts = np.searchsorted(norms[0][left], norms[1][right] * (1 - span))
        upper = norms[1][right] / np.maximum(1 - span, 1e-300)
        ends = np.searchsorted(norms[0][left], upper, side="right")
        for own, other in in_windows(starts, ends):
            pairs = left[other], right[own]
            errors = relative_distances(
                reference.values.sketch[reference.first[pairs[0]]],
                port.values.sketch[port.first[pairs[1]]],
            )
            limit = np.sqrt(reference.limit[pairs[0]] ** 2 + port.limit[pairs[1]] ** 2)
            is_equal = errors <= limit
            yield pairs[0][is_equal], pairs[1][is_equal], errors[is_equal]


def same_kind(left: Indices, right: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Yield the rows of each kind that both sides have; a kind is a row of integers."""
    both = np.concatenate([left, right])
    if not len(both):
        return
    _, kind = np.unique(both, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    order = np.argsort(kind, kind="stable")
    bounds = np.flatnonzero(np.diff(kind[order])) + 1
    for rows in np.split(order, bounds):
        split = np.searchsorted(rows, len(left))
        if 0 < split < len(rows):
            yield rows[:split], rows[split:] - len(left)


class Groups:
    """Joins equal contents of two programs."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._parent = list(range(sum(counts)))

    def join(self, left: Indices, right: Indices) -> None:
        """Put pairs of contents, one of each program, into one group."""
        for own, other in zip(left.tolist(), (right + self._counts[0]).tolist(), strict=True):
            first, second = self._find(own), self._find(other)
            self._parent[max(first, second)] = min(first, second)

    def _find(self, item: int) -> int:
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def numbers(self) -> tuple[Indices, Indices]:
        """Return the group of each content, for each program."""
        numbers = np.array([self._find(item) for item in range(len(self._parent))], np.int64)
        return numbers[: self._counts[0]], numbers[self._counts[0] :]
