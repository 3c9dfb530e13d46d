"""Trials of an answer: the port runs with values of the reference in place of its own.

The reference runs once more to keep these values whole. That it computes the same again is checked
then: of a program that draws other random numbers in each run nothing can be said.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from otel_torch.bisecting.compared import ComparedRank, ComparedRuns, Exchanges, RankedKey
from otel_torch.bisecting.recorded_programs import RecordedPrograms
from otel_torch.bisecting.runs import ProgramRun, RunsDiffer
from otel_torch.graph.blame import Origin
from otel_torch.graph.compare import GraphFault
from otel_torch.parity.report.wording import short_place
from otel_torch.recording.graph_values import file_name, write_wanted
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.tensor_files import read_header

Array = NDArray[Any]

# whole values that one run of the reference may leave on the disk, in bytes
KEPT_BYTES = 1 << 30
# more than most values take; whether all fit is a bound on the disk, no promise
_BYTES_PER_ELEMENT = 4


@dataclass(frozen=True, slots=True)
class Attempt:
    """Faults that one trial heals together.

    Attributes:
        faults: Of the leading rank, which are healed together.
        closeness: What the exchange can heal: FAR, CLOSE or SOLE of `graph.cut`.
        exchanges: The reference's values by those of the port in whose place they are put.
        is_repeated: Whether a line is healed wherever it runs, with all that is between.
        without: Values of the port whose exchange was tried before, and was of no use.
        suspects: What of the port may be at fault at all, if a trial has shown it.
        ends_region: What is exchanged is the last of the fault's region.
    """

    faults: tuple[GraphFault, ...]
    closeness: int
    exchanges: Exchanges
    is_repeated: bool = False
    without: frozenset[RankedKey] = frozenset()
    suspects: Set[Origin] | None = None
    ends_region: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """An attempt that was made.

    Attributes:
        compared: The reference beside the port with the exchanged values.
        healed: Values of the port's leading rank behind the exchange that are right now and were
            not.
        is_rescaled: All of these were off by a factor alone, as gradients are of a loss that is
            divided later, and none is a result: they prove nothing.
        breaks: A result of the port was right, and is wrong with the exchange, or far more wrong:
            the port needs another value there than the reference has.
        is_idle: All results of the port are what they were: what differs there does not matter.
        is_reordered: What was exchanged had the reference's numbers in another order, in which the
            rest of the port may still have them.
        unfit: Why a value could not be put in place; None if all were.
        exchanged: All exchanges that were in place, those of earlier attempts, too.
        differed: Where whole numbers that were exchanged differed, as the metadata has it, by file.
        scaled: How many times the reference's numbers what was exchanged held, by file, where it
            differed by a factor alone.
    """

    attempt: Attempt
    compared: ComparedRuns
    healed: frozenset[RankedKey]
    is_rescaled: bool
    breaks: bool
    is_idle: bool
    is_reordered: bool
    unfit: str | None
    exchanged: Exchanges
    differed: Mapping[str, Mapping[str, Any]]
    scaled: Mapping[str, float]

    @property
    def is_better(self) -> bool:
        """Whether the exchange healed a value, changed a result and broke none."""
        is_healing = bool(self.healed) or self.compared.is_match
        return is_healing and not (self.breaks or self.is_idle)

    @property
    def is_harmless(self) -> bool:
        """Whether the exchange healed a value and changed no result, so that it may stay."""
        is_idle = self.is_idle and bool(self.healed) and self.unfit is None
        return is_idle and not self.is_reordered

    def where_they_differ(self, key: RankedKey) -> str:
        """Return at which position whole numbers of the port differ, such as token ids, in words;
        empty for other values.
        """
        difference = self.differed.get(file_name(*key))
        if difference is None:
            return ""
        index, more = difference["index"], difference["count"] - 1
        # the first of a batch needs no index
        position = index if any(index[:-1]) else index[-1:]
        at = f" at position {', '.join(map(str, position))}" if position else ""
        others = f", and at {more} more" if more else ""
        return f"They differ{at}: {difference['reference']} beside {difference['port']}{others}."

    @property
    def factor(self) -> str:
        """By what factor alone all that was exchanged differs from the reference, in words; empty
        if by anything else.
        """
        factors = {self.scaled.get(file_name(*key)) for key in self.attempt.exchanges}
        words = {"" if factor is None else f"{factor:.3g}" for factor in factors}
        factor = words.pop() if len(words) == 1 else ""
        return f"What comes of it is {factor} times the reference's." if factor else ""


class Trials:
    """Tries exchanges, each with all that have proved good before."""

    def __init__(self, programs: RecordedPrograms) -> None:
        self._programs = programs
        self._folder = programs.programs.folder
        self._kept: set[RankedKey] = set()
        self._not_kept: dict[str, str] = {}
        self._good: Exchanges = {}
        self._count = 0

    @property
    def exchanged(self) -> Set[RankedKey]:
        """The values of the port that have an exchange in place."""
        return self._good.keys()

    def has_exchanged(self, keys: Set[RankedKey]) -> bool:
        """Return whether any of these values of the port has an exchange in place."""
        return not self.exchanged.isdisjoint(keys)

    def accept(self, attempt: Attempt) -> None:
        """Leave an exchange in place in all further trials."""
        self._good |= attempt.exchanges

    def take_back(self, keys: Set[RankedKey]) -> None:
        """Leave the port its own values in all further trials."""
        for key in keys:
            del self._good[key]

    def make(
        self, compared: ComparedRuns, attempt: Attempt, without: Set[RankedKey] = frozenset()
    ) -> Trial:
        """Run the port with an exchange.

        Args:
            without: Values of the port that have an exchange in place, and get none.

        Raises:
            RunFailed: A program did not end well.
            RunsDiffer: The reference computes other values each time.
        """
        exchanges = {
            port: own
            for port, own in (self._good | attempt.exchanges).items()
            if port not in without
        }
        needed = {key for own in exchanges.values() for key in own.references}
        if missing := needed - self._kept:
            self._keep(compared, missing)
        self._count += 1
        folder = self._folder / f"put-{self._count}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for port, own in exchanges.items():
            own.write(self._folder / "kept", folder / file_name(*port))
        where = short_place(compared.leading.finding(attempt.faults[0]))
        run = self._programs.record(
            "port", f"with the reference's value behind {where}", graph_put=str(folder.resolve())
        )
        again = self._programs.compare(compared.reference, run, exchanges)
        leading = compared.leading
        healed = _healed(leading, again, attempt)
        is_rescaled = not again.is_match and leading.are_rescaled(
            healed, again.of_rank(leading.rank)
        )
        ranks = [(rank, again.of_rank(rank.rank)) for rank in compared.ranks]
        breaks = any(before.is_broken_by(after) for before, after in ranks)
        is_idle = not again.is_match and all(
            before.returns_the_same(after) for before, after in ranks
        )
        differed: dict[str, Any] = {}
        scaled: dict[str, float] = {}
        for number in run.recordings:
            metadata = _metadata(run, number)
            differed |= metadata.get("values_differed", {})
            scaled |= metadata.get("values_scaled", {})
        unfit = self._unfit(run, attempt)
        return Trial(
            attempt,
            again,
            healed,
            is_rescaled,
            breaks,
            is_idle,
            leading.are_reordered(attempt.exchanges),
            unfit,
            exchanges,
            differed,
            scaled,
        )

    def _keep(self, compared: ComparedRuns, first: set[RankedKey]) -> None:
        """Run the reference for whole values: what is needed now, and may be needed later."""
        keys = set(first)
        left = KEPT_BYTES
        for rank in compared.ranks:
            for value, numel in rank.wrong_in_reference():
                left -= _BYTES_PER_ELEMENT * numel
                if left >= 0:
                    keys.add(rank.reference_key(value))
        wanted = keys - self._kept
        folder = self._folder / "kept"
        write_wanted(folder, [file_name(*key) for key in wanted])
        again = self._programs.record(
            "reference", "again, to keep its values", graph_keep=str(folder.resolve())
        )
        self._kept |= wanted
        for number in again.recordings:
            self._not_kept |= _metadata(again, number).get("values_not_kept", {})
        repeated = self._programs.compare(compared.reference, again)
        results = {key for rank in compared.ranks for key in rank.results_of_reference()}
        for rank in repeated.ranks:
            # what the port does not have may differ: weights before their values are loaded
            if results.isdisjoint(rank.results_of_reference(are_wrong=True)):
                continue
            first_place = short_place(rank.finding(rank.comparison.faults[0]))
            raise RunsDiffer(
                f"the reference computes other values in each run, first at {first_place}: set its "
                "seeds, so that the programs can be compared"
            )

    def values_of_reference(self, keys: Collection[RankedKey]) -> dict[RankedKey, Array]:
        """Return those of some values of the reference that were kept, whole."""
        return _read_values(self._folder / "kept", keys)

    def values_of_port(self, keys: Collection[RankedKey]) -> dict[RankedKey, Array]:
        """Run the port as it is for some of its values, and return those that could be kept, whole.

        Raises:
            RunFailed: The port did not end well.
        """
        folder = self._folder / "kept" / "port"
        write_wanted(folder, [file_name(*key) for key in keys])
        why = "to keep a table, and what it takes of it"
        self._programs.record("port", why, graph_keep=str(folder.resolve()))
        return _read_values(folder, keys)

    def _unfit(self, run: ProgramRun, attempt: Attempt) -> str | None:
        """Return why a value of an attempt could not be put in place, if any could not."""
        for port, own in attempt.exchanges.items():
            for reference in own.references:
                if lost := self._not_kept.get(file_name(*reference)):
                    return f"{reference.value.label} of the reference could not be kept: {lost}"
            put = _metadata(run, port.rank).get("values_put", {})
            reason = put.get(file_name(*port), "the port did not get there again")
            if reason is not None:
                return f"{port.value.label}: {reason}"
        return None


def _healed(before: ComparedRank, after: ComparedRuns, attempt: Attempt) -> frozenset[RankedKey]:
    """Return the values of the port that are right now and were not.

    What was exchanged says nothing, nor does what only rearranges it.
    """
    rank = after.of_rank(before.rank)
    exchanged = before.moved_from(attempt.exchanges)
    return frozenset(
        key
        for key, was_right in before.right.items()
        if not was_right and key not in exchanged and rank.right.get(key, False)
    )


def _read_values(folder: Path, keys: Collection[RankedKey]) -> dict[RankedKey, Array]:
    """Return the values that have a file in a folder."""
    paths = {key: folder / file_name(*key) for key in keys}
    stored = {key: next(read_header(path)) for key, path in paths.items() if path.exists()}
    read = {key: own.read() for key, own in stored.items()}
    return {key: array for key, array in read.items() if array is not None}


def _metadata(run: ProgramRun, rank: int) -> dict[str, Any]:
    """Return the metadata of the recording of a rank, {} without one."""
    path = run.recordings.get(rank)
    return {} if path is None else read_metadata(path)
