"""Which values may hold rows of further tokens, on graphs of a few nodes."""

import numpy as np

from otel_torch.graph.builder import GraphBuilder
from otel_torch.graph.further_rows import may_be_further

TOKENS, WIDTH = 6, 4


class Program:
    """A program that is written down value by value."""

    def __init__(self) -> None:
        self._builder, self.unknown = GraphBuilder(width=1), []

    def value(
        self, reads=None, *, rows=TOKENS, leaf=None, moves=False, is_unknown=False, width=WIDTH
    ) -> int:
        """Add a value, made by a node that reads others, or a leaf of some kind."""
        maker = -1 if leaf else self._builder.add_node("operation", reads or [], moves=moves)
        shape = (rows, width)
        value = self._builder.add_value(shape=shape, sketch=[1.0], maker=maker, leaf=leaf)
        self.unknown += [value] * is_unknown
        return value

    def further(self) -> list[int]:
        """Return the values that may hold rows of further tokens."""
        graph = self._builder.finish()
        is_unknown = np.isin(np.arange(len(graph.values)), self.unknown)
        return np.flatnonzero(may_be_further(graph, is_unknown)).tolist()


def test_tokens_of_another_batch_are_in_all_that_is_computed_of_them() -> None:
    program = Program()
    weight = program.value(leaf="parameter", is_unknown=True)
    ids = program.value(leaf="input", is_unknown=True)
    embedded = program.value([weight, ids], moves=True)
    assert program.further() == [ids, embedded]


def test_of_equal_inputs_there_are_no_further_tokens_whatever_is_wrong() -> None:
    program = Program()
    x = program.value(leaf="input")
    positions = program.value([])
    wrong = program.value([x, positions], is_unknown=True)
    program.value([wrong])
    assert program.further() == []


def test_constants_that_something_is_joined_with_may_be_paddings() -> None:
    program = Program()
    x = program.value(leaf="input")
    zeros = program.value([], rows=2)
    joined = program.value([x, zeros], rows=TOKENS + 2, moves=True)
    padded = program.value([x], rows=TOKENS + 3)
    assert program.further() == [joined, padded]


def test_an_index_is_joined_with_nothing_and_a_repeated_row_is_no_further_one() -> None:
    program = Program()
    table = program.value(leaf="parameter")
    program.value([table, program.value([], width=1)], moves=True)
    program.value([program.value(leaf="input")], rows=2 * TOKENS, moves=True)
    assert program.further() == []


def test_what_is_joined_with_something_unknown_has_wrong_rows() -> None:
    program = Program()
    ids = program.value(leaf="input", is_unknown=True)
    right, wrong = program.value([ids]), program.value([ids], is_unknown=True)
    joined = program.value([right, wrong], rows=2 * TOKENS, moves=True)
    program.value([joined], rows=2 * TOKENS, moves=True)
    alike = program.value([right, right], rows=2 * TOKENS, moves=True)
    assert program.further() == [ids, right, wrong, alike]
