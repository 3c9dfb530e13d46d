"""The smallest set of changes that makes the difference, in as few runs as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# how much more of the ranking each step of the search for a set that heals takes
_STRIDE = 4


def find_minimal_set(ranked: Sequence[T], heals: Callable[[Sequence[T]], bool]) -> list[T] | None:
    """Return the changes of which all are needed, and which together are enough.

    The last change of the shortest start of the ranking that heals is needed: without it nothing is
    healed. With that in place the rest is searched again, until what is needed is enough. A good
    ranking takes a run, a useless one of n changes about log4(n) + log2(n).

    Args:
        ranked: Changes, the most suspicious first.
        heals: Whether the result is the old one with these changes taken back. Each call is a run.

    Returns:
        None where even all of them do not heal.

    >>> find_minimal_set("abcdefgh", lambda tried: {"b", "g"} <= set(tried))
    ['g', 'b']
    """
    needed: list[T] = []
    rest = list(ranked)
    while count := _shortest_start(rest, lambda start: heals([*needed, *start])):
        needed.append(rest[count - 1])
        rest = rest[: count - 1]
        if not rest or heals(needed):
            return needed
    return None


def _shortest_start(ranked: Sequence[T], heals: Callable[[Sequence[T]], bool]) -> int:
    """Return the length of the shortest start that heals, else 0: strides, then halves."""
    fails, length = 0, 1
    while not heals(ranked[:length]):
        if length >= len(ranked):
            return 0
        fails, length = length, min(_STRIDE * length, len(ranked))
    while length - fails > 1:
        middle = (fails + length) // 2
        if heals(ranked[:middle]):
            length = middle
        else:
            fails = middle
    return length
