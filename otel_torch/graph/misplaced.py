"""Weights and moves that may be at fault instead of the operation that reads their results.

`matmul(k, q)` beside `matmul(q, k)`: each operand is right by itself. Either this line exchanges
them, or whatever made the two does, down to their weights. If only an order is wrong, the operation
that moves it may be at fault; if a scale is, a scaled weight may be another way to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

import numpy as np

from otel_torch.graph.compare import GraphComparison, GraphFault
from otel_torch.graph.equal_rows import find_equal_rows
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import (
    RIGHT,
    WRONG,
    ComparedProgram,
    before_moves,
    is_moved,
    made_from,
    made_with,
    moved_back,
)


class Misplaced(NamedTuple):
    """What brought operands of the port's place into it.

    Attributes:
        nodes: That only moved what the reference's operand is moved from as well, made it by the
            operation that makes the reference's, or made what says too little, such as masks.
        leaves: That may be in each other's place instead, for nothing tells whose they are; and
            wrong ones that led to right operands, for these may be in another order.
    """

    nodes: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()


def find_misplaced(comparison: GraphComparison, fault: GraphFault) -> Misplaced:
    """Return what may have brought the operands of a fault into its place.

    What both programs read in the same place is at home, and so is what is behind it.
    """
    reference, port = comparison.programs
    if fault.port is None or fault.port.leaf != NOTHING:
        return Misplaced()
    node = fault.port.nodes[0]
    reordered = _reordered_leaves(port, node) if fault.explanation.kind == "order" else frozenset()
    if fault.reference is None or fault.reference.leaf != NOTHING:
        return Misplaced(leaves=reordered | _wrong_leaves_behind(port, port.reads[node]))
    places = fault.reference.nodes[0], node
    reads = _not_at_home(comparison.programs, places)
    does_the_same = reference.operation[places[0]] == port.operation[node]
    moves = _moves_from_common(comparison.programs, reads)
    if moves is not None:
        return Misplaced(frozenset(moves if does_the_same else ()), reordered)
    leaves = reordered | _wrong_leaves_behind(port, reads[1])
    if does_the_same:
        leaves |= _strange_leaves_behind(comparison, *map(_made_right, comparison.programs, reads))
    nodes = _made_alike(comparison.programs, reads) | _makers_of_vague(port, reads[1])
    return Misplaced(nodes, leaves)


def _not_at_home(
    programs: tuple[ComparedProgram, ComparedProgram], nodes: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Return what each of two nodes reads and the other one does not, or not in the same order."""
    groups = [program.operands(node) for program, node in zip(programs, nodes, strict=True)]
    common = [
        [group for group in own if group != NOTHING and group in other]
        for own, other in zip(groups, groups[::-1], strict=True)
    ]
    at_home = set(common[0]) if common[0] == common[1] else set()
    first, second = (
        [
            read
            for read, group in zip(program.reads[node], own, strict=True)
            if read >= 0 and group not in at_home
        ]
        for program, node, own in zip(programs, nodes, groups, strict=True)
    )
    return first, second


def _moves_from_common(
    programs: tuple[ComparedProgram, ComparedProgram], reads: tuple[list[int], list[int]]
) -> set[int] | None:
    """Return the port's nodes that moved its operands out of the right values which the reference's
    are moved out of; None if something else is behind them.
    """
    reference, port = programs
    if len(reads[0]) != len(reads[1]):
        return None
    nodes: set[int] = set()
    for own, other in zip(*reads, strict=True):
        behind = moved_back(reference, [own])
        common = _groups(reference, (v for v in behind if reference.state[v] == RIGHT))

        def is_common(value: int, common: set[int] = common) -> bool:
            return bool(port.state[value] == RIGHT) and int(port.side.group[value]) in common

        def goes_on(value: int, is_common: Callable[[int], bool] = is_common) -> bool:
            return is_moved(port, value) and not is_common(value)

        moved = made_from(port, [other], goes_on)
        if not all(goes_on(value) or is_common(value) for value in moved):
            return None
        nodes |= {port.maker[value] for value in moved if goes_on(value)}
    return nodes


def _made_alike(
    programs: tuple[ComparedProgram, ComparedProgram], reads: tuple[list[int], list[int]]
) -> frozenset[int]:
    """Return the port's nodes that make its operands by the reference's operations."""
    makers = [
        [program.maker[read] for read in own] for program, own in zip(programs, reads, strict=True)
    ]
    return frozenset(
        other
        for own, other in zip(*makers, strict=False)
        if min(own, other) >= 0 and programs[0].family(own) == programs[1].family(other)
    )


def _makers_of_vague(program: ComparedProgram, reads: Iterable[int]) -> frozenset[int]:
    """Return the nodes that make what says too little of some values, back to what says more."""
    is_informed = program.is_informed
    vague = (read for read in reads if not is_informed[read])
    behind = made_from(program, vague, lambda value: not is_informed[value])
    return frozenset(
        program.maker[value]
        for value in behind
        if program.maker[value] >= 0 and not is_informed[value]
    )


def _made_right(program: ComparedProgram, reads: Iterable[int]) -> list[int]:
    """Return the values that a node made and that are right."""
    return [read for read in reads if program.maker[read] >= 0 and program.state[read] == RIGHT]


def _reordered_leaves(program: ComparedProgram, node: int) -> frozenset[int]:
    """Return the leaves that a node reads, if moved, with right numbers in another order."""
    reads = [read for read in program.reads[node] if read >= 0]
    moved = moved_back(program, reads)
    return frozenset(
        value
        for value in moved
        if program.maker[value] < 0
        and program.state[value] != RIGHT
        and program.same_numbers[value] >= 0
    )


def _wrong_leaves_behind(program: ComparedProgram, reads: Iterable[int]) -> frozenset[int]:
    """Return the wrong leaves behind those of some values, and of what these were moved from, that
    are not wrong.
    """
    moved = moved_back(program, (read for read in reads if read >= 0))
    not_wrong = {value for value in moved if program.state[value] != WRONG}
    behind = made_from(
        program, not_wrong, lambda value: value in not_wrong or program.state[value] != RIGHT
    )
    return frozenset(
        value for value in behind if program.maker[value] < 0 and program.state[value] == WRONG
    )


def _strange_leaves_behind(
    comparison: GraphComparison, own: Iterable[int], other: Iterable[int]
) -> frozenset[int]:
    """Return the leaves behind some values of the port that are not behind those of the reference,
    and may be in the place of others that are.

    Args:
        own, other: Values of the reference and of the port.
    """
    reference, port = comparison.programs
    known = made_from(reference, own, lambda value: True)
    known_groups = _groups(reference, known)
    _, sources = before_moves(port, other)

    def is_known(value: int) -> bool:
        is_right = port.state[value] == RIGHT and port.is_informed[value]
        return bool(is_right) and int(port.side.group[value]) in known_groups

    behind = made_from(port, sources, lambda value: value in sources or not is_known(value))
    strange = {value for value in behind if port.maker[value] < 0 and not is_known(value)}
    groups = _groups(port, behind)
    rivals = {
        value
        for value in known
        if reference.maker[value] < 0 and int(reference.side.group[value]) not in groups
    }
    met = _groups(reference, _read_with(reference, made_with(reference, rivals)))
    all_strange = made_with(port, strange)
    # positions and lengths of another batch are never those of the reference
    return frozenset(
        leaf
        for leaf in strange
        if (port.is_informed[leaf] or not comparison.has_rows)
        and not _is_at_home(comparison.programs, leaf)
        and not _is_right_beside_others(port, made_with(port, [leaf]), all_strange, met)
    )


def _read_with(program: ComparedProgram, values: Set[int]) -> set[int]:
    """Return what is read together with some values."""
    nodes = {node for value in values for node in program.readers[value]}
    return {read for node in nodes for read in program.reads[node] if read >= 0} - values


def _is_right_beside_others(
    program: ComparedProgram, made: Set[int], strange: Set[int], met: Set[int]
) -> bool:
    """Return whether what is made from a leaf is right together with a value that its rivals never
    meet in the other program.

    Args:
        made: What is made from the leaf.
        strange: What is made from leaves that may be in the place of others, too.
        met: The groups of what the rivals meet.
    """
    is_sure = (program.state == RIGHT) & program.is_informed
    return any(
        is_sure[program.makes[node]].all()
        and any(
            read >= 0
            and is_sure[read]
            and read not in strange
            and int(program.side.group[read]) not in met
            for read in program.reads[node]
        )
        for node in {node for value in made for node in program.readers[value]}
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
