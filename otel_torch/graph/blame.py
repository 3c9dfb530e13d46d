"""Where the wrong part of a program begins, and which of these places is a fault.

From each wrong end, doubt is followed back to its sources: nodes and leaves that are wrong although
all that they read is right. A source from which only right values follow reaches no wrong end, and
is never named. A source that leads to right values and to a wrong end is acquitted if the two
programs compute the right value by different operations. One operation that makes the same of
unequal values does not see the difference (a norm does not see a scale), and the source stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import (
    DOUBTFUL,
    RIGHT,
    WRONG,
    ComparedProgram,
    does_nothing,
    is_given,
    made_from,
    moved_back,
)

# A node (0, 1, …) or a leaf, as -1 - value.
Origin = int


@dataclass(slots=True, eq=False)
class DoubtSource:
    """A place where the wrong part of one program begins.

    Attributes:
        origin: The node, or the leaf as -1 - value.
        is_weak: Only values with little information accuse it.
        is_accused: Something that depends on no other source is wrong because of it.
        was_legal: The same code is acquitted where it ran first.
        first_end: The place of the first wrong end that it leads to.
        suspects: Doubtful origins before it, which may be the fault instead.
        new_suspects: Those of them that were not before the same code when that was legal.
        cleared: Acquitted sources before it.
    """

    origin: Origin
    is_weak: bool
    is_accused: bool = False
    was_legal: bool = False
    first_end: int = 0
    suspects: list[Origin] = field(default_factory=list)
    cleared: list[Origin] = field(default_factory=list)
    new_suspects: list[Origin] = field(default_factory=list)


# How often doubt may fade until all that is fainter counts the same. A mask is made in three steps:
# compare, combine, apply.
TIERS = 4
# How often what follows an acquitted source may be acquitted, too: the way through one formula that
# is written otherwise. The longest that a corpus needs has 10 steps; behind 14 only an optimizer's
# first step is right, which sees no more of a gradient than its sign.
ROUNDS = 12
# Bits of sources by how often doubt has faded on its way: the surest first.
Tiers = tuple[int, ...]
NO_DOUBT: Tiers = (0,) * TIERS


def unite(parts: Iterable[Tiers]) -> Tiers:
    """Return the union of doubts: of each source the surest.

    >>> unite([(1, 2, 0, 0), (0, 1, 4, 0)])
    (1, 2, 4, 0)
    """
    total = [0] * TIERS
    for part in parts:
        for tier, bits in enumerate(part):
            total[tier] |= bits
    seen = 0
    for tier, bits in enumerate(total):
        total[tier] = bits & ~seen
        seen |= bits
    return tuple(total)


def fade(tiers: Tiers, times: int = 1) -> Tiers:
    """Return a doubt that is less sure.

    >>> fade((1, 2, 0, 4))
    (0, 1, 2, 4)
    """
    for _ in range(times):
        tiers = (0, *tiers[: TIERS - 2], tiers[TIERS - 2] | tiers[TIERS - 1])
    return tiers


@dataclass(slots=True, eq=False)
class Doubt:
    """Which sources each value in doubt depends on, as bits.

    Attributes:
        sources: By bit.
        tiers: Value -> bits of the sources that doubt comes from; the first tier is strong.
        cleared: Value -> acquitted origins that it depends on.
        legal: Origins of weak doubt of which something right is made: they are not suspected.
    """

    sources: list[Origin] = field(default_factory=list)
    bits: dict[Origin, int] = field(default_factory=dict)
    tiers: dict[int, Tiers] = field(default_factory=dict)
    cleared: dict[int, frozenset[Origin]] = field(default_factory=dict)
    legal: Set[Origin] = frozenset()

    def bit(self, origin: Origin) -> int:
        """Return the bit of a source, a new one if need be."""
        if origin not in self.bits:
            self.bits[origin] = 1 << len(self.sources)
            self.sources.append(origin)
        return self.bits[origin]

    def members(self, bits: int) -> list[Origin]:
        """Return the sources of some bits."""
        members = []
        while bits:
            low = bits & -bits
            members.append(self.sources[low.bit_length() - 1])
            bits ^= low
        return members

    def of(self, values: list[int]) -> Tiers:
        """Return what values depend on, together."""
        parts = [self.tiers[value] for value in values if value in self.tiers]
        if not parts:
            return NO_DOUBT
        return parts[0] if len(parts) == 1 else unite(parts)

    def strong(self, value: int) -> int:
        """Return the bits of the sources that a value depends on without fading."""
        return self.tiers.get(value, NO_DOUBT)[0]


@dataclass(frozen=True, slots=True)
class Rules:
    """Which rules of blame are in force; a test switches each one off to see what it decides."""

    acquits: bool = True
    sees_insensitive: bool = True
    weak_last: bool = True
    doubts_weak_equal: bool = True
    heals_order: bool = True
    compares_suspects: bool = True
    finds_other_numbers: bool = True
    finds_other_orders: bool = True
    accused_first: bool = True
    # what is wrong in one block and harms nothing is no fault in another one
    acquits_repetitions: bool = False


def spread_doubt(
    program: ComparedProgram,
    cleared: set[Origin],
    rules: Rules,
    legal: Set[Origin] = frozenset(),
) -> Doubt:
    """Follow doubt from its sources through the program, in the order of execution.

    Doubt fades where a value is equal but says little (a mask), and where a value holds the right
    numbers, though in another order or in parts.

    Args:
        program: One side.
        cleared: Acquitted origins, which count as right.
        legal: Origins that are no sources of weak doubt: something right is made of what they make.
    """
    doubt, state = Doubt(), program.state
    is_right, is_wrong = (state == RIGHT).tolist(), (state == WRONG).tolist()
    informed = program.is_informed.tolist()
    same_numbers = [group >= 0 for group in program.same_numbers]
    moves = program.graph.nodes.moves.tolist()
    acquitted = cleared, legal
    for value in (state != RIGHT).nonzero()[0].tolist():
        if program.maker[value] < 0:
            is_strong = is_wrong[value] or not rules.weak_last
            _enter(doubt, -1 - value, [value], NO_DOUBT, frozenset(), is_strong, acquitted)
    own_nodes = zip(program.reads, program.makes, strict=True)
    for node, (reads, makes) in enumerate(islice(own_nodes, program.own_nodes)):
        open_values = [value for value in makes if not is_right[value]]
        # halves of an exchanged weight are right by their numbers, not by their place
        is_out_of_order = moves[node] and any(
            read >= 0 and same_numbers[read] and not is_right[read] for read in reads
        )
        vague = [
            value for value in makes if is_right[value] and (is_out_of_order or not informed[value])
        ]
        if not open_values and not vague:
            continue
        tiers = doubt.of(reads)
        if rules.doubts_weak_equal and any(tiers):
            doubt.tiers |= dict.fromkeys(vague, fade(tiers))
        if not open_values:
            continue
        before: frozenset[Origin] = frozenset()
        if doubt.cleared:
            before = before.union(*(doubt.cleared.get(value, before) for value in reads))
        is_strong = any(is_wrong[value] for value in open_values) or not rules.weak_last
        if rules.heals_order and all(same_numbers[value] for value in open_values):
            same = doubt.of([value for value in reads if value >= 0 and same_numbers[value]])
            kept = (0, same[0] | same[1], *NO_DOUBT[2:])
            tiers = unite([kept, fade(tiers, 2)])
        _enter(doubt, node, open_values, tiers, before, is_strong, acquitted)
    return doubt


def _enter(
    doubt: Doubt,
    origin: Origin,
    values: list[int],
    tiers: Tiers,
    before: frozenset[Origin],
    is_strong: bool,
    acquitted: tuple[Set[Origin], Set[Origin]],
) -> None:
    """Note what values that are not right depend on; make their origin a source if nothing else."""
    strong, weak, *rest = tiers
    cleared, legal = acquitted
    if origin in cleared:
        before |= {origin}
    elif not strong and is_strong:
        strong = doubt.bit(origin)
    elif origin in legal:
        if not any(tiers) and not before:
            return
    elif not strong and not weak:
        weak = doubt.bit(origin)
    for value in values:
        doubt.tiers[value] = (strong, weak, *rest)
        if before:
            doubt.cleared[value] = before


def find_sources(
    program: ComparedProgram, other: ComparedProgram, ends: list[int], rules: Rules
) -> tuple[list[DoubtSource], Doubt]:
    """Return the sources from which wrong ends are reached, the surest first, and all doubt.

    Args:
        program: The side whose sources are wanted.
        other: The other side, with which right values are computed differently or alike.
        ends: Wrong ends, in the order in which the reference made them.
    """
    cleared: set[Origin] = set()
    doubt = spread_doubt(program, cleared, rules)
    if rules.acquits_repetitions:
        needed = doubt.of(ends)[0]
        harmless = [
            origin
            for origin, bit in doubt.bits.items()
            if not bit & needed and _is_wrong(program, origin)
        ]
        cleared |= _repetitions(program, doubt, harmless)
        if cleared:
            doubt = spread_doubt(program, cleared, rules)
    first, blind, innocent = doubt, set[int](), cleared
    while rules.acquits:
        innocent = set(cleared)
        doubt, acquitting = _acquit(program, other, ends, rules, first, innocent, blind)
        if not acquitting:
            break
        blind |= acquitting
    acquitted: Set[Origin] = frozenset()
    if rules.acquits:
        legal, way = _legal(program, other, doubt, rules, blind)
        if way:
            doubt = spread_doubt(program, innocent, rules, way)
        unneeded = sum(doubt.bits.values()) & ~doubt.of(ends)[0]
        elsewhere = _acquitting(program, other, doubt, unneeded, rules, blind)
        doubt.legal = legal
        acquitted = legal.union(*doubt.cleared.values(), *elsewhere.values())
    return _sources(program, doubt, ends, rules, acquitted), doubt


def _acquit(
    program: ComparedProgram,
    other: ComparedProgram,
    ends: list[int],
    rules: Rules,
    doubt: Doubt,
    cleared: set[Origin],
    blind: Set[int],
) -> tuple[Doubt, set[int]]:
    """Acquit what right values acquit, and what follows it then, as long as there is such.

    Args:
        cleared: What is acquitted already; what is acquitted here is added.
        blind: Nodes whose right values acquit nothing.

    Returns:
        The doubt that is left, and nodes that acquit without end, if any: what makes a right value
        of all that is wrong before it does not see it, as the first step of Adam sees only signs.
    """
    kept: set[Origin] = set()
    for _ in range(ROUNDS):
        acquitting = _acquitting(program, other, doubt, doubt.of(ends)[0], rules, blind)
        acquitted = set().union(*acquitting.values()) - kept
        if not acquitted:
            return doubt, set()
        if rules.acquits_repetitions:
            acquitted |= _repetitions(program, doubt, acquitted) - kept
        cleared |= acquitted
        before, doubt = doubt, spread_doubt(program, cleared, rules)
        # an end that nothing else explains keeps its sources
        bare = [end for end in ends if before.strong(end) and not doubt.strong(end)]
        if bare:
            kept |= set(before.members(before.of(bare)[0]))
            cleared -= kept
            doubt = spread_doubt(program, cleared, rules)
    return doubt, {node for node, origins in acquitting.items() if origins - kept}


def find_suspects(
    program: ComparedProgram, other: ComparedProgram, values: list[int]
) -> set[Origin]:
    """Return what may have made some values wrong: right values do not acquit it."""
    _, doubt = find_sources(program, other, values, Rules())
    strong, *weak = doubt.of(values)
    unsure = (origin for bits in weak for origin in doubt.members(bits))
    return {*doubt.members(strong), *(own for own in unsure if _is_wrong(program, own))}


def _is_wrong(program: ComparedProgram, origin: Origin) -> bool:
    values = [-1 - origin] if origin < 0 else program.makes[origin]
    return any(program.state[value] == WRONG for value in values)


def _acquitting(
    program: ComparedProgram,
    other: ComparedProgram,
    doubt: Doubt,
    needed: int,
    rules: Rules,
    blind: Set[int],
) -> dict[int, set[Origin]]:
    """Return nodes that make right values, and the sources that these acquit.

    Args:
        needed: Bits of the sources that lead to wrong ends.
        blind: Nodes that acquit nothing.
    """
    acquitting: dict[int, set[Origin]] = {}
    doubted = [value for value, tiers in doubt.tiers.items() if tiers[0] & needed]
    unknown = _of_unknown_numbers(program, doubt)
    for node in sorted({reader for value in doubted for reader in program.readers[value]} - blind):
        bits = doubt.of(program.reads[node])[0]
        if not bits & needed:
            continue
        made = _sure(program, doubt, node)
        if not made:
            made = [item for item in program.makes[node] if program.same_numbers[item] >= 0]
            bits &= unknown
            if not made or not bits:
                continue
        if _is_evidence(program, other, doubt, node, made[0], rules):
            acquitting[node] = set(doubt.members(bits))
    return acquitting


def _sure(program: ComparedProgram, doubt: Doubt, node: int) -> list[int]:
    """Return what a node makes that is surely right; nothing if any of it is in doubt."""
    makes = program.makes[node]
    if any(made in doubt.tiers for made in makes):
        return []
    return [made for made in makes if program.is_sure[made]]


def _is_evidence(
    program: ComparedProgram,
    other: ComparedProgram,
    doubt: Doubt,
    node: int,
    made: int,
    rules: Rules,
) -> bool:
    """Return whether a right value says that what its node reads is right, though in doubt."""
    if _says_little(program, node) or does_nothing(program, node) or _is_put(program, other, made):
        return False
    if not rules.sees_insensitive or not _is_insensitive(program, other, node, made):
        return True
    return _are_independent(program, doubt, program.reads[node])


def _legal(
    program: ComparedProgram, other: ComparedProgram, doubt: Doubt, rules: Rules, blind: Set[int]
) -> tuple[set[Origin], set[Origin]]:
    """Return what surely right values acquit of weak doubt.

    Returns:
        Its sources, and in other blocks and steps the same code with numbers in another order, and
        constants that are made anew; and all origins between these sources and right values.
    """
    bits_of_legal = 0
    seen: set[int] = set()
    doubted = {reader for value in doubt.tiers for reader in program.readers[value]}
    for node in sorted(doubted - blind):
        if program.graph.nodes.moves[node]:  # half of an exchanged weight is right wherever it goes
            continue
        made = _sure(program, doubt, node)
        weak = 0
        for bits in doubt.of(program.reads[node])[1:]:
            weak |= bits
        if made and weak and _is_evidence(program, other, doubt, node, made[0], rules):
            bits_of_legal |= weak
            seen.update(own for own in program.reads[node] if _is_weakly_doubted(doubt, own))
    legal = set(doubt.members(bits_of_legal))
    layouts = {origin for origin in legal if _has_same_numbers(program, origin)}
    repeated = _repetitions(program, doubt, layouts)
    repeated = {origin for origin in repeated if _has_same_numbers(program, origin)}
    before = made_from(program, seen, lambda own: _is_weakly_doubted(doubt, own))
    way = {
        node if (node := program.maker[own]) >= 0 else -1 - own
        for own in before
        if _is_weakly_doubted(doubt, own)
    }
    return legal | repeated | _same_leaves(program, doubt, legal), way


def _is_weakly_doubted(doubt: Doubt, value: int) -> bool:
    return any(doubt.tiers.get(value, NO_DOUBT)[1:])


def _same_leaves(program: ComparedProgram, doubt: Doubt, legal: Iterable[Origin]) -> set[Origin]:
    """Return sources that are leaves with the numbers of legal ones, and read by the same code."""

    def content(origin: Origin) -> object:
        leaf = -1 - origin
        codes = frozenset(map(program.code, program.readers[leaf]))
        return int(program.side.group[leaf]), codes

    contents = {content(origin) for origin in legal if origin < 0}
    return {origin for origin in doubt.sources if origin < 0 and content(origin) in contents}


def _repetitions(program: ComparedProgram, doubt: Doubt, legal: Iterable[Origin]) -> set[Origin]:
    """Return sources that are the same code as legal ones, in another block."""
    codes = {_code_of_rank(program, origin) for origin in legal if origin >= 0}
    sources = (origin for origin in doubt.sources if origin >= 0)
    return {origin for origin in sources if _code_of_rank(program, origin) in codes}


def _legal_before(
    program: ComparedProgram, sources: Iterable[Origin], acquitted: Set[Origin]
) -> set[Origin]:
    """Return sources whose code was legal when it was in doubt for the first time."""
    first: dict[object, Origin] = {}
    for origin in sorted(own for own in {*sources, *acquitted} if own >= 0):
        first.setdefault(_code_of_rank(program, origin), origin)
    return {own for own in sources if own >= 0 and first[_code_of_rank(program, own)] in acquitted}


def _new_suspects(
    program: ComparedProgram,
    suspects: dict[Origin, list[Origin]],
    acquitted: Set[Origin],
) -> dict[Origin, list[Origin]]:
    """Return the suspects before each source that no such code was among when the source's code ran
    for the first time, if that was right or legal then; else none.

    Args:
        suspects: By the sources that they are before.
    """
    nodes = program.graph.nodes
    suspects = {
        origin: own
        for origin, own in suspects.items()
        if own and origin >= 0 and nodes.line[origin] >= 0
    }
    numbers = _numbers_in_line(program) if suspects else []

    def place(node: int) -> tuple[object, int, int]:
        return _code_of_rank(program, node), int(nodes.module[node]), numbers[node]

    # one line may run several modules, and an operation several times
    places = set(map(place, suspects))
    first: dict[tuple[object, int, int], int] = {}
    for node in range(program.own_nodes if places else 0):
        if (own_place := place(node)) in places:
            first.setdefault(own_place, node)
    new: dict[Origin, list[Origin]] = {}
    for origin, own in suspects.items():
        node = first.get(place(origin), origin)
        if node == origin:
            continue
        was_right = all(program.state[made] == RIGHT for made in program.makes[node])
        if was_right or node in acquitted:
            known = _codes_before(program, node, _codes_before(program, origin))
            new[origin] = [suspect for suspect in own if _code(program, suspect) not in known]
    return new


def _numbers_in_line(program: ComparedProgram) -> list[int]:
    """Return the number of each node among those of the same code in one run of its line."""
    numbers, counts, lines = [], Counter[object](), program.graph.nodes.line.tolist()
    for node, line in enumerate(lines):
        if node and line != lines[node - 1]:
            counts.clear()
        code = program.code(node)
        numbers.append(counts[code])
        counts[code] += 1
    return numbers


def _codes_before(
    program: ComparedProgram, node: int, way: Set[object] | None = None
) -> set[object]:
    """Return the code of what a node depends on, back through what the code of a way makes; without
    one, through what is not right.
    """

    def goes_on(value: int) -> bool:
        if way is None:
            return bool(program.state[value] != RIGHT)
        return _code_of(program, value) in way

    reads = [read for read in program.reads[node] if read >= 0]
    return {_code_of(program, value) for value in made_from(program, reads, goes_on)}


def _code_of_rank(program: ComparedProgram, node: int) -> object:
    """Return the code of a node, and the rank that runs it: another one may go wrong in it."""
    made = program.makes[node]
    return program.code(node), int(program.graph.values.process[made[0]]) if made else 0


def _code_of(program: ComparedProgram, value: int) -> object:
    """Return the code that makes a value, and what a leaf holds."""
    maker = program.maker[value]
    return _code(program, -1 - value if maker == NOTHING else maker)


def _code(program: ComparedProgram, origin: Origin) -> object:
    """Return the code of a node, and what a leaf holds."""
    return program.code(origin) if origin >= 0 else int(program.side.group[-1 - origin])


def idle_operands(program: ComparedProgram, values: Iterable[int]) -> list[int]:
    """Return what was to change some right values, and has left them as they were."""
    right = [value for value in values if value >= 0 and program.state[value] == RIGHT]
    makers = {program.maker[value] for value in moved_back(program, right)}
    return [
        read
        for node in sorted(makers)
        if node >= 0 and does_nothing(program, node)
        for read in program.reads[node]
        if read >= 0 and program.state[read] != RIGHT
    ]


def _says_little(program: ComparedProgram, node: int) -> bool:
    """Return whether a node may not read what is in doubt, or moves a part of it: that says nothing
    of the rest. A fused operation moves what its parts have made, and these say it.
    """
    nodes = program.graph.nodes
    is_fused = nodes.moves[node] and (nodes.inside == node).any()
    return bool(nodes.is_vague[node] or is_fused) or _takes_part(program, node)


def _takes_part(program: ComparedProgram, node: int) -> bool:
    """Return whether a node moves a part of what it reads."""
    if not program.graph.nodes.moves[node] or len(program.reads[node]) != 1:
        return False
    numel = program.graph.values.numel
    return bool((numel[program.makes[node]] < numel[program.reads[node][0]]).all())


def _is_put(program: ComparedProgram, other: ComparedProgram, value: int) -> bool:
    """Return whether the other program has a right value only because it was put there."""
    partner = int(program.side.partner[value])
    if partner < 0 or not other.is_put[partner]:
        return False
    return bool(other.is_put[other.side.group == other.side.group[partner]].all())


def _of_unknown_numbers(program: ComparedProgram, doubt: Doubt) -> int:
    """Return the bits of sources whose numbers the other program does not have.

    These are acquitted by numbers that it has, though in another order; an order is not.
    """
    return sum(bit for origin, bit in doubt.bits.items() if not _has_same_numbers(program, origin))


def _has_same_numbers(program: ComparedProgram, origin: Origin) -> bool:
    value = -1 - origin if origin < 0 else program.makes[origin][0]
    return program.same_numbers[value] >= 0


def _is_insensitive(
    program: ComparedProgram, other: ComparedProgram, node: int, value: int
) -> bool:
    """Return whether both programs make an equal value by one operation from unequal ones.

    Such an operation does not see the difference, so that its result proves nothing.
    """
    partner = int(program.side.partner[value])
    if partner < 0:
        return False
    # a fused operation and what it does inside make the same value
    equal = np.flatnonzero(other.side.group == other.side.group[partner]).tolist()
    return any(
        other.maker[own] >= 0 and _is_done_alike(program, node, other, other.maker[own])
        for own in moved_back(other, equal)
    )


def _are_independent(program: ComparedProgram, doubt: Doubt, values: Iterable[int]) -> bool:
    """Return whether several values are in doubt, each because of other ones: an operation that
    makes a right value of them sees both, as queries and keys in another order within their heads.

    These may be parts of one value, as of a fused projection. A weight that only lies otherwise is
    not counted.
    """

    def is_doubted(value: int) -> bool:
        return value in doubt.tiers or value in doubt.cleared

    computed = [
        value for value in set(values) if is_doubted(value) and not is_given(program, value)
    ]
    if len(computed) < 2:
        return False
    # from the latest back, so that all that was made of a value is known when its turn comes
    ways = {value: 1 << place for place, value in enumerate(computed)}
    waiting = [(-program.maker[value], value) for value in computed]
    heapify(waiting)
    are_whole = set[int]()
    while waiting:
        _, value = heappop(waiting)
        node, is_shared = program.maker[value], ways[value].bit_count() > 1
        if is_shared and (value in computed or value in are_whole):
            return False
        for read in set(program.reads[node] if node >= 0 else ()):
            if not is_doubted(read):
                continue
            if not is_shared and not _takes_part(program, node):
                are_whole.add(read)
            if read not in ways:
                heappush(waiting, (-program.maker[read], read))
            ways[read] = ways.get(read, 0) | ways[value]
    return True


def _is_done_alike(program: ComparedProgram, node: int, other: ComparedProgram, twin: int) -> bool:
    """Return whether two nodes do the same to the same, or the first to what is in doubt."""
    if program.label(node) != other.label(twin):
        return False
    operands = program.operands(node), other.operands(twin)
    return len(operands[0]) == len(operands[1]) and all(
        own in (-1, its) for own, its in zip(*operands, strict=True)
    )


def _sources(
    program: ComparedProgram,
    doubt: Doubt,
    ends: list[int],
    rules: Rules,
    acquitted: Set[Origin],
) -> list[DoubtSource]:
    strong = doubt.of(ends)[0]
    weak = 0
    for value in ends:
        tiers = doubt.tiers.get(value, NO_DOUBT)
        if not tiers[0]:
            weak |= next(filter(None, tiers), 0)
    accused = _accused(program, doubt, ends)
    legal = _legal_before(program, doubt.sources, acquitted)
    members = {
        origin: is_weak
        for is_weak, bits in ((False, strong), (True, weak & ~strong))
        for origin in doubt.members(bits)
    }
    before = {origin: what_is_before(program, doubt, origin) for origin in members}
    suspects = {origin: own for origin, (own, _) in before.items()}
    new = _new_suspects(program, suspects, acquitted)
    sources = [
        DoubtSource(
            origin,
            is_weak,
            origin in accused,
            origin in legal,
            _first_end(doubt, origin, ends),
            *before[origin],
            new.get(origin, []),
        )
        for origin, is_weak in members.items()
    ]
    if rules.accused_first:
        sources.sort(key=lambda source: (source.is_weak, not source.is_accused))
    return sources


def _first_end(doubt: Doubt, origin: Origin, ends: list[int]) -> int:
    """Return the place of the first wrong end to which a source leads."""
    bit = doubt.bits[origin]
    return next(
        (place for place, end in enumerate(ends) if any(bits & bit for bits in doubt.of([end]))),
        len(ends),
    )


def what_is_before(
    program: ComparedProgram, doubt: Doubt, origin: Origin
) -> tuple[list[Origin], list[Origin]]:
    """Return the suspects before a source, the most likely first, and what was acquitted."""
    if origin < 0:
        return [], []
    reads = program.reads[origin]
    unsure = doubt.of([value for value in reads if program.state[value] != RIGHT])
    idle = doubt.of(idle_operands(program, reads))
    suspects = [
        suspect
        for bits in (*unsure[1:], *doubt.of(reads)[1:], *idle)
        for suspect in doubt.members(bits)
    ]
    cleared = {item for read in reads for item in doubt.cleared.get(read, frozenset())}
    return [own for own in dict.fromkeys(suspects) if own not in doubt.legal], sorted(cleared)


def _accused(program: ComparedProgram, doubt: Doubt, ends: list[int]) -> set[Origin]:
    """Return the sources that alone explain something wrong after them."""
    accused: set[Origin] = set()
    alone: dict[int, Origin] = {bit: origin for origin, bit in doubt.bits.items()}
    for value, tiers in doubt.tiers.items():
        origin = alone.get(tiers[0])
        if origin is None or program.state[value] == DOUBTFUL:
            continue
        node = program.maker[value]
        if node not in (origin, -1) and not program.graph.nodes.moves[node]:
            accused.add(origin)
    return accused | {alone[doubt.strong(end)] for end in ends if doubt.strong(end) in alone}
