"""The way from two versions to the change that makes the difference.

The program runs with both, and their graphs are compared. What changed between the versions and ran
is ranked by how near it is to the first line that differs. Then the new version runs with some of
it taken back, until the smallest set is known that gives the old result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.processes import OUTPUT
from otel_torch.bisecting.recorded_programs import RecordedPrograms, RunOptions
from otel_torch.bisecting.runs import ProgramRun, RunFailed
from otel_torch.bisecting.versions.commits import CommitLog
from otel_torch.bisecting.versions.minimal_set import find_minimal_set
from otel_torch.bisecting.versions.ranking import (
    CandidateChange,
    CodePlace,
    ExecutedFunctions,
    place_of,
    rank,
)
from otel_torch.bisecting.versions.splice import WHOLE_MODULE, DoesNotFit
from otel_torch.bisecting.versions.version_answer import (
    FoundChange,
    VersionBisection,
    make_patch,
)
from otel_torch.bisecting.versions.version_programs import (
    Change,
    SettingChange,
    VersionPrograms,
)
from otel_torch.parity.finding import CodeLine, Proof, Report
from otel_torch.parity.sides import Sides
from otel_torch.rendering.words import plural

# runs with something taken back, after which the search says what it knows
_MOST_TRIALS = 40
# names that the line of a trial has
_SHOWN_NAMES = 3
_TRACEBACK = re.compile(r'File "(.+)", line \d+, in (\S+)')


def bisect_versions(
    programs: VersionPrograms,
    options: RunOptions,
    commits: CommitLog | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> VersionBisection:
    """Find the smallest set of changes that makes one program compute something else.

    Args:
        commits: Where the history of the changed lines is, if it is at hand.
        tell: Called with what is known so far.

    Raises:
        RecordingError: A recording cannot be read.
    """
    answer = VersionBisection(
        Bisection(Report("match", reference="", port=""), runs=programs.runs),
        programs.suspects,
        programs.settings,
    )
    try:
        _VersionSearch(programs, options, commits, tell, answer).run()
    except RunFailed as error:
        answer.bisection.report = Report("incomparable", str(error))
    return answer


class _TrialsSpent(Exception):
    """No further run is worth it."""


class _Unit(NamedTuple):
    """What is exchanged for a change, and why nothing smaller."""

    change: Change
    reason: str | None = None


class _VersionSearch:
    def __init__(
        self,
        programs: VersionPrograms,
        options: RunOptions,
        commits: CommitLog | None,
        tell: Callable[[str], None],
        answer: VersionBisection,
    ) -> None:
        self._versions, self._commits, self._tell, self._answer = programs, commits, tell, answer
        self._programs = RecordedPrograms(programs, options)
        self._reference: ProgramRun | None = None
        self._outcomes: dict[frozenset[Change], bool] = {}

    def run(self) -> None:
        answer, report = self._answer, self._compare()
        answer.bisection.report = report
        report.following = ()
        if report.verdict in ("match", "partial"):
            return
        if not (self._versions.suspects or self._versions.settings):
            raise RunFailed("nothing differs between the two versions, but the numbers do")
        units = self._ranked_units(report)
        answer.candidates = len(units)
        found = self._smallest(units)
        proof: Proof | None = "proven" if found else "not proven"
        if found is None:
            found = units[:1]
        answer.changes = [self._describe(unit, proof) for unit in found]
        answer.bisection.is_healed = proof == "proven"
        if answer.bisection.is_healed:
            report.verdict, report.reason = "diverged", None

    # -- the two versions as they are

    def _compare(self) -> Report:
        try:
            compared, later = self._programs.first()
            if later is not None:
                self._tell(f"the first steps match, step {later.steps.port} does not")
                compared = self._programs.later(later)
        except RunFailed as error:
            ran = {run.side for run in self._versions.runs}
            if ran != {"reference"}:
                raise
            self._reference = self._versions.runs[-1]
            self._answer.crash = str(error).partition(" (all of it:")[0]
            return Report("diverged", reference="", port="")
        self._reference = compared.reference
        ends = compared.leading.comparison.ends
        self._answer.largest_error = max((float(pair.error) for pair in ends), default=0.0)
        return compared.report()

    # -- what may be at fault

    def _ranked_units(self, report: Report) -> list[_Unit]:
        executed = self._versions.executed()
        candidates = self._candidates(executed)
        anchors = self._anchors(report)
        kinds = {finding.kind for finding in report.introduced[:1]}
        ranked = rank(
            candidates, executed, anchors, self._text_of, are_weights=kinds == {"weights"}
        )
        units: dict[Change, _Unit] = {own: _Unit(own) for own in self._versions.settings}
        for candidate in ranked:
            file, name = candidate.place
            fitting, reason = self._versions.splice_of(file).fitting_unit(name)
            units.setdefault(CodePlace(file, fitting), _Unit(CodePlace(file, fitting), reason))
        return list(units.values())

    def _candidates(self, executed: ExecutedFunctions) -> list[CandidateChange]:
        candidates = []
        loaded = sorted({place.file for place in executed.order} & self._versions.files.keys())
        for file in loaded:
            try:
                splice = self._versions.splice_of(file)
            except DoesNotFit as reason:
                self._answer.excluded.append(str(reason))
                continue
            for change in splice.changes.values():
                place = CodePlace(file, change.name)
                kind = change.known.kind
                own = CodePlace(file, change.name.partition("#")[0])
                if kind != "function" or executed.ran(own):
                    candidates.append(CandidateChange(place, kind))
        for suspect in self._versions.suspects:
            if suspect.has_other_compiled_code:
                self._answer.excluded.append(f"compiled libraries of {suspect.name}")
        return candidates

    def _text_of(self, place: CodePlace) -> str:
        if place.file not in self._versions.files:
            return ""
        try:
            splice = self._versions.splice_of(place.file)
        except DoesNotFit:
            return ""
        return splice.text_of(place.name, 0) + splice.text_of(place.name, 1)

    def _anchors(self, report: Report) -> list[CodePlace]:
        """Return the functions of the lines that differ, or where the new version crashed."""
        found: list[CodePlace | None] = []
        for finding in report.introduced:
            for line, index in ((finding.port_line, 1), (finding.line, 0)):
                if line is not None:
                    file = self._absolute(line.file, index)
                    found.append(place_of(self._versions.relative(file), line.function))
        if self._answer.crash is not None:
            found += self._traceback()
        return list(dict.fromkeys(place for place in found if place is not None))

    def _absolute(self, file: str, index: int) -> str:
        folder = self._versions.surroundings[index].folder or Path.cwd()
        return str((folder / file).resolve())

    def _traceback(self) -> list[CodePlace | None]:
        output = self._versions.folder / f"{len(self._versions.runs) + 1}-port" / OUTPUT
        text = output.read_text(encoding="utf-8", errors="replace")
        frames = _TRACEBACK.findall(text)
        return [
            place
            for file, function in reversed(frames)
            for place in self._places_named(self._versions.relative(file), function)
        ]

    def _places_named(self, file: str | None, function: str) -> list[CodePlace | None]:
        """Return the definitions of a name: a traceback has no qualified ones."""
        if file is None or file not in self._versions.files:
            return [place_of(file, function)]
        try:
            names = self._versions.splice_of(file).definitions[1]
        except DoesNotFit:
            return []
        return [CodePlace(file, x) for x in names if x.rpartition(".")[2] == function]

    # -- trials

    def _smallest(self, units: Sequence[_Unit]) -> list[_Unit] | None:
        """Return the smallest set of units that heals; of modules where no smaller ones do."""
        try:
            found = find_minimal_set(units, self._heals)
            if found is None:
                modules = dict.fromkeys(
                    CodePlace(own.change.file, WHOLE_MODULE)
                    for own in units
                    if isinstance(own.change, CodePlace)
                )
                reason = "no set of functions gives the old result"
                whole = [_Unit(own, reason) for own in modules]
                settings = [own for own in units if isinstance(own.change, SettingChange)]
                found = find_minimal_set([*settings, *whole], self._heals)
        except _TrialsSpent:
            return None
        return found

    def _heals(self, units: Sequence[_Unit]) -> bool:
        """Return whether the new version computes what the old one does with units taken back."""
        changes = list(dict.fromkeys(own.change for own in units))
        key = frozenset(changes)
        if key not in self._outcomes:
            if len(self._outcomes) >= _MOST_TRIALS:
                raise _TrialsSpent
            self._outcomes[key] = self._try(changes)
        return self._outcomes[key]

    def _try(self, changes: Sequence[Change]) -> bool:
        what = _describe_changes(changes)
        self._tell(f"trying {what}")
        assert self._reference is not None
        try:
            with self._versions.taken_back(changes) as plan:
                run = self._programs.record("port", f"with the old {what}", exchange=plan)
            return self._programs.compare(self._reference, run).is_match
        except (DoesNotFit, RunFailed) as error:
            self._answer.failed.append(f"{what}: {str(error).partition(' (all of it:')[0]}")
            return False

    # -- the answer

    def _describe(self, unit: _Unit, proof: Proof | None) -> FoundChange:
        change = unit.change
        if isinstance(change, SettingChange):
            return FoundChange(
                change.name, "setting", None, change.values, Sides(None, None), "", proof
            )
        suspect = next(own for own in self._versions.suspects if change.file in own.files)
        splice = self._versions.splice_of(change.file)
        lines = Sides(*(self._line(change, index) for index in (0, 1)))
        texts = [splice.text_of(change.name, index) for index in (0, 1)]
        known = splice.definitions[1].get(change.name) or splice.definitions[0].get(change.name)
        unit_kind = "module" if known is None else known.kind
        return FoundChange(
            _dotted(change),
            unit_kind,
            suspect.name,
            suspect.versions,
            lines,
            make_patch(texts[0], texts[1], lines),
            proof,
            unit.reason,
            () if self._commits is None else self._commits.touching(change, suspect.versions),
        )

    def _line(self, place: CodePlace, side: int) -> CodeLine | None:
        path = self._versions.files[place.file][side]
        if path is None:
            return None
        if path.is_relative_to(Path.cwd()):  # as the graph names its lines
            path = path.relative_to(Path.cwd())
        if place.name == WHOLE_MODULE:
            return CodeLine(str(path), 1, "", "")
        definition = self._versions.splice_of(place.file).definitions[side].get(place.name)
        return None if definition is None else CodeLine(str(path), definition.first, place.name, "")


def _dotted(place: CodePlace) -> str:
    """Return a definition as it is imported.

    >>> _dotted(CodePlace("a/b/__init__.py", "C.f"))
    'a.b.C.f'
    """
    module = place.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{module}.{place.name}" if place.name else module


def _describe_changes(changes: Sequence[Change]) -> str:
    names = [own.name if isinstance(own, SettingChange) else _dotted(own) for own in changes]
    shown = ", ".join(names[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {plural(more, 'other')}" if more > 0 else shown
