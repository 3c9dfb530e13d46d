"""Ranks changes: the fewer calls from the first differing line, the earlier one is tried."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# what makes weights: where these differ, no line does
_INITIALIZERS = re.compile(r"init|reset_parameters|normal|uniform|weights", re.IGNORECASE)


class CodePlace(NamedTuple):
    """A definition: the module's file below the folder of its package, and its name in it."""

    file: str
    name: str


@dataclass(slots=True)
class ExecutedFunctions:
    """What ran in both programs, in the order of the first calls, and who called whom first."""

    order: dict[CodePlace, int] = field(default_factory=dict)
    neighbors: defaultdict[CodePlace, set[CodePlace]] = field(
        default_factory=lambda: defaultdict(set)
    )

    def read(self, folder: Path, relative: Callable[[str], str | None]) -> None:
        """Add what a run has noted.

        Args:
            relative: Returns the path of a file below the folder of its package, if it is in one.
        """
        for notes in sorted(folder.glob("*.jsonl")):
            for line in notes.read_text(encoding="utf-8").splitlines():
                file, function, caller_file, caller = json.loads(line)
                place = place_of(relative(file), function)
                if place is None:
                    continue
                self.order.setdefault(place, len(self.order))
                other = place_of(relative(caller_file), caller) if caller_file else None
                # an import is no call
                if other is not None and other.name and place.name:
                    self.neighbors[place].add(other)
                    self.neighbors[other].add(place)

    def ran(self, place: CodePlace) -> bool:
        """Return whether a definition ran: of what is no function whether its module was loaded."""
        return place in self.order

    def distances(self, anchors: Iterable[CodePlace]) -> dict[CodePlace, int]:
        """Return over how many calls each function is from the nearest anchor."""
        distances = dict.fromkeys(anchors, 0)
        queue = deque(distances)
        while queue:
            place = queue.popleft()
            for neighbor in sorted(self.neighbors.get(place, ())):
                if neighbor not in distances:
                    distances[neighbor] = distances[place] + 1
                    queue.append(neighbor)
        return distances


def place_of(file: str | None, function: str) -> CodePlace | None:
    """Return the definition that holds a function: `C.f.<locals>.g` is in `C.f`.

    >>> place_of("a/b.py", "C.f.<locals>.<lambda>")
    CodePlace(file='a/b.py', name='C.f')
    """
    if file is None:
        return None
    name = function.partition(".<locals>")[0]
    return CodePlace(file, "" if name.startswith("<") else name)


class CandidateChange(NamedTuple):
    """A change that may make the difference.

    `kind` is that of the definition: `function`, `value` or `class`.
    """

    place: CodePlace
    kind: str


def rank(
    candidates: Sequence[CandidateChange],
    executed: ExecutedFunctions,
    anchors: Sequence[CodePlace],
    text_of: Callable[[CodePlace], str],
    *,
    are_weights: bool,
) -> list[CandidateChange]:
    """Return the candidates, the most suspicious first.

    Args:
        anchors: The functions of the lines that differ, the first one first.
        text_of: Returns the text of a function, to see what it names.
        are_weights: Whether parameters differ, so that what makes them is suspect.
    """
    distances = executed.distances(anchors)
    first = {place: index for index, place in reversed(list(enumerate(anchors)))}
    readers: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for place, distance in distances.items():
        readers[place.file].append((place.name, distance))
    far = len(executed.order) + 1

    def distance_of(candidate: CandidateChange) -> int:
        place = candidate.place
        if are_weights and _INITIALIZERS.search(place.name):
            return 0
        if candidate.kind == "function":
            return distances.get(place, far)
        # a value or a class is as near as the nearest function that names it, or belongs to it
        last = re.compile(rf"\b{re.escape(place.name.rpartition('.')[2])}\b")
        near = [
            distance
            for name, distance in readers.get(place.file, ())
            if name.startswith(f"{place.name}.")
            or last.search(text_of(CodePlace(place.file, name)))
        ]
        return min(near, default=far) + 1

    def key(candidate: CandidateChange) -> tuple[object, ...]:
        place = candidate.place
        shared = max((_shared_parts(place.file, own.file) for own in anchors), default=0)
        return (
            distance_of(candidate),
            first.get(place, len(anchors)),
            -shared,
            candidate.kind != "function",
            executed.order.get(place, far),
            place,
        )

    return sorted(candidates, key=key)


def _shared_parts(path: str, other: str) -> int:
    """Return how many folders two paths share, and 1 more for the same file.

    >>> _shared_parts("a/b/c.py", "a/b/d.py"), _shared_parts("a/b.py", "a/b.py")
    (2, 2)
    """
    count = 0
    for own, its in zip(Path(path).parts, Path(other).parts, strict=False):
        if own != its:
            break
        count += 1
    return count
