"""Two programs as their runs are recorded and compared: which steps, with which limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from otel_torch.bisecting.compared import (
    AnyExchange,
    ComparedRank,
    ComparedRuns,
    RankedKey,
    compare_runs,
    is_one_beside_several,
)
from otel_torch.bisecting.later_steps import (
    EVERY_STEP,
    SETTINGS,
    TooManyOperations,
    find_later_step,
    has_short_steps,
)
from otel_torch.bisecting.printed import PrintedLine, find_printed, pair_lines
from otel_torch.bisecting.runs import (
    NothingRecorded,
    ProgramRun,
    Programs,
    RunFailed,
    SideName,
)
from otel_torch.graph.error_model import NoiseDiffersError, is_coarse
from otel_torch.graph.graph import NOTHING, Graph
from otel_torch.parity.operations.read_graph import read_graph
from otel_torch.parity.sides import Sides

Noise = Literal["auto", "on", "off"]
_WITHOUT_NOISE = "what rounding may cause was computed, and not measured with noise: {}"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How two programs are recorded and compared.

    Attributes:
        noise: Whether the reference also runs with noise: `auto` where it computes in a dtype
            coarser than float32, or is off by hardly more than the model of errors allows.
        tolerance: A relative L2 error that is always legal, if any.
        steps: Which steps are recorded, as OTEL_TORCH_STEPS has it; by default the first of each
            model, or a later one if that is the first to differ.
        is_one_program: Whether one program runs with two versions of what it uses.
    """

    noise: Noise = "auto"
    tolerance: float | None = None
    steps: str | None = None
    is_one_program: bool = False


class RecordedPrograms:
    """Two programs that can be recorded and compared as often as needed.

    Attributes:
        warnings: What was left out of the comparison.
    """

    def __init__(self, programs: Programs, options: RunOptions) -> None:
        self.warnings: list[str] = []
        self.programs, self._options = programs, options
        self._tolerance = options.tolerance
        self._noise: ProgramRun | None = None
        self._noisy: list[ProgramRun] = []  # all runs with noise, also those not compared any more
        self._bears_noise = True  # with noise the reference runs the same operations
        self._calls_nothing = False  # a program calls no module
        # what the programs print: values of the port, and those of the reference
        self._shown: dict[RankedKey, RankedKey] = {}
        self._read = cache(read_graph)
        steps = {} if options.steps is None else {"steps": options.steps}
        self._settings: dict[SideName, dict[str, str]] = {
            "reference": SETTINGS | steps,
            "port": SETTINGS | steps,
        }
        self._before_rows = self._state()

    def first(self, tell: Callable[[str], None]) -> ComparedRuns:
        """Record both as they are, and compare.

        Returns:
            The comparison of the first step of each model; if these match, that of the first step
            that differs, of trainings and of one program else the last one. Where a program calls
            no model, or what enters one differs, that of all from the first operation on. All
            further runs record the same.
        """
        try:
            compared = self._record_both("as it is")
        except NothingRecorded:
            self._calls_nothing = True
            return self._from_the_beginning("a program calls no module", tell, steps=EVERY_STEP)
        if (whole := self._whole(compared, tell)) is not None:
            return whole
        compared = self._to_the_end(compared, tell) or self._later(compared, tell) or compared
        return self._prepared(compared, tell) or compared

    def _attempt(
        self, record: Callable[[], ComparedRuns], is_answer: Callable[[ComparedRuns], bool]
    ) -> ComparedRuns | None:
        """Return a further comparison if it answers; else all runs are recorded as before."""
        before, self._noise = self._state(), None
        with suppress(RunFailed):
            compared = record()
            if is_answer(compared):
                return compared
        self._settings, self._noise = before
        return None

    def _whole(self, compared: ComparedRuns, tell: Callable[[str], None]) -> ComparedRuns | None:
        """Return the comparison of all steps, if these match, though a model returns something else
        in each program: one normalizes inside of it, the other after both of its calls.
        """
        rank = compared.leading
        if self._options.steps is not None or not rank.comparison.returns_another:
            return None
        if not has_short_steps(_paths(compared)):
            return None
        tell("a model returns something else in each program: recording all steps")
        return self._attempt(
            self._in_all_steps,
            lambda whole: whole.is_match and bool(whole.leading.comparison.ends),
        )

    def _in_all_steps(self) -> ComparedRuns:
        for own in self._settings.values():
            own["steps"] = EVERY_STEP
        return self._record_both("in all steps")

    def _to_the_end(
        self, compared: ComparedRuns, tell: Callable[[str], None]
    ) -> ComparedRuns | None:
        """Return the comparison of all steps, if the first ones differ and the programs' forwards
        are others: what was recorded of each then ends elsewhere, and what it made last is no pair.
        """
        is_open = compared.leading.has_recorded_fault
        if not is_open or not self._go_on_alike(compared, has_others=True):
            return None
        tell("the programs' forwards are others: recording all steps")
        return self._in_all_steps()

    def _go_on_alike(self, compared: ComparedRuns, *, has_others: bool = False) -> bool:
        """Return whether both programs go on after what was recorded of them, so that they may put
        together what can be compared: the scores of all tokens.

        Args:
            has_others: Only where the forwards of both are other ones.
        """
        rank = compared.leading
        is_open = all(own.get("steps") != EVERY_STEP for own in self._settings.values())
        if self._options.steps is not None or not is_open or rank.is_divided:
            return False
        if not all(graph.is_cut for graph in rank.comparison.graphs):
            return False
        return has_short_steps(_paths(compared), has_others=has_others)

    def _later(self, compared: ComparedRuns, tell: Callable[[str], None]) -> ComparedRuns | None:
        """Return the comparison of a later step, if the first ones match; else None."""
        rank = compared.leading
        if rank.has_recorded_fault or self._options.steps is not None:
            return None
        limit = max((pair.limit for pair in rank.comparison.ends), default=0.0)
        later = find_later_step(_paths(compared), limit)
        if isinstance(later, TooManyOperations):
            self.warnings.append(str(later))
            return None
        # an optimizer's last step shows in no forward; what samples end with is printed
        tells_last = self._options.is_one_program or _are_trainings(compared)
        if later is None or (later.is_last and not tells_last):
            return None
        tell(str(later))
        self._settings["reference"]["steps"] = later.steps.reference
        self._settings["port"]["steps"] = later.steps.port
        self._tolerance = max(later.tolerance, self._tolerance or 0.0)
        if later.is_every:
            return self._record_both("in all steps")
        return self._record_both(
            "in the last step" if later.is_last else "in the first step that differs"
        )

    def _from_the_beginning(
        self, reason: str, tell: Callable[[str], None], **settings: str
    ) -> ComparedRuns:
        """Record both from their first operation on, and compare."""
        tell(f"{reason}: recording both from the first operation on")
        for own in self._settings.values():
            own |= {"graph_before": "on"} | settings
        return self._record_both("from its first operation on")

    def _prepared(self, compared: ComparedRuns, tell: Callable[[str], None]) -> ComparedRuns | None:
        """Return the comparison of all from the first operation on, if what a program has prepared
        before its models run is or may be the first fault, and is made by operations.
        """
        if self._options.steps is not None or self._options.is_one_program:
            return None
        kinds = _leaves_at_fault(compared.leading)
        if not kinds:
            return None
        # a parameter has a name: only what has prepared it says more
        is_named = "parameter" in kinds
        return self._attempt(
            lambda: self._from_the_beginning("what a model starts with differs", tell),
            lambda whole: _begins_at_operation(whole.leading, is_prepared=is_named),
        )

    def port_from_the_beginning(self, compared: ComparedRuns) -> ComparedRank | None:
        """Return the port from its first operation on beside the reference as it was recorded; None
        if it cannot be recorded so. Further runs are recorded as before.
        """
        if self._settings["port"].get("graph_before") == "on":
            return compared.leading
        if self._options.is_one_program:
            return None
        why = "from its first operation on, to learn what has made its weights"
        with suppress(RunFailed):
            run = self.record("port", why, graph_before="on")
            return self.compare(compared.reference, run).leading
        return None

    def by_rows(self) -> ComparedRuns:
        """Record both with the rows of their values, and compare; so do all further runs.

        What prepares tokens for other batches is another program: it is left out, and a weight is
        no result of it.
        """
        self._before_rows, self._noise = self._state(), None
        if not self._calls_nothing:
            for settings in self._settings.values():
                settings.pop("graph_before", None)
        return self._with_noise(self.compare(*self._by_rows()))

    def in_whole_values(self) -> None:
        """Record as before `by_rows` in all further runs."""
        self._settings, self._noise = self._before_rows

    def _state(self) -> tuple[dict[SideName, dict[str, str]], ProgramRun | None]:
        """Return how runs are recorded now, and the run with noise that they are compared with."""
        return {side: dict(own) for side, own in self._settings.items()}, self._noise

    def record(self, side: SideName, why: str, **settings: str) -> ProgramRun:
        """Run one of them. Raises RunFailed if it does not end well, or records nothing."""
        return self.programs.run(side, why, self._settings[side] | settings)

    def compare(
        self,
        reference: ProgramRun,
        port: ProgramRun,
        exchanges: Mapping[RankedKey, AnyExchange] = MappingProxyType({}),
    ) -> ComparedRuns:
        """Compare two runs, with the noise of the reference if that was recorded.

        Args:
            exchanges: Values of the reference by those of the port in whose place they were put.
        """
        return compare_runs(
            reference,
            port,
            self._noise,
            self._tolerance,
            self._read,
            exchanges,
            is_one_program=self._options.is_one_program,
            shown=self._shown if reference.side != port.side else {},
        )

    def compare_printed(
        self, compared: ComparedRuns, lines: Sequence[Sides[PrintedLine]]
    ) -> ComparedRuns | None:
        """Compare two runs again, with the values that the programs print as further ends; None if
        these were not recorded or cannot be compared. Later comparisons have the same ends.
        """
        rank = compared.leading
        graphs = rank.comparison.graphs
        numbers = (
            pair for line in lines for pair in zip(*(own.numbers for own in line), strict=True)
        )
        for own, its in numbers:
            if (pair := find_printed(graphs, Sides(own, its))) is not None:
                self._shown[rank.port_key(pair.port)] = rank.reference_key(pair.reference)
        if self._shown:
            again = self.compare(compared.reference, compared.port)
            if again.leading.comparison.is_comparable:
                return again if self._noise is not None else self._with_noise(again)
        self._shown.clear()
        return None

    def printed_lines(self, compared: ComparedRuns) -> list[Sides[PrintedLine]]:
        """Return the lines with numbers that both programs print, and the reference each time."""
        outputs: dict[SideName, list[Path]] = {"reference": [], "port": []}
        for run in self.programs.runs:
            # what runs with noise, or with exchanged values, prints other numbers
            if run.output is not None and run not in self._noisy:
                outputs[run.side].append(run.output)
        if not all(outputs.values()):
            return []
        references, port = outputs["reference"], outputs["port"][0]
        lines = pair_lines(references, port)
        if len(references) > 1 or first_apart(lines, compared) is None:
            return lines
        again = self.record("reference", "again, to learn what it prints each time")
        return pair_lines([*references, *filter(None, [again.output])], port)

    def _record_both(self, why: str) -> ComparedRuns:
        self._noise = None  # of what was recorded before
        reference, port = self.record("reference", why), self.record("port", why)
        if is_one_beside_several(reference, port):
            reference, port = self._cut(reference, port)
        compared = self.compare(reference, port)
        if compared.needs_rows and self._go_on_alike(compared):
            return self._in_all_steps()
        if compared.needs_rows:
            return self.by_rows()
        if compared.may_move_axes:
            compared = self.compare(*self._by_axes())
        return self._with_noise(compared)

    def _with_noise(self, compared: ComparedRuns) -> ComparedRuns:
        """Compare once more with the noise of the reference, if that is wanted."""
        is_wanted = self._wants_noise(compared)
        if not self._bears_noise or not (is_wanted or self._may_be_rounding(compared)):
            return compared
        try:
            self._noise = self.record("reference", "with noise, to learn its floor", noise="1")
            self._noisy.append(self._noise)
            noisy = self.compare(compared.reference, compared.port)
        except (NoiseDiffersError, RunFailed) as error:
            self._noise, self._bears_noise = None, False
            self.warnings.append(_WITHOUT_NOISE.format(error))
            return compared
        if is_wanted or noisy.is_match:
            return noisy
        self._noise = None  # there is a fault, and the model of errors is closer to its place
        return compared

    def _cut(self, reference: ProgramRun, port: ProgramRun) -> tuple[ProgramRun, ProgramRun]:
        """Record one process again beside several ranks, with the parts that these may have."""
        alone = min(reference, port, key=lambda run: len(run.recordings))
        ranks = str(max(len(reference.recordings), len(port.recordings)))
        if self._settings[alone.side].get("graph_parts") == ranks:
            return reference, port
        self._settings[alone.side]["graph_parts"] = ranks
        again = self.record(alone.side, f"with the parts that {ranks} ranks may have")
        return (again, port) if alone is reference else (reference, again)

    def _by_axes(self) -> tuple[ProgramRun, ProgramRun]:
        """Record both again with each axis of their values moved last."""
        for settings in self._settings.values():
            settings["graph_axes"] = "on"
        why = "with axes moved, for the programs lay their values out otherwise"
        return self.record("reference", why), self.record("port", why)

    def _by_rows(self) -> tuple[ProgramRun, ProgramRun]:
        """Record both again with the rows of their values.

        Tokens that one program computes at once may be spread over all steps of the other.
        """
        rows = {"graph_rows": "on"}
        if self._options.steps is None:
            rows["steps"] = EVERY_STEP
        for settings in self._settings.values():
            settings |= rows
        why = "by rows, for the programs divide their work otherwise"
        return self.record("reference", why), self.record("port", why)

    def _wants_noise(self, compared: ComparedRuns) -> bool:
        if self._options.noise == "auto":
            return any(map(_is_unsure, compared.ranks))
        return self._options.noise == "on"

    def _may_be_rounding(self, compared: ComparedRuns) -> bool:
        """Return whether all that differs may be what an optimizer has made of rounding: it divides
        the gradient of a key's bias, which is zero but for that, by its own size.
        """
        is_asked = self._options.noise == "auto" and _are_trainings(compared)
        return is_asked and not compared.is_match


def _are_trainings(compared: ComparedRuns) -> bool:
    return all(graph.has_backward for graph in compared.leading.comparison.graphs)


def _paths(compared: ComparedRuns) -> Sides[Sequence[Path]]:
    """Return the recordings of both programs that the leading rank's comparison is of."""
    rank = compared.leading
    return Sides(rank.paths(compared.reference), rank.paths(compared.port))


def first_apart(
    lines: Iterable[Sides[PrintedLine]], compared: ComparedRuns
) -> Sides[PrintedLine] | None:
    """Return the first of some lines whose numbers differ by more than what was compared may."""
    ends = (pair for rank in compared.ranks for pair in rank.comparison.ends)
    limit = max((pair.limit for pair in ends), default=0.0)
    return next((line for line in lines if line.reference.numbers_apart(line.port, limit)), None)


def _begins_at_leaf(rank: ComparedRank) -> bool:
    faults = rank.comparison.faults
    return bool(faults) and faults[0].begins_at_leaf


def _begins_at_operation(rank: ComparedRank, *, is_prepared: bool) -> bool:
    """Return whether the first fault begins at an operation.

    Args:
        is_prepared: Only at one that runs before any model does.
    """
    faults = rank.comparison.faults
    if not faults or faults[0].begins_at_leaf:
        return False
    if not is_prepared:
        return True
    places = zip(rank.comparison.graphs, faults[0].places, strict=True)
    return any(
        graph.is_before_models[place.nodes[0]] for graph, place in places if place is not None
    )


def _leaves_at_fault(rank: ComparedRank) -> set[str]:
    """Return the kinds of the leaves that are the first fault, may be instead of it, or are read in
    the place of other values.
    """
    graphs, faults = rank.comparison.graphs, rank.comparison.faults
    leaves: list[tuple[Graph, int]] = []
    if _begins_at_leaf(rank):
        places = zip(graphs, faults[0].places, strict=True)
        leaves = [(graph, place.leaf) for graph, place in places if place is not None]
    elif faults and not rank.is_divided:
        cut = rank.cut(faults[0])
        others = () if cut is None else cut.others
        leaves = [(graphs[1], -1 - origin) for origin in others if origin < 0]
        for fault in faults:
            own = fault.explanation
            if own.kind == "operand":
                leaves += [(graphs[0], value) for value in own.reference]
                leaves += [(graphs[1], value) for value in own.port]
    return {
        graph.leaf_kinds[kind]
        for graph, leaf in leaves
        if leaf != NOTHING and (kind := graph.values.leaf[leaf]) != NOTHING
    }


def _is_unsure(rank: ComparedRank) -> bool:
    """Return whether the model of errors says too little: in a coarse dtype, beside ranks, which
    add up in another order, where the ends are hardly wrong, and where all are right, but so much
    is legal that a fault may hide.
    """
    comparison = rank.comparison
    if is_coarse(comparison.graphs[0]) or comparison.is_close:
        return True
    if comparison.is_match:
        return comparison.is_vague or comparison.is_suspicious
    return rank.is_divided
