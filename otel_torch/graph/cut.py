"""Where a fault ends: the values to exchange so that nothing behind it knows of it.

If everything behind the exchange matches, the fault is in what comes before it; and if all of that
was computed from right values, it is there and nowhere else.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from otel_torch.graph.blame import Origin
from otel_torch.graph.compare import FaultPlace, GraphComparison, GraphFault
from otel_torch.graph.counterparts import (
    Counterpart,
    find_counterparts,
    is_beside,
    root_of,
    with_parts,
)
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.misplaced import Misplaced, find_misplaced, misplaced_rows
from otel_torch.graph.row_counterparts import RowCounterpart, find_row_counterparts
from otel_torch.graph.states import (
    DOUBTFUL,
    RIGHT,
    WRONG,
    ComparedProgram,
    Programs,
    is_moved,
    is_open,
    made_with,
    reads_wrong,
)

# Lines that a person reads at once: a fault is proven to be among those between right values and
# the exchange. Of 40 faults in eight other architectures that are 33, with 12 lines 28.
CLOSE_LINES = 16
# what an exchange can heal, the surest last: code that is too much to read, few lines around the
# fault, or the fault alone
FAR, CLOSE, SOLE = range(3)

AnyCounterpart = Counterpart | RowCounterpart


@dataclass(frozen=True, slots=True)
class Cut:
    """The exchange that heals a fault.

    Attributes:
        exchanges: What to put in which place.
        region: The port's nodes of which these values are made, back to right values.
        lines: How many lines of code these nodes have.
        others: Other wrong places from which they are made as well: nodes, which are in the region,
            or as -1 - value leaves, and rows that may be in the place of others. The exchange heals
            these as well.
        is_leaf: The fault is a weight or an input, which is exchanged itself.
        is_code: The fault is a line of the port, neither a leaf nor something that it leaves out.
    """

    exchanges: tuple[AnyCounterpart, ...]
    region: tuple[int, ...]
    lines: int
    others: tuple[int, ...]
    is_leaf: bool = False
    is_code: bool = False

    @property
    def closeness(self) -> int:
        """Return FAR, CLOSE or SOLE."""
        if not (self.is_leaf or self.region) or self.lines > CLOSE_LINES:
            return FAR
        if not self.others:
            return SOLE
        has_leaves = any(origin < 0 for origin in self.others)
        return CLOSE if self.is_code and not has_leaves else FAR


def counterparts_of(comparison: GraphComparison) -> Mapping[int, AnyCounterpart]:
    """Return what each value of the port that is not right should be, where that is known.

    Values that only parts of fused operations have are left out, and those that a trial has put
    there.
    """
    if comparison.has_rows:
        return find_row_counterparts(comparison.programs)
    graphs = comparison.graphs
    ends = [
        (int(graphs[0].ends[pair.reference]), int(graphs[1].ends[pair.port]))
        for pair in comparison.ends
        if not pair.is_right
    ]
    reference, port = comparison.programs
    return {
        value: counterpart
        for value, counterpart in find_counterparts(comparison.programs, ends).items()
        if not (is_beside(reference, counterpart.reference) or is_beside(port, value))
        and not port.is_put[value]
    }


def find_cut(
    comparison: GraphComparison,
    fault: GraphFault,
    counterparts: Mapping[int, AnyCounterpart],
    suspects: Set[Origin] | None = None,
) -> Cut | None:
    """Return the values to exchange behind a fault; None where the programs do not meet again.

    Args:
        comparison: Of which `fault` is one.
        counterparts: Of the port's values (`counterparts_of`).
        suspects: What of the port may be at fault at all, if a trial has shown it.
    """
    reference, port = comparison.programs
    leaves = _leaves(comparison, fault)
    if leaves is not None:
        return Cut((leaves,), (), 0, (), is_leaf=True)
    begins = begins_of(port, fault.port)
    if fault.explanation.kind == "features":
        own_order = _of_one_size(port, begins)
        counterparts = {root: own for root, own in counterparts.items() if root not in own_order}
    ports_of: dict[int, list[int]] = defaultdict(list)
    for root, own in counterparts.items():
        for value in own.references:
            ports_of[root_of(reference, value)].append(root)
    first = _first_of(reference, begins_of(reference, fault.reference), ports_of.keys())
    values = _first_of(port, begins, counterparts.keys())
    # what the port leaves out shows in the reference alone
    left_out = (root for value in first for root in ports_of[value])
    values = list(dict.fromkeys([*values, *left_out]))
    values += _in_other_processes((reference, port), values, counterparts, ports_of)
    if not values:
        return None
    is_suspect = _suspicion(comparison, fault, suspects)
    nodes, others = _what_makes(port, values, begins, is_suspect)
    misplaced = _all_misplaced(comparison, fault, others)
    unclear = misplaced.leaves.union(misplaced_rows(comparison, fault))
    others += tuple(-1 - value for value in sorted(unclear))
    lines = {int(port.graph.nodes.line[node]) for node in _named(fault.port)}
    elsewhere = tuple(origin for origin in others if _line(port, origin) not in lines)
    # of several places each may be the fault, and so may what is in doubt
    doubtful = _computed_in_doubt(port, nodes) if elsewhere else set()
    wrong = _wrong_because_of(port, nodes, values, begins, doubtful.union(others))
    region = {*wrong, *misplaced.nodes}
    region |= _moves_in_doubt(port, nodes, region)
    length = len({_line(port, node) for node in region})
    exchanges = tuple(counterparts[value] for value in values)
    is_code = fault.port is not None and fault.port.leaf == NOTHING
    return Cut(exchanges, tuple(sorted(region)), length, elsewhere, is_code=is_code)


def _of_one_size(program: ComparedProgram, values: Iterable[int]) -> set[int]:
    """Return values and all that is made from them by moves, or of the same size: whatever order
    the program has given to their features, it is theirs.
    """
    numel = program.graph.values.numel

    def goes_on(value: int, made: int) -> bool:
        return is_moved(program, made) or bool(numel[made] == numel[value])

    return made_with(program, values, goes_on)


def _all_misplaced(
    comparison: GraphComparison, fault: GraphFault, others: tuple[int, ...]
) -> Misplaced:
    """Return what brought operands into the places of a fault and of others, as far as these are
    faults as well.
    """
    port = comparison.programs[1]
    found = find_misplaced(comparison, fault)
    for another in comparison.faults:
        if another is fault or not another.is_certain:
            continue
        if any(origin_of(port, value) in others for value in begins_of(port, another.port)):
            more = find_misplaced(comparison, another)
            found = Misplaced(found.nodes | more.nodes, found.leaves | more.leaves)
    return found


def _suspicion(
    comparison: GraphComparison, fault: GraphFault, suspects: Set[Origin] | None
) -> Callable[[int], bool]:
    """Return what tells whether the origin of a value of the port may be at fault."""
    port = comparison.programs[1]
    if suspects is not None:
        return lambda value: origin_of(port, value) in suspects
    accused = {
        value
        for another in comparison.faults
        if another is not fault and another.is_certain and None not in another.places
        for value in begins_of(port, another.port)
    }
    # a weight in another layout looks wrong, too: it has to be accused, or to lead to nothing right
    return lambda value: (
        value in accused or _is_made_wrong(port, value) or _is_wrong_leaf(port, value)
    )


def _is_wrong_leaf(program: ComparedProgram, value: int) -> bool:
    """Return whether a leaf is wrong, and nothing right is made from it."""
    if program.maker[value] >= 0 or program.state[value] != WRONG:
        return False
    made = made_with(program, [value])
    return not any(program.state[own] == RIGHT and program.is_informed[own] for own in made)


def _is_made_wrong(program: ComparedProgram, value: int) -> bool:
    """Return whether a node makes a wrong value of right ones."""
    node = program.maker[value]
    return bool(program.state[value] == WRONG and node >= 0 and not reads_wrong(program, node))


def _leaves(comparison: GraphComparison, fault: GraphFault) -> Counterpart | None:
    """Return a weight or an input at fault and what it should be, if they are of one size."""
    if fault.reference is None or fault.port is None or not fault.begins_at_leaf:
        return None
    own, other = fault.reference.leaf, fault.port.leaf
    reference, port = (graph.values.numel for graph in comparison.graphs)
    sizes = {int(reference[value]) for value in with_parts(comparison.programs[0], own)}
    return Counterpart(own, other) if port[other] in sizes else None


def _in_other_processes(
    programs: Programs,
    values: list[int],
    counterparts: Mapping[int, AnyCounterpart],
    ports_of: Mapping[int, list[int]],
) -> list[int]:
    """Return what other processes of the port have of what some of its values should be."""
    reference, port = programs
    process = port.graph.values.process
    return [
        root
        for value in values
        for own in counterparts[value].references
        for root in ports_of[root_of(reference, own)]
        if process[root] != process[value] and root not in values
    ]


def _named(place: FaultPlace | None) -> tuple[int, ...]:
    return () if place is None else (*place.nodes, *place.region)


def _line(program: ComparedProgram, origin: int) -> int:
    """Return the line of a node, or of a leaf as -1 - value."""
    graph = program.graph
    return int(graph.nodes.line[origin] if origin >= 0 else graph.values.line[-1 - origin])


# an operation, and the line that runs it
OperationLine = tuple[str, tuple[Any, ...] | None]


def operation_lines(
    comparison: GraphComparison, fault: GraphFault
) -> tuple[set[OperationLine], set[OperationLine]]:
    """Return with which operations of which lines a fault begins in each program, if not leaves."""
    first, second = (
        set()
        if place is None or place.leaf != NOTHING
        else {operation_line(program, place.nodes[0])}
        for program, place in zip(comparison.programs, fault.places, strict=True)
    )
    return first, second


def operation_line(program: ComparedProgram, node: int) -> OperationLine:
    """Return the operation of a node, and its line."""
    graph = program.graph
    line = int(graph.nodes.line[node])
    operation = graph.operations[graph.nodes.operation[node]]
    return operation, graph.lines[line] if line >= 0 else None


def with_repetitions(
    comparison: GraphComparison,
    fault: GraphFault,
    lines: tuple[Set[OperationLine], Set[OperationLine]],
    count: int | None,
    may_repeat: tuple[Callable[[int], bool], Callable[[int], bool]],
) -> GraphFault:
    """Return a fault with the first places in which it and others repeat: layers do.

    Args:
        lines: Of each program, with which the repeated faults begin.
        count: Of places in each program; None for all.
        may_repeat: Whether a node of each program may be such a place.
    """
    places = [
        place
        if place is None or place.leaf != NOTHING
        else replace(
            place,
            nodes=_with_more(place.nodes, filter(may, _repeats(program, own, values)), count),
        )
        for program, place, own, values, may in zip(
            comparison.programs,
            fault.places,
            lines,
            comparison.open_values,
            may_repeat,
            strict=True,
        )
    ]
    return replace(fault, reference=places[0], port=places[1])


def _with_more(nodes: Sequence[int], repeated: Iterable[int], count: int | None) -> tuple[int, ...]:
    """Return the first nodes of a fault, filled up to a count with those that repeat them."""
    more = (node for node in repeated if node not in nodes)
    return tuple(islice(chain(nodes, more), count)) or tuple(nodes)


def _repeats(
    program: ComparedProgram, lines: Set[OperationLine], values: Set[int]
) -> Iterator[int]:
    """Yield the nodes of some lines and operations that make any of some values."""
    for node, makes in enumerate(program.makes):
        if not values.isdisjoint(makes) and operation_line(program, node) in lines:
            yield node


def origin_of(program: ComparedProgram, value: int) -> Origin:
    """Return what makes a value: a node, or the leaf itself."""
    node = program.maker[value]
    return node if node >= 0 else -1 - value


def moved_from(program: ComparedProgram, values: Iterable[int]) -> set[int]:
    """Return values and all that only rearranges them."""
    moved = set(values)
    for node in np.flatnonzero(program.graph.nodes.moves).tolist():
        if moved.issuperset(program.reads[node]) and program.reads[node]:
            moved.update(program.makes[node])
    return moved


def begins_of(program: ComparedProgram, place: FaultPlace | None) -> set[int]:
    """Return the values that a fault begins with: what it names, and what its region makes of
    right values alone.
    """
    if place is None:
        return set()
    if place.leaf != NOTHING:
        return {place.leaf}
    first = [node for node in place.region if not reads_wrong(program, node)]
    return {made for node in (*place.nodes, *first) for made in program.makes[node]}


def _first_of(program: ComparedProgram, begins: set[int], known: Set[int]) -> list[int]:
    """Return the first roots of which something is known on every way from some values on."""
    waiting = [value for value in begins if is_open(program, value)]
    seen = set(waiting)
    heapq.heapify(waiting)
    first: dict[int, None] = {}
    while waiting:
        value = heapq.heappop(waiting)
        root = root_of(program, value)
        if root in known:
            first[root] = None
            continue
        for node in program.readers[value]:
            for made in program.makes[node]:
                if made not in seen and is_open(program, made):
                    seen.add(made)
                    heapq.heappush(waiting, made)
    return list(first)


def _what_makes(
    program: ComparedProgram,
    values: list[int],
    begins: set[int],
    is_suspect: Callable[[int], bool],
) -> tuple[set[int], tuple[int, ...]]:
    """Return the nodes that make some values of right ones, and other wrong places among them.

    Args:
        begins: What the fault begins with.
        is_suspect: Returns whether the origin of a value may be at fault.
    """
    nodes: set[int] = set()
    others: set[int] = set()
    waiting, seen = list(values), set(values)
    while waiting:
        value = waiting.pop()
        node = program.maker[value]
        reads = [] if node < 0 else [read for read in program.reads[node] if read >= 0]
        before = [read for read in reads if is_open(program, read)]
        if value not in begins and is_suspect(value):
            others.add(origin_of(program, value))
        if node < 0:
            continue
        nodes.add(node)
        waiting += (read for read in before if read not in seen)
        seen.update(before)
    return nodes, tuple(sorted(others))


def _computed_in_doubt(program: ComparedProgram, nodes: set[int]) -> set[int]:
    """Return those of some nodes that compute a value which is neither right nor wrong."""
    is_moving, state = program.graph.nodes.moves, program.state
    return {
        node
        for node in nodes
        if not is_moving[node] and any(state[made] == DOUBTFUL for made in program.makes[node])
    }


def _moves_in_doubt(program: ComparedProgram, nodes: set[int], region: set[int]) -> set[int]:
    """Return those of some nodes that moved what a region reads, maybe to a wrong place."""
    is_moving, state = program.graph.nodes.moves, program.state
    reads = {read for node in region for read in program.reads[node]}
    moves: set[int] = set()
    for node in sorted(nodes - region, reverse=True):
        makes = reads.intersection(program.makes[node])
        if is_moving[node] and any(state[made] == DOUBTFUL for made in makes):
            moves.add(node)
            reads.update(program.reads[node])
    return moves


def _wrong_because_of(
    program: ComparedProgram,
    nodes: set[int],
    exchanged: list[int],
    begins: set[int],
    others: Set[int],
) -> Iterator[int]:
    """Yield those of some nodes to which something wrong leads that was not exchanged."""
    wrong = begins | {-1 - origin for origin in others if origin < 0}
    right = set(exchanged)
    for node in sorted(nodes):
        makes = program.makes[node]
        begins_here = node in others or not begins.isdisjoint(makes)
        if begins_here or not wrong.isdisjoint(program.reads[node]):
            yield node
            wrong.update(made for made in makes if made not in right)
