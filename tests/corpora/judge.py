"""Grades the first finding of a comparison against what is right.

The same words for every corpus, best first:

- `exact`: one of the right places, with all that is right to say of it;
- `place`: the right place; the rank, the cause or the reason is missing;
- `near`: the parent or the child, the event before or after, or the right phase and step;
- `late`: downstream of the right place;
- `missed`: nothing is named;
- `wrong`: anything else;
- `error`: a program or the comparison failed.

A clean pair is `silent` or `false`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_torch.bisecting.bisection import Bisection
from otel_torch.parity.finding import Finding, Report
from otel_torch.recording.reader import load_recording
from tests.contradictions import contradictions
from tests.corpora.case import MODULES, Place, Right, at

GRADES = ("exact", "place", "near", "late", "missed", "wrong", "error")
# the rule in FastVideo's documentation of its traces
RULE_STATISTICS = ("abs_mean", "max")
RULE_TOLERANCE = 0.005

Row = dict[str, Any]


@dataclass(frozen=True)
class Recordings:
    """The recordings of one case; `noise` is the reference with noise added, or None.

    bisection: the answer, if the case was bisected.
    """

    reference: Path
    port: Path
    noise: Path | None = None
    bisection: Bisection | None = None


@dataclass(frozen=True)
class Named:
    """The first fault that a judge named, by each program's names; a place is None if a program
    lacks it. `finding` is None if the judge names places only.
    """

    reference: Place | None
    port: Place | None
    kind: str = ""
    finding: Finding | None = None

    @classmethod
    def of(cls, first: Finding) -> Named:
        return cls(
            _place(first.side, first.module),
            _place(first.port_side, first.port_module),
            first.kind,
            first,
        )

    @property
    def phase(self) -> str | None:
        """That of a wrong loss, or of its gradient, is `loss`."""
        first = self.finding
        assert first is not None
        tensor = str(first.tensor or first.port_tensor)
        is_of_root = "" in (first.module, first.port_module)
        if first.phase == "train" and tensor == "loss":
            return "loss"
        is_of_loss = first.phase == "backward" and is_of_root and tensor.startswith("grad")
        return "loss" if is_of_loss else first.phase

    def __str__(self) -> str:
        place = str(self.port or "nothing")
        if self.reference != self.port:
            place += f", in the reference {self.reference or 'nothing'}"
        first = self.finding
        if first is None:
            return place
        rank = None if first.rank is None else f"rank {first.rank}"
        cause = first.cause and first.cause.kind
        tensor = first.port_tensor or first.tensor
        words = place, tensor, first.phase, f"step {first.step}", rank, self.kind, cause
        return " ".join(filter(None, words)) + f": {' '.join(first.explanation.split())[:160]}"


# ---- judges


def our_diff(report: Report, in_whole: bool = True, engine: str = MODULES) -> Named | None:
    """Return the first finding of a report.

    Raises: RuntimeError, if the report contradicts itself, or has not compared everything that it
    has to compare `in_whole`.
    """
    # where an order is wrong, or the reference's value is used elsewhere, operations may be right
    lines = contradictions(report) if engine == MODULES else []
    if lines:
        raise RuntimeError(f"contradiction: {lines[0]}")
    if report.first is not None:
        return Named.of(report.first)
    right = ("match",) if in_whole else ("match", "partial")
    if report.verdict not in right or report.introduced:
        raise RuntimeError(f"{report.verdict}: {report.reason}")
    return None


def fastvideo_rule(recordings: Recordings) -> Named | None:
    """Judge by FastVideo's rule: the first output, in the reference's order, whose shape, abs_mean or
    max differs by more than 0.5 %.

    Rows pair by (module, step, tensor) and occurrence; unpaired rows are skipped.
    """
    port = dict(_outputs(recordings.port))
    for key, row in _outputs(recordings.reference):
        port_row = port.get(key)
        if port_row is not None and _is_outside(row, port_row):
            place = Place("output", row["module"])
            return Named(place, place)
    return None


def _place(side: str | None, module: str | None) -> Place | None:
    return None if side is None or module is None else Place(side, module)


def _outputs(recording: Path) -> Iterable[tuple[tuple[Any, ...], Row]]:
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in load_recording(recording).rows:
        if row["tensor"].startswith("out") and row.get("phase", "forward") == "forward":
            key = (row["module"], row["step"], row["tensor"])
            yield (*key, seen[key]), row
            seen[key] += 1


def _is_outside(row: Row, port_row: Row) -> bool:
    if row["shape"] != port_row["shape"]:
        return True
    values = [
        (row[name], port_row[name])
        for name in RULE_STATISTICS
        if row.get(name) is not None and port_row.get(name) is not None
    ]
    # `not … <=`, so that a NaN on one side is outside
    return any(
        not abs(a - b) <= RULE_TOLERANCE * abs(a) for a, b in values if not (a != a and b != b)
    )


OURS, RULE = "otel_torch", "FastVideo 0.5 %"


# ---- grades


def grade(right: Right | None, named: Named | None, recordings: Recordings) -> tuple[str, bool]:
    """Return the better grade of both programs' names, and whether it is exact in both."""
    if right is None:
        return ("false" if named else "silent"), False
    if right.causes is not None:
        return _grade_cause(right, named), False
    if named is None:
        return "missed", False
    if not is_at_its_moment(right, named):
        return "wrong", False
    grades = [
        _grade_place(right, place, named.kind, places, recording)
        for place, places, recording in (
            (named.port, right.places, recordings.port),
            (named.reference, right.in_reference, recordings.reference),
        )
        if places
    ]
    best = min(grades, key=GRADES.index, default="exact")
    if best == "exact":
        best = right.grade if _is_explained(right, named) else "place"
    return best, set(grades) == {"exact"}


def _grade_cause(right: Right, named: Named | None) -> str:
    """Grade what is said to be the cause, wherever it is."""
    cause = named and named.finding and named.finding.cause
    if not right.causes and named:
        return "wrong" if cause else "exact"
    if cause is None:
        return "missed"
    if cause.kind in right.causes and all(word in cause.text for word in right.words):
        return "exact"
    return "place" if cause.kind in right.coarser else "wrong"


def is_at_its_moment(right: Right, named: Named) -> bool:
    if right.phases and named.phase not in right.phases:
        return False
    first = named.finding
    if right.step is not None and (first is None or first.step != right.step):
        return False
    return any(
        all(_field(first, name) == value for name, value in says.items())
        for says in (right.says, *right.or_says)
    )


def _field(finding: Any, name: str) -> Any:
    value = getattr(finding, name)
    return value and value.kind if name == "cause" else value


def _is_explained(right: Right, named: Named) -> bool:
    if not right.words or named.finding is None:
        return True
    explanation = named.finding.explanation.lower()
    return all(
        any(word.lower() in explanation for word in words.split("|")) for words in right.words
    )


def _grade_place(
    right: Right, place: Place | None, kind: str, places: Sequence[Place], recording: Path
) -> str:
    if right.phases:  # phase and step are right
        return "exact" if place and at(place.module) in places else "near"
    # a missing call is a kind of finding; its side is that of the tensor that is missing
    is_missing = (
        place is not None and kind == "missing" and Place("missing", place.module) in places
    )
    if right.near is not None:
        if place and place.module in {expected.module for expected in places}:
            return "exact" if place in places or is_missing else "place"
        return "near" if place and place.module in right.near else "wrong"
    if place is None:
        return "wrong"
    if place in places or is_missing:
        return "exact"
    order = {event: position for position, event in enumerate(timeline(recording))}
    for expected in places:
        if is_related(place.module, expected.module):
            return "near"
        if place in order and expected in order and abs(order[place] - order[expected]) == 1:
            return "near"
    # a wrong weight shows when its module is called, or at the end if it never is
    position = order.get(place, order.get(Place("input", place.module), len(order)))
    due = min((order[expected] for expected in places if expected in order), default=0)
    return "late" if position > due else "wrong"


def is_related(a: str, b: str) -> bool:
    """Return whether two modules are the same, or parent and child."""
    return a == b or a.rpartition(".")[0] == b or b.rpartition(".")[0] == a


def timeline(recording: Path) -> list[Place]:
    """Return the inputs and outputs of all modules in time order, each place once."""
    moments: dict[Place, int] = {}
    for row in load_recording(recording).rows:
        for side, moment in zip(("input", "output"), row.get("order") or (None, None), strict=True):
            place = Place(side, row["module"])
            if moment is not None and moment < moments.get(place, moment + 1):
                moments[place] = moment
    return sorted(moments, key=moments.__getitem__)
