"""Two recorded runs beside each other, rank by rank, in the words of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from otel_torch.bisecting.runs import ProgramRun, RunFailed
from otel_torch.graph.blame import Origin, find_suspects
from otel_torch.graph.compare import FaultPlace, GraphComparison, GraphFault, compare_graphs
from otel_torch.graph.counterparts import is_beside
from otel_torch.graph.cut import (
    FAR,
    AnyCounterpart,
    Cut,
    OperationLine,
    begins_of,
    counterparts_of,
    find_cut,
    moved_from,
    operation_line,
    origin_of,
    with_repetitions,
)
from otel_torch.graph.distances import (
    distances_but_for_a_factor,
    most_of_estimate,
    relative_distances,
)
from otel_torch.graph.ends import EndPair, values_of_ends
from otel_torch.graph.equality import REORDERED
from otel_torch.graph.error_model import JUMP
from otel_torch.graph.exchanged import makes_wrong
from otel_torch.graph.explanation import Explanation
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.layouts import Axes, Layouts, Part
from otel_torch.graph.row_counterparts import RowCounterpart
from otel_torch.graph.states import (
    RIGHT,
    ComparedProgram,
    is_in_order,
    is_open,
    made_from,
    made_with,
    use_values_equally,
)
from otel_torch.parity.finding import CodeLine, Finding, Report
from otel_torch.parity.operations.compare_operations import make_finding, report_comparison
from otel_torch.parity.operations.labels import code_line
from otel_torch.parity.operations.read_graph import RecordedGraph, read_graph
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.parity.sides import Sides
from otel_torch.recording.graph_values import (
    ValueKey,
    copy_rows,
    copy_value,
    file_name,
)


class RankedKey(NamedTuple):
    """A value in the recording of one rank."""

    value: ValueKey
    rank: int


class Exchange(NamedTuple):
    """What is put in the place of a value of the port.

    Attributes:
        reference: A value of the reference.
        axes: An axis of that value and the same axis of the port's, beside which all others keep
            their order; None if that is not known.
        part: Which elements of each axis are the part; None for all.
    """

    reference: RankedKey
    axes: Axes | None
    part: Part | None

    @property
    def references(self) -> tuple[RankedKey, ...]:
        """The value of the reference, as one of several."""
        return (self.reference,)

    def write(self, kept: Path, target: Path) -> None:
        """Write what is put in place, if the value was kept in a folder."""
        source = kept / file_name(*self.reference)
        if source.exists():
            copy_value(source, target, self.axes, self.part)


class RowExchange(NamedTuple):
    """The rows that are put in the place of some rows of a value of the port: of each value of the
    reference its rows, and their places.
    """

    sources: tuple[tuple[RankedKey, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def references(self) -> tuple[RankedKey, ...]:
        """The values of the reference that have the rows."""
        return tuple(reference for reference, _, _ in self.sources)

    def write(self, kept: Path, target: Path) -> None:
        """Write what is put in place, if the values were kept in a folder."""
        sources = [(kept / file_name(*own), rows, places) for own, rows, places in self.sources]
        if all(path.exists() for path, _, _ in sources):
            copy_rows(sources, target)


AnyExchange = Exchange | RowExchange
Exchanges = dict[RankedKey, AnyExchange]


@dataclass(frozen=True, eq=False)
class ComparedRank:
    """One rank of both programs, or one process beside all ranks of the other program.

    Attributes:
        is_divided: One program runs in one process, the other one in several, which have parts and
            terms of its values.
    """

    rank: int
    recorded: Sides[RecordedGraph]
    comparison: GraphComparison
    is_divided: bool = False

    @cached_property
    def counterparts(self) -> Mapping[int, AnyCounterpart]:
        """What each value of the port that is not right should be, where that is known."""
        return {
            value: own
            for value, own in counterparts_of(self.comparison).items()
            if self._is_held(own)
        }

    def _is_held(self, own: AnyCounterpart) -> bool:
        """Return whether it is known what of a value of the reference the port should have."""
        if isinstance(own, RowCounterpart):
            return True
        return self._layouts.held(own.reference, own.port) is not None

    def paths(self, run: ProgramRun) -> list[Path]:
        """Return the recordings of a run that are compared here."""
        return _compared_paths(run, self.rank, self.is_divided)

    def finding(self, fault: GraphFault) -> Finding:
        """Return a fault in the names of both programs."""
        return make_finding(self.comparison, fault, self.recorded)

    def cut(
        self,
        fault: GraphFault,
        without: Set[RankedKey] = frozenset(),
        suspects: Set[Origin] | None = None,
    ) -> Cut | None:
        """Return where a fault ends; None where the programs do not meet again behind it, or have
        values of other sizes.

        Args:
            without: Values of the port whose exchange is of no use.
            suspects: What of the port may be at fault at all, if a trial has shown it.
        """
        counterparts = self.counterparts
        if without:
            counterparts = {
                value: own
                for value, own in counterparts.items()
                if self.port_key(own.port) not in without
            }
        cut = find_cut(self.comparison, fault, counterparts, suspects)
        return cut if cut is not None and all(map(self._is_held, cut.exchanges)) else None

    def suspects_after(self, trial: ComparedRank, exchanges: Iterable[RankedKey]) -> set[Origin]:
        """Return what of the port may still have made values wrong that a trial has exchanged.

        The reference's values behind them show what else leads to right results.
        """
        reference, port = trial.comparison.programs
        own, names = self.values_of_port, trial.values_of_port
        exchanged = [names[key] for key in exchanges if key in names]
        suspects = set()
        for origin in find_suspects(port, reference, exchanged):
            value = -1 - origin if origin < 0 else port.makes[origin][0]
            key = trial.port_key(value)
            if key in own:
                suspects.add(origin_of(self.comparison.programs[1], own[key]))
        return suspects

    def begins_with(self, fault: GraphFault, suspects: Set[Origin]) -> bool:
        """Return whether a fault begins with any of some suspects."""
        port = self.comparison.programs[1]
        return any(origin_of(port, value) in suspects for value in begins_of(port, fault.port))

    def with_proven_region(
        self,
        fault: GraphFault,
        without: Set[RankedKey] = frozenset(),
        suspects: Set[Origin] | None = None,
    ) -> GraphFault:
        """Return a fault with what is between right values and the exchange, if it is little."""
        cut = self.cut(fault, without, suspects)
        if cut is None or cut.closeness == FAR or not cut.region:
            return fault
        place = fault.port or FaultPlace((), NOTHING, ())
        region = tuple(sorted({*place.region, *cut.region}))
        return replace(fault, port=replace(place, region=region))

    @cached_property
    def _layouts(self) -> Layouts:
        return Layouts(self.comparison.programs)

    def exchanges(self, cuts: Iterable[Cut]) -> Exchanges:
        """Return the reference's values by those of the port in whose place they are put."""
        return {
            self.port_key(own.port): self._exchange(own) for cut in cuts for own in cut.exchanges
        }

    def _exchange(self, own: AnyCounterpart) -> AnyExchange:
        if isinstance(own, RowCounterpart):
            return RowExchange(
                tuple(
                    (self.reference_key(value), rows, places) for value, rows, places in own.sources
                )
            )
        held = self._layouts.held(own.reference, own.port)
        assert held is not None
        whole, part = self._layouts.part(held)
        return Exchange(self.reference_key(whole), self._layouts.axes(held, own.port), part)

    def is_broken_by(self, trial: ComparedRank) -> bool:
        """Return whether a result of the port is right here and wrong in a trial, or wrong here and
        far more so or NaN in a trial: what was put there does not belong there. What was right
        within a wide limit may be called wrong once less is wrong before it; only a larger error
        counts.
        """
        is_worse = any(
            before is not None and not after.is_right and after.error > _most_error(before)
            for before, after in self._ends_beside(trial)
        )
        return is_worse or self._has_lost_numbers(trial)

    def _has_lost_numbers(self, trial: ComparedRank) -> bool:
        """Return whether a result of the port has more NaN or Inf in a trial than here and than the
        reference's: that says nothing of how far the two are apart.
        """
        graphs = *self.comparison.graphs, trial.comparison.graphs[1]
        reference, before, after = (graph.values.nonfinite[graph.ends] for graph in graphs)
        return any(
            after[pair.port] > max(before[pair.port], reference[pair.reference])
            for pair in self.comparison.ends
        )

    def returns_the_same(self, trial: ComparedRank) -> bool:
        """Return whether a trial leaves all results of the port as they are, within limits."""
        graphs = self.comparison.graphs[1], trial.comparison.graphs[1]
        for before, after in self._ends_beside(trial):
            if before is None:
                return False
            first, second = (
                graph.values.sketch[[graph.ends[pair.port]]]
                for graph, pair in zip(graphs, (before, after), strict=True)
            )
            limit = min(before.limit, after.limit) * most_of_estimate(first.shape[1])
            if not relative_distances(first, second)[0] <= limit:
                return False
        return True

    def is_lessened_by(self, trial: ComparedRank) -> bool:
        """Return whether what the port itself computes where values were exchanged is less wrong in
        a trial, and nowhere more so.
        """
        before, after = self._replaced, trial._replaced
        changes = [
            (pair.error - after[key].error, pair.limit)
            for key, pair in before.items()
            if key in after
        ]
        is_lessened = any(change > limit for change, limit in changes)
        return is_lessened and not any(-change > limit for change, limit in changes)

    @cached_property
    def _replaced(self) -> dict[RankedKey, EndPair]:
        """The pairs of what the port itself computed where values were exchanged, by its name."""
        graph = self.comparison.graphs[1]
        return {
            self.port_key(int(graph.ends[pair.port])): pair for pair in self.comparison.replaced
        }

    def _ends_beside(self, trial: ComparedRank) -> Iterator[tuple[EndPair | None, EndPair]]:
        """Yield each end of a trial, after the same end here, if any: of an end of the reference
        beside which several of the port's are compared, the same of these.
        """
        ends = self.comparison.ends
        before = {pair.reference: pair for pair in ends}
        beside = {(pair.reference, pair.port): pair for pair in ends}
        for after in trial.comparison.ends:
            own = before.get(after.reference)
            yield beside.get((after.reference, after.port), own), after

    def is_open(self, fault: GraphFault) -> bool:
        """Return whether a fault still makes an end wrong, though values were exchanged."""
        comparison = self.comparison
        places = zip(comparison.programs, fault.places, comparison.open_values, strict=True)
        return any(
            makes_wrong(program, begins_of(program, place), values)
            for program, place, values in places
        )

    def reference_key(self, value: int) -> RankedKey:
        """Return a value of the reference as its recording names it."""
        return _key(self.recorded.reference, value, self.rank)

    def port_key(self, value: int) -> RankedKey:
        """Return a value of the port as its recording names it."""
        return _key(self.recorded.port, value, self.rank)

    @cached_property
    def values_of_port(self) -> dict[RankedKey, int]:
        """The values of the port by their names."""
        return by_key(self.recorded.port, self.rank)

    @cached_property
    def _values_of_reference(self) -> dict[RankedKey, int]:
        """The values of the reference by their names."""
        return by_key(self.recorded.reference, self.rank)

    def wrong_in_reference(self) -> Iterator[tuple[int, int]]:
        """Yield the values that the reference has and the port has not, with their sizes."""
        program = self.comparison.programs[0]
        for value in np.flatnonzero(program.state != RIGHT).tolist():
            if not is_beside(program, value):
                yield value, max(int(program.graph.values.numel[value]), 0)

    def results_of_reference(self, *, are_wrong: bool = False) -> set[RankedKey]:
        """Return the ends of the reference that were compared, or those that were wrong."""
        ends = [pair for pair in self.comparison.ends if not (are_wrong and pair.is_right)]
        return set(map(self.reference_key, values_of_ends(self.comparison.programs, ends)[0]))

    def moved_from(self, keys: Iterable[RankedKey]) -> set[RankedKey]:
        """Return values of the port, and what only rearranges them."""
        moved = moved_from(self.comparison.programs[1], self._numbers_of(keys))
        return set(map(self.port_key, moved))

    def are_made_from(self, keys: Iterable[RankedKey], before: Iterable[RankedKey]) -> bool:
        """Return whether the port makes each of some values from some others."""
        others = self._numbers_of(before)
        return self._numbers_of(keys) <= made_with(self.comparison.programs[1], others) - others

    def first_of(self, keys: Iterable[RankedKey]) -> set[RankedKey]:
        """Return those of some values that the port makes from none of the others."""
        program, names = self.comparison.programs[1], self.values_of_port
        known = {key: names[key] for key in keys if key in names}
        behind = {
            made
            for value in made_with(program, known.values())
            for node in program.readers[value]
            for made in program.makes[node]
        }
        return {key for key, value in known.items() if value not in behind}

    def _numbers_of(self, keys: Iterable[RankedKey]) -> set[int]:
        """Return the values of the port with some names, as far as it has them."""
        return {self.values_of_port[key] for key in keys if key in self.values_of_port}

    def is_unrecorded(self, fault: GraphFault) -> bool:
        """Return whether a fault is in what came from steps that were not recorded."""
        return any(self._are_unrecorded(fault))

    def _are_unrecorded(self, fault: GraphFault) -> tuple[bool, bool]:
        """Return in which programs a fault is in what came from steps that were not recorded."""
        reference, port = (
            place is not None
            and place.leaf != NOTHING
            and bool(graph.values.unrecorded[place.leaf])
            for graph, place in zip(self.comparison.graphs, fault.places, strict=True)
        )
        return reference, port

    @property
    def has_recorded_fault(self) -> bool:
        """Whether each program has a fault outside of what unrecorded steps made. Where one has
        none, the faults of the other may just be the steps that it recorded in addition.
        """
        faults = self.comparison.faults
        return all(
            any(
                not self._are_unrecorded(fault)[side]
                for fault in faults
                if fault.places[side] is not None
            )
            for side in (0, 1)
        )

    def is_exchanged_itself(self, fault: GraphFault) -> bool:
        """Return whether a fault is a weight or an input of one size in both programs."""
        if not fault.begins_at_leaf:
            return False
        cut = self.cut(fault)
        return cut is not None and cut.is_leaf

    def may_follow(self, fault: GraphFault, faults: Iterable[GraphFault]) -> bool:
        """Return whether a fault is a constant of the port that comes after what another one makes
        wrong: a token that was chosen has gone through Python, where no operation is seen.
        """
        graph, place = self.comparison.graphs[1], fault.port
        if place is None or place.leaf == NOTHING or not place.nodes:
            return False
        before = (other.port for other in faults if other.is_certain and other.port is not None)
        return graph.leaf_kinds[graph.values.leaf[place.leaf]] == "constant" and any(
            other.leaf == NOTHING and min(other.nodes) < min(place.nodes) for other in before
        )

    def is_input_of_another_size(self, fault: GraphFault) -> bool:
        """Return whether a fault is an input, and has more or fewer elements in the port."""
        sizes = {
            graph.values.numel[place.leaf]
            for graph, place in zip(self.comparison.graphs, fault.places, strict=True)
            if place is not None
            and place.leaf != NOTHING
            and graph.leaf_kinds[graph.values.leaf[place.leaf]] == "input"
        }
        return len(sizes) > 1

    def healed_lines(
        self, fault: GraphFault, without: Set[RankedKey], suspects: Set[Origin] | None
    ) -> set[CodeLine | None]:
        """Return the lines of the port between right values and what a trial has exchanged, that
        run in the module where a fault begins.
        """
        graph, place = self.comparison.graphs[1], fault.port
        cut = self.cut(fault, without, suspects)
        if place is None or not place.nodes or cut is None:
            return set()
        nodes, module = graph.nodes, graph.nodes.module[place.nodes[0]]
        return {
            code_line(graph, int(nodes.line[node]))
            for node in (*place.nodes[:1], *cut.region)
            if nodes.module[node] == module
        }

    def reads_any_of(self, fault: GraphFault, references: Set[RankedKey]) -> bool:
        """Return whether the port's operation at fault reads a value, or what rearranges it, that
        equals one of some values of the reference.
        """
        program, place = self.comparison.programs[1], fault.port
        if place is None or place.leaf != NOTHING or not place.nodes or not references:
            return False
        waiting, seen = list(program.reads[place.nodes[0]]), set[int]()
        while waiting:
            value = waiting.pop()
            seen.add(value)
            node, partner = program.maker[value], int(program.side.partner[value])
            if program.is_put[value]:
                continue
            is_right = program.state[value] == RIGHT and partner >= 0
            if is_right and self.reference_key(partner) in references:
                return True
            if node >= 0 and program.graph.nodes.moves[node]:
                waiting += set(program.reads[node]) - seen
        return False

    def with_repetitions(
        self,
        fault: GraphFault,
        lines: tuple[Set[OperationLine], Set[OperationLine]],
        count: int | None,
    ) -> GraphFault:
        """Return a fault with the places in which it repeats, as `otel_torch.graph.cut` does. If
        not a helper is at fault but a line that calls it, other callers are no repetitions.
        """
        finding = self.finding(fault)
        first, second = (
            partial(_is_run_by, program, recorded, line)
            for program, recorded, line in zip(
                self.comparison.programs,
                self.recorded,
                (finding.line, finding.port_line),
                strict=True,
            )
        )
        return with_repetitions(self.comparison, fault, lines, count, (first, second))

    def repetitions_before(
        self, keys: Iterable[RankedKey], lines: Set[OperationLine], count: int
    ) -> GraphFault | None:
        """Return the first places of some lines of the port, as a fault, of what makes some values
        wrong; None where none does.
        """
        program = self.comparison.programs[1]
        wrong = made_from(program, self._numbers_of(keys), partial(is_open, program))
        nodes = {program.maker[value] for value in wrong if is_open(program, value)} - {NOTHING}
        repeated = sorted(node for node in nodes if operation_line(program, node) in lines)
        if not repeated:
            return None
        place = FaultPlace(tuple(repeated[:count]), NOTHING, ())
        return GraphFault(None, place, None, 0.0, False, Explanation("other"))

    def results(self, fault: GraphFault) -> frozenset[RankedKey]:
        """Return what the port computes from what a fault begins with."""
        program = self.comparison.programs[1]
        begins = moved_from(program, begins_of(program, fault.port))
        readers = {node for value in begins for node in program.readers[value]}
        made = {value for node in readers for value in program.makes[node]} - begins
        return frozenset(map(self.port_key, made))

    def is_less_finite(self, key: RankedKey, exchange: AnyExchange) -> bool:
        """Return whether the reference's value has more NaN or Inf than the port's: of masks one
        program may have -inf where the other has a large number.
        """
        if key not in self.values_of_port:  # of another rank
            return False
        reference, port = (graph.values.nonfinite for graph in self.comparison.graphs)
        names = self._values_of_reference
        brought = sum(int(reference[names[own]]) for own in exchange.references if own in names)
        return brought > int(port[self.values_of_port[key]])

    def are_reordered(self, keys: Iterable[RankedKey]) -> bool:
        """Return whether any of some values has the reference's numbers in another order."""
        program, names = self.comparison.programs[1], self.values_of_port
        return any(program.side.relation[names[key]] == REORDERED for key in keys if key in names)

    def are_rescaled(self, healed: Set[RankedKey], trial: ComparedRank) -> bool:
        """Return whether a trial has healed something, and all of it differed from the trial's by a
        factor alone, and is no result.
        """
        returned = values_of_ends(trial.comparison.programs, trial.comparison.ends)[1]
        if not healed or not healed.isdisjoint(map(trial.port_key, returned)):
            return False
        sketches, limits = [], []
        for rank in (self, trial):
            values = [rank.values_of_port[key] for key in healed]
            sketches.append(rank.comparison.graphs[1].values.sketch[values])
            limits.append(rank.comparison.limits[1][values])
        return bool((distances_but_for_a_factor(*sketches) <= np.hypot(*limits)).all())

    @cached_property
    def right(self) -> dict[RankedKey, bool]:
        """Whether each value of the port that can identify a place is right."""
        program = self.comparison.programs[1]
        return {
            self.port_key(value): bool(program.state[value] == RIGHT)
            for value in program.is_informed.nonzero()[0].tolist()
        }


def _most_error(end: EndPair) -> float:
    """Return the error up to which an exchange has not made a result worse."""
    return max(end.error, end.limit) if end.is_right else JUMP * end.error


def _is_run_by(
    program: ComparedProgram, recorded: RecordedGraph, line: CodeLine | None, node: int
) -> bool:
    """Return whether a line runs a node, or calls the function whose line does."""
    makes = program.makes[node]
    return line is None or not makes or line in recorded.stack_of(makes[0])[:2]


@dataclass(frozen=True, eq=False)
class ComparedRuns:
    """All ranks of both programs."""

    reference: ProgramRun
    port: ProgramRun
    ranks: tuple[ComparedRank, ...]

    @property
    def is_match(self) -> bool:
        """Whether all ends of all ranks are right."""
        return all(rank.comparison.is_match for rank in self.ranks)

    @property
    def needs_rows(self) -> bool:
        """Whether rows, not measured yet, are all that can tell more: no end of one program has the
        size of the other's, or hardly any, or ranks pad their parts.
        """
        comparison = self.leading.comparison
        is_padded = self.leading.is_divided and comparison.has_padded_ends
        is_apart = not comparison.is_comparable or comparison.is_by_chance
        return not comparison.has_rows and (is_padded or is_apart)

    @property
    def may_share_rows(self) -> bool:
        """Whether measuring rows could tell more: they are needed, or the programs split their
        tokens or batch differently, or have them in another order.
        """
        comparison = self.leading.comparison
        if comparison.has_rows or self.leading.is_divided:
            return self.needs_rows
        is_alike = use_values_equally(comparison.programs) and is_in_order(comparison.programs[1])
        return self.needs_rows or not is_alike

    def says_less_than(self, other: ComparedRuns) -> bool:
        """Return whether another comparison of the programs shows more of them to be right."""
        return self.leading.comparison.share_right < other.leading.comparison.share_right

    @property
    def may_move_axes(self) -> bool:
        """Whether recording moved axes could tell more: the ends differ, or may, and some values
        have the same numbers with their axes in another order.
        """
        return any(
            (rank.comparison.is_vague or not rank.comparison.is_match)
            and rank.comparison.may_move_axes
            for rank in self.ranks
        )

    @property
    def leading(self) -> ComparedRank:
        """The first rank that differs, else the first."""
        differing = (rank for rank in self.ranks if not rank.comparison.is_match)
        return next(differing, self.ranks[0])

    def of_rank(self, number: int) -> ComparedRank:
        """Return a rank by its number."""
        return next(rank for rank in self.ranks if rank.rank == number)

    def report(self, number: int | None = None) -> Report:
        """Return the report of a rank, of the leading one by default."""
        rank = self.leading if number is None else self.of_rank(number)
        runs = Sides(self.reference, self.port)
        sources = runs.map(lambda run: RecordingSource(run.recordings[rank.rank]))
        return report_comparison(sources, rank.recorded, rank.comparison)


def compare_runs(
    reference: ProgramRun,
    port: ProgramRun,
    noise: ProgramRun | None = None,
    tolerance: float | None = None,
    read: Callable[..., RecordedGraph] = read_graph,
    exchanges: Mapping[RankedKey, AnyExchange] = MappingProxyType({}),
    *,
    is_one_program: bool = False,
    shown: Mapping[RankedKey, RankedKey] = MappingProxyType({}),
) -> ComparedRuns:
    """Compare two runs, rank by rank.

    Args:
        noise: The reference's run with noise, if any.
        tolerance: A relative L2 error that is always legal, if any.
        read: Reads the reference and its noise, which are compared several times.
        exchanges: Values of the reference by those of the port in whose place they were put.
        is_one_program: Whether one program ran with two versions of what it uses.
        shown: Values of the reference by those of the port that print the same: further ends.

    Raises:
        RunFailed: No rank ran in both programs.
        RecordingError: A recording cannot be read.
        NoiseDiffersError: The run with noise ran other operations.
    """
    common = sorted(reference.recordings.keys() & port.recordings.keys())
    if not common:
        raise RunFailed("no rank ran in both programs")
    is_split = is_one_beside_several(reference, port)

    def sources(run: ProgramRun, rank: int) -> Iterable[RecordingSource]:
        return map(RecordingSource, _compared_paths(run, rank, is_split))

    def compare(rank: int) -> ComparedRank:
        own = read(*sources(reference, rank), has_loops=is_one_program)
        other = read_graph(*sources(port, rank), has_loops=is_one_program)
        recorded = Sides(own, other)
        names = recorded.map(lambda graph: by_key(graph, rank))
        noisy = None
        if noise is not None:
            noisy = read(*sources(noise, rank), has_loops=is_one_program).graph
        comparison = compare_graphs(
            recorded.reference.graph,
            recorded.port.graph,
            noisy,
            tolerance=tolerance,
            # before what a rank got there are terms and shares, of which none is known to be wrong
            exchanged=() if is_split else _exchanged(names, exchanges),
            is_one_program=is_one_program,
            shown=_shown(names, shown),
        )
        return ComparedRank(rank, recorded, comparison, is_split)

    return ComparedRuns(reference, port, tuple(map(compare, common[:1] if is_split else common)))


def _compared_paths(run: ProgramRun, rank: int, is_divided: bool) -> list[Path]:
    return list(run.recordings.values()) if is_divided else [run.recordings[rank]]


def is_one_beside_several(reference: ProgramRun, port: ProgramRun) -> bool:
    """Return whether one program ran in one process, and the other one in several ranks."""
    counts = len(reference.recordings), len(port.recordings)
    return min(counts) == 1 < max(counts)


def _exchanged(
    names: Sides[dict[RankedKey, int]], exchanges: Mapping[RankedKey, AnyExchange]
) -> list[tuple[int, int]]:
    """Return the values of reference and port that were exchanged in a rank's recording."""
    reference, port = names
    return [
        (reference[own.reference], port[key])
        for key, own in exchanges.items()
        if isinstance(own, Exchange) and key._replace(value=key.value.as_put()) in port
    ]


def _shown(
    names: Sides[dict[RankedKey, int]], shown: Mapping[RankedKey, RankedKey]
) -> list[tuple[int, int]]:
    """Return the values of a rank's recordings that the programs print."""
    reference, port = names
    return [
        (reference[own], port[key])
        for key, own in shown.items()
        if own in reference and key in port
    ]


def by_key(recorded: RecordedGraph, rank: int) -> dict[RankedKey, int]:
    """Return the values of a recording by their names.

    Args:
        rank: Of a recording of one process.
    """
    return {_key(recorded, value, rank): value for value in range(len(recorded.places))}


def _key(recorded: RecordedGraph, value: int, rank: int) -> RankedKey:
    place = recorded.places[value]
    key = ValueKey(place.loop or 0, place.step or 0, place.tensor or "")
    return RankedKey(key, rank if place.rank is None else place.rank)
