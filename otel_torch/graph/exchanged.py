"""What a trial has exchanged: values of the port that those of the reference have replaced.

The program goes on with the reference's value, and its own value has become an end: what makes it
wrong is still found, also what another fault had hidden before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

import numpy as np

from otel_torch.graph.ends import EndPair, Limits, Programs, compare_ends, values_of_ends
from otel_torch.graph.states import RIGHT, ComparedProgram


def add_exchanged(
    programs: Programs, limits: Limits, exchanged: Sequence[tuple[int, int]]
) -> tuple[Programs, list[EndPair]]:
    """Make ends of values that were exchanged.

    Args:
        exchanged: What was put in the place of which value, of reference and port.

    Returns:
        The programs with these ends, and the pairs of them.
    """
    counts = [len(program.graph.ends) for program in programs]
    first, second = (
        _with_ends(program, [pair[side] for pair in exchanged])
        for side, program in enumerate(programs)
    )
    extended = first, second
    places = range(len(exchanged))
    pairs = [compare_ends(extended, limits, *(count + n for count in counts)) for n in places]
    return extended, pairs


def _with_ends(program: ComparedProgram, values: Sequence[int]) -> ComparedProgram:
    graph = program.graph
    names = [*graph.end_names, *("" for _ in values)]
    ends = np.append(graph.ends, np.array(values, np.int64))
    passed = np.append(graph.passed, np.zeros(len(values), bool))
    return replace(program, graph=replace(graph, ends=ends, end_names=names, passed=passed))


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
    waiting = [value for value in ends if value not in replaced]
    values = set(waiting)
    while waiting:
        value = waiting.pop()
        node = program.maker[value]
        # a mask may be wrong and pass for right, and so may a part in the place of another
        if node < 0 or _is_surely_right(program, value):
            continue
        new = {read for read in program.reads[node] if read >= 0} - replaced - values
        values |= new
        waiting += new
    return values


def _is_surely_right(program: ComparedProgram, value: int) -> bool:
    is_right = program.state[value] == RIGHT and program.is_informed[value]
    return bool(is_right and not program.graph.nodes.moves[program.maker[value]])
