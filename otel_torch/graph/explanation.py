"""What differs between the two programs at a fault, as data: no words, no names that it knows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from typing import Any, Literal

import numpy as np

from otel_torch.graph.equality import REORDERED, TERM
from otel_torch.graph.graph import MEAN, Graph
from otel_torch.graph.states import (
    RIGHT,
    WRONG,
    ComparedProgram,
    is_given,
    is_given_vector,
    moved_back,
)

Kind = Literal[
    "arguments",  # the same operation with other arguments
    "operation",  # another operation on the same operands
    "exchanged",  # the same operands in another order
    "operand",  # one operand is another value
    "missing",  # the port reads less than the reference
    "extra",  # the port reads more
    "order",  # the same numbers in another order
    "rows",  # the port takes other rows of a table; reference and port: which
    "features",  # one operand has its features in another order, and what scales or shifts them not
    "cast",  # a change of dtype that the other one does not make
    "rounded",  # the port alone rounds a value to a coarser dtype
    "random",  # both draw numbers
    "leaf",  # a parameter, buffer, input or constant has another content
    "end",  # the programs return other values of those that both compute
    "other",  # none of these alone
]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What differs.

    Attributes:
        kind: The difference, if it is a simple one.
        reference, port: What stands on each side: the differing arguments, names of operations,
            or values (numbers) that only one side reads.
        operation: What has these arguments or reads these values; empty for other kinds.
        nodes: Two nodes of the regions, other than their first, that read right values, and between
            which the difference is; None if it is between others, or of whole regions.
    """

    kind: Kind
    reference: tuple[Any, ...] = field(default=())
    port: tuple[Any, ...] = field(default=())
    operation: str = ""
    nodes: tuple[int, int] | None = None


# operations whose operands may come in any order
_COMMUTATIVE = frozenset(("add", "mul", "maximum", "minimum", "eq", "ne"))
# a product of matrices, which torch computes by one of these as shapes and a bias ask for
_PRODUCT = "mm"
_PRODUCTS = frozenset((_PRODUCT, "bmm", "addmm", "baddbmm", "addbmm"))


def explain(
    reference: ComparedProgram,
    port: ComparedProgram,
    regions: tuple[list[int], list[int]],
    sources: tuple[int | None, int | None],
) -> Explanation:
    """Compare the regions of a fault.

    Args:
        reference, port: Both programs.
        regions: The nodes of each region, in the order of execution.
        sources: Where each region begins to be wrong: a node, or a leaf as -1 - value.
    """
    programs = reference, port
    own, other = sources
    if own is not None and other is not None and own < 0 and other < 0:
        is_order = port.side.relation[-1 - other] == REORDERED
        return Explanation("order" if is_order else "leaf", (-1 - own,), (-1 - other,))
    if all(p.graph.nodes.random[region].any() for p, region in zip(programs, regions, strict=True)):
        return Explanation("random", _names(reference, regions[0]), _names(port, regions[1]))
    if own is not None and other is not None and own >= 0 and other >= 0:
        simple = _compare_nodes(programs, own, other)
        if simple is not None:
            return simple
    return _compare_regions(programs, regions)


def _compare_nodes(
    programs: tuple[ComparedProgram, ComparedProgram], own: int, other: int
) -> Explanation | None:
    """Return what differs between two nodes that should do the same; None if that is not simple."""
    reference, port = programs
    operands = reference.operands(own), port.operands(other)
    name = _names(reference, [own])[0]
    features = _features_in_another_order(programs, own, other)
    if features is not None:
        return Explanation("features", features[:1], features[1:], name)
    is_same = Counter(operands[0]) == Counter(operands[1])
    is_other = reference.operation[own] != port.operation[other]
    if is_other and reference.family(own) == port.family(other) and operands[0] == operands[1]:
        return _differing_arguments(programs, own, other, name)
    if is_other:
        is_known = not operands[0] or any(group != -1 for group in operands[0])
        moves = (p.graph.nodes.moves[n] for p, n in zip(programs, (own, other), strict=True))
        if is_same and is_known and not any(moves):
            return Explanation("operation", _names(reference, [own]), _names(port, [other]))
        return None
    has_others = reference.argument[own] != port.argument[other]
    has_other_size = _size_made(reference, own) != _size_made(port, other)
    if _read_others(*operands) and (has_others or has_other_size):
        return None
    if has_others:
        arguments = _differing_arguments(programs, own, other, name)
        if arguments is not None and _reorders(port, other):
            return replace(arguments, kind="order")
        return arguments
    if operands[0] == operands[1]:
        return None
    if is_same and reference.family(own)[-1] in _COMMUTATIVE:
        return None
    return Explanation(
        "exchanged" if is_same else "operand",
        _values_only(reference, own, operands[1]),
        _values_only(port, other, operands[0]),
        name,
    )


def _read_others(reference: Sequence[int], port: Sequence[int]) -> bool:
    """Return whether two nodes read right values, and none of these in common."""
    first, second = set(reference) - {-1}, set(port) - {-1}
    return bool(first and second and first.isdisjoint(second))


def _size_made(program: ComparedProgram, node: int) -> int:
    return int(program.graph.values.numel[program.makes[node]].sum())


def _features_in_another_order(
    programs: tuple[ComparedProgram, ComparedProgram], own: int, other: int
) -> tuple[int, int] | None:
    """Return what both nodes read in one order, as the reference has it, and what the port's reads
    in another order than the reference's does, if one of them is a gain or a bias for the other.
    """
    reference, port = programs
    if reference.family(own) != port.family(other):
        return None
    values = dict(zip(reference.operands(own), reference.reads[own], strict=True))
    common = {
        read: values[group]
        for read, group in zip(port.reads[other], port.operands(other), strict=True)
        if group != -1 and group in values
    }
    behind = moved_back(reference, reference.reads[own])
    moved = [
        read
        for read in port.reads[other]
        if read >= 0 and port.side.relation[read] == REORDERED and port.side.partner[read] in behind
    ]
    pairs = [
        (kept, read)
        for kept, read in product(common, moved)
        if is_given_vector(port, kept) != is_given_vector(port, read)
    ]
    # a bias belongs to the weight, and not to what is multiplied with that
    pairs.sort(key=lambda pair: not all(is_given(port, value) for value in pair))
    return next(((common[kept], read) for kept, read in pairs), None)


def _reads_right(program: ComparedProgram, node: int) -> bool:
    """Return whether a node reads right values alone; a term of one may be what is wrong."""
    is_right = all(program.state[value] == RIGHT for value in program.reads[node])
    return is_right and TERM not in program.relations(node)


def _compare_regions(
    programs: tuple[ComparedProgram, ComparedProgram], regions: tuple[list[int], list[int]]
) -> Explanation:
    reference, port = programs
    only = _without_common(programs, regions)
    if not all(regions):
        only = _without_computed(programs, only)
    if not any(only):
        return Explanation("other")
    for own in only[0]:
        for other in only[1]:
            if _read_the_same(programs, own, other):
                simple = _compare_nodes(programs, own, other)
                if simple is not None and all(map(_reads_right, programs, (own, other))):
                    return replace(simple, nodes=(own, other))
                # behind wrong values other arguments may be a legal way to write the same
                if simple is not None and simple.kind != "arguments":
                    return simple
    names = _names(reference, only[0]), _names(port, only[1])
    nodes = [(p.graph.nodes, node) for p, side in zip(programs, only, strict=True) for node in side]
    if all(_reorders(p, node) for p, side in zip(programs, regions, strict=True) for node in side):
        return Explanation("order", *names)
    read = [_right_groups(p, nodes) for p, nodes in zip(programs, regions, strict=True)]
    # a weight that has no counterpart may be what the other program reads in another form
    is_less = read[1] < read[0] and not _reads_unknown(port, regions[1])
    if is_less and (more := read[0] - read[1] - _read_elsewhere(port)):
        return Explanation("missing", _names(reference, _readers(reference, only[0], more)))
    is_more = read[0] < read[1] and not _reads_unknown(reference, regions[0])
    if is_more and (more := read[1] - read[0] - _read_elsewhere(reference)):
        return Explanation("extra", (), _names(port, _readers(port, only[1], more)))
    if any(table.casts[node] for table, node in nodes):
        return Explanation("cast", *names)
    if set(names[0]) == set(names[1]) or _compute_alike(programs, only, read):
        return _compare_reads(programs, regions, read)
    return Explanation("operation", *names)


def _compute_alike(
    programs: tuple[ComparedProgram, ComparedProgram],
    nodes: tuple[list[int], list[int]],
    read: Sequence[set[int]],
) -> bool:
    """Return whether two regions do the same but for moves, each with one right value that the
    other one does not read.
    """
    if len(read[0] - read[1]) != 1 or len(read[1] - read[0]) != 1:
        return False
    first, second = (
        {
            _PRODUCT if name in _PRODUCTS else name
            for node in side
            if not program.graph.nodes.moves[node]
            for name in [program.family(node)[-1]]
        }
        for program, side in zip(programs, nodes, strict=True)
    )
    return first == second


def _compare_reads(
    programs: tuple[ComparedProgram, ComparedProgram],
    regions: tuple[list[int], list[int]],
    read: Sequence[set[int]],
) -> Explanation:
    """Return which right value each of two regions reads first that the other one does not."""
    first = _first_reading(programs[0], regions[0], read[0] - read[1])
    second = _first_reading(programs[1], regions[1], read[1] - read[0])
    if first is None or second is None:
        return Explanation("other")
    name = _names(programs[0], [first[0]])[0]
    nodes = first[0], second[0]
    is_first = all(map(_reads_right, programs, nodes))
    return Explanation("operand", first[1:], second[1:], name, nodes if is_first else None)


def _first_reading(
    program: ComparedProgram, nodes: list[int], groups: set[int]
) -> tuple[int, int] | None:
    """Return the first node that reads a right value of some groups, and that value."""
    for node in nodes:
        for value, group in zip(program.reads[node], program.operands(node), strict=True):
            if group in groups:
                return node, value
    return None


def _read_the_same(programs: tuple[ComparedProgram, ComparedProgram], own: int, other: int) -> bool:
    """Return whether two nodes are one operation, and have a right operand in common."""
    reference, port = programs
    common = set(reference.operands(own)) & set(port.operands(other))
    return reference.operation[own] == port.operation[other] and bool(common - {-1})


def _read_elsewhere(program: ComparedProgram) -> set[int]:
    """Return the groups of the right values of which a program makes something wrong."""
    graph = program.graph
    makers, reads = graph.values.maker[program.state == WRONG], graph.nodes.reads
    read = reads.content[np.isin(reads.owners(), makers) & (reads.content >= 0)]
    groups = program.side.group[read[program.state[read] == RIGHT]]
    return set(groups.tolist())


def _reads_unknown(program: ComparedProgram, nodes: list[int]) -> bool:
    """Return whether nodes read what no operation has computed and the other program has not."""
    reads = {read for node in nodes for read in program.reads[node] if read >= 0}
    return any(program.state[read] != RIGHT and is_given(program, read) for read in reads)


def _readers(program: ComparedProgram, nodes: list[int], groups: set[int]) -> list[int]:
    """Return the nodes that read a right value of some groups; all if none does."""
    chosen = [node for node in nodes if not groups.isdisjoint(program.operands(node))]
    return chosen or nodes


def _names(program: ComparedProgram, nodes: list[int]) -> tuple[str, ...]:
    graph = program.graph
    return tuple(graph.operations[graph.nodes.operation[node]] for node in nodes)


def _without_common(
    programs: tuple[ComparedProgram, ComparedProgram], regions: tuple[list[int], list[int]]
) -> tuple[list[int], list[int]]:
    """Drop nodes that do the same to the same right values on both sides."""
    keys = [
        [p.signature(node) for node in region] for p, region in zip(programs, regions, strict=True)
    ]
    common = Counter(keys[0]) & Counter(keys[1])
    rest: tuple[list[int], list[int]] = ([], [])
    for side in (0, 1):
        left = common.copy()
        for node, key in zip(regions[side], keys[side], strict=True):
            if left[key]:
                left[key] -= 1
            else:
                rest[side].append(node)
    return rest


def _without_computed(
    programs: tuple[ComparedProgram, ComparedProgram], nodes: tuple[list[int], list[int]]
) -> tuple[list[int], list[int]]:
    """Drop operations that the other program makes wrong values by elsewhere: it has such code."""
    reference, port = programs
    wrong = [_families_of_wrong(program) for program in programs]
    return (
        [node for node in nodes[0] if reference.family(node) not in wrong[1]],
        [node for node in nodes[1] if port.family(node) not in wrong[0]],
    )


def _families_of_wrong(program: ComparedProgram) -> list[list[str]]:
    """Return the families of the operations that make values that are not right."""
    makers = np.unique(program.graph.values.maker[program.state != RIGHT])
    own = makers[(makers >= 0) & (makers < program.own_nodes)]
    _, examples = np.unique(program.graph.nodes.operation[own], return_index=True)
    return [program.family(node) for node in own[examples].tolist()]


def _reorders(program: ComparedProgram, node: int) -> bool:
    """Return whether a node moves all that it reads, and leaves nothing out."""
    numel = program.graph.values.numel
    read, made = program.reads[node], program.makes[node]
    is_whole = sum(int(numel[value]) for value in read if value >= 0) == sum(numel[made])
    return bool(program.graph.nodes.moves[node] and is_whole)


def _right_groups(program: ComparedProgram, nodes: list[int]) -> set[int]:
    return {group for node in nodes for group in program.operands(node)} - {-1}


def _values_only(program: ComparedProgram, node: int, others: tuple[int, ...]) -> tuple[int, ...]:
    groups = program.operands(node)
    if Counter(groups) == Counter(others):
        return tuple(program.reads[node])
    return tuple(
        read for read, group in zip(program.reads[node], groups, strict=True) if group not in others
    )


# an argument that only the other side has
_ABSENT = object()
# significant digits of a number in float32
_DIGITS = 6


def _differing_arguments(
    programs: tuple[ComparedProgram, ComparedProgram], own: int, other: int, name: str
) -> Explanation | None:
    """Return the arguments that differ, in order; None if only a scalar is a tensor on a side."""
    lists = list(map(_arguments, programs, (own, other)))
    if any(type(items) is not list for items in lists):
        return Explanation("arguments", (lists[0],), (lists[1],), name)
    pairs = [(a, b) for a, b in zip_longest(*lists, fillvalue=_ABSENT) if not _is_same(a, b)]
    if not pairs:
        return None
    reference, port = (
        tuple(item for item in side if item is not _ABSENT) for side in zip(*pairs, strict=True)
    )
    return Explanation("arguments", reference, port, name)


def _arguments(program: ComparedProgram, node: int) -> Any:
    """Return the arguments of a node, with the number of a tensor that holds no more than that."""
    graph, reads = program.graph, program.reads[node]
    arguments = json.loads(graph.arguments[graph.nodes.argument[node]])
    # arguments that are left out are null, as tensors are
    if type(arguments) is not list or arguments.count(None) != len(reads):
        return arguments
    values = iter(reads)
    return [_number(graph, next(values)) if item is None else item for item in arguments]


def _number(graph: Graph, value: int) -> float | None:
    if value < 0 or graph.values.numel[value] != 1:
        return None
    number = float(graph.values.statistics[value, MEAN])
    return float(f"{number:.{_DIGITS}g}") if np.isfinite(number) else None


def _is_same(first: Any, second: Any) -> bool:
    numbers = [x for x in (first, second) if isinstance(x, int | float) and type(x) is not bool]
    if len(numbers) == 2:
        return math.isclose(*numbers, rel_tol=10.0**-_DIGITS)
    return bool(first == second)
