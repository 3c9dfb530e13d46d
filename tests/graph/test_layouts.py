"""Which part of a value of one process a rank should have, on a product split by columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from otel_torch.graph.compare import compare_graphs
from otel_torch.graph.cut import counterparts_of
from otel_torch.graph.graph import Graph
from otel_torch.graph.layouts import Layouts
from tests.graph.writer import Tensor, Writer

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(4, 8)).astype(np.float32)
W = RANDOM.normal(size=(8, 8)).astype(np.float32)
V = RANDOM.normal(size=(8, 6)).astype(np.float32)
RANKS = 2


class RankWriter(Writer):
    """Writes what each rank computes, one rank after the other."""

    rank = 0

    def of_rank(self, rank: int) -> None:
        """Set the rank of the statements that follow."""
        self.rank = rank

    def _content(self, array: np.ndarray, dtype: str | None = None) -> dict[str, Any]:
        return Writer._content(self, array, dtype) | {"process": self.rank}


def one_process() -> Graph:
    """Return the program of one process, with the columns and rows that ranks may have."""
    writer = Writer()
    made = compute(writer, W, V, scale=1.5)
    for value in (writer.leaf("w", W), writer.leaf("v", V), *made):
        for axis in (0, 1):
            add_parts(writer, value, axis)
    writer.end("out", made[-1])
    return writer.finish()


def add_parts(writer: Writer, value: Tensor, axis: int) -> None:
    node = writer.builder.add_node(
        "part",
        [value.index],
        arguments=f'[null, {{"{axis}": {RANKS}}}]',
        moves=True,
        is_reading=True,
    )
    for part in np.split(value.array, RANKS, axis):
        writer._value(part, None, maker=node)


def compute(writer: Writer, w: np.ndarray, v: np.ndarray, scale: float) -> list[Tensor]:
    """Multiply by a weight, scale, and multiply by another one."""
    hidden = writer.op("mm", writer.leaf("x", X, "input"), writer.leaf("w", w))
    scaled = writer.op("mul.scalar", hidden, scale)
    return [hidden, scaled, writer.op("mm", scaled, writer.leaf("v", v))]


def ranks(order: list[int], scale: float) -> Graph:
    """Return the program of ranks that have columns of the first weight, and rows of the second."""
    writer = RankWriter()
    terms = []
    for rank, part in enumerate(order):
        writer.of_rank(rank)
        writer._leaves.clear()
        columns, rows = np.split(W, RANKS, 1)[part], np.split(V, RANKS, 0)[part]
        terms.append(compute(writer, columns, rows, scale)[-1])
    total = writer.op("add", *terms)
    writer.end("out", total)
    return writer.finish()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_rank_should_have_the_part_that_it_has_of_right_values(order: list[int]) -> None:
    reference, port = one_process(), ranks(order, scale=-1.5)
    comparison = compare_graphs(reference, port)
    layouts = Layouts(comparison.programs)
    parts = {}
    for own in counterparts_of(comparison).values():
        held = layouts.held(own.reference, own.port)
        if held is not None and port.values.shape[own.port] == (4, 4):
            parts[int(port.values.process[own.port])] = layouts.part(held)[1]
    columns = range(4), range(4, 8)
    assert parts == {rank: (range(4), columns[part]) for rank, part in enumerate(order)}
