"""Ranks changes: the fewer calls from the first differing line, the earlier one is tried."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """What ran in both programs, in the order of the first calls, and what is next to what: who
    called whom first, methods and their class.
    """

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
                    self._connect(place, other)
        for place in self.order:
            if owner := place.name.rpartition(".")[0]:  # what a method reads, another one has set
                self._connect(place, place._replace(name=owner))

    def _connect(self, place: CodePlace, other: CodePlace) -> None:
        self.neighbors[place].add(other)
        self.neighbors[other].add(place)

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


def rank(
    candidates: Mapping[CodePlace, str],
    executed: ExecutedFunctions,
    anchors: Sequence[CodePlace],
    text_of: Callable[[CodePlace, int], str],
    weight: str | None,
) -> list[CodePlace]:
    """Return the candidates, the most suspicious first.

    Args:
        candidates: Changes, each `function`, `value` or `class`.
        anchors: The functions of the lines that differ, the first one first. Without any, the
            program itself gets other values: what makes weights has drawn other random numbers.
        text_of: Returns the old (0) or new (1) text of a definition in a file with candidates.
        weight: The name of a parameter that differs, so that what makes it is suspect.
    """
    distances = executed.distances(anchors)
    first = {place: index for index, place in reversed(list(enumerate(anchors)))}
    far = len(executed.order) + 1

    def distance_of(place: CodePlace) -> int:
        if weight is not None:
            lines = [set(map(str.strip, text_of(place, side).split("\n"))) for side in (0, 1)]
            if any(re.search(rf"\b{re.escape(weight)}\b", line) for line in lines[0] ^ lines[1]):
                return -1
        if (weight is not None or not anchors) and _INITIALIZERS.search(place.name):
            return 0
        if candidates[place] == "function":
            return distances.get(place, far)
        # a value or a class is as near as the nearest function that names it, or belongs to it
        last = re.compile(rf"\b{re.escape(place.name.rpartition('.')[2])}\b")
        near = [
            distance
            for own, distance in distances.items()
            if own.file == place.file
            and (
                own.name.startswith(f"{place.name}.")
                or last.search(text_of(own, 0) + text_of(own, 1))
            )
        ]
        return min(near, default=far) + 1

    def key(place: CodePlace) -> tuple[object, ...]:
        shared = [len(_around(place) & _around(own)) for own in anchors]
        return (
            distance_of(place),
            first.get(place, len(anchors)),
            -max(shared, default=0),
            candidates[place] != "function",
            executed.order.get(place, far),
            place,
        )

    return sorted(candidates, key=key)


def _around(place: CodePlace) -> set[str | Path]:
    return {place.file, *Path(place.file).parents}
