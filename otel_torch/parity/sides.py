"""The two sides of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Sides(NamedTuple, Generic[T]):
    """One object for the reference and one for the port.

    >>> Sides("blocks.0", "layers.0").map(len)
    Sides(reference=8, port=8)
    """

    reference: T
    port: T

    def map(self, function: Callable[[T], S]) -> Sides[S]:
        """Apply a function to both sides."""
        return Sides(function(self.reference), function(self.port))
