"""Which value of the reference each wrong value of the port should be.

Behind a fault no value is equal, but the two programs do the same again: they read the wrong values
together with the same right ones (a weight, a mask) and by the same operations. From these places
counterparts are followed, backwards to where a fault ends and forwards to the ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from otel_torch.graph.equality import MOVED
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.shapes import have_same_order
from otel_torch.graph.states import RIGHT, ComparedProgram, Programs, viewed_by


@dataclass(frozen=True, slots=True)
class Counterpart:
    """What to put in a value's place: a value of the reference, or a part of it as `Layouts` has
    it, in that of one of the port.
    """

    reference: int
    port: int

    @property
    def references(self) -> tuple[int, ...]:
        """The value of the reference, as one of several."""
        return (self.reference,)


def find_counterparts(
    programs: Programs, ends: Iterable[tuple[int, int]]
) -> dict[int, Counterpart]:
    """Return what each value of the port that is not right should be, as far as that is known.

    Views stand for what they are views of (see `root_of`), unless these are laid out otherwise.
    Each process of the port does what the reference does, with the whole of its values or a part.

    Args:
        ends: Pairs of values that the programs return, of reference and port.
    """
    pairs = list(ends)
    found: dict[int, Counterpart] = {}
    for process in np.unique(programs[1].graph.values.process).tolist():
        found |= _counterparts_of(programs, pairs, process)
    return found


def _counterparts_of(
    programs: Programs, ends: Iterable[tuple[int, int]], process: int
) -> dict[int, Counterpart]:
    """Return what each value of one process of the port should be."""
    pairs = _Pairs(programs, process)
    # those that read all the same first, then those that do the same to one right value, then those
    # that use one weight: a program may add a bias in the product, or after it
    for keys in (_whole, _by_operation, _by_weight):
        for nodes in _alike(programs, keys, process):
            pairs.add_nodes(*nodes)
    for reference, port in ends:
        pairs.add(reference, port)
    for own, other in _alike(programs, _by_weights_alone, process):
        pairs.add(programs[0].makes[own][0], programs[1].makes[other][0])
    pairs.follow()
    return pairs.counterparts()


def root_of(program: ComparedProgram, value: int) -> int:
    """Return what a value that is not right is a view of, back to where it is right no more.

    The result of a fused operation is no view of what its parts compute beside the program.
    """
    for viewed in viewed_by(program, value):
        is_inside = is_beside(program, viewed) > is_beside(program, value)
        if program.state[viewed] == RIGHT or is_inside:
            break
        value = viewed
    return value


def with_parts(program: ComparedProgram, value: int) -> list[int]:
    """Return a value, and the parts that were recorded of it, as ranks may have them."""
    return [value, *program.parts.get(value, ())]


def is_beside(program: ComparedProgram, value: int) -> bool:
    """Return whether a part of a fused operation made a value: the program itself has none."""
    maker = program.maker[value]
    return maker >= 0 and bool(program.graph.nodes.inside[maker] != NOTHING)


def _outside(program: ComparedProgram, value: int) -> int:
    """Return a value that the program itself has in the place of one that only a part of a fused
    operation has: what it was moved from, or the result that was moved from it.
    """
    nodes = program.graph.nodes
    while is_beside(program, value):
        maker = program.maker[value]
        moved = [node for node in program.readers[value] if nodes.moves[node]]
        if nodes.moves[maker] and len(program.reads[maker]) == 1:
            value = program.reads[maker][0]
        elif moved and nodes.inside[moved[0]] == NOTHING:
            value = program.makes[moved[0]][0]
        else:
            break
    return value


def _maker(program: ComparedProgram, value: int) -> int:
    """Return the node that computed a value or what it is a part of, inside of a fused one too.

    One program may write out what the other one fuses, or have three weights in one.
    """
    while (node := program.maker[value]) >= 0 and program.graph.nodes.moves[node]:
        reads = program.reads[node]
        if len(reads) != 1 or reads[0] < 0 or program.state[reads[0]] == RIGHT:
            break
        value = reads[0]
    return node


class _Pairs:
    """Pairs of values, and what follows from them.

    Args:
        process: Of the port: values of its other processes are not paired.
    """

    def __init__(self, programs: Programs, process: int) -> None:
        self._programs, self._process = programs, process
        self.reference_of: dict[int, int] = {}
        self._port_of: dict[int, int] = {}
        self._new: deque[tuple[int, int]] = deque()
        self._read: dict[int, Counterpart] = {}  # by root of the port, as both programs read it

    def add(self, reference: int, port: int) -> None:
        """Pair two values, unless they are equal or one of them is paired already."""
        first, second = self._programs
        if reference < 0 or port < 0 or second.graph.values.process[port] != self._process:
            return
        if first.state[reference] == RIGHT and second.state[port] == RIGHT:
            return
        reference, port = _outside(first, reference), _outside(second, port)
        read = Counterpart(reference, port)
        reference, port = root_of(first, reference), root_of(second, port)
        if reference in self._port_of or port in self.reference_of:
            return
        numel = second.graph.values.numel[port]
        if not any(first.graph.values.numel[own] == numel for own in with_parts(first, reference)):
            return
        self._port_of[reference], self.reference_of[port] = port, reference
        self._read[port] = read
        self._new.append((reference, port))

    def add_nodes(self, reference: int, port: int) -> None:
        """Pair what two nodes read that is not the same right value, in order."""
        nodes = tuple(zip(self._programs, (reference, port), strict=True))
        groups = [program.operands(node) for program, node in nodes]
        common = (set(groups[0]) & set(groups[1])) - {NOTHING}
        reads = [
            [v for v, group in zip(program.reads[node], own, strict=True) if group not in common]
            for (program, node), own in zip(nodes, groups, strict=True)
        ]
        if len(reads[0]) == len(reads[1]):
            for values in zip(*reads, strict=True):
                self.add(*values)

    def follow(self) -> None:
        """Pair what paired values are made from, and what is made from them."""
        while self._new:
            reference, port = self._new.popleft()
            first, second = self._programs
            nearest = first.maker[reference], second.maker[port]
            furthest = _maker(first, reference), _maker(second, port)
            for makers in dict.fromkeys((nearest, furthest)):
                if min(makers) >= 0 and self._do_the_same(*makers):
                    self.add_nodes(*makers)
            readers = [
                _by_signature(program, value)
                for program, value in zip(self._programs, (reference, port), strict=True)
            ]
            for signature, nodes in readers[0].items():
                if len(nodes) == len(readers[1].get(signature, ())):
                    for own, other in zip(nodes, readers[1][signature], strict=True):
                        self._add_results(own, other)

    def counterparts(self) -> dict[int, Counterpart]:
        """Return what to put in the place of each root: in that of its view if only views agree."""
        found = {}
        for port, reference in self.reference_of.items():
            roots, views = Counterpart(reference, port), self._read[port]
            found[port] = views if self._only_views_agree(roots, views) else roots
        return found

    def _only_views_agree(self, roots: Counterpart, views: Counterpart) -> bool:
        """Return whether two values have an order of their own, and views of them the same.

        Views that only merge axes have the orders of what they merge.
        """
        first, second = (program.graph.values.shape for program in self._programs)
        if have_same_order(first[roots.reference], second[roots.port]):
            return False
        keep_order = have_same_order(
            first[roots.reference], first[views.reference]
        ) and have_same_order(second[roots.port], second[views.port])
        return first[views.reference] == second[views.port] and not keep_order

    def _do_the_same(self, reference: int, port: int) -> bool:
        first, second = self._programs
        return first.signature(reference) == second.signature(port)

    def _add_results(self, reference: int, port: int) -> None:
        """Pair what two nodes make that read nothing wrong but what is paired."""
        first, second = self._programs
        for own, other in zip(first.reads[reference], second.reads[port], strict=True):
            if other < 0 or (first.state[own] == RIGHT and second.state[other] == RIGHT):
                continue
            if self.reference_of.get(root_of(second, other)) != root_of(first, own):
                return
        for own, other in zip(first.makes[reference], second.makes[port], strict=False):
            self.add(own, other)


def _by_signature(program: ComparedProgram, root: int) -> dict[Hashable, list[int]]:
    """Return the nodes that read a value or a view of it, by what they do."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    waiting = [root]
    while waiting:
        value = waiting.pop()
        for node in program.readers[value]:
            views = [made for made in program.makes[node] if root_of(program, made) == root]
            if views:
                waiting += views
            else:
                found[program.signature(node)].append(node)
    return {signature: sorted(nodes) for signature, nodes in found.items()}


def _alike(
    programs: Programs,
    keys: Callable[[ComparedProgram, int], list[Hashable]],
    process: int,
) -> Iterator[tuple[int, int]]:
    """Yield nodes of the reference and of a process of the port that make wrong values and have a
    key in common.
    """
    by_key: tuple[dict[Hashable, list[int]], ...] = (defaultdict(list), defaultdict(list))
    processes = 0, process
    for program, nodes, own in zip(programs, by_key, processes, strict=True):
        is_own = (program.graph.values.process == own) & (program.state != RIGHT)
        for node, makes in enumerate(program.makes):
            if is_own[makes].any():
                for key in keys(program, node):
                    nodes[key].append(node)
    for same, references in by_key[0].items():
        ports = by_key[1].get(same, [])
        if len(references) == len(ports):
            yield from zip(references, ports, strict=True)


def _known(program: ComparedProgram, node: int) -> list[int]:
    """Return what a node reads that is right and identifies a place."""
    return [
        value
        for value in program.reads[node]
        if value >= 0 and program.state[value] == RIGHT and program.is_informed[value]
    ]


def _whole(program: ComparedProgram, node: int) -> list[Hashable]:
    return [program.signature(node)] if _known(program, node) else []


def _by_operation(program: ComparedProgram, node: int) -> list[Hashable]:
    operation, groups = program.operation[node], program.side.group
    return [(operation, int(groups[value])) for value in _known(program, node)]


def _by_weight(program: ComparedProgram, node: int) -> list[Hashable]:
    return [int(program.side.group[weight]) for weight in _weights(program, node)[:1]]


def _by_weights_alone(program: ComparedProgram, node: int) -> list[Hashable]:
    applied = weights_alone(program, node)
    return [] if applied is None else [frozenset(applied[0])]


def weights_alone(program: ComparedProgram, node: int) -> tuple[list[int], int] | None:
    """Return the groups of weights that a node applies to one value, the largest first, and that
    value; None where no weight is a matrix.

    It makes the same of it in any layout, by a convolution or as a product of windows. A scale says
    less: it may be applied before or after a sum.
    """
    kinds, values = program.graph.leaf_kinds, program.graph.values
    weights = [
        weight
        for weight in _weights(program, node)
        if values.leaf[weight] == NOTHING or kinds[values.leaf[weight]] != "input"
    ]
    shapes = values.shape
    has_matrix = any(sum(size > 1 for size in shapes[weight]) > 1 for weight in weights)
    if len(program.reads[node]) != len(weights) + 1 or not has_matrix:
        return None
    (value,) = (own for own in program.reads[node] if _weight_behind(program, own) not in weights)
    return [int(program.side.group[weight]) for weight in weights], value


def _weights(program: ComparedProgram, node: int) -> list[int]:
    """Return the right weights and inputs that a node reads in any layout, the largest first."""
    weights = [_weight_behind(program, value) for value in program.reads[node]]
    right = [
        weight
        for weight in weights
        if weight != NOTHING and program.state[weight] == RIGHT and program.is_informed[weight]
    ]
    return sorted(right, key=lambda weight: -program.graph.values.numel[weight])


def _weight_behind(program: ComparedProgram, value: int) -> int:
    """Return the weight that a value was moved from, which may be itself; NOTHING if it was made.

    What one program makes of several weights, the other one may have been given. By rows, what was
    made is a weight, too, if the other program has it as a whole: of tokens it has the rows.
    """
    groups, relation = program.side.group, program.side.relation
    while value >= 0 and (node := program.maker[value]) >= 0:
        if relation[value] >= MOVED and int(groups[value]) in program.weights:
            return value
        reads = program.reads[node]
        if not program.graph.nodes.moves[node] or len(reads) != 1:
            is_whole = program.graph.has_rows and relation[value] >= MOVED
            return value if is_whole else NOTHING
        value = reads[0]
    return value
