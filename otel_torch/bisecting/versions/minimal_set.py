"""The smallest set of changes that makes the difference, in as few runs as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# how much more of the ranking each step of the search for a set that heals takes
_STRIDE = 4
# of how many changes that break the program together each is tried alone
_MOST_ALONE = 16


def find_minimal_set(
    ranked: Sequence[T], heals: Callable[[Sequence[T]], bool | None]
) -> list[T] | None:
    """Return the changes of which all are needed, and which together are enough.

    The last change of the shortest start of the ranking that heals is needed: without it nothing is
    healed. With that in place the rest is searched again, until what is needed is enough. A good
    ranking takes a run, a useless one of n changes about log4(n) + log2(n).

    Args:
        ranked: Changes, the most suspicious first.
        heals: Whether the result is the old one with these changes taken back; None where the
            program fails, as a mix of two versions may. Each call is a run.

    Returns:
        None where even all of them do not heal.

    >>> find_minimal_set("abcdefgh", lambda tried: {"b", "g"} <= set(tried))
    ['g', 'b']
    """
    needed: list[T] = []
    rest = list(ranked)
    while start := _shortest_start(rest, lambda tried: heals([*needed, *tried])):
        needed.append(start[-1])
        rest = start[:-1]
        if not rest or heals(needed):
            return needed
    return None


def leave_out(found: list[T], heals: Callable[[Sequence[T]], bool | None]) -> list[T]:
    """Return those of a set that heals of which all are needed.

    Where a mix of two versions fails, the shortest start of a ranking that heals may hold more.
    """
    if len(found) > 1:
        alone = [[own] for own in found]
        for some in (*alone, *([x for x in found if x != own] for own in found)):
            if heals(some):
                return leave_out(some, heals)
    return found


def _shortest_start(ranked: list[T], heals: Callable[[Sequence[T]], bool | None]) -> list[T]:
    """Return the shortest start that heals, or one change that does; none where all do not."""
    fails, length = 0, 1
    while not (outcome := heals(ranked[:length])):
        if outcome is None and length <= _MOST_ALONE:
            for own in ranked[fails:length]:
                if length > 1 and heals([own]):
                    return [own]
        if length >= len(ranked):
            return []
        fails, length = length, min(_STRIDE * length, len(ranked))
    while length - fails > 1:
        middle = (fails + length) // 2
        if heals(ranked[:middle]):
            length = middle
        else:
            fails = middle
    return ranked[:length]
