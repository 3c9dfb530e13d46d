"""Grades the first finding of a comparison of operations by its line, and by its module.

By line, best first:

- `line`: a right line, or the wrong weight, in at least one program;
- `region`: a right line is among those of the region that the finding shows;
- `other`: another line;
- `missed`: nothing is named.

By module, in the words of `judge.py`: `exact` is the right module, `near` its parent or child. The side
of a tensor does not count, for an operation is between tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from otel_torch.parity.finding import CodeLine, Report
from otel_torch.rendering.words import plural
from tests.corpora.case import Line, Right
from tests.corpora.judge import Named, is_at_its_moment, is_related

LINE_GRADES = ("line", "region", "other", "missed")


class Half(NamedTuple):
    """What a finding names in one program, and the lines of the region that it shows there."""

    side: str | None
    module: str
    tensor: str
    line: CodeLine | None
    region: tuple[CodeLine, ...]

    def names(self, right: Line) -> bool:
        """Return whether the finding names this line or leaf."""
        if self.side == "parameter" and right.leaf and _is_leaf(self.leaf, right.leaf):
            return True
        return self._may_be(right) and self.line is not None and _is_line(self.line, right)

    def holds(self, right: Line) -> bool:
        """Return whether the region holds this line."""
        return self._may_be(right) and any(_is_line(line, right) for line in self.region)

    def __str__(self) -> str:
        if self.side is None:
            return "nothing"
        words = [self.side, self.leaf if self.side == "parameter" else self.module or "(root)"]
        if self.line is not None:
            words.append(f"{self.line.file.rpartition('/')[2]}:{self.line.line} {self.line.text}")
        return f"{' '.join(words)} (of {plural(len(self.region), 'line')})"

    @property
    def leaf(self) -> str:
        return ".".join(filter(None, (self.module, self.tensor.removeprefix("param."))))

    def _may_be(self, right: Line) -> bool:
        if self.side is None:
            return False
        if right.leaf:  # the lines of the module that owns a weight read it
            owner = right.leaf.rpartition(".")[0]
            return self.module == owner or _is_leaf(self.module, right.leaf)
        return not right.module or self.module == right.module


def grade_line(right: Right | None, report: Report) -> str:
    """Return the better grade of both programs' lines; "" where none is known to be right."""
    if right is None or not right.lines:
        return ""
    if report.first is None:
        return "missed"
    sides = tuple(zip(halves(report), (right.lines.reference, right.lines.port), strict=True))
    if any(half.names(line) for half, lines in sides for line in lines):
        return "line"
    if any(half.holds(line) for half, lines in sides for line in lines):
        return "region"
    return "other"


def grade_module(right: Right | None, named: Named | None) -> str:
    """Return the better grade of both programs' modules; "" where none is known to be right."""
    if right is None:
        return "false" if named else "silent"
    if named is None:
        return "missed"
    if not right.places and not right.says:
        return ""
    if right.phases and any(not place.module for place in right.places):
        # losses and clips run in no module, in the phase of the forward before
        right = replace(right, phases=(*right.phases, "forward"))
    if not is_at_its_moment(right, named):
        return "wrong"
    pairs = [
        (place.module, expected.module)
        for place, places in ((named.port, right.places), (named.reference, right.in_reference))
        for expected in places or ()
        if place is not None
    ]
    if any(module == expected for module, expected in pairs) or not right.places:
        return "exact"
    return "near" if any(_is_beside(*pair) for pair in pairs) else "wrong"


def halves(report: Report) -> tuple[Half, Half]:
    """Return what the first finding of a report names, in the reference and in the port."""
    first = report.first
    assert first is not None
    reference, port = report.operations or ((), ())
    return (
        Half(first.side, first.module or "", first.tensor or "", first.line, _lines(reference)),
        Half(
            first.port_side, first.port_module or "", first.port_tensor or "", first.port_line, _lines(port)
        ),
    )  # fmt: skip


def describe(report: Report) -> str:
    """Return what the first finding of a report names in each program, and what differs."""
    assert report.first is not None
    return " | ".join((*map(str, halves(report)), report.first.explanation[:160]))


def _lines(operations: Iterable[object]) -> tuple[CodeLine, ...]:
    lines = (operation.line for operation in operations)  # type: ignore[attr-defined]
    return tuple(line for line in dict.fromkeys(lines) if line is not None)


def _is_line(line: CodeLine, right: Line) -> bool:
    if right.place and right.place != f"{Path(line.file).name}:{line.line}":
        return False
    return right.text in line.text and right.function in f"{line.file}:{line.function}"


def _is_leaf(leaf: str, right: str) -> bool:
    return leaf == right or (right.endswith(".") and leaf.startswith(right))


def _is_beside(module: str, expected: str) -> bool:
    """Return whether two modules are parent and child, or are so but for a list that holds the child.

    >>> _is_beside("up_blocks.0", "up_blocks.0.resnets.1"), _is_beside("", "blocks.0.attn")
    (True, False)
    """
    return (
        is_related(module, expected) or _caller(module) == expected or _caller(expected) == module
    )


def _caller(module: str) -> str:
    """Return the module that calls another: its parent, or that of the list that holds it."""
    parent, _, name = module.rpartition(".")
    return parent.rpartition(".")[0] if name.isdigit() else parent
