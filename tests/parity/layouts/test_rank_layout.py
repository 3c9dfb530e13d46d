"""Rows of ranks are put into groups of equal ones without asking each pair of them."""

from __future__ import annotations

import numpy as np
import pytest

from otel_torch.parity.layouts.rank_layout import group_alike, relative_distance
from otel_torch.parity.layouts.rank_rows import RankRow

LIMIT = 1e-3


def row(rank, sketch):
    return RankRow(rank, {"numel": 8, "l2": float(np.linalg.norm(sketch))}, sketch)


def are_alike(first, second):
    scale = max(first.l2, second.l2)
    return relative_distance(first.sketch, second.sketch, scale) <= LIMIT


def rows_of(kind):
    """Return rows of 60 ranks, every third of which has nearly the numbers of another one."""
    numbers = np.random.default_rng(0)
    sketches = numbers.standard_normal((60, 64)).astype("f4")
    sketches[::3] = sketches[1::3] * (1 + numbers.choice([1e-4, 9.99e-4, 1.01e-3], (20, 1)))
    if kind == "zeros":
        sketches[10:20] = 0
    if kind == "not finite":
        sketches[5, 3], sketches[11, 0], sketches[12, 0] = np.nan, np.inf, -np.inf
    if kind == "first number equal":
        sketches[:, 0] = 1
    if kind == "one much larger":
        sketches[30] *= 1e6
    return [row(rank, sketch) for rank, sketch in enumerate(sketches)]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    "kind", ["plain", "zeros", "not finite", "first number equal", "one much larger"]
)
def test_the_groups_are_those_of_asking_every_pair(kind):
    rows, expected = rows_of(kind), []
    for one in rows:
        group = next((group for group in expected if are_alike(group[0], one)), None)
        group.append(one) if group is not None else expected.append([one])
    found = group_alike(rows, LIMIT, are_alike)
    assert [[one.rank for one in group] for group in found] == [
        [one.rank for one in group] for group in expected
    ]
    assert 20 < len(found) < 60


def test_the_time_does_not_grow_with_the_square_of_the_ranks():
    asked = []
    sketches = np.random.default_rng(0).standard_normal((1000, 64)).astype("f4")
    rows = [row(rank, sketch) for rank, sketch in enumerate(sketches)]

    def ask(first, second):
        asked.append(first)
        return are_alike(first, second)

    assert len(group_alike(rows, LIMIT, ask)) == 1000
    assert len(asked) < 10_000  # of 499,500 pairs
