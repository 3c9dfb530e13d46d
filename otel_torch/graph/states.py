"""The state of each value beside the other program: right, doubtful or wrong.

Nobody is accused on a doubtful value: doubt only flows through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from otel_torch.graph.equality import (
    MOVED,
    NONE,
    PART,
    REORDERED,
    ROWS,
    TERM,
    Side,
    has_information,
)
from otel_torch.graph.error_model import (
    JUMP,
    MOST_ERROR,
    STATISTICS_ERROR,
    arriving_errors,
    rounded_to,
)
from otel_torch.graph.graph import MEAN, NOTHING, STD, Flags, Floats, Graph, Indices
from otel_torch.graph.shapes import have_same_order, without_ones

RIGHT, DOUBTFUL, WRONG = range(3)
STATE_NAMES = ("right", "doubtful", "wrong")


@dataclass(frozen=True, slots=True, eq=False)
class ComparedProgram:
    """One of the two programs, with what is known of its values.

    Attributes:
        graph: The program.
        state: RIGHT, DOUBTFUL or WRONG, per value.
        arriving: How far each value may be off by what it was made from, relative L2.
        is_informed: Which values can identify a place.
        is_put: Which values a trial has put in the place of the program's own.
        is_sure: Which values are right beyond their mean: the error is within the limit of what
            varies in them. Weights of a norm are all close to one.
        side: Which values of the other program they equal.
        same_numbers: Where both programs have the same numbers, though in parts or in another
            order, the group of the whole, or of the reference's value; -1 for others.
        operation, argument: Labels of nodes, numbered alike in both programs.
        readers: The nodes that read each value.
        reads, makes: Those of the nodes, as lists.
        parts: Of values that were cut for the comparison, the parts.
        terms: Values of several ranks that are right as terms of one sum.
        weights: Groups of the values that either program was given, and not as an input.
        own_nodes: How many nodes the program itself has; readings come after them.
    """

    graph: Graph
    state: Indices
    arriving: Floats
    is_informed: Flags
    is_put: Flags
    is_sure: Flags
    side: Side
    same_numbers: list[int]
    operation: list[int]
    argument: list[int]
    readers: list[list[int]]
    reads: list[list[int]]
    makes: list[list[int]]
    maker: list[int]
    parts: dict[int, list[int]]
    terms: frozenset[int]
    weights: frozenset[int]
    own_nodes: int

    def label(self, node: int) -> tuple[int, int]:
        """Return what a node does: its operation and arguments without operands."""
        return self.operation[node], self.argument[node]

    def code(self, node: int) -> tuple[int, int]:
        """Return what a node does, and in which line."""
        return self.operation[node], int(self.graph.nodes.line[node])

    def family(self, node: int) -> list[str]:
        """Return an operation without its overload, as `aten.add` of `aten.add.Tensor`."""
        operation: str = self.graph.operations[self.graph.nodes.operation[node]]
        return operation.split(".")[:2]

    def operands(self, node: int) -> tuple[int, ...]:
        """Return the groups of what a node reads; -1 for values that are not right."""
        return tuple(
            int(self.side.group[read]) if read >= 0 and self.state[read] == RIGHT else -1
            for read in self.reads[node]
        )

    def relations(self, node: int) -> set[int]:
        """Return how what a node reads and makes is related to the other program."""
        values = (*self.reads[node], *self.makes[node])
        return {int(self.side.relation[value]) for value in values if value >= 0}

    def signature(self, node: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return what a node does to what: its label and its operands."""
        return self.label(node), self.operands(node)


Programs = tuple[ComparedProgram, ComparedProgram]


def made_from(
    program: ComparedProgram, values: Iterable[int], goes_on: Callable[[int], bool]
) -> set[int]:
    """Return values and what they were made from, back through those that `goes_on` accepts."""
    found = set(values)
    waiting = list(found)
    while waiting:
        value = waiting.pop()
        if program.maker[value] >= 0 and goes_on(value):
            new = {read for read in program.reads[program.maker[value]] if read >= 0} - found
            found |= new
            waiting += new
    return found


def made_with(
    program: ComparedProgram,
    values: Iterable[int],
    goes_on: Callable[[int, int], bool] = lambda value, made: True,
) -> set[int]:
    """Return values and all that is made from them, on through what `goes_on` accepts of a value
    and what is made with it.
    """
    found = set(values)
    waiting = list(found)
    while waiting:
        value = waiting.pop()
        made = {made for node in program.readers[value] for made in program.makes[node]}
        new = {own for own in made - found if goes_on(value, own)}
        found |= new
        waiting += new
    return found


def before_moves(program: ComparedProgram, values: Iterable[int]) -> tuple[set[int], set[int]]:
    """Return the nodes that only moved some values, and what they were moved from."""

    moved = moved_back(program, values)
    nodes = {program.maker[value] for value in moved if is_moved(program, value)}
    return nodes, {value for value in moved if not is_moved(program, value)}


def moved_back(program: ComparedProgram, values: Iterable[int]) -> set[int]:
    """Return values and all that they were only moved from."""
    return made_from(program, values, lambda value: is_moved(program, value))


def is_moved(program: ComparedProgram, value: int) -> bool:
    """Return whether a node made a value that only rearranges or selects."""
    node = program.maker[value]
    return node >= 0 and bool(program.graph.nodes.moves[node])


def is_given(program: ComparedProgram, value: int) -> bool:
    """Return whether no operation has computed a value, as a weight, also if it was moved."""
    leaf = program.graph.values.leaf
    return all(leaf[own] >= 0 or is_moved(program, own) for own in moved_back(program, [value]))


def is_given_vector(program: ComparedProgram, value: int) -> bool:
    """Return whether a value has one axis, and was not computed: a gain or a bias."""
    values = program.graph.values
    has_one_axis = max(values.shape[value], default=0) == values.numel[value]
    return bool(program.is_informed[value]) and has_one_axis and is_given(program, value)


def does_nothing(program: ComparedProgram, node: int) -> bool:
    """Return whether a node makes what it reads already, as a product with ones does: that the
    result is right says nothing of its other operands.
    """
    reads, makes = program.reads[node], program.makes[node]
    if len(reads) < 2 or len(makes) != 1 or program.graph.nodes.moves[node]:
        return False
    group = program.side.group
    return any(
        read >= 0 and program.state[read] == RIGHT and group[read] == group[makes[0]]
        for read in reads
    )


def is_open(program: ComparedProgram, value: int) -> bool:
    """Return whether a fault may pass through a value: one that is not right, or that something
    wrong has left as it was.
    """
    if program.state[value] != RIGHT:
        return True
    while is_moved(program, value) and len(program.reads[program.maker[value]]) == 1:
        value = program.reads[program.maker[value]][0]
    node = program.maker[value]
    return node >= 0 and does_nothing(program, node) and reads_wrong(program, node)


def reads_wrong(program: ComparedProgram, node: int) -> bool:
    """Return whether a node reads something that is not right."""
    return any(read >= 0 and program.state[read] != RIGHT for read in program.reads[node])


def viewed_by(program: ComparedProgram, value: int) -> Iterator[int]:
    """Yield what a value is a view of, the nearest first: all of its elements, moved."""
    nodes, numel = program.graph.nodes, program.graph.values.numel
    while (node := program.maker[value]) >= 0 and nodes.moves[node]:
        reads = program.reads[node]
        if len(reads) != 1 or reads[0] < 0 or numel[reads[0]] != numel[value]:
            return
        value = reads[0]
        yield value


def read_by(program: ComparedProgram, value: int) -> list[int]:
    """Return the nodes that read a value or what it is a view of: another view of that may be
    equal to it.
    """
    readers = list(program.readers[value])
    for viewed in viewed_by(program, value):
        view = program.maker[value]
        readers += [node for node in program.readers[viewed] if node != view]
        value = viewed
    return readers


def computed_from(program: ComparedProgram, value: int) -> set[int]:
    """Return the values that round and are computed from a value by such alone: of indices only
    the place of the largest comes through, of logits all numbers.
    """
    found: set[int] = set()
    rounds = (program.graph.values.roundoff > 0).tolist()
    nodes = read_by(program, value)
    while nodes:
        new = {made for made in program.makes[nodes.pop()] if rounds[made]} - found
        nodes += [node for made in new for node in program.readers[made]]
        found |= new
    return found


def reordered_partner(programs: Programs, side: int, value: int, *, may_merge: bool = False) -> int:
    """Return the other program's value that has the numbers of one in another order, but in the
    same shape; NOTHING if there is none.

    Args:
        may_merge: Whether neighboring axes may be merged in one of both.
    """
    program = programs[side]
    if program.side.relation[value] != REORDERED:
        return NOTHING
    partner = int(program.side.partner[value])
    shapes = program.graph.values.shape[value], programs[1 - side].graph.values.shape[partner]
    own, other = map(without_ones, shapes)
    return partner if own == other or (may_merge and have_same_order(*shapes)) else NOTHING


def is_rounded(programs: Programs, value: int) -> bool:
    """Return whether a value of the port equals one of the reference, but is off by more than that
    is rounded: a coarser dtype came before it.
    """
    side, finest = programs[1].side, programs[0].graph.values.roundoff
    unrounded = finest[side.partner[value]]
    is_off = side.relation[value] >= ROWS and side.error[value] > JUMP * unrounded
    return bool(is_off and unrounded > 0)


def unrounded_partner(programs: Programs, value: int) -> int:
    """Return the reference's value of one that the port has cast to a coarser dtype and back;
    NOTHING if it has not.
    """
    port, roundoff = programs[1], programs[1].graph.values.roundoff
    node, partner = port.maker[value], int(port.side.partner[value])
    if node == NOTHING or not port.graph.nodes.casts[node] or not is_rounded(programs, value):
        return NOTHING
    unrounded = programs[0].graph.values.roundoff[partner]
    coarsest = max((roundoff[read] for read in port.reads[node] if read >= 0), default=0.0)
    return partner if roundoff[value] <= unrounded < coarsest else NOTHING


def use_values_equally(programs: tuple[ComparedProgram, ComparedProgram]) -> bool:
    """Return whether most of what both programs have, as their weights, makes as many values of the
    same sizes in both. Else one of them goes through its tokens or its batch in more parts than the
    other, or through paddings.
    """
    uses: list[dict[int, list[int]]] = [{}, {}]
    for sizes, program in zip(uses, programs, strict=True):
        is_common = program.is_informed & (program.state == RIGHT)
        is_common &= program.side.relation >= MOVED
        for value in np.flatnonzero(is_common).tolist():
            sizes.setdefault(int(program.side.group[value]), []).extend(
                _sizes_made_with(program, value)
            )
    # what a program draws its weights from, or joins with other weights, says nothing
    common = {group for group in uses[0].keys() & uses[1].keys() if all(own[group] for own in uses)}
    if not common:  # one of them may have all weights in one
        return not any(map(_has_own_input, programs))
    unequal = sum(sorted(uses[0][group]) != sorted(uses[1][group]) for group in common)
    return 2 * unequal <= len(common)


def is_in_order(program: ComparedProgram) -> bool:
    """Return whether most of what a program computes, and the other one has, is in one order."""
    relation = program.side.relation[(program.graph.values.maker >= 0) & program.is_informed]
    return bool((relation == REORDERED).sum() <= (relation > REORDERED).sum())


def _has_own_input(program: ComparedProgram) -> bool:
    """Return whether a program is given something that is not equal to anything of the other."""
    return any(program.state[value] != RIGHT for value in program.graph.leaves_of("input"))


def _sizes_made_with(program: ComparedProgram, value: int) -> list[int]:
    """Return how many elements each operation makes of something and a value, or what only moves
    it.
    """
    nodes: set[int] = set()
    waiting = [value]
    while waiting:
        new = set(program.readers[waiting.pop()]) - nodes
        nodes |= new
        for node in new:
            if program.graph.nodes.moves[node] and len(set(program.reads[node])) == 1:
                waiting += program.makes[node]
    numel = program.graph.values.numel
    return [
        sum(int(numel[made]) for made in program.makes[node])
        for node in nodes
        if not program.graph.nodes.moves[node] and len(set(program.reads[node])) > 1
    ]


def make_programs(
    graphs: tuple[Graph, Graph],
    sides: tuple[Side, Side],
    limits: tuple[Floats, Floats],
    has_noise: bool,
    closer: tuple[Floats, Floats] | None = None,
    expected: tuple[Indices, Indices] | None = None,
) -> tuple[ComparedProgram, ComparedProgram]:
    """Return both programs with the states of their values.

    Args:
        closer: The error above which an equal value is in doubt, if that is not its limit.
        expected: What is known of each value besides its numbers: WRONG where its counterpart
            differs, DOUBTFUL where it should have one; RIGHT for the others, of which none is
            wrong.
    """
    operations: dict[str, int] = {}
    arguments: dict[str, int] = {}
    programs = []
    weights = frozenset[int]().union(*map(_groups_of_weights, graphs, sides))
    are_divided = all(graph.has_rows for graph in graphs) or any(g.is_split for g in graphs)
    for place, (graph, side, limit) in enumerate(zip(graphs, sides, limits, strict=True)):
        names = [operations.setdefault(name, len(operations)) for name in graph.operations]
        texts = [arguments.setdefault(text, len(arguments)) for text in graph.arguments]
        pair_limit = np.hypot(limit, limits[1 - place][side.partner])
        arriving, jumps = np.zeros(len(limit)), np.zeros(len(limit), bool)
        if not has_noise:  # which has measured it
            equal = np.where(side.relation >= MOVED, side.error, np.nan)
            arriving, jumps = arriving_errors(graph, equal, limit)
        informed = has_information(graph.values) & (np.maximum(limit, arriving) < MOST_ERROR)
        if are_divided:  # positions, lengths and indices are numbers of a batch, not of its tokens
            informed &= graph.values.roundoff > 0
        if closer is not None:
            jumps = side.error > np.hypot(closer[place], closer[1 - place][side.partner])
        state = states(graph, side, informed, jumps)
        if expected is None:
            state[(state == RIGHT) & _are_rounded_alone(graphs, side, place)] = DOUBTFUL
            same = _same_numbers(graphs, sides, place)
        else:  # where a value has its numbers in another order, its place tells
            same = np.full(len(state), NOTHING)
            is_unequal = (expected[place] == WRONG) & (side.relation < ROWS)
            state[(state == WRONG) & (expected[place] == RIGHT)] = DOUBTFUL
            is_unequal |= _are_permuted(graphs, side, place) & informed
            state[is_unequal] = WRONG
        programs.append(
            ComparedProgram(
                graph,
                state,
                arriving,
                informed,
                graph.is_put,
                (state == RIGHT) & informed & _is_equal_in_variation(graph, side, pair_limit),
                side,
                same.tolist(),
                [names[index] for index in graph.nodes.operation.tolist()],
                [texts[index] for index in graph.nodes.argument.tolist()],
                _readers(graph),
                graph.nodes.reads.lists(),
                graph.nodes.makes.lists(),
                graph.values.maker.tolist(),
                _parts(graph),
                _terms(graph, side),
                weights,
                int((~graph.nodes.is_reading).sum()),
            )
        )
    return programs[0], programs[1]


def _are_rounded_alone(graphs: tuple[Graph, Graph], side: Side, place: int) -> Flags:
    """Return which values a program has rounded to a coarser dtype where the other one has not."""
    rounded = rounded_to(graphs[place])
    unrounded = graphs[1 - place].values.roundoff[side.partner]
    is_rounded = (side.relation >= ROWS) & (rounded > unrounded) & (unrounded > 0)
    flags: Flags = is_rounded & (side.error > JUMP * unrounded)
    return flags


def _are_permuted(graphs: tuple[Graph, Graph], side: Side, place: int) -> Flags:
    """Return which values have the numbers of one of the same shape in another order."""
    shapes, others = graphs[place].values.shape, graphs[1 - place].values.shape
    flags: Flags = side.relation == REORDERED
    for value in np.flatnonzero(flags).tolist():
        flags[value] = shapes[value] == others[side.partner[value]]
    return flags


def _readers(graph: Graph) -> list[list[int]]:
    """Return the program's own nodes that read each value."""
    is_reading = graph.nodes.is_reading
    lists = graph.readers().lists()
    if not is_reading.any():
        return lists
    return [[node for node in nodes if not is_reading[node]] for nodes in lists]


def _parts(graph: Graph) -> dict[int, list[int]]:
    """Return the parts of each value that was cut."""
    parts: dict[int, list[int]] = {}
    for node in np.flatnonzero(graph.nodes.is_reading).tolist():
        made = graph.nodes.makes[node].tolist()
        if len(made) > 1:
            parts.setdefault(int(graph.nodes.reads[node][0]), []).extend(made)
    return parts


def _groups_of_weights(graph: Graph, side: Side) -> set[int]:
    """Return the groups of what a program was given, and not as an input."""
    given = np.flatnonzero(graph.values.leaf != NOTHING)
    are_inputs = np.isin(given, graph.leaves_of("input"))
    return set(side.group[given[~are_inputs]].tolist())


def _terms(graph: Graph, side: Side) -> frozenset[int]:
    """Return the values that are right as terms of a sum of several."""
    read = (graph.nodes.reads[node] for node in np.flatnonzero(graph.nodes.is_reading).tolist())
    terms = {value for own in read if len(own) > 1 for value in own.tolist()}
    return frozenset(value for value in terms if side.relation[value] == TERM)


def _same_numbers(graphs: tuple[Graph, Graph], sides: tuple[Side, Side], place: int) -> Indices:
    """Return what `ComparedProgram.same_numbers` says of one side's values."""
    side, partner = sides[place], sides[place].partner
    numel = [graph.values.numel for graph in graphs]
    size = numel[1 - place][partner]
    # where limits are coarse, wrong numbers may have nearly the statistics of right ones: all that
    # a norm makes have always the same deviation
    is_same = np.isin(side.relation, (REORDERED, PART)) & (side.error <= STATISTICS_ERROR)
    is_led = np.where(side.relation == PART, size > numel[place], place == 1)
    group = np.where(is_led, sides[1 - place].group[partner], side.group)
    return np.where(is_same, group, -1)


def states(graph: Graph, side: Side, informed: Flags, jumps: Flags) -> Indices:
    """Return the state of each value.

    Right: equal to some value of the other program, or put there as one. Doubtful: the same numbers
    in another order, part of a whole, too little information to say so, or moved from a right value
    without being equal itself. Wrong: none of these.
    """
    state = np.full(len(graph.values), WRONG, np.int64)
    state[(side.relation != NONE) | ~informed | (graph.values.numel < 0)] = DOUBTFUL
    state[side.relation >= ROWS] = RIGHT
    state[graph.is_put] = RIGHT
    state[jumps] = DOUBTFUL
    _doubt_moves(graph, state)
    return state


def _is_equal_in_variation(graph: Graph, side: Side, limits: Floats) -> Flags:
    """Return which values are within the limit of their deviation from their mean, and those whose
    mean is not known.
    """
    mean, deviation = graph.values.statistics[:, MEAN], graph.values.statistics[:, STD]
    with np.errstate(all="ignore"):
        equal: Flags = side.error * np.hypot(mean, deviation) <= limits * deviation
    return equal | np.isnan(mean)


def _doubt_moves(graph: Graph, state: Indices) -> None:
    """Make moved values doubtful where they would be wrong and nothing that was moved is."""
    nodes = graph.nodes
    moves = np.flatnonzero(nodes.moves)
    if not len(moves):
        return
    makes = nodes.makes
    for node in moves.tolist():
        reads, made = nodes.reads[node], makes[node]
        if (state[made] == WRONG).any() and (state[reads[reads >= 0]] != WRONG).all():
            state[made] = np.where(state[made] == WRONG, DOUBTFUL, state[made])
