"""The way from two versions to the change that makes the difference.

The program runs with both, and their graphs are compared. What changed between the versions and ran
is ranked by how near it is to the first line that differs. Then the new version runs with some of
it taken back, until the smallest set is known that gives the old result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.processes import OUTPUT
from otel_torch.bisecting.recorded_programs import RecordedPrograms, RunOptions
from otel_torch.bisecting.runs import ProgramRun, RunFailed
from otel_torch.bisecting.versions.commits import CommitLog
from otel_torch.bisecting.versions.minimal_set import find_minimal_set, leave_out
from otel_torch.bisecting.versions.ranking import CodePlace, ExecutedFunctions, place_of, rank
from otel_torch.bisecting.versions.splice import WHOLE_MODULE, DoesNotFit
from otel_torch.bisecting.versions.version_answer import FoundChange, VersionBisection, make_patch
from otel_torch.bisecting.versions.version_programs import Change, SettingChange, VersionPrograms
from otel_torch.parity.finding import CodeLine, Proof, Report
from otel_torch.parity.sides import Sides
from otel_torch.rendering.words import plural

# runs with something taken back, after which the search says what it knows
_MOST_TRIALS = 40
# names that the line of a trial has
_SHOWN_NAMES = 3
_TRACEBACK = re.compile(r'File "(.+)", line \d+, in (\S+)')


class _TrialsSpent(Exception):
    """No further run is worth it."""


class VersionSearch:
    """Looks for the smallest set of changes that makes one program compute something else.

    Args:
        commits: Where the history of the changed lines is, if it is at hand.
        tell: Called with what is known so far.
    """

    def __init__(
        self,
        programs: VersionPrograms,
        options: RunOptions,
        commits: CommitLog | None,
        tell: Callable[[str], None],
    ) -> None:
        self._versions, self._commits, self._tell = programs, commits, tell
        self._programs = RecordedPrograms(programs, replace(options, is_one_program=True))
        bisection = Bisection(Report("match", reference="", port=""), runs=programs.runs)
        self._answer = VersionBisection(bisection, programs.suspects, programs.settings)
        self._reference: ProgramRun | None = None
        self._outcomes: dict[frozenset[Change], bool | None] = {}
        self._reasons: dict[Change, str | None] = {}  # why nothing smaller is exchanged

    def search(self) -> VersionBisection:
        """Return the answer. Raises RecordingError if a recording cannot be read."""
        answer = self._answer
        try:
            answer.bisection.report = report = self._compare()
            if report.verdict not in ("match", "partial"):
                self._find_changes(report)
        except RunFailed as error:
            answer.bisection.report = Report("incomparable", str(error))
        return answer

    def _find_changes(self, report: Report) -> None:
        if not (self._versions.suspects or self._versions.settings):
            raise RunFailed("nothing differs between the two versions, but the numbers do")
        changes = self._ranked_changes(report)
        self._answer.candidates = len(changes)
        found = self._smallest(changes)
        proof: Proof = "proven" if found else "not proven"
        self._answer.changes = [self._describe(own, proof) for own in found or changes[:1]]
        self._answer.bisection.is_healed = bool(found)
        if found:
            report.verdict, report.reason = "diverged", None

    # -- the two versions as they are

    def _compare(self) -> Report:
        try:
            compared = self._programs.first(self._tell)
        except RunFailed as error:
            if {run.side for run in self._versions.runs} != {"reference"}:
                raise
            self._reference = self._versions.runs[-1]
            self._answer.crash = _short(error)
            return Report("diverged", reference="", port="")
        self._reference = compared.reference
        ends = compared.leading.comparison.ends
        self._answer.largest_error = max((float(pair.error) for pair in ends), default=0.0)
        report = compared.report()
        report.following = ()  # its recordings are not kept
        return report

    # -- what may be at fault

    def _ranked_changes(self, report: Report) -> list[Change]:
        executed = self._versions.executed()
        tensors = [
            x.port_tensor or x.tensor or "" for x in report.introduced if x.kind == "weights"
        ]
        weight = tensors[0].rpartition(".")[2] if tensors else None
        ranked = rank(
            self._candidates(executed),
            executed,
            self._anchors(report, executed),
            lambda place, side: self._versions.splice_of(place.file).text_of(place.name, side),
            weight,
        )
        self._reasons = dict.fromkeys(self._versions.settings)
        for file, name in ranked:
            fitting, reason = self._versions.splice_of(file).fitting_unit(name)
            self._reasons.setdefault(CodePlace(file, fitting), reason)
        return list(self._reasons)

    def _candidates(self, executed: ExecutedFunctions) -> dict[CodePlace, str]:
        """Return the definitions that ran and differ, with their kinds; note what cannot be."""
        candidates: dict[CodePlace, str] = {}
        excluded = self._answer.excluded
        loaded = {place.file for place in executed.order}
        for suspect in self._versions.suspects:
            for file in sorted(loaded & suspect.files.keys()):
                try:
                    changes = self._versions.splice_of(file).changes
                except DoesNotFit as reason:
                    excluded[f"modules of {suspect.name} {reason}"].append(file)
                    continue
                for name, definition in changes.items():
                    ran = CodePlace(file, name.partition("#")[0]) in executed.order
                    if ran or definition.kind != "function":
                        candidates[CodePlace(file, name)] = definition.kind
            if suspect.has_other_compiled_code:
                excluded["compiled libraries"].append(suspect.name)
        return candidates

    def _anchors(self, report: Report, executed: ExecutedFunctions) -> list[CodePlace]:
        """Return the functions of the lines that differ, or where the new version crashed."""
        found: list[CodePlace | None] = []
        for finding in report.introduced:
            for line, index in ((finding.port_line, 1), (finding.line, 0)):
                if line is not None:
                    folder = self._versions.surroundings[index].folder or Path.cwd()
                    file = self._versions.relative(str((folder / line.file).resolve()))
                    found.append(place_of(file, line.function))
        if self._answer.crash is not None:
            for path, function in reversed(self._traceback()):
                file = self._versions.relative(path)  # its functions have no classes
                found += [
                    place
                    for place in executed.order
                    if place.file == file and place.name.rpartition(".")[2] == function
                ]
        return list(dict.fromkeys(place for place in found if place is not None))

    def _traceback(self) -> list[tuple[str, str]]:
        output = self._versions.folder / f"{len(self._versions.runs) + 1}-port" / OUTPUT
        return _TRACEBACK.findall(output.read_text(encoding="utf-8", errors="replace"))

    # -- trials

    def _smallest(self, changes: Sequence[Change]) -> list[Change] | None:
        """Return the smallest set of changes that heals; of modules where no smaller ones do."""
        found = None
        try:
            found = find_minimal_set(changes, self._heals)
            if found is None:
                whole = {
                    own._replace(name=WHOLE_MODULE) if isinstance(own, CodePlace) else own: None
                    for own in changes
                }
                self._reasons = dict.fromkeys(whole, "no set of functions gives the old result")
                found = find_minimal_set(list(whole), self._heals)
            if found and None in self._outcomes.values():  # where a mix failed, less may do
                found = leave_out(found, self._heals)
        except _TrialsSpent:
            self._tell(f"{_MOST_TRIALS} runs with something taken back are enough")
        return found

    def _heals(self, changes: Sequence[Change]) -> bool | None:
        """Return whether the new version computes what the old one does with changes taken back;
        None where it fails in another way than without them.
        """
        key = frozenset(changes)
        if key not in self._outcomes:
            if len(self._outcomes) >= _MOST_TRIALS:
                raise _TrialsSpent
            self._outcomes[key] = self._try(changes)
        return self._outcomes[key]

    def _try(self, changes: Sequence[Change]) -> bool | None:
        what = _describe_changes(changes)
        self._tell(f"trying {what}")
        assert self._reference is not None
        try:
            with self._versions.taken_back(changes) as plan:
                run = self._programs.record("port", f"with the old {what}", exchange=plan)
            return self._programs.compare(self._reference, run).is_match
        except (DoesNotFit, RunFailed) as error:
            self._answer.failed.append(f"{what}: {_short(error)}")
            return False if _short(error) == self._answer.crash else None

    # -- the answer

    def _describe(self, change: Change, proof: Proof) -> FoundChange:
        if isinstance(change, SettingChange):
            return FoundChange(change.name, "setting", change.values, proof)
        suspect = next(own for own in self._versions.suspects if change.file in own.files)
        splice = self._versions.splice_of(change.file)
        known = {**splice.definitions[0], **splice.definitions[1]}.get(change.name)
        places = Sides(self._line(change, 0), self._line(change, 1))
        return FoundChange(
            _dotted(change),
            "module" if known is None else known.kind,
            suspect.versions,
            proof,
            suspect.name,
            places,
            make_patch(splice.text_of(change.name, 0), splice.text_of(change.name, 1), places),
            self._reasons[change],
            () if self._commits is None else self._commits.touching(change, suspect.versions),
        )

    def _line(self, place: CodePlace, side: int) -> CodeLine | None:
        path = self._versions.files[place.file][side]
        definition = self._versions.splice_of(place.file).definitions[side].get(place.name)
        if path is None or (definition is None and place.name != WHOLE_MODULE):
            return None
        if path.is_relative_to(Path.cwd()):  # as the graph names its lines
            path = path.relative_to(Path.cwd())
        return CodeLine(str(path), definition.first if definition else 1, place.name, "")


def _short(error: Exception) -> str:
    return str(error).partition(" (all of it:")[0]


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
