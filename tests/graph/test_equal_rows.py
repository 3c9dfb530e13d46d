"""Rows of values beside rows of other values, each on a graph of a few rows."""

import numpy as np
import pytest

from otel_torch.graph.builder import GraphBuilder
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


def test_a_value_without_any_row_of_the_other_program_is_not_all_there() -> None:
    assert find(graph_of(-TOKENS), graph_of(TOKENS)).are_all(np.array([True])).tolist() == [False]
