"""What a trial has exchanged: values of the port that those of the reference have replaced.

The program continues with the reference's value. Its own value becomes an end, so that a fault
before it is still found, even one that another fault has hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

import numpy as np

from otel_torch.graph.ends import EndPair, Limits, compare_ends, values_of_ends
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import RIGHT, ComparedProgram, Programs, does_nothing, made_from


def add_ends(
    programs: Programs, limits: Limits, values: Sequence[tuple[int, int]]
) -> tuple[Programs, list[EndPair]]:
    """Make ends of further values.

    Args:
        values: Of reference and port: what was put in the place of which, or what both show.

    Returns:
        The programs with these ends, and the pairs of them.
    """
    counts = [len(program.graph.ends) for program in programs]
    first, second = (
        _with_ends(program, [pair[side] for pair in values])
        for side, program in enumerate(programs)
    )
    extended = first, second
    places = range(len(values))
    pairs = [compare_ends(extended, limits, *(count + n for count in counts)) for n in places]
    return extended, pairs


def _with_ends(program: ComparedProgram, values: Sequence[int]) -> ComparedProgram:
    graph = program.graph
    names = [*graph.end_names, *("" for _ in values)]
    ends = np.append(graph.ends, np.array(values, np.int64))
    weights = np.append(graph.end_weights, np.full(len(values), NOTHING))
    passed = np.append(graph.passed, np.zeros(len(values), bool))
    extended = replace(graph, ends=ends, end_names=names, end_weights=weights, passed=passed)
    return replace(program, graph=extended)


def open_values(
    programs: Programs, ends: Iterable[EndPair], exchanged: Iterable[EndPair]
) -> tuple[Set[int], Set[int]]:
    """Return the values of each program that still make an end wrong, whatever was exchanged."""
    wrong = values_of_ends(programs, [pair for pair in ends if not pair.is_right])
    replaced = values_of_ends(programs, list(exchanged))
    first, second = (
        _before(program, wrong[side], set(replaced[side])) for side, program in enumerate(programs)
    )
    return first, second


def makes_wrong(program: ComparedProgram, begins: Set[int], values: Set[int]) -> bool:
    """Return whether some values are among others (`open_values`), or what is computed from them.

    A coarse limit may let the first wrong value pass.
    """
    made = {
        item for value in begins for node in program.readers[value] for item in program.makes[node]
    }
    return not values.isdisjoint(begins | made)


def _before(program: ComparedProgram, ends: list[int], replaced: set[int]) -> Set[int]:
    # a mask may be wrong and pass for right, and so may a part in the place of another
    values = made_from(
        program,
        ends,
        lambda value: value not in replaced and not _is_surely_right(program, value),
    )
    return values - replaced


def _is_surely_right(program: ComparedProgram, value: int) -> bool:
    if program.state[value] != RIGHT or not program.is_informed[value]:
        return False
    node = program.maker[value]
    return not (program.graph.nodes.moves[node] or (node >= 0 and does_nothing(program, node)))
