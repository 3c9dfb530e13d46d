"""The way from two programs to their faults.

Both run, and their graphs are compared. What may be at fault is tried: the port runs once more with
the reference's values in place of its own where the fault ends. Where everything behind that is
right, the fault was there; what is still wrong behind it is the next one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.compared import ComparedRank, ComparedRuns, Exchanges
from otel_torch.bisecting.earlier_places import earlier_attempts
from otel_torch.bisecting.error_curves import add_errors
from otel_torch.bisecting.preparation import preparing_nodes, rearranged_weights
from otel_torch.bisecting.printed import PrintedLine
from otel_torch.bisecting.recorded_programs import RecordedPrograms, RunOptions, first_apart
from otel_torch.bisecting.runs import EndedEarly, Programs, RunFailed, RunsDiffer
from otel_torch.bisecting.taken_rows import begin_at_take, computed_of, takes_of
from otel_torch.bisecting.trials import Attempt, Trial, Trials
from otel_torch.graph.compare import GraphFault
from otel_torch.graph.cut import (
    CLOSE,
    FAR,
    SOLE,
    OperationLine,
    operation_lines,
)
from otel_torch.graph.graph import Floats
from otel_torch.parity.finding import CodeLine, Finding, Proof, Report
from otel_torch.parity.operations.compare_operations import region_operations
from otel_torch.parity.operations.list_operations import list_operations
from otel_torch.parity.report.wording import short_place
from otel_torch.parity.sides import Sides

_NO_MEETING = "behind it the two programs do not meet again, so no value can be exchanged"
_RESCALED = (
    "what comes after it matches with the reference's value, but was off by a factor alone, which "
    "may belong elsewhere"
)
_FAR = (
    "what comes after it matches with the reference's value, but other places lead there as well, "
    "and may be wrong instead"
)
_OTHER_SIZE = (
    "it is an input of another size, and with the reference's in its place all that is made of it "
    "is right: paddings and batches may differ"
)
_HARMLESS = "{place} differs as well, and changes nothing that the port returns"
_STEPS_BETWEEN = (
    "what the steps between the recorded ones have made was exchanged, too: they have the faults "
    "above, and may have others. Mend these, and run it again"
)
_PRINTED = "the programs print other numbers, `{}` and `{}`: what makes them was not compared"
_PRINTED_ALONE = (
    "the programs return nothing of the same size, and were compared by the numbers that both print"
)
_ENDED = "more may be wrong: {}"
_UNTRIED = "the search ended before it was tried"
_NOT_ALL = "with the reference's value there not all results of the ranks match"
# lines that make weights: where there are more, most are how the program lays out all of them
_MOST_PREPARING = 8
# how many places are tried before the search for one fault ends: each try is a run of the port
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Options:
    """How faults are searched for.

    Attributes:
        runs: How the programs are recorded and compared.
        module: Only faults in modules with such a name, of either program, count.
        most_faults: How many faults are looked for.
    """

    runs: RunOptions = field(default_factory=RunOptions)
    module: re.Pattern[str] | None = None
    most_faults: int = 8


def bisect_programs(
    programs: Programs, options: Options, tell: Callable[[str], None] = lambda text: None
) -> Bisection:
    """Find where a port begins to differ from its reference, and try each answer.

    Args:
        programs: The two programs.
        tell: Called with what is known so far.

    Raises:
        RecordingError: A recording cannot be read.
    """
    began = time.monotonic()
    answer = _answer(programs, options, tell)
    answer.seconds = time.monotonic() - began
    return answer


def _answer(programs: Programs, options: Options, tell: Callable[[str], None]) -> Bisection:
    recorded = RecordedPrograms(programs, options.runs)
    begun: list[_Search] = []

    def search(compared: ComparedRuns) -> Bisection:
        begun.append(_Search(recorded, options, tell, compared))
        return begun[-1].run()

    try:
        compared = recorded.first(tell)
        by_prints = _by_prints(compared, recorded, tell)
        answer, compared = _bisect(by_prints or compared, recorded, search)
        if by_prints is not None:
            answer.report.warnings.append(_PRINTED_ALONE)
        if answer.verdict != "diverged":
            return _with_printed(answer, compared, recorded, search, tell)
        return answer
    except (RunFailed, EndedEarly) as error:
        if begun and not isinstance(error, RunsDiffer):
            return _so_far(begun, str(error))
        reason = str(error)
        ended_early = reason if isinstance(error, EndedEarly) else None
        report = Report("incomparable", reason)
        return Bisection(report, runs=programs.runs, ended_early=ended_early)


def _so_far(begun: Sequence[_Search], reason: str) -> Bisection:
    """Return what is known when a search could not go on."""
    for search in begun:
        search.end_early(reason)
    answers = [search.answer for search in begun]
    return max(answers, key=lambda answer: (answer.begins_proven, bool(answer.faults)))


def _by_prints(
    compared: ComparedRuns, recorded: RecordedPrograms, tell: Callable[[str], None]
) -> ComparedRuns | None:
    """Return the comparison by what programs print, if all else that can be compared may belong to
    something else: single numbers, or a few values of one shape. Only the words of a line tell.
    """
    if compared.is_match or not compared.leading.comparison.is_by_shape:
        return None
    return _compare_printed(compared, recorded.printed_lines(compared), recorded, tell)


def _compare_printed(
    compared: ComparedRuns,
    lines: Sequence[Sides[PrintedLine]],
    recorded: RecordedPrograms,
    tell: Callable[[str], None],
) -> ComparedRuns | None:
    """Compare again by what programs print, and tell of it; None if that cannot be compared."""
    again = recorded.compare_printed(compared, lines)
    if again is not None:
        tell("comparing what the programs print")
    return again


def _bisect(
    compared: ComparedRuns,
    recorded: RecordedPrograms,
    search: Callable[[ComparedRuns], Bisection],
) -> tuple[Bisection, ComparedRuns]:
    """Return the answer by what programs return, and the comparison that it is of: by rows first,
    where nothing can be proven of whole values.
    """
    by_rows: ComparedRuns | None = None
    is_open = bool(compared.leading.comparison.faults)
    if is_open and compared.may_share_rows and not _may_prove(compared.leading):
        by_rows = recorded.by_rows()
        if by_rows.leading.comparison.faults:
            return _rows_first(compared, by_rows, recorded, search)
        recorded.in_whole_values()
    answer = search(compared)
    is_healed_by_several = answer.is_healed and len(answer.faults) > 1
    if not answer.faults or answer.begins_proven or is_healed_by_several:
        return answer, compared
    faults = compared.leading.comparison.faults
    is_resized = answer.is_healed and any(map(compared.leading.is_input_of_another_size, faults))
    if by_rows is None and compared.may_share_rows:
        by_rows = recorded.by_rows()
    # rows tell nothing of an order: what is in another one looks right; but where an input of
    # another size is all that differs, that its rows are right is the answer
    if by_rows is None or bool(by_rows.leading.comparison.faults) == is_resized:
        return answer, compared
    second = search(by_rows)
    if is_resized:
        is_better = second.verdict == "match"
    else:
        is_better = second.begins_proven or not answer.is_healed
    return (second, by_rows) if is_better else (answer, compared)


def _rows_first(
    compared: ComparedRuns,
    by_rows: ComparedRuns,
    recorded: RecordedPrograms,
    search: Callable[[ComparedRuns], Bisection],
) -> tuple[Bisection, ComparedRuns]:
    """Return the answer by rows if it is proven, or rows show more to be right, or whole values
    heal nothing.
    """
    answer = search(by_rows)
    shows_more = compared.says_less_than(by_rows)
    if answer.begins_proven or (answer.is_healed and shows_more):
        return answer, by_rows
    recorded.in_whole_values()
    second = search(compared)
    # several places that heal the whole may be right, where rows show more to be so
    is_better = second.is_healed and (len(second.faults) == 1 or not shows_more)
    return (second, compared) if is_better else (answer, by_rows)


def _may_prove(rank: ComparedRank) -> bool:
    """Return whether there is a fault behind which a value may be exchanged that proves it."""
    cuts = map(rank.cut, filter(rank.is_open, rank.comparison.faults))
    return any(cut is not None and cut.closeness > FAR for cut in cuts)


def _with_printed(
    answer: Bisection,
    compared: ComparedRuns,
    recorded: RecordedPrograms,
    search: Callable[[ComparedRuns], Bisection],
    tell: Callable[[str], None],
) -> Bisection:
    """Return a match as it is, unless the port prints other numbers: then what makes these is at
    fault, or was not compared. Of programs that return nothing in common the prints are compared.
    """
    lines = recorded.printed_lines(compared)
    apart = first_apart(lines, compared)
    if answer.verdict == "incomparable":
        again = _compare_printed(compared, lines, recorded, tell)
        if again is not None:
            answer = search(again)
        elif apart is None and any(line.reference.tells for line in lines):
            answer.report.verdict, answer.report.reason = "match", None
        if answer.verdict != "incomparable":
            answer.report.warnings.append(_PRINTED_ALONE)
    elif apart is not None:
        again = _compare_printed(compared, [apart], recorded, tell)
        if again is not None and (searched := search(again)).faults:
            return searched
    report = answer.report
    if apart is not None and answer.verdict != "diverged":
        text = _PRINTED.format(*apart.map(lambda line: line.text))
        report.leave_out(text)
        report.judge_whole()
        if answer.verdict == "incomparable":
            report.reason = f"{report.reason}; {text}"
    return answer


class _Search:
    """Answers one comparison of two programs.

    Attributes:
        answer: What is known so far.
    """

    def __init__(
        self,
        programs: RecordedPrograms,
        options: Options,
        tell: Callable[[str], None],
        compared: ComparedRuns,
    ) -> None:
        self._options, self._tell, self._compared = options, tell, compared
        self._programs, self._trials = programs, Trials(programs)
        report = compared.report()
        report.following = ()  # its recordings are not kept
        report.warnings += programs.warnings
        self.answer = Bisection(report, runs=programs.programs.runs)
        if self.answer.verdict == "diverged":
            report.introduced = []
        # with which operations of which lines the healed faults begin, in each program
        self._healed_lines: tuple[set[OperationLine], set[OperationLine]] = set(), set()
        self._healed_places = 0
        self._last_place = ""  # what was tried last
        # the line of each proven fault, and the lines between right values and what was exchanged
        self._stretches: list[tuple[CodeLine | None, set[CodeLine | None]]] = []
        self._tried: set[object] = set()  # places of hidden faults
        self._is_hollow = False  # only what the port returns was exchanged, which heals anything
        self._is_vague = False  # something was exchanged behind several places
        self._is_bridged = False  # what unrecorded steps have made was exchanged: it has faults
        # what differs and seems not to matter, each with the comparison that it was found in
        self._harmless: list[tuple[ComparedRuns, Trial]] = []
        # by the line of each fault, the sketches of what it reads of weights in another form
        self._weights: dict[CodeLine | None, list[Floats]] = {}
        # what was exchanged, in order, with the faults that this has added to the answer
        self._healed: list[tuple[Attempt, list[Finding]]] = []

    def run(self) -> Bisection:
        if self.answer.verdict == "diverged":
            self._heal(self._compared)
        return self.answer

    def end_early(self, reason: str) -> None:
        """Note why the search did not go on; what would have been tried next is named untried."""
        answer, leading = self.answer, self._compared.leading
        answer.ended_early = reason
        if answer.verdict != "diverged":
            answer.report.leave_out(reason)
            answer.report.judge_whole()
            return
        answer.report.warnings.append(_ENDED.format(reason))
        if not answer.faults:
            for fault in self._open(leading)[:1]:
                self._add(leading, fault, None, _UNTRIED)
        answer.report.first = next(iter(answer.faults), None)

    def _open(self, rank: ComparedRank) -> list[GraphFault]:
        """Return the faults that may still be tried, the likeliest first."""
        faults = rank.comparison.faults
        return [fault for fault in faults if rank.is_open(fault) and self._counts(rank, fault)]

    def _heal(self, compared: ComparedRuns) -> None:
        """Find one fault after the other, until the port is right with all of them healed."""
        first = compared
        # a fault may take several rounds: the later ones heal it in further layers
        for _ in range(2 * self._options.most_faults):
            if len(self.answer.faults) >= self._options.most_faults:
                break
            if compared.is_match and self._is_bridged:
                break
            heal = self._heal_hidden if compared.is_match else self._heal_one
            trial = heal(compared)
            if trial is None:
                break
            last, compared = trial.attempt, trial.compared
        if self._harmless:
            self._add_harmful(compared, last)
        compared = self._without_needless(first, compared)
        self.answer.is_healed = compared.is_match and not self._is_hollow
        if first.leading.is_divided and not compared.is_match:
            self.answer.withdraw_proofs(_NOT_ALL)
        self._add_preparation()
        self.answer.report.first = next(iter(self.answer.faults), None)
        if compared is not first:
            add_errors(self.answer, first, compared, self._trials.exchanged)

    def _heal_one(self, compared: ComparedRuns) -> Trial | None:
        """Add the next fault to the answer; return the trial that heals it, if any does."""
        leading = compared.leading
        faults = self._open(leading)
        steps = [fault for fault in faults if leading.is_unrecorded(fault)]
        # what other steps have made is no cause as long as there is one in these
        own = [fault for fault in faults if fault not in steps] or faults
        is_between = steps == faults or _are_surer(steps, own)
        if self.answer.faults and is_between:
            return self._bridge(compared, steps)
        if leading.is_divided:
            own = _first_and_repetitions(self.answer, leading, own)
        attempts = self._attempts(compared, own)
        # what heals at a close place is proven, so that no far one need be tried; but what was
        # exchanged behind several places hides until that is done in all layers
        attempts.sort(
            key=lambda attempt: (
                not (self._is_vague and attempt.is_repeated),
                not any(fault.is_certain for fault in attempt.faults),
                all(leading.may_follow(fault, own) for fault in attempt.faults),
                -attempt.closeness,
            )
        )
        attempts = list(self._with_known_first(leading, attempts[:_TRIES]))
        trial, failed = self._first_better(compared, attempts)
        if trial is not None and trial.is_harmless:
            self._trials.accept(trial.attempt)
            self._harmless.append((compared, trial))
        elif trial is not None:
            trial = self._earlier(compared, _narrowed(leading, trial))
            trial = self._at_take(leading, trial)
            self._accept(compared, trial)
            known = len(self.answer.faults)
            proof = self._proof(trial)
            untested = next((own for own in failed if own.unfit), None)
            if proof != "proven" and untested is not None:
                # a surer place whose value could not be exchanged is not refuted by a far one
                fault = untested.attempt.faults[0]
                self._add(leading, fault, None, untested.unfit, untested)
            is_hollow = proof != "proven" and not trial.healed
            self._is_hollow |= is_hollow
            unproven = _NO_MEETING if is_hollow else _RESCALED if trial.is_rescaled else _FAR
            if any(leading.is_input_of_another_size(fault) for fault in trial.attempt.faults):
                proof, unproven = "not proven", _OTHER_SIZE
            reason = None if proof == "proven" else unproven
            healed = _healed_by(trial, leading)
            for fault, lines in self._without_work_of_others(leading, healed, trial):
                self._add(leading, fault, proof, reason, trial)
                if proof == "proven":
                    self._stretches.append((leading.finding(fault).port_line, lines))
            self._healed.append((trial.attempt, self.answer.faults[known:]))
        elif failed and any(own[0] in attempt.faults for attempt in attempts):
            # what was found here, not the later layers of what is known already
            new = (each for each in failed if each.attempt.faults[0] in own)
            tried = next(new, failed[0])
            fault, unfit = tried.attempt.faults[0], tried.unfit
            self._add(leading, fault, None if unfit else "not proven", unfit, tried)
        elif own:  # what cannot be tried is not refuted by others that fail
            self._add(leading, own[0], None, _NO_MEETING)
        return trial

    def _earlier(self, compared: ComparedRuns, trial: Trial) -> Trial:
        """Return a trial that exchanges an order or a precision alone if that heals as much, else
        the trial.
        """
        for attempt in earlier_attempts(compared.leading, trial):
            second = self._trials.make(compared, attempt)
            heals_as_much = len(second.healed) >= len(trial.healed)
            is_match = second.compared.is_match or not trial.compared.is_match
            if second.is_better and second.unfit is None and is_match and heals_as_much:
                return second
        return trial

    def _at_take(self, rank: ComparedRank, trial: Trial) -> Trial:
        """Return a trial whose fault begins at the port's take of wrong rows, if there is one."""
        takes = takes_of(rank, trial)
        if takes:
            tables = [rank.port_key(value) for take in takes for value in take[1:]]
            computed = map(rank.reference_key, computed_of(rank, trial))
            with suppress(RunFailed):
                own = self._trials.values_of_port(tables)
                return begin_at_take(
                    rank, trial, takes, self._trials.values_of_reference(list(computed)), own
                )
        return trial

    def _with_known_first(
        self, rank: ComparedRank, attempts: Sequence[Attempt]
    ) -> Iterator[Attempt]:
        """Yield attempts, each after the known faults in later layers that it would heal as well:
        of what these make wrong it may be no cause.
        """
        lines, count = self._healed_lines[1], self._healed_places
        for attempt in attempts:
            keys = attempt.exchanges.keys()
            known = None if attempt.is_repeated else rank.repetitions_before(keys, lines, count)
            cut = None if known is None else rank.cut(known)
            if known is not None and cut is not None:
                exchanges = rank.exchanges([cut])
                if exchanges.keys() != keys:
                    yield Attempt((known,), cut.closeness, exchanges, is_repeated=True)
            yield attempt

    def _heal_hidden(self, compared: ComparedRuns) -> Trial | None:
        """Add a fault that others have hidden; return the trial that heals it, if any does.

        Right values enter it, wrong ones leave it, and what was made of these was exchanged: what
        the port itself computes there has to be less wrong then, and a result has to change.
        """
        leading = compared.leading
        for fault in leading.comparison.faults:
            finding, cut = leading.finding(fault), leading.cut(fault)
            is_leaf = finding.kind == "weights"
            place = (finding.port_module, finding.port_tensor) if is_leaf else finding.port_line
            is_known = place in self._tried or self.answer.has_place_of(finding)
            if cut is None or is_known or not self._counts(leading, fault):
                continue
            exchanges = leading.exchanges([cut])
            if cut.closeness < SOLE or self._trials.has_exchanged(exchanges.keys()):
                continue
            self._tried.add(place)
            attempt = Attempt((fault,), SOLE, exchanges)
            trial = self._trials.make(compared, attempt)
            after = trial.compared.of_rank(leading.rank)
            is_healing = trial.healed and trial.unfit is None and leading.is_lessened_by(after)
            if is_healing and self._matters(compared, attempt):
                self._accept(compared, trial)
                self._add(leading, fault, "proven", None, trial)
                return trial
        return None

    def _matters(self, compared: ComparedRuns, attempt: Attempt) -> bool:
        """Return whether an exchange changes a result of the port that gets nothing else behind it:
        what paddings become is wrong, and nobody reads it.
        """
        own = attempt.exchanges.keys()
        first = self._compared.leading
        behind = {key for key in self._trials.exchanged if first.are_made_from([key], own)}
        before = self._trials.make(compared, attempt, without=behind | own)
        after = self._trials.make(compared, attempt, without=behind)
        ranks = [before.compared.of_rank(rank.rank) for rank in compared.ranks]
        return not all(rank.returns_the_same(after.compared.of_rank(rank.rank)) for rank in ranks)

    def _without_needless(self, first: ComparedRuns, compared: ComparedRuns) -> ComparedRuns:
        """Take out of the answer what need not be exchanged since something before it is; return
        the comparison without that.

        Args:
            first: Of the programs as they are.
            compared: Of the port with all that was exchanged.
        """
        for index, (attempt, faults) in enumerate(self._healed):
            later = self._healed[index + 1 :]
            needless = attempt.exchanges.keys() - {key for own, _ in later for key in own.exchanges}
            # a repetition of the same fault is none that could stand for it
            others = [key for own, its in later if its for key in own.exchanges]
            if not faults or not first.leading.are_made_from(needless, others):
                continue
            trial = self._trials.make(compared, later[-1][0], without=needless)
            if trial.breaks:
                continue
            self._trials.take_back(needless)
            compared = trial.compared
            for fault in faults:
                self.answer.withdraw(fault)
        return compared

    def _add_harmful(self, compared: ComparedRuns, last: Attempt) -> None:
        """Add what seemed not to matter, if it matters once all else is healed; else warn of it.

        Args:
            last: What was exchanged last.
        """
        if not self.answer.faults:
            before, trial = self._harmless[0]
            self._add(before.leading, trial.attempt.faults[0], "not proven", None, trial)
            return
        exchanged = {key for _, trial in self._harmless for key in trial.attempt.exchanges}
        is_harmful = (
            compared.is_match
            and not self._trials.make(compared, last, without=exchanged).compared.is_match
        )
        for before, trial in self._harmless:
            for fault in _healed_by(trial, before.leading):
                if is_harmful:
                    proof = self._proof(trial)
                    reason = None if proof == "proven" else _FAR
                    self._add(before.leading, fault, proof, reason, trial)
                else:
                    place = short_place(before.leading.finding(fault))
                    warning = _HARMLESS.format(place=place)
                    if warning not in self.answer.report.warnings:
                        self.answer.report.warnings.append(warning)

    def _without_work_of_others(
        self, rank: ComparedRank, faults: Sequence[GraphFault], trial: Trial
    ) -> list[tuple[GraphFault, set[CodeLine | None]]]:
        """Return faults, each with the lines that a trial has healed, without what may be the work
        of an earlier one: the same stretch of code runs again, or what is read belongs where that
        one was healed, as when two halves of a value have changed places.
        """
        attempt = trial.attempt
        healed = {
            reference
            for key, exchange in trial.exchanged.items()
            if key not in attempt.exchanges
            for reference in exchange.references
        }
        own: list[tuple[GraphFault, set[CodeLine | None]]] = []
        for fault in faults:
            lines = rank.healed_lines(fault, attempt.without, attempt.suspects)
            line = rank.finding(fault).port_line
            runs_again = any(
                (first in lines and (line == first or line in stretch))
                or (lines and lines <= stretch)
                for first, stretch in self._stretches
            )
            # weights of one line may all be wrong; one in another order goes with what was healed
            is_weight = fault.begins_at_leaf and fault.explanation.kind != "order"
            # a port that leaves something out reads what it should, and not more
            is_read = fault.explanation.kind != "missing" and (
                bool(self._stretches) and rank.reads_any_of(fault, healed)
            )
            if is_weight or not (runs_again or is_read):
                own.append((fault, lines))
        return own

    def _accept(self, compared: ComparedRuns, trial: Trial) -> None:
        self._trials.accept(trial.attempt)
        for fault in trial.attempt.faults:
            for lines, healed in zip(
                operation_lines(compared.leading.comparison, fault),
                self._healed_lines,
                strict=True,
            ):
                healed |= lines
            self._healed_places += max(len(place.nodes) for place in fault.places if place)

    def _bridge(self, compared: ComparedRuns, steps: Sequence[GraphFault]) -> Trial | None:
        """Give the port what the reference got from steps that were not recorded.

        These steps have the faults that were found, too, and nobody has healed them there.
        """
        cuts = list(filter(None, map(compared.leading.cut, steps)))
        if not cuts:
            return None
        attempt = Attempt(tuple(steps), FAR, compared.leading.exchanges(cuts))
        trial = self._trials.make(compared, attempt)
        self._trials.accept(attempt)
        self._is_bridged = True
        self.answer.report.warnings.append(_STEPS_BETWEEN)
        return trial if trial.is_better else None

    def _first_better(
        self, compared: ComparedRuns, attempts: Sequence[Attempt]
    ) -> tuple[Trial | None, list[Trial]]:
        """Try attempts one by one, then all of them together.

        Returns:
            The first trial that makes something right, if any, whether it matters or not; and those
            before it.
        """
        failed: list[Trial] = []
        for attempt in attempts:
            place = short_place(compared.leading.finding(attempt.faults[0]))
            if place != self._last_place:  # a line is tried in layer after layer
                self._tell(f"trying {place}")
            self._last_place = place
            trial, accepted = self._tried_in_part(compared, attempt)
            if accepted is not None:
                return accepted, failed
            heals_and_breaks = trial.breaks and bool(trial.healed)
            for extend in (_everywhere, _further) if heals_and_breaks else (_further,):
                extended = extend(compared.leading, attempt)
                if extended is not None:
                    _, accepted = self._tried_in_part(compared, extended)
                    if accepted is not None:
                        return accepted, failed
            failed.append(trial)
        if len(failed) > 1:
            trial = self._trials.make(compared, _together(attempts))
            if trial.is_better:
                return self._smallest(compared, list(attempts), trial), failed
        return None, failed

    def _tried_in_part(
        self, compared: ComparedRuns, attempt: Attempt
    ) -> tuple[Trial, Trial | None]:
        """Make an attempt; return its trial, and the trial of it or of a part of it that heals
        something, if any, whether that matters or not.
        """
        trial = self._trials.make(compared, attempt)
        if trial.breaks and (finite := _finite(compared.leading, attempt)) is not None:
            trial = self._trials.make(compared, finite)
        first = self._in_first_places(compared, trial) if trial.is_better else None
        if first is not None and (first.is_harmless or first.breaks):
            return trial, first if first.is_harmless else None
        return trial, trial if trial.is_better or trial.is_harmless else None

    def _in_first_places(self, compared: ComparedRuns, trial: Trial) -> Trial | None:
        """Return a trial of the first places of an attempt alone, if there are others behind them
        and not all is healed: if that changes no result, the others heal the work of a fault
        between them; if it breaks one, they hide that.
        """
        attempt = trial.attempt
        if trial.compared.is_match or attempt.is_repeated:
            return None
        first = compared.leading.first_of(attempt.exchanges)
        if not first or len(first) == len(attempt.exchanges):
            return None
        exchanges = {key: own for key, own in attempt.exchanges.items() if key in first}
        return self._trials.make(compared, replace(attempt, exchanges=exchanges))

    def _smallest(self, compared: ComparedRuns, attempts: list[Attempt], together: Trial) -> Trial:
        """Leave out what is not needed of attempts that make something right together."""
        for attempt in list(attempts):
            rest = [own for own in attempts if own is not attempt]
            if len(rest) > 1:
                trial = self._trials.make(compared, _together(rest))
                if trial.is_better and trial.compared.is_match == together.compared.is_match:
                    attempts, together = rest, trial
        return together

    def _attempts(self, compared: ComparedRuns, faults: Sequence[GraphFault]) -> list[Attempt]:
        """Return what to try, the surest first.

        Weights and inputs depend on nothing, so all that can be exchanged are tried together; what
        has another size is not. A line that was at fault already is tried in its next repetitions.
        """
        leading = compared.leading
        leaves = tuple(fault for fault in faults if leading.is_exchanged_itself(fault))
        attempts: list[Attempt] = []
        for fault in faults:
            batch = leaves if fault in leaves else (fault,)
            if any(batch == attempt.faults for attempt in attempts):
                continue
            is_repeated = self.answer.has_place_of(leading.finding(fault))
            if is_repeated:
                batch = (self._with_repetitions(leading, fault),)
            cuts = list(filter(None, map(leading.cut, batch)))
            if cuts:
                exchanges = leading.exchanges(cuts) | _on_other_ranks(compared, fault)
                # a trial cannot tell faults apart that the same values heal
                if any(exchanges == attempt.exchanges for attempt in attempts):
                    continue
                closeness = min(cut.closeness for cut in cuts)
                attempts.append(Attempt(batch, closeness, exchanges, is_repeated))
        return attempts

    def _with_repetitions(self, rank: ComparedRank, fault: GraphFault) -> GraphFault:
        """Return a fault of a line that was healed already with the next places of all such lines.

        They are as many as were healed so far, so that a fault in each layer takes few runs.
        """
        own = operation_lines(rank.comparison, fault)
        lines = own[0] | self._healed_lines[0], own[1] | self._healed_lines[1]
        return rank.with_repetitions(fault, lines, self._healed_places)

    def _add(
        self,
        rank: ComparedRank,
        fault: GraphFault,
        proof: Proof | None,
        unproven: str | None,
        trial: Trial | None = None,
    ) -> None:
        """Add a fault, unless it is among the faults already: its line, or what a proven one
        leaves.
        """
        answer = self.answer
        finding: Finding = replace(rank.finding(fault), proof=proof)
        if trial is not None and fault.port is not None and fault.begins_at_leaf:
            where = trial.where_they_differ(rank.port_key(fault.port.leaf))
            finding = replace(finding, explanation=f"{finding.explanation} {where}".rstrip())
        if trial is not None and trial.factor:
            finding = replace(finding, explanation=f"{finding.explanation} {trial.factor}".strip())
        if answer.has_place_of(finding):
            return
        if trial is None:
            proven = rank.with_proven_region(fault)
        elif trial.attempt.ends_region:
            proven = fault
        else:
            proven = rank.with_proven_region(fault, trial.attempt.without, trial.attempt.suspects)
        if proof == "proven":
            finding = replace(finding, region=rank.finding(proven).region)
        answer.operations.append(region_operations(rank.comparison, proven))
        answer.report.operations = answer.operations[0]
        if unproven is not None:
            answer.unproven[len(answer.faults)] = unproven
        answer.faults.append(finding)
        self._weights[finding.port_line] = rearranged_weights(rank.comparison, proven)

    def _add_preparation(self) -> None:
        """Add where the port has made what faults read of weights, if the reference has these in
        another form.
        """
        weights = [self._weights[finding.port_line] for finding in self.answer.faults]
        rank = self._programs.port_from_the_beginning(self._compared) if any(weights) else None
        if rank is None:
            return
        program = rank.comparison.programs[1]
        for index, own in enumerate(weights):
            nodes = preparing_nodes(program, own)
            finding, (reference, port) = self.answer.faults[index], self.answer.operations[index]
            known = {operation.line for operation in port}
            operations = [
                operation
                for operation in list_operations(program.graph, nodes, program.state)
                if operation.line not in known
            ]
            lines = dict.fromkeys(operation.line for operation in operations if operation.line)
            if len(lines) > _MOST_PREPARING:
                continue
            self.answer.faults[index] = replace(finding, port_set_by=(*lines, *finding.port_set_by))
            self.answer.operations[index] = reference, [*operations, *port]
        self.answer.report.operations = self.answer.operations[0]

    def _proof(self, trial: Trial) -> Proof:
        """Return what a trial proves that has made something right.

        A value exchanged behind several places may not belong there, and what differs later may be
        its work. So more than what is returned has to be right then, and what is found later has to
        be alone.
        """
        closeness = trial.attempt.closeness
        if trial.is_rescaled:
            return "not proven"
        is_proven = closeness == CLOSE and bool(trial.healed) and not self._is_vague
        self._is_vague |= closeness < SOLE
        return "proven" if closeness == SOLE or is_proven else "not proven"

    def _counts(self, rank: ComparedRank, fault: GraphFault) -> bool:
        """Return whether a fault is in one of the modules that were asked for."""
        pattern = self._options.module
        if pattern is None:
            return True
        finding = rank.finding(fault)
        return any(pattern.search(name or "") for name in (finding.module, finding.port_module))


def _are_surer(faults: Sequence[GraphFault], others: Sequence[GraphFault]) -> bool:
    """Return whether any of some faults is certain, and none of others."""
    return any(own.is_certain for own in faults) and not any(own.is_certain for own in others)


def _first_and_repetitions(
    answer: Bisection, rank: ComparedRank, faults: Sequence[GraphFault]
) -> list[GraphFault]:
    """Return what is tried beside ranks: the first fault, then its line wherever that repeats.

    What is right as a term or a share says little, so that a wrong place may heal others.
    """
    if not answer.faults:
        return list(faults[:1])
    return [fault for fault in faults if answer.has_place_of(rank.finding(fault))]


def _narrowed(rank: ComparedRank, trial: Trial) -> Trial:
    """Return a trial with the one fault that it leaves, if it acquits what else leads to what was
    exchanged.
    """
    attempt = trial.attempt
    if attempt.closeness == SOLE or attempt.is_repeated or len(attempt.faults) > 1:
        return trial
    suspects = rank.suspects_after(trial.compared.of_rank(rank.rank), attempt.exchanges)
    others = () if rank.is_divided else rank.comparison.faults
    for fault in (*attempt.faults, *others):
        if not rank.begins_with(fault, suspects):
            continue
        cut = rank.cut(fault, attempt.without, suspects)
        if cut is None or cut.closeness < SOLE:
            continue
        if rank.exchanges([cut]) == attempt.exchanges:
            narrowed = replace(attempt, faults=(fault,), closeness=SOLE, suspects=suspects)
            return replace(trial, attempt=narrowed)
    return trial


def _extensible(attempt: Attempt) -> GraphFault | None:
    """Return the only fault of an attempt, unless it is a leaf or repeated already."""
    fault, *others = attempt.faults
    is_whole = bool(others) or fault.begins_at_leaf or attempt.is_repeated
    return None if is_whole else fault


def _finite(rank: ComparedRank, attempt: Attempt) -> Attempt | None:
    """Return an attempt without what is less finite than in the port, if there is such."""
    finite = {
        key: own for key, own in attempt.exchanges.items() if not rank.is_less_finite(key, own)
    }
    if not finite or len(finite) == len(attempt.exchanges):
        return None
    return replace(attempt, exchanges=finite)


def _everywhere(rank: ComparedRank, attempt: Attempt) -> Attempt | None:
    """Return an attempt with a fault healed wherever its line runs, if there are more such places.

    An optimizer may not see a factor that each step has: healed in one step, it breaks the next.
    """
    fault = _extensible(attempt)
    if fault is None:
        return None
    fault = rank.with_repetitions(fault, operation_lines(rank.comparison, fault), None)
    cut = rank.cut(fault)
    if cut is None:
        return None
    exchanges = rank.exchanges([cut])
    if exchanges.keys() <= attempt.exchanges.keys():
        return None
    return Attempt((fault,), cut.closeness, exchanges, is_repeated=True)


def _further(rank: ComparedRank, attempt: Attempt) -> Attempt | None:
    """Return an attempt with what is exchanged further behind a fault, if there is such.

    In a value next to it the axes may be in an order that cannot be told from those of the
    reference, or the programs may compute something else there.
    """
    fault, tried = _extensible(attempt), frozenset(attempt.exchanges)
    if fault is None:
        return None
    cut = rank.cut(fault, tried)
    if cut is None:
        return None
    return Attempt((fault,), cut.closeness, rank.exchanges([cut]), without=tried)


def _together(attempts: Sequence[Attempt]) -> Attempt:
    faults = tuple(fault for attempt in attempts for fault in attempt.faults)
    exchanges: Exchanges = {}
    for attempt in attempts:
        exchanges |= attempt.exchanges
    return Attempt(faults, min(attempt.closeness for attempt in attempts), exchanges)


def _healed_by(trial: Trial, rank: ComparedRank) -> Sequence[GraphFault]:
    """Return the faults of a trial behind which something is right now; of several weights of one
    size some may be none. Where all that is behind was exchanged itself, return all.
    """
    faults = trial.attempt.faults
    return [fault for fault in faults if rank.results(fault) & trial.healed] or faults


def _on_other_ranks(compared: ComparedRuns, fault: GraphFault) -> Exchanges:
    """Return the exchanges for the same line on the other ranks."""
    line = compared.leading.finding(fault).port_line
    exchanges: Exchanges = {}
    for rank in compared.ranks:
        if rank is not compared.leading:
            same = [own for own in rank.comparison.faults if rank.finding(own).port_line == line]
            exchanges |= rank.exchanges(list(filter(None, map(rank.cut, same))))
    return exchanges
