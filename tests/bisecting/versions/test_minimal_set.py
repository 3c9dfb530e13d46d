"""The smallest set of changes, and how many runs it takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from otel_torch.bisecting.versions.minimal_set import find_minimal_set, leave_out


def counting(needed: set[int]) -> tuple[Callable[[Sequence[int]], bool], list[frozenset[int]]]:
    """Return what heals with `needed`, and the different sets that it was asked for."""
    asked: list[frozenset[int]] = []

    def heals(tried: Sequence[int]) -> bool:
        if frozenset(tried) not in asked:
            asked.append(frozenset(tried))
        return needed <= set(tried)

    return heals, asked


def test_the_first_of_a_good_ranking_takes_one_run() -> None:
    heals, asked = counting({0})
    assert find_minimal_set(range(100), heals) == [0]
    assert asked == [frozenset({0})]


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_needed_is_found_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    needed = set(draw.sample(range(50), draw.randint(1, 4)))
    found = find_minimal_set(range(50), counting(needed)[0])
    assert found is not None and set(found) == needed and len(found) == len(needed)


def test_one_of_fifty_takes_eleven_runs_at_most() -> None:
    for place in range(50):
        heals, asked = counting({place})
        find_minimal_set(range(50), heals)
        assert len(asked) <= 11


def test_nothing_heals() -> None:
    assert find_minimal_set(range(9), lambda tried: False) is None
    assert find_minimal_set([], lambda tried: False) is None


def test_a_set_that_cannot_run_counts_as_not_healed() -> None:
    """3 runs only with 5: alone it fails."""
    found = find_minimal_set(range(9), lambda tried: {3, 5} <= set(tried))
    assert found == [5, 3]


def refactored(tried: Sequence[int]) -> bool | None:
    """5 heals, but of 2, 6, 7 and 8 none runs without the others."""
    return None if 0 < len({2, 6, 7, 8} & set(tried)) < 4 else 5 in tried


def test_what_heals_alone_is_found_where_a_mix_of_versions_fails() -> None:
    assert find_minimal_set(range(8), refactored) == [5]


def test_what_only_kept_a_mix_from_failing_is_left_out() -> None:
    assert leave_out([8, 7, 6, 5, 2], refactored) == [5]
    assert leave_out([1, 3], lambda tried: {1, 3} <= set(tried)) == [1, 3]
