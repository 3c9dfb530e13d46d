"""The answer to which change did it: data for people and programs."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.versions.environments import Suspect
from otel_torch.bisecting.versions.version_programs import SettingChange
from otel_torch.parity.finding import CodeLine, Proof
from otel_torch.parity.sides import Sides


@dataclass(frozen=True, slots=True)
class FoundChange:
    """A change that is needed to make the difference.

    Attributes:
        name: The function, class or attribute as it is imported, the module, or the setting.
        unit: `function`, `class`, `value`, `module` or `setting`.
        versions: Of the package; the two values of a setting.
        package: The package or repository; None for a setting.
        lines: Where it begins in both versions; None where it does not exist.
        patch: What changed, as a unified diff.
        reason: Why no smaller unit was exchanged, if one does not fit.
        commits: Those that touch its lines, the last one first.
    """

    name: str
    unit: str
    versions: Sides[str]
    proof: Proof
    package: str | None = None
    lines: Sides[CodeLine | None] = Sides(None, None)
    patch: str = ""
    reason: str | None = None
    commits: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `changes` in JSON."""
        plain = ("name", "unit", "package", "versions", "patch", "proof", "reason", "commits")
        places = self.lines.map(lambda own: own and {"file": own.file, "line": own.line})
        return {name: getattr(self, name) for name in plain} | places._asdict()


@dataclass(slots=True)
class VersionBisection:
    """Which change makes one program compute something else.

    Attributes:
        bisection: The two programs as they are, with the places where they begin to differ.
        suspects: Packages and repositories that differ.
        settings: Settings that differ.
        changes: All of them are needed, and together they are enough if they are proven.
        candidates: How many changes ran and could be taken back.
        excluded: What cannot be exchanged, by why.
        failed: Why trials did not run to their end.
        crash: What the new version ended with, where it computes nothing.
        largest_error: Of the ends that match, relative L2.
    """

    bisection: Bisection
    suspects: Sequence[Suspect]
    settings: Sequence[SettingChange]
    changes: list[FoundChange] = field(default_factory=list)
    candidates: int = 0
    excluded: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    failed: list[str] = field(default_factory=list)
    crash: str | None = None
    largest_error: float = 0.0

    @property
    def verdict(self) -> str:
        """`match`, `diverged`, `partial` or `incomparable`, as `otel-torch diff` has it."""
        return self.bisection.verdict

    def as_json(self) -> dict[str, Any]:
        """Return the object that `otel-torch bisect --json` prints."""
        suspects = [(own.name, own.versions) for own in self.suspects]
        suspects += [(own.name, own.values) for own in self.settings]
        plain = ("candidates", "excluded", "failed", "crash")
        return {
            **self.bisection.as_json(),
            "suspects": [{"name": name, "versions": pair} for name, pair in suspects],
            "changes": [change.as_json() for change in self.changes],
            **{name: getattr(self, name) for name in plain},
        }


def make_patch(old: str, new: str, lines: Sides[CodeLine | None]) -> str:
    """Return what differs between two texts as a unified diff of the files that hold them."""
    names = lines.map(lambda line: "/dev/null" if line is None else line.place)
    begins = lines.map(lambda line: 1 if line is None else line.line)
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="", n=2))
    return "\n".join(_renumbered(line, begins) for line in diff)


def _renumbered(line: str, begins: Sides[int]) -> str:
    """Return a line of a diff; numbers of lines are those of the files.

    >>> _renumbered("@@ -1,2 +3 @@", Sides(10, 20))
    '@@ -10,2 +22 @@'
    """
    if not line.startswith("@@ "):
        return line
    ranges = []
    for begin, word in zip(begins, line.split()[1:3], strict=True):
        first, comma, count = word[1:].partition(",")
        ranges.append(f"{word[0]}{int(first) + begin - 1}{comma}{count}")
    return f"@@ {' '.join(ranges)} @@"
