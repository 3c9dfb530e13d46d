"""Rows of values beside rows of other values, each on a graph of a few rows."""

import numpy as np
import pytest

from otel_torch.graph import equal_rows
from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.distances import most_of_estimate, relative_distances
from otel_torch.graph.equal_rows import find_equal_rows
from otel_torch.graph.graph import NOTHING, Graph

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.standard_normal((6, 8))


def graph_of(*contents: np.ndarray, leaves: int = 0) -> Graph:
    """Return a program in which each value is made of the one before it."""
    builder = GraphBuilder(width=1)
    for place, rows in enumerate(contents):
        maker = NOTHING
        if place >= leaves:
            maker = builder.add_node("make", [place - 1] if place else [-1])
        leaf = "parameter" if place < leaves else None
        builder.add_value(shape=rows.shape, rows=rows, sketch=[1.0], maker=maker, leaf=leaf)
    return builder.finish()


def find(own: Graph, other: Graph, limit: float = 1e-6):
    limits = np.full(len(own.values), limit), np.full(len(other.values), limit)
    every = [np.ones(len(graph.values), bool) for graph in (own, other)]
    return find_equal_rows(own, other, limits, *every)


def test_rows_are_found_in_any_order_and_in_several_values() -> None:
    packed = graph_of(TOKENS[[4, 0, 2]], TOKENS[[1, 5]])
    found = find(packed, graph_of(TOKENS[:3], TOKENS[3:]))
    assert found.unmatched.tolist() == [0, 0]
    assert found.partner.tolist() == [0, 0]  # most rows of the first, or as many
    assert found.error.tolist() == [0, 0]


def test_the_share_of_rows_that_are_nowhere_and_the_error_of_the_others() -> None:
    close = TOKENS[:2] * (1 + 1e-7)
    found = find(graph_of(np.concatenate([close, -TOKENS[:2]])), graph_of(TOKENS))
    assert found.unmatched.tolist() == [0.5]
    assert found.error[0] == pytest.approx(1e-7, rel=1e-3)
    assert find(graph_of(-TOKENS), graph_of(TOKENS)).partner.tolist() == [NOTHING]


def test_rows_of_zeros_say_nothing_and_small_rows_may_be_off_by_more_of_themselves() -> None:
    mixed = np.concatenate([TOKENS[:2], np.zeros((2, 8)), 1e-3 * TOKENS[2:3]])
    off = mixed.copy()
    off[4] *= 1 + 1e-4
    found = find(graph_of(off), graph_of(mixed))
    assert (found.values.tolist(), found.unmatched.tolist()) == ([0], [0])
    off[:2] *= 1 + 1e-4
    assert find(graph_of(off), graph_of(mixed)).unmatched.tolist() == [pytest.approx(2 / 3)]


def test_what_a_program_computed_is_not_looked_for_among_weights() -> None:
    weight, port = graph_of(TOKENS, leaves=1), graph_of(TOKENS[[1, 2]])
    assert find(port, weight).unmatched.tolist() == [1]
    assert find(graph_of(TOKENS[[3, 1]], leaves=1), weight).unmatched.tolist() == [0]


def test_one_program_may_have_tokens_that_the_other_never_had() -> None:
    padded, packed = graph_of(TOKENS), graph_of(TOKENS[:3], TOKENS[3:5])
    found = find(padded, packed)
    assert found.unmatched.tolist() == [pytest.approx(1 / 6)]
    assert [held.tolist() for held in found.holders] == [[0, 1]]
    assert found.are_all(np.array([True, True])).tolist() == [True]
    assert found.are_all(np.array([True, False])).tolist() == [False]  # that has a wrong row
    assert find(packed, padded).are_all(np.array([False])).tolist() == [True, True]


def test_a_row_that_is_passed_on_says_nothing_of_what_comes_with_it() -> None:
    # attention that looks back leaves the first token as it was
    attended = np.concatenate([TOKENS[:1], -TOKENS[1:]])
    found = find(graph_of(TOKENS, attended, attended), graph_of(TOKENS[:3]))
    assert found.are_all(np.array([True])).tolist() == [True, False, False]


def test_a_value_without_any_row_of_the_other_program_is_not_all_there() -> None:
    assert find(graph_of(-TOKENS), graph_of(TOKENS)).are_all(np.array([True])).tolist() == [False]


@pytest.mark.parametrize("has_one_size", [False, True])
def test_no_equal_row_is_passed_over(has_one_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = RANDOM.standard_normal((400, 8)) * RANDOM.lognormal(size=(400, 1))
    if has_one_size:  # as a norm leaves them
        theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    off = RANDOM.standard_normal((400, 8)) * 10.0 ** RANDOM.uniform(-9, -1, (400, 1))
    own = theirs + off * np.linalg.norm(theirs, axis=1, keepdims=True)
    measured: list[int] = []

    def count(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        measured.append(len(first))
        return relative_distances(first, second)

    monkeypatch.setattr(equal_rows, "relative_distances", count)
    found = find(graph_of(*own[:, None]), graph_of(theirs), 1e-4)
    # the error of a value is spread over its rows
    sizes = np.linalg.norm(theirs, axis=1)
    shares = np.maximum(np.sqrt((sizes**2).mean()) / sizes, 1)
    limits = most_of_estimate(8) * 1e-4 * np.hypot(1, shares)
    distances = np.stack([relative_distances(np.tile(row, (400, 1)), theirs) for row in own])
    expected = (distances <= limits).any(axis=1)
    assert ((found.unmatched == 0) == expected).all()
    assert (found.partner[found.unmatched == 0] == 0).all()
    assert 0.2 < expected.mean() < 0.9
    assert sum(measured) < 2 * 400  # of 160,000 pairs
