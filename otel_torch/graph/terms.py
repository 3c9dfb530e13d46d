"""Ranks that go on with terms of a sum where the other program has the sum.

Terms may be used for long, as all that is linear makes terms of terms. Where they are first read as
if they were the sum, a reduction over the ranks is missing: somewhere behind what made them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from otel_torch.graph.blame import DoubtSource
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import WRONG, ComparedProgram, Programs, before_moves, made_from

Pair = tuple[DoubtSource | None, DoubtSource | None]


def begin_with_terms(programs: Programs, pair: Pair) -> Pair:
    """Return the sources of a fault at what made the terms, if one program reads terms where the
    other one reads their sum, by the same operation.
    """
    first, second = pair
    if first is None or second is None or min(first.origin, second.origin) < 0:
        return pair
    nodes = first.origin, second.origin
    if programs[0].operation[nodes[0]] != programs[1].operation[nodes[1]]:
        return pair
    read = [
        program.terms.intersection(program.reads[node])
        for program, node in zip(programs, nodes, strict=True)
    ]
    if bool(read[0]) == bool(read[1]):
        return pair
    side = 0 if read[0] else 1
    _, computed = before_moves(programs[side], read[side])
    makers = [programs[side].maker[value] for value in computed if programs[side].maker[value] >= 0]
    if not makers or is_summed_later(programs[side], nodes[side]):
        return pair
    begins = _in_both(programs, side, min(makers))
    return _moved(first, begins[0]), _moved(second, begins[1])


def makers_of_terms(programs: Programs, side: int, value: int) -> tuple[int, int] | None:
    """Return what first makes the terms from which one program computes a value by terms alone, in
    both programs; NOTHING where no operation does. None if the value is no term.
    """
    program = programs[side]
    if value not in program.terms:
        return None
    behind = made_from(program, [value], lambda own: own in program.terms) & program.terms
    makers = [program.maker[own] for own in behind if program.maker[own] >= 0]
    return _in_both(programs, side, min(makers)) if makers else None


def _in_both(programs: Programs, side: int, node: int) -> tuple[int, int]:
    """Return what makes terms in one program and what makes their sum in the other, in the order of
    the programs; NOTHING where no operation does.
    """
    other = programs[1 - side]
    whole = int(programs[side].side.partner[programs[side].makes[node][0]])
    while whole >= 0 and other.maker[whole] >= other.own_nodes:  # only a part of it is the sum
        whole = other.reads[other.maker[whole]][0]
    begins = [node, node]
    begins[1 - side] = other.maker[whole] if whole >= 0 else NOTHING
    return begins[0], begins[1]


def _moved(source: DoubtSource, origin: int) -> DoubtSource:
    if origin == NOTHING:
        return source
    return replace(source, origin=origin, suspects=[source.origin, *source.suspects])


def is_summed_later(program: ComparedProgram, node: int) -> bool:
    """Return whether the ranks reduce a node's result later: from there on all have the same."""
    waiting = list(program.makes[node])
    if any(_is_replicated(program, value) for value in waiting):
        return False
    while waiting:
        for reader in program.readers[waiting.pop()]:
            if any(_is_replicated(program, value) for value in program.makes[reader]):
                return True
            if program.graph.nodes.moves[reader]:
                waiting += program.makes[reader]
    return False


def _is_replicated(program: ComparedProgram, value: int) -> bool:
    """Return whether the same code has made the same wrong value elsewhere."""
    if program.state[value] != WRONG:
        return False
    code = program.code(program.maker[value])
    same = np.flatnonzero(program.side.group == program.side.group[value]).tolist()
    makers = {program.maker[own] for own in same if program.maker[own] >= 0}
    return sum(program.code(maker) == code for maker in makers) > 1
