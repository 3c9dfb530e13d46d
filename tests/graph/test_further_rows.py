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
        self,
        reads=None,
        *,
        rows=TOKENS,
        leaf=None,
        moves=False,
        is_unknown=False,
        width=WIDTH,
        zeros=None,
        is_whole=False,
    ) -> int:
        """Add a value, made by a node that reads others, or a leaf of some kind; with `zeros` its
        rows are measured, and as many of them are zeros.
        """
        maker = -1 if leaf else self._builder.add_node("operation", reads or [], moves=moves)
        measured = None if zeros is None else [[1.0]] * (rows - zeros) + [[0.0]] * zeros
        value = self._builder.add_value(
            shape=(rows, width),
            roundoff=0.0 if is_whole else 1e-7,
            sketch=[1.0],
            rows=measured,
            maker=maker,
            leaf=leaf,
        )
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


def test_room_in_a_cache_makes_no_further_tokens_of_what_attends_to_it() -> None:
    program = Program()
    x = program.value(leaf="input", zeros=0)
    cache = program.value([program.value([], rows=9, zeros=9), x], rows=9, zeros=3)
    kept = program.value([cache], moves=True, zeros=0)
    program.value([x, kept], zeros=0)
    program.value([x, cache], zeros=0)
    padded = program.value([cache], rows=9, zeros=0)
    assert program.further() == [padded]


def test_places_of_a_packed_batch_that_select_what_is_known_bring_no_further_tokens() -> None:
    def packed(*, is_unknown: bool) -> tuple[list[int], list[int]]:
        program = Program()
        table, sines = (program.value(leaf="parameter") for _ in range(2))
        ids, places = (
            program.value(leaf="input", rows=1, is_unknown=True, is_whole=True) for _ in range(2)
        )
        embedded = program.value([table, ids], moves=True, is_unknown=is_unknown)
        turned = program.value([sines, places], moves=True, is_unknown=True)
        return program.further(), [ids, places, embedded, turned]

    assert packed(is_unknown=False)[0] == []
    further, all_of_them = packed(is_unknown=True)
    assert further == all_of_them
