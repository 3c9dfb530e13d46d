"""Which rows of the reference those of the port should be, on programs of two weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_torch.graph.compare import compare_graphs
from otel_torch.graph.graph import Graph
from otel_torch.graph.row_counterparts import find_row_counterparts
from tests.graph.writer import Tensor, Writer

RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.normal(size=(6, 8)).astype(np.float32)
V, W = RANDOM.normal(size=(2, 8, 8)).astype(np.float32)
PADDING = np.ones((2, 8), np.float32)


class RowWriter(Writer):
    """Writes a program whose values have their rows as fingerprints."""

    def _content(self, array: np.ndarray, dtype: str | None = None) -> dict[str, Any]:
        rows = array.reshape(-1, 8).astype(np.float64)
        return Writer._content(self, array, dtype) | {"rows": rows}


def program(
    *calls: np.ndarray, factor: float = 1.5, steps: int = 1, makes_weights: bool = False
) -> Graph:
    """Return the graph of a program that computes a batch of tokens in each call, in each step from
    what the last one made; its weights are given, or made by an operation.
    """
    writer = RowWriter()
    tokens = [writer.leaf(f"x{place}", call, "input") for place, call in enumerate(calls)]
    weights = [writer.leaf("v", V), writer.leaf("w", W)]
    if makes_weights:
        weights = [writer.op("mul.scalar", own, 2.0) for own in weights]
    for _ in range(steps):
        tokens = [compute(writer, call, weights, factor) for call in tokens]
    for place, made in enumerate(tokens):
        writer.end(f"out{place}", made)
    return writer.finish()


def compute(writer: Writer, call: Tensor, weights: list[Tensor], factor: float) -> Tensor:
    hidden = writer.op("mul.scalar", writer.op("mm", call, weights[0]), factor)
    return writer.op("mm", hidden, weights[1])


def rows_by_value(reference: Graph, port: Graph) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """Return of each counterpart the operation that makes the value, and its rows by source."""
    programs = compare_graphs(reference, port).programs
    found = find_row_counterparts(programs)
    return {
        (port.operations[port.nodes.operation[port.values.maker[own.port]]], own.port): [
            rows for _, rows, _ in own.sources
        ]
        for own in found.values()
    }


def test_packed_rows_are_found_in_a_padded_batch() -> None:
    padded = np.concatenate([TOKENS[:4], PADDING, TOKENS[4:]])
    found = rows_by_value(program(padded), program(TOKENS[4:], TOKENS[:4], factor=1.4))
    assert {operation for operation, _ in found} == {"mul.scalar", "mm"}
    assert list(found.values()) == [[(6, 7)], [(0, 1, 2, 3)]] * 2


def test_weights_that_a_program_has_made_show_its_tokens_as_well() -> None:
    reference = program(TOKENS[:4], TOKENS[4:], makes_weights=True)
    found = rows_by_value(reference, program(TOKENS[::-1], factor=1.4, makes_weights=True))
    assert list(found.values()) == [[(3, 2, 1, 0), (1, 0)]] * 2


def test_rows_of_one_value_may_come_from_several() -> None:
    found = rows_by_value(program(TOKENS[:4], TOKENS[4:]), program(TOKENS[::-1], factor=1.4))
    assert list(found.values()) == [[(3, 2, 1, 0), (1, 0)]] * 2


def test_tokens_that_only_the_port_has_keep_their_rows() -> None:
    padded = np.concatenate([TOKENS, PADDING])
    found = rows_by_value(program(TOKENS), program(padded, factor=1.4))
    assert list(found.values()) == [[(0, 1, 2, 3, 4, 5)]] * 2


def test_equal_tokens_keep_their_order() -> None:
    twice = TOKENS[[0, 1, 0, 2, 0]]
    found = rows_by_value(program(twice), program(twice[:2], twice[2:], factor=1.4))
    assert list(found.values()) == [[(0, 1)], [(2, 3, 4)]] * 2


def test_later_steps_have_their_rows_where_the_first_one_has_them() -> None:
    found = rows_by_value(
        program(TOKENS, steps=3), program(TOKENS[3:], TOKENS[:3], factor=1.4, steps=3)
    )
    assert len(found) > 2 * 2  # of all steps
    assert {tuple(rows) for rows in found.values()} == {((3, 4, 5),), ((0, 1, 2),)}


def test_equal_tokens_go_on_where_their_text_has_been_read_to() -> None:
    texts = TOKENS[[0, 1, 2, 0, 3, 1]]  # two of three tokens
    found = rows_by_value(program(texts), program(texts[[0, 1, 3, 4]], texts[[2, 5]], factor=1.4))
    assert list(found.values()) == [[(0, 1, 3, 4)], [(2, 5)]] * 2
