"""Which doubtful place before a source is the fault instead of it.

A mask or a small tensor says too little to be called wrong, so the first place that surely is wrong
may be the one that uses it. Comparing the two programs tells more than either alone.
"""

from __future__ import annotations

from dataclasses import replace

from otel_torch.graph.blame import Doubt, DoubtSource, idle_operands, what_is_before
from otel_torch.graph.equality import REORDERED, ROWS
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import (
    RIGHT,
    ComparedProgram,
    is_given,
    is_given_vector,
    reordered_partner,
)

# what a source does, None for a leaf, and to what
_TwinKey = tuple[object, tuple[object, ...]]


def blame_other_numbers(
    programs: tuple[ComparedProgram, ComparedProgram],
    sources: list[list[DoubtSource]],
    doubts: list[Doubt],
) -> list[list[DoubtSource]]:
    """Blame what both programs compute from the same right values, but with other numbers.

    `lt(distance, 4)` beside `lt(distance, 3)`: other ways to write the same use other operations.
    A suspect of either program is enough. The other one's result may even pass for right, as that
    of `add(variance, 1e-6)` does, which is almost the variance.
    """
    operations = [_by_operands(program) for program in programs]
    blamed: list[set[int]] = [set(), set()]
    for side, program in enumerate(programs):
        for source in sources[side]:
            for node in (source.origin, *source.suspects):
                key = _operation_on(program, node)
                others = operations[1 - side].get(key, []) if key is not None else []
                arguments = {programs[1 - side].argument[other] for other in others}
                if others and program.argument[node] not in arguments:
                    blamed[side].add(node)
                    blamed[1 - side].add(others[0])
    return _move(programs, sources, doubts, blamed)


def blame_other_orders(
    programs: tuple[ComparedProgram, ComparedProgram],
    sources: list[list[DoubtSource]],
    doubts: list[Doubt],
) -> list[list[DoubtSource]]:
    """Blame what puts the same numbers into another order within one shape.

    A layout has another shape. A legal exchange, of channels or of text and image, is acquitted by
    what comes after it: both programs have its numbers, too.
    """
    blamed: list[set[int]] = [set(), set()]
    for side in (0, 1):
        suspects = dict.fromkeys(node for source in sources[side] for node in source.suspects)
        for node in (own for own in suspects if own >= 0):
            partner = reordered_partner(programs, side, programs[side].makes[node][0])
            if partner != NOTHING and not _is_carried_on(programs[side], doubts[side], node):
                blamed[side].add(node)
                blamed[1 - side].add(programs[1 - side].maker[partner])
    return _move(programs, sources, doubts, blamed)


def blame_what_changes_nothing(
    programs: tuple[ComparedProgram, ComparedProgram],
    sources: list[list[DoubtSource]],
    doubts: list[Doubt],
) -> list[list[DoubtSource]]:
    """Blame what is wrong and leaves as it was what a source reads: a table of ones, where the
    other program has one that turns.

    Weights of ones say nothing of themselves; they are blamed beside one of their size.
    """
    blamed: list[set[int]] = [set(), set()]
    for side, (program, doubt) in enumerate(zip(programs, doubts, strict=True)):
        other = programs[1 - side].graph.values.numel
        sizes = {other[-1 - source.origin] for source in sources[1 - side] if source.origin < 0}
        for source in sources[side]:
            if source.origin < 0:
                continue
            idle = idle_operands(program, program.reads[source.origin])
            blamed[side].update(doubt.members(doubt.of(idle)[0]))
            leaves = (value for value in idle if program.maker[value] == NOTHING)
            blamed[side].update(
                -1 - leaf for leaf in leaves if program.graph.values.numel[leaf] in sizes
            )
    return _move(programs, sources, doubts, blamed)


def _is_carried_on(program: ComparedProgram, doubt: Doubt, origin: int) -> bool:
    """Return whether the other program has numbers that were computed from an origin in doubt."""
    bit, moves = doubt.bit(origin), program.graph.nodes.moves
    return any(
        program.same_numbers[value] >= 0
        and program.maker[value] not in (origin, NOTHING)
        and not moves[program.maker[value]]
        and any(bits & bit for bits in tiers)
        for value, tiers in doubt.tiers.items()
    )


def _by_operands(program: ComparedProgram) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return the nodes by their operation and operands, where all of these are right."""
    nodes: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for node in range(len(program.reads)):
        key = _operation_on(program, node)
        if key is not None:
            nodes.setdefault(key, []).append(node)
    return nodes


def _operation_on(program: ComparedProgram, node: int) -> tuple[int, tuple[int, ...]] | None:
    """Return an operation with its operands; None if one of them is not known to be right."""
    if node < 0 or program.graph.nodes.moves[node]:
        return None
    operands = program.operands(node)
    return (program.operation[node], operands) if operands and -1 not in operands else None


def _move(
    programs: tuple[ComparedProgram, ComparedProgram],
    sources: list[list[DoubtSource]],
    doubts: list[Doubt],
    blamed: list[set[int]],
) -> list[list[DoubtSource]]:
    """Move sources to what is blamed before them or for what they read."""
    return [
        _once(
            [
                _moved_to(programs[side], doubts[side], source, blamed[side])
                for source in sources[side]
            ]
        )
        for side in (0, 1)
    ]


def _moved_to(
    program: ComparedProgram, doubt: Doubt, source: DoubtSource, blamed: set[int]
) -> DoubtSource:
    if source.origin < 0 or source.origin in blamed:
        return source
    makers = (program.maker[read] for read in program.reads[source.origin] if read >= 0)
    for node in (*source.suspects, *makers):
        if node in blamed:
            reads = program.reads[node] if node >= 0 else []
            strong = doubt.members(doubt.of(reads)[0])
            suspects, cleared = what_is_before(program, doubt, node)
            return replace(source, origin=node, suspects=strong + suspects, cleared=cleared)
    return source


def blame_suspects_of_twins(
    programs: tuple[ComparedProgram, ComparedProgram],
    sources: list[list[DoubtSource]],
    doubts: list[Doubt],
) -> list[list[DoubtSource]]:
    """Blame what is doubtful before sources that have a twin on the other side, and before those of
    the port whose code was legal before.

    Twins do the same to the same right values. So they differ in what no evidence calls right: in
    one program at least, for its operand is not the right one of the other. This goes on as long as
    what is blamed has a twin itself. Of code that was legal when it ran first, what it did not read
    then is at fault, if that is one thing.
    """
    while True:
        keys = [
            [_twin_key(program, source) for source in side]
            for program, side in zip(programs, sources, strict=True)
        ]
        twins = _with_twins(keys[0], keys[1]), _with_twins(keys[1], keys[0])
        resolved = [
            [
                blamed
                for source, key in zip(sources[side], keys[side], strict=True)
                for blamed in (
                    _blame_suspects(programs[side], doubts[side], source)
                    if (key in twins[side] or (side == 1 and len(source.new_suspects) == 1))
                    and not _reorders_half(programs[side], source.origin)
                    else [source]
                )
            ]
            for side in (0, 1)
        ]
        resolved = [_once(side) for side in resolved]
        if [list(map(id, side)) for side in resolved] == [list(map(id, side)) for side in sources]:
            return sources
        sources = resolved


def _reorders_half(program: ComparedProgram, node: int) -> bool:
    """Return whether a node reads features in another order and a gain or a bias for them in the
    other program's, or the reverse, and the program means that: it has a weight in another order
    and not its bias, or elsewhere reads both so.
    """
    if node < 0 or (orders := _orders(program, node)) not in _HALF_REORDERED:
        return False
    given = [read for read in program.reads[node] if read >= 0 and is_given(program, read)]
    if len(given) > 1 and orders == _HALF_REORDERED[0]:
        return True
    return any(
        _orders(program, other) == _REORDERED_IN_WHOLE
        for other in range(program.own_nodes)
        if program.operation[other] == program.operation[node]
    )


# whether an operand is a vector, and whether it is in another order
_REORDERED_IN_WHOLE = {(False, True), (True, True)}
_HALF_REORDERED = ({(False, True), (True, False)}, {(False, False), (True, True)})


def _orders(program: ComparedProgram, node: int) -> set[tuple[bool, bool]]:
    """Return which operands of a node are vectors, and which of both kinds are in another order;
    nothing of those that are not known to be right or in another order. A bias is in the order of
    its weight, whatever is multiplied with that.
    """
    relation, state = program.side.relation, program.state
    known = [
        read
        for read in program.reads[node]
        if read >= 0 and (relation[read] == REORDERED or state[read] == RIGHT)
    ]
    given = [read for read in known if is_given(program, read)]
    return {
        (is_given_vector(program, read), bool(relation[read] == REORDERED))
        for read in (given if len(given) > 1 else known)
    }


def _with_twins(keys: list[_TwinKey], others: list[_TwinKey]) -> set[_TwinKey]:
    """Return the keys that have a twin among others."""
    same: dict[object, list[_TwinKey]] = {}
    for label, operands in others:
        same.setdefault((label, len(operands)), []).append((label, operands))
    return {
        key
        for key in set(keys)
        if any(_are_twins(key, other) for other in same.get((key[0], len(key[1])), ()))
    }


def _are_twins(own: _TwinKey, other: _TwinKey) -> bool:
    """Return whether two sources read the same, as far as their operands are known."""
    pairs = list(zip(own[1], other[1], strict=True))
    if own == other:
        return own[0] is not None
    has_common = any(first == second != NOTHING for first, second in pairs)
    return has_common and all(
        first == second or NOTHING in (first, second) for first, second in pairs
    )


def _blame_suspects(
    program: ComparedProgram, doubt: Doubt, source: DoubtSource
) -> list[DoubtSource]:
    """Return the first suspect before a source, or the source if there is none. If that suspect is
    a leaf, return all suspected leaves: a weight and its bias are reordered together.
    """
    if not source.suspects:
        return [source]
    is_news = len(source.new_suspects) == 1
    first, *others = source.new_suspects if is_news else source.suspects
    together = [other for other in others if first < 0 and other < 0]
    blamed = replace(source, was_legal=source.was_legal or is_news, new_suspects=[])
    return [
        replace(blamed, origin=origin, suspects=suspects, cleared=cleared)
        for origin in (first, *together)
        for suspects, cleared in (what_is_before(program, doubt, origin),)
    ]


def _once(sources: list[DoubtSource]) -> list[DoubtSource]:
    """Drop sources that an earlier one repeats."""
    first: dict[int, DoubtSource] = {}
    for source in sources:
        first.setdefault(source.origin, source)
    return list(first.values())


def _twin_key(program: ComparedProgram, source: DoubtSource) -> _TwinKey:
    """Return what a source does to which values, as far as these are known; None for leaves."""
    if source.origin < 0:
        return None, ()
    operands = tuple(_known_operand(program, read) for read in program.reads[source.origin])
    return program.label(source.origin), operands


def _known_operand(program: ComparedProgram, value: int) -> object:
    """Return the group of a value or of what it was moved from.

    Of a value whose numbers both programs have, in another order or in parts, it is that of the
    reference's value, or of the whole; of what was moved out of one, it is the place in it, too.
    """
    while value >= 0 and program.side.relation[value] < ROWS:
        if program.same_numbers[value] >= 0:
            return program.same_numbers[value]
        node = program.maker[value]
        if node < 0 or not program.graph.nodes.moves[node] or len(program.reads[node]) != 1:
            return NOTHING
        value = program.reads[node][0]
    if value < 0 or not program.is_informed[value]:
        return NOTHING
    return _place_in_whole(program, value) or int(program.side.group[value])


def _place_in_whole(program: ComparedProgram, value: int) -> object:
    """Return how a right value was moved out of one that has its numbers in another order."""
    moves: list[object] = []
    while program.state[value] == RIGHT:
        node = program.maker[value]
        if node < 0 or not program.graph.nodes.moves[node] or len(program.reads[node]) != 1:
            return None
        moves.append((program.label(node), program.makes[node].index(value)))
        value = program.reads[node][0]
    whole = program.same_numbers[value]
    return (whole, *moves) if whole >= 0 else None
