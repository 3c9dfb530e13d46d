"""Compare two programs: the entry point of this package.

graphs -> error model -> equal values -> states -> sources of each side -> faults of both
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, product, zip_longest

import numpy as np

from otel_torch.graph.blame import (
    DoubtSource,
    Rules,
    find_sources,
)
from otel_torch.graph.distances import relative_distances
from otel_torch.graph.ends import (
    EndPair,
    are_by_shape,
    are_few_and_wrong,
    beside_shown,
    count_lacked_rows,
    in_order,
    pair_ends,
    values_of_ends,
)
from otel_torch.graph.equality import MOVED, REORDERED, ROWS, Side, find_equal
from otel_torch.graph.error_model import (
    JUMP,
    MOST_ERROR,
    angle_errors,
    base_limits,
    is_coarse,
    legal_errors,
    limits_with_noise,
    noise_floors,
    rounding_errors,
)
from otel_torch.graph.exchanged import add_ends, makes_wrong, open_values
from otel_torch.graph.explanation import Explanation, explain
from otel_torch.graph.graph import AXIS_LAST, NOTHING, Floats, Graph, Indices
from otel_torch.graph.returned_within import find_returned_within
from otel_torch.graph.shapes import has_twins, have_same_order
from otel_torch.graph.states import RIGHT, STATE_NAMES, ComparedProgram, make_programs
from otel_torch.graph.suspects import (
    blame_other_numbers,
    blame_other_orders,
    blame_suspects_of_twins,
    blame_what_changes_nothing,
)
from otel_torch.graph.terms import Pair, begin_with_terms, makers_of_terms
from otel_torch.graph.unfold import unfold

# How many nodes after its source a region may have: beyond that the two programs do not do the same
# again, and a longer list helps nobody. Legal rewrites of one formula in the corpora take 30.
REGION_NODES = 64
# a hundred times what legal ports' results are off in float32: 1.5e-6 at most in our corpora
_SUSPICIOUS = 1.5e-4


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """A fault's place in one program.

    Attributes:
        nodes: The source first, then the same fault's repetitions (one line, one operation).
        leaf: The leaf at fault; NOTHING if it is a node. `nodes` are then its readers.
        region: The nodes from what both programs still have in common to where they do the same
            again, in the order of execution.
        suspects: Nodes, and leaves as -1 - value, that may be the fault instead.
    """

    nodes: tuple[int, ...]
    leaf: int
    region: tuple[int, ...]
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphFault:
    """A place where the port begins to differ.

    Attributes:
        reference, port: The place in each program; None where only the other one has one.
        error: The relative error of the value of the port's source (else the reference's), against
            the most similar value where there is one; None if nothing compares.
        limit: The largest relative error that would be legal there.
        is_certain: The place is accused by values that depend on nothing else in doubt.
        explanation: What differs.
    """

    reference: FaultPlace | None
    port: FaultPlace | None
    error: float | None
    limit: float
    is_certain: bool
    explanation: Explanation

    @property
    def places(self) -> tuple[FaultPlace | None, FaultPlace | None]:
        """The places in reference and port."""
        return self.reference, self.port

    @property
    def begins_at_leaf(self) -> bool:
        """Whether the place is a leaf of both programs."""
        return all(place is not None and place.leaf != NOTHING for place in self.places)


@dataclass(frozen=True, slots=True, eq=False)
class GraphComparison:
    """The result of comparing two programs.

    Attributes:
        programs: The two programs as they were compared: fused operations look inside.
        faults: The surest first; empty where all ends are right, those of exchanged values too.
        ends: Pairs of ends.
        replaced: Pairs of what the port itself computed where values were exchanged.
        unpaired_ends: Names of ends that only one program has, of each.
        limits: The largest legal relative error of each value, in its own program.
        open_values: The values of each program that make an end wrong, though some were exchanged.
        lacked_rows: How many rows of the reference's ends are in no end of the port, where ends
            were compared by rows.
    """

    programs: tuple[ComparedProgram, ComparedProgram]
    faults: list[GraphFault]
    ends: list[EndPair]
    replaced: list[EndPair]
    unpaired_ends: list[list[str]]
    limits: tuple[Floats, Floats]
    open_values: tuple[Set[int], Set[int]]
    lacked_rows: int

    @property
    def graphs(self) -> tuple[Graph, Graph]:
        """The two programs without what was found of them."""
        return self.programs[0].graph, self.programs[1].graph

    @property
    def states(self) -> tuple[Indices, Indices]:
        """The state of each value of each program: RIGHT, DOUBTFUL, WRONG."""
        return self.programs[0].state, self.programs[1].state

    @property
    def partners(self) -> tuple[Indices, Indices]:
        """The value of the other program that each one is most like; NOTHING for none."""
        return self.programs[0].side.partner, self.programs[1].side.partner

    @property
    def errors(self) -> tuple[Floats, Floats]:
        """The relative distance to it."""
        return self.programs[0].side.error, self.programs[1].side.error

    @property
    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Right, doubtful and wrong values of each program."""
        return _count(self.programs[0]), _count(self.programs[1])

    @property
    def share_right(self) -> float:
        """The share of right values among those of both programs, from 0 to 1."""
        return float((np.concatenate(self.states) == RIGHT).mean())

    @property
    def is_match(self) -> bool:
        """Whether all ends are right."""
        return all(pair.is_right for pair in self.ends)

    @property
    def is_comparable(self) -> bool:
        """Whether any ends of the two programs have as many elements, or rows of each other."""
        return any(pair.is_comparable for pair in self.ends)

    @property
    def is_by_chance(self) -> bool:
        """Whether every paired end may be paired by chance: all are wrong, have as many elements
        in another shape, and are outnumbered by the unpaired ends of both programs.
        """
        pairs = [pair for pair in self.ends if pair.is_comparable]
        if not are_few_and_wrong(self.programs, pairs):
            return False
        values = values_of_ends(self.programs, pairs)
        sizes = [
            [set(graph.values.shape[value]) - {1} for value in own]
            for graph, own in zip(self.graphs, values, strict=True)
        ]
        return all(own != other for own, other in zip(*sizes, strict=True))

    @property
    def is_by_shape(self) -> bool:
        """Whether the ends were paired by shape alone, so that they may not belong together."""
        return are_by_shape(self.programs, self.ends)

    @property
    def returns_another(self) -> bool:
        """Whether at each wrong end one program returns what the other computes on its way: the
        rest may come later.
        """
        values = values_of_ends(self.programs, [pair for pair in self.ends if not pair.is_right])
        return bool(values[0]) and all(
            any(
                program.state[value] == RIGHT and program.is_informed[value]
                for program, value in zip(self.programs, pair, strict=True)
            )
            for pair in zip(*values, strict=True)
        )

    @property
    def has_padded_ends(self) -> bool:
        """Whether a wrong end's size neither divides nor is a multiple of its counterpart's: ranks
        pad it.
        """
        reference, port = (graph.values.numel[graph.ends].tolist() for graph in self.graphs)
        wrong = [pair for pair in self.ends if not pair.is_right]
        sizes = [sorted((reference[pair.reference], port[pair.port])) for pair in wrong]
        return any(smaller > 0 and larger % smaller for smaller, larger in sizes)

    @property
    def has_rows(self) -> bool:
        """Whether the rows of values were measured in both programs."""
        return all(graph.has_rows for graph in self.graphs)

    @property
    def may_move_axes(self) -> bool:
        """Whether recording with moved axes could tell more: neither program was recorded so, and
        some values hold the same numbers with their axes in another order.
        """
        if any(AXIS_LAST in graph.operations for graph in self.graphs):
            return False
        own, other = (program.side for program in self.programs)
        reference, port = (graph.values.shape for graph in self.graphs)
        shapes: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # of what holds the same
        for group, shape in zip(own.group.tolist(), reference, strict=True):
            shapes[group].add(shape)
        return any(
            has_twins(port[value])
            or not all(
                have_same_order(shape, port[value])
                for shape in shapes[own.group[other.partner[value]]]
            )
            for value in np.flatnonzero(other.relation == REORDERED).tolist()
        )

    @property
    def is_vague(self) -> bool:
        """Whether an end's limit is so wide that a fault could hide within it."""
        return any(JUMP * pair.limit >= MOST_ERROR for pair in self.ends)

    @property
    def is_suspicious(self) -> bool:
        """Whether an end is right only because much is legal there."""
        return any(pair.is_right and pair.error >= _SUSPICIOUS for pair in self.ends)

    @property
    def is_close(self) -> bool:
        """Whether the wrong ends are so near to their limits that the error model may be off."""
        wrong = [pair for pair in self.ends if not pair.is_right]
        return bool(wrong) and all(pair.error <= JUMP * pair.limit for pair in wrong)


def compare_graphs(
    reference: Graph,
    port: Graph,
    noise: Graph | None = None,
    rules: Rules | None = None,
    tolerance: float | None = None,
    exchanged: Sequence[tuple[int, int]] = (),
    is_one_program: bool = False,
    shown: Sequence[tuple[int, int]] = (),
) -> GraphComparison:
    """Compare two programs.

    Args:
        reference, port: Two programs that should compute the same.
        noise: The reference recorded again with noise, if any.
        rules: Rules to switch off, for tests.
        tolerance: A relative error that is legal for each value that rounds, if any.
        exchanged: Values of which a trial has put the reference's in the place of the port's.
        is_one_program: Whether one program ran with two versions of what it uses.
        shown: Values that both programs show, which are ends, too.

    Raises:
        NoiseDiffersError: `noise` is another program than `reference`.
    """
    rules = rules or Rules()
    floors = noise_floors(reference, noise)
    modelled = [base_limits(graph, legal_errors(graph)) for graph in (reference, port)]
    if tolerance is not None:
        modelled = [
            np.where(graph.values.roundoff > 0, np.maximum(limit, tolerance), limit)
            for graph, limit in zip((reference, port), modelled, strict=True)
        ]
    limits = limits_with_noise(modelled[0], floors, reference), modelled[1]
    # whether there is a fault, the port's own roundings decide, too; where it is, closer limits
    end_limits = limits if is_coarse(reference) else None
    graphs = unfold(reference, limits[0]), unfold(port, limits[1])
    if noise is not None:
        limits = limits[0], _port_limits_under_noise(graphs, limits)
    sides = _find_equal(graphs, limits)
    if noise is None:
        wider = (
            _beside_angles(graphs[0], limits[0], sides[0]),
            _beside_angles(graphs[1], limits[1], sides[1]),
        )
        if wider[0] is not limits[0] or wider[1] is not limits[1]:
            limits = wider
            sides = _find_equal(graphs, limits)
    if noise is None and max(limit.max(initial=0.0) for limit in limits) >= MOST_ERROR:
        # the model of a long program says nothing in the end: what was measured on the way does
        limits = (
            _beside_measured(graphs[0], limits[0], sides[0]),
            _beside_measured(graphs[1], limits[1], sides[1]),
        )
        sides = _find_equal(graphs, limits)
    programs = make_programs(graphs, sides, limits, noise is not None)
    ends, unpaired = pair_ends(programs, end_limits or limits, is_one_program=is_one_program)
    programs, shown_pairs = add_ends(programs, end_limits or limits, shown)
    if shown_pairs:  # better than what was paired in its order
        ends = beside_shown(programs, ends, shown) + shown_pairs
    if not any(pair.is_comparable for pair in ends):
        within = find_returned_within(programs, {port for _, port in exchanged})
        extended, ends_within = add_ends(programs, end_limits or limits, within)
        # that all of it is right says nothing of what the programs end with
        if exchanged or not all(pair.is_right for pair in ends_within):
            programs, ends = extended, ends + ends_within
    programs, replaced = add_ends(programs, end_limits or limits, exchanged)
    open_to = open_values(programs, ends, replaced)
    faults = _find_faults(programs, [*ends, *replaced], limits, rules, open_to)
    lacked = count_lacked_rows(programs, limits, ends)
    return GraphComparison(programs, faults, ends, replaced, unpaired, limits, open_to, lacked)


def compare_known(
    graphs: tuple[Graph, Graph],
    limits: tuple[Floats, Floats],
    closer: tuple[Floats, Floats],
    expected: tuple[Indices, Indices],
    ends: Sequence[EndPair],
    equal: Sequence[tuple[int, int, float]],
) -> GraphComparison:
    """Compare two programs whose ends and limits are known.

    Args:
        limits: The largest relative error of each value.
        closer: The error above which an equal value is in doubt.
        expected: What is known of each value besides its numbers (see `make_programs`).
        ends: Pairs of ends.
        equal: Values of both that are known to be equal, each with its error.
    """
    sides = find_equal(*graphs, limits, equal)
    programs = make_programs(graphs, sides, limits, True, closer, expected)
    open_to = open_values(programs, ends, ())
    rules = Rules(finds_other_numbers=False, finds_other_orders=False, acquits_repetitions=True)
    faults = _find_faults(programs, ends, limits, rules, open_to)
    return GraphComparison(programs, faults, list(ends), [], [[], []], limits, open_to, 0)


def _find_equal(graphs: tuple[Graph, Graph], limits: tuple[Floats, Floats]) -> tuple[Side, Side]:
    return find_equal(
        *graphs, (np.minimum(limits[0], MOST_ERROR), np.minimum(limits[1], MOST_ERROR))
    )


def _beside_measured(graph: Graph, limits: Floats, side: Side) -> Floats:
    """Return the limits that follow from how far the values before each are off."""
    measured = np.where(side.relation >= MOVED, side.error, np.nan)
    closer: Floats = np.minimum(limits, base_limits(graph, legal_errors(graph, measured)))
    return closer


def _beside_angles(graph: Graph, limits: Floats, side: Side) -> Floats:
    """Return the limits that follow from how far angles are off where both programs have them: the
    same limits unless one of their functions is off by more.
    """
    errors = angle_errors(graph, np.where(side.relation >= ROWS, side.error, np.nan))
    if not ((errors > limits) & (side.relation < ROWS)).any():
        return limits
    return np.maximum(limits, base_limits(graph, legal_errors(graph, least_errors=errors)))


def _port_limits_under_noise(graphs: tuple[Graph, Graph], limits: tuple[Floats, Floats]) -> Floats:
    """Leave the port one rounding of its own: the reference's floor holds the rest.

    A port in a coarser dtype than the reference keeps the limits of the model, and so do programs
    of which one is split over ranks: these add up in other orders.
    """
    coarsest = [graph.values.roundoff.max(initial=0.0) for graph in graphs]
    if coarsest[1] > coarsest[0] or any(graph.is_split for graph in graphs):
        return limits[1]
    return base_limits(graphs[1], rounding_errors(graphs[1].values.roundoff))


def _count(program: ComparedProgram) -> dict[str, int]:
    counts = np.bincount(program.state, minlength=len(STATE_NAMES)).tolist()
    return dict(zip(STATE_NAMES, counts, strict=True))


# -- faults


def _find_faults(
    programs: tuple[ComparedProgram, ComparedProgram],
    ends: Sequence[EndPair],
    limits: tuple[Floats, Floats],
    rules: Rules,
    open_to: tuple[Set[int], Set[int]],
) -> list[GraphFault]:
    wrong = [pair for pair in ends if not pair.is_right]
    if not wrong:
        return []
    wrong = in_order(programs, wrong)
    sources, doubts = [], []
    values_of_sides = values_of_ends(programs, wrong)
    for side, (program, values) in enumerate(zip(programs, values_of_sides, strict=True)):
        found, doubt = find_sources(program, programs[1 - side], values, rules)
        sources.append(found)
        doubts.append(doubt)
    if rules.compares_suspects:
        sources = blame_suspects_of_twins(programs, sources, doubts)
    if rules.finds_other_numbers:
        sources = blame_other_numbers(programs, sources, doubts)
    sources = blame_what_changes_nothing(programs, sources, doubts)
    if rules.finds_other_orders:
        sources = blame_other_orders(programs, sources, doubts)
    # what was not recorded may have made a wrong leaf of right values: the last that is blamed
    pairs: list[Pair] = []
    for is_last, is_open in product((False, True), (True, False)):
        chosen = [
            [
                source
                for source in side
                if _is_unrecorded(program, source) == is_last
                and makes_wrong(program, _begins(program, source), values) == is_open
            ]
            for program, side, values in zip(programs, sources, open_to, strict=True)
        ]
        pairs += _pair_sources(programs, chosen)
    pairs = [begin_with_terms(programs, pair) for pair in pairs]
    faults = _group(programs, [_make_fault(programs, pair, limits) for pair in pairs])
    exchanged = [_ends_only(programs, pair) for pair in wrong if _is_exchanged(programs, pair)]
    if exchanged and _is_exchanged(programs, wrong[0]):
        return exchanged + faults
    return faults + exchanged or [_ends_only(programs, pair) for pair in wrong]


def _is_exchanged(programs: tuple[ComparedProgram, ComparedProgram], pair: EndPair) -> bool:
    """Return whether both programs have the values of two ends, but end with others."""
    ends = zip(programs, (pair.reference, pair.port), strict=True)
    return all(program.state[program.graph.ends[end]] == RIGHT for program, end in ends)


def _pair_sources(
    programs: tuple[ComparedProgram, ComparedProgram], sources: list[list[DoubtSource]]
) -> list[Pair]:
    """Pair the sources of both sides that begin at the same right values, the best first."""
    frontiers = [
        [_frontier(programs, side, source) for source in own] for side, own in enumerate(sources)
    ]
    scored = []
    for own, begins in enumerate(frontiers[0]):
        for other, begins_too in enumerate(frontiers[1]):
            overlap = len(begins & begins_too) / max(len(begins | begins_too), 1)
            same = _is_same_kind(programs, sources[0][own], sources[1][other])
            if overlap or same:
                scored.append((-overlap, not same, own, other))
    taken: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for _, _, own, other in sorted(scored):
        if own not in taken[0] and other not in taken[1]:
            taken[0][own], taken[1][other] = other, own
    pairs: list[tuple[int | None, int | None]] = list(taken[0].items())
    # a source without a counterpart stands beside the next one without; a draw of weights beside
    # another such draw
    for prepares in (False, True):
        rest = [
            [
                index
                for index, source in enumerate(sources[side])
                if index not in taken[side] and _draws_weights(programs[side], source) == prepares
            ]
            for side in (0, 1)
        ]
        pairs += zip_longest(rest[0], rest[1])
    meet = {(own, other) for overlap, _, own, other in scored if overlap}
    found: list[tuple[tuple[int, ...], Pair]] = []
    for indices in pairs:
        first, second = indices
        pair: Pair = (
            None if first is None else sources[0][first],
            None if second is None else sources[1][second],
        )
        present = [source for source in pair if source is not None]
        rank = min(index for index in indices if index is not None)
        weak = all(source.is_weak for source in present)
        # the other program reads what this one draws
        draws_alone = None in pair and any(map(_draws_weights, programs, pair))
        accused = any(source.is_accused for source in present)
        first_end = min(source.first_end for source in present)
        all_accused = all(source.is_accused for source in present)
        # of both programs' code, unless both are accused: then the port's tells
        was_legal = any(source.was_legal for source in (present[-1:] if all_accused else present))
        meets = indices in meet
        # nothing runs before a leaf, which tells nothing of one without a counterpart
        is_lone_leaf = not meets and any(source.origin < 0 for source in present)
        may_be_earlier = is_lone_leaf or any(source.suspects for source in present)
        is_alike = meets and _is_same_kind(programs, *present)
        order = (
            weak, draws_alone, not accused, was_legal, first_end, None in pair,
            may_be_earlier, not meets, not all_accused, not is_alike, rank,
        )  # fmt: skip
        found.append((order, pair))
    return [pair for _, pair in sorted(found, key=lambda item: item[0])]


def _is_same_kind(
    programs: tuple[ComparedProgram, ComparedProgram], own: DoubtSource, other: DoubtSource
) -> bool:
    if own.origin < 0 or other.origin < 0:
        return (
            own.origin < 0
            and other.origin < 0
            and _leaf_kind(programs[0], own) == _leaf_kind(programs[1], other)
        )
    return programs[0].family(own.origin) == programs[1].family(other.origin)


def _draws_weights(program: ComparedProgram, source: DoubtSource | None) -> bool:
    """Return whether a source draws random numbers before the first forward of a model."""
    if source is None or source.origin < 0:
        return False
    graph, node = program.graph, source.origin
    return bool(graph.nodes.random[node]) and bool(graph.is_before_models[node])


def _begins(program: ComparedProgram, source: DoubtSource) -> set[int]:
    """Return the values with which a source begins."""
    return {-1 - source.origin} if source.origin < 0 else set(program.makes[source.origin])


def _is_unrecorded(program: ComparedProgram, source: DoubtSource) -> bool:
    return source.origin < 0 and bool(program.graph.values.unrecorded[-1 - source.origin])


def _leaf_kind(program: ComparedProgram, source: DoubtSource) -> tuple[str, int]:
    values, leaf = program.graph.values, -1 - source.origin
    return program.graph.leaf_kinds[values.leaf[leaf]], int(values.numel[leaf])


def _frontier(
    programs: tuple[ComparedProgram, ComparedProgram], side: int, source: DoubtSource
) -> set[int]:
    """Return the groups of the right values at which a source begins: of one that has rows or parts
    of the reference's, the group of that.
    """
    program, origin = programs[side], source.origin
    nodes = [origin] if origin >= 0 else program.readers[-1 - origin][:1]
    nodes = nodes + _upstream(program, source)
    return {
        _group_of(programs, side, read)
        for node in nodes
        for read in program.reads[node]
        if read >= 0 and program.state[read] == RIGHT
    }


def _group_of(programs: tuple[ComparedProgram, ComparedProgram], side: int, value: int) -> int:
    own = programs[side].side
    if side == 1 and own.relation[value] < MOVED and own.partner[value] >= 0:
        return int(programs[0].side.group[own.partner[value]])
    return int(own.group[value])


def _make_fault(
    programs: tuple[ComparedProgram, ComparedProgram], pair: Pair, limits: tuple[Floats, Floats]
) -> GraphFault:
    regions = _regions(programs, pair)
    places: list[FaultPlace | None] = []
    for program, source, region in zip(programs, pair, regions, strict=True):
        leaf = -1 - source.origin if source is not None and source.origin < 0 else NOTHING
        if source is None:
            places.append(None)
        else:
            nodes = tuple(program.readers[leaf]) if leaf >= 0 else (source.origin,)
            places.append(FaultPlace(nodes, leaf, tuple(region), tuple(source.suspects)))
    error, limit = _error(programs, pair, limits)
    origins = [None if source is None else source.origin for source in pair]
    explanation = explain(*programs, regions, (origins[0], origins[1]))
    is_certain = any(source is not None and source.is_accused for source in pair)
    return GraphFault(places[0], places[1], error, limit, is_certain, explanation)


def _value(program: ComparedProgram, source: DoubtSource) -> int:
    return -1 - source.origin if source.origin < 0 else program.makes[source.origin][0]


def _error(
    programs: tuple[ComparedProgram, ComparedProgram], pair: Pair, limits: tuple[Floats, Floats]
) -> tuple[float | None, float]:
    """Return how far the two sources' values are apart, and how far they might be."""
    sides = [side for side in (1, 0) if pair[side] is not None]
    values = {side: _value(programs[side], pair[side]) for side in sides}  # type: ignore[arg-type]
    limit = float(np.sqrt(sum(limits[side][value] ** 2 for side, value in values.items())))
    if len(values) < 2:
        return None, limit
    tables = [program.graph.values for program in programs]
    if tables[0].numel[values[0]] != tables[1].numel[values[1]]:
        return None, limit
    sketches = [table.sketch[[values[side]]] for side, table in enumerate(tables)]
    error = float(relative_distances(sketches[0], sketches[1])[0])
    return (None if np.isnan(error) else error), limit


def _regions(
    programs: tuple[ComparedProgram, ComparedProgram], pair: Pair
) -> tuple[list[int], list[int]]:
    """Return the nodes of each side from the source to where both sides do the same again.

    One operation that both have is no such place: the softmax of a formula comes between other
    operations of it.
    """
    walks = [
        [] if source is None else _downstream(program, source)
        for program, source in zip(programs, pair, strict=True)
    ]
    signs = [
        [program.signature(node) for node in walk]
        for program, walk in zip(programs, walks, strict=True)
    ]
    regions: list[list[int]] = []
    for side in (0, 1):
        source, walk = pair[side], walks[side]
        others = set(pairwise(signs[1 - side][1:]))
        steps = list(pairwise(signs[side]))
        stop = len(walk)
        for place in range(1, len(steps)):
            if steps[place] in others and min(steps[place][0][1], default=0) < 0:
                stop = place
                break
        upstream = [] if source is None else _upstream(programs[side], source)
        regions.append(sorted({*upstream, *walk[: max(stop, 1)]}))
    return regions[0], regions[1]


def _upstream(program: ComparedProgram, source: DoubtSource) -> list[int]:
    """Return what is suspected or was acquitted before a source; of a leaf what reads it first."""
    nodes = [origin for origin in source.suspects + source.cleared if origin >= 0]
    leaves = [-1 - origin for origin in source.suspects if origin < 0]
    return nodes + [reader for leaf in leaves for reader in program.readers[leaf][:1]]


def _downstream(program: ComparedProgram, source: DoubtSource) -> list[int]:
    """Return the source and the next nodes that are wrong because of it, in order."""
    start = [source.origin] if source.origin >= 0 else program.readers[-1 - source.origin][:1]
    walk: list[int] = []
    seen = set(start)
    waiting = list(start)
    while waiting and len(walk) < REGION_NODES:
        node = heapq.heappop(waiting)
        walk.append(node)
        for value in program.makes[node]:
            if program.state[value] != RIGHT:
                for reader in program.readers[value]:
                    if reader not in seen:
                        seen.add(reader)
                        heapq.heappush(waiting, reader)
    return walk


def _group(
    programs: tuple[ComparedProgram, ComparedProgram], faults: list[GraphFault]
) -> list[GraphFault]:
    """Put repetitions of a fault together: the same operation of the same line on both sides."""
    groups: dict[object, GraphFault] = {}
    for fault in faults:
        key = tuple(_line_key(p, place) for p, place in zip(programs, fault.places, strict=True))
        first = groups.get(key)
        if first is None:
            groups[key] = fault
            continue
        places = [_merge(own, again) for own, again in zip(first.places, fault.places, strict=True)]
        groups[key] = replace(first, reference=places[0], port=places[1])
    return list(groups.values())


def _line_key(program: ComparedProgram, place: FaultPlace | None) -> object:
    if place is None:
        return None
    if place.leaf >= 0:
        return ("leaf", place.leaf)
    return program.code(place.nodes[0])


def _merge(own: FaultPlace | None, again: FaultPlace | None) -> FaultPlace | None:
    if own is None or again is None or own.leaf >= 0:
        return own
    return replace(own, nodes=tuple(dict.fromkeys(own.nodes + again.nodes)))


def _ends_only(programs: tuple[ComparedProgram, ComparedProgram], pair: EndPair) -> GraphFault:
    """Return a fault of ends: each returned value is right, but they are other ones, or terms of a
    sum in one program, with what first made the terms.
    """
    values = [
        int(program.graph.ends[end])
        for program, end in zip(programs, (pair.reference, pair.port), strict=True)
    ]
    terms = [makers_of_terms(programs, side, value) for side, value in enumerate(values)]
    makers = (terms[0] or terms[1]) if None in terms else None
    places = []
    for program, value, maker in zip(programs, values, makers or (NOTHING, NOTHING), strict=True):
        node = program.maker[value]
        region = (maker, node) if NOTHING not in (maker, node) else ()
        places.append(
            FaultPlace((node,) if node >= 0 else (), NOTHING if node >= 0 else value, region)
        )
    return GraphFault(places[0], places[1], pair.error, pair.limit, True, Explanation("end"))
