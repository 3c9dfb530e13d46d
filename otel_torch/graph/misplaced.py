"""Weights and moves that may be at fault instead of the operation that reads their results.

`matmul(k, q)` beside `matmul(q, k)`: each operand is right by itself. Either this line exchanges
them, or whatever made the two does, down to their weights. If only an order is wrong, the operation
that moves it may be at fault; if a scale is, a scaled weight may be another way to write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from otel_torch.graph.compare import GraphComparison, GraphFault
from otel_torch.graph.equal_rows import find_equal_rows
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import RIGHT, WRONG, ComparedProgram, before_moves, made_from


def acquitted_leaves(comparison: GraphComparison, fault: GraphFault) -> frozenset[int]:
    """Return the wrong leaves of the port that led to the right values which a fault reads."""
    program = comparison.programs[1]
    if fault.port is None or fault.port.leaf != NOTHING:
        return frozenset()
    reads = [read for read in program.reads[fault.port.nodes[0]] if read >= 0]
    _, computed = before_moves(program, reads)
    right = {value for value in computed if program.state[value] == RIGHT}
    behind = made_from(
        program, right, lambda value: value in right or program.state[value] != RIGHT
    )
    return frozenset(
        value for value in behind if program.maker[value] < 0 and program.state[value] == WRONG
    )


class Misplaced(NamedTuple):
    """What brought operands of the port's place into it.

    Attributes:
        nodes: That only moved what the reference's operand is moved from as well.
        leaves: That may be in each other's place instead, for nothing tells whose they are.
    """

    nodes: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()


def find_misplaced(comparison: GraphComparison, fault: GraphFault) -> Misplaced:
    """Return what brought the operands of a fault into its place, if both programs do the same."""
    places = fault.reference, fault.port
    if any(place is None or place.leaf != NOTHING for place in places):
        return Misplaced()
    programs = comparison.programs
    nodes = [place.nodes[0] for place in places if place is not None]
    if programs[0].operation[nodes[0]] != programs[1].operation[nodes[1]]:
        return Misplaced()
    groups = [set(program.operands(node)) for program, node in zip(programs, nodes, strict=True)]
    reads = [
        [
            read
            for read, group in zip(program.reads[node], program.operands(node), strict=True)
            if group != NOTHING and group not in other and program.maker[read] >= 0
        ]
        for program, node, other in zip(programs, nodes, groups[::-1], strict=True)
    ]
    moves, sources = zip(
        *(before_moves(program, own) for program, own in zip(programs, reads, strict=True)),
        strict=True,
    )
    if _groups(programs[0], sources[0]) == _groups(programs[1], sources[1]):
        return Misplaced(nodes=frozenset(moves[1]))
    known = _groups(programs[0], _ancestors(programs[0], reads[0]))
    # positions and lengths of another batch are never those of the reference
    leaves = (
        value
        for value in _ancestors(programs[1], reads[1])
        if programs[1].maker[value] < 0
        and (programs[1].is_informed[value] or not comparison.has_rows)
    )
    return Misplaced(
        leaves=frozenset(
            leaf
            for leaf in leaves
            if int(programs[1].side.group[leaf]) not in known and not _is_at_home(programs, leaf)
        )
    )


def misplaced_rows(comparison: GraphComparison, fault: GraphFault) -> list[int]:
    """Return right values that the port reads in the place of a fault and the reference does not.

    By rows a value is right wherever its rows are: a time of another step is, too.
    """
    if not comparison.has_rows or fault.reference is None or fault.port is None:
        return []
    reference, port = comparison.programs
    chosen, among = (np.zeros(len(program.maker), bool) for program in (port, reference))
    for node in {*fault.reference.nodes, *fault.reference.region}:
        reads = {read for read in reference.reads[node] if read >= 0}
        among[[*reads, *before_moves(reference, reads)[1]]] = True
    for node in (*fault.port.nodes[:1], *fault.port.region):
        for read in port.reads[node]:
            is_computed = read >= 0 and port.maker[read] >= 0 and port.is_informed[read]
            chosen[read] |= is_computed and port.state[read] == RIGHT
    graphs, limits = (port.graph, reference.graph), comparison.limits[::-1]
    here = find_equal_rows(*graphs, limits, chosen, among)
    if not here.unmatched.any():
        return []
    # what the whole reference lacks are further tokens
    anywhere = find_equal_rows(*graphs, limits, chosen, np.ones(len(among), bool))
    values: list[int] = here.values[here.unmatched > anywhere.unmatched].tolist()
    return values


def _ancestors(program: ComparedProgram, values: Iterable[int]) -> set[int]:
    return made_from(program, values, lambda value: True)


def _groups(program: ComparedProgram, values: Iterable[int]) -> set[int]:
    return {int(program.side.group[value]) for value in values}


def _is_at_home(programs: tuple[ComparedProgram, ComparedProgram], leaf: int) -> bool:
    """Return whether the reference has a leaf's content under the same name."""
    reference, port = programs
    partner = int(port.side.partner[leaf])
    if port.state[leaf] != RIGHT or partner < 0:
        return False
    return _name(reference, partner) == _name(port, leaf)


def _name(program: ComparedProgram, leaf: int) -> tuple[str, str]:
    graph = program.graph
    return graph.modules[graph.values.module[leaf]].partition(":")[2], graph.values.name[leaf]
