"""What of a file of OTLP lines has been acknowledged, in a small hidden file beside it: a delivery
that is cut off goes on where it was, and nothing that has arrived is sent again.

The file is named after what the lines begin with and not after where they lie, as a later run
renames the files of an earlier one. It is replaced whole, so that a kill leaves the old one or the
new one.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

SCHEMA = "otel_torch.sent/1"
_PATTERN = ".otel-torch-sent.*.json"
# of a line, what tells it from others
_HEAD_BYTES = 65536


class Ranges:
    """Sets of whole numbers as ranges [first, last), which stay few where numbers come in order.

    >>> ranges = Ranges(); ranges.add(0, 3); ranges.add(5, 9); ranges.add(3, 4); list(ranges), list(ranges.missing(0, 10))
    ([(0, 4), (5, 9)], [(4, 5), (9, 10)])
    """

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for first, last in ranges:
            self.add(first, last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def add(self, first: int, last: int) -> None:
        """Put the numbers from `first` up to, and without, `last` into the set."""
        start = bisect.bisect_left(self._ranges, first, key=lambda one: one[1])
        end = bisect.bisect_right(self._ranges, last, key=lambda one: one[0])
        touched = self._ranges[start:end]
        self._ranges[start:end] = [
            (min([first, *(one[0] for one in touched)]), max([last, *(one[1] for one in touched)]))
        ]

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The numbers of [first, last) that are not in the set, as ranges."""
        for start, end in self._ranges[
            bisect.bisect_right(self._ranges, first, key=lambda one: one[1]) :
        ]:
            if start >= last:
                break
            if first < start:
                yield first, start
            first = max(first, end)
        if first < last:
            yield first, last

    def covers(self, first: int, last: int) -> bool:
        """Whether all numbers of [first, last) are in the set."""
        return next(self.missing(first, last), None) is None


class Sent:
    """What of one file a destination has acknowledged: lines by where they begin and end, and parts
    of lines by their items.

    replaced: another file was here when something of this name was sent last.
    """

    def __init__(self, path: Path, destination: str, file: BinaryIO) -> None:
        self.path, self.destination = path, destination
        self.lines = Ranges()
        self._parts: dict[int, Ranges] = {}
        self._last: tuple[int, int] | None = None
        self._file = file
        name = self._digest(0, _HEAD_BYTES)[:16]
        self.beside = path.with_name(_PATTERN.replace("*", name))
        self._others: dict[str, Any] = {}
        self.replaced = self._read() or self._other_of_this_name()

    def parts(self, line: int) -> Ranges:
        """Which items of the line that begins at `line` have been acknowledged; none where all
        have, or nothing.
        """
        return self._parts.get(line, Ranges())

    def acknowledge(self, start: int, end: int, first: int, last: int, items: int) -> None:
        """The items [first, last) of the line at [start, end), which has `items` of them, have
        arrived.
        """
        parts = self._parts.setdefault(start, Ranges())
        parts.add(first, last)
        if parts.covers(0, items):
            del self._parts[start]
            self.lines.add(start, end)
            self._last = start, end

    def forget(self) -> None:
        """All of it is to be sent again."""
        self.lines, self._parts, self._last = Ranges(), {}, None

    def save(self) -> str:
        """Replace the file beside. Returns why it cannot be, empty where it was."""
        ours = {
            "lines": list(self.lines),
            "parts": {str(line): list(ranges) for line, ranges in self._parts.items()},
            "last": [*self._last, self._digest(*self._last)] if self._last else None,
        }
        found = {
            "schema": SCHEMA,
            "file": self.path.name,
            "destinations": self._others | {self.destination: ours},
        }
        temporary = self.beside.with_name(f"{self.beside.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(found) + "\n", encoding="utf-8")
            os.replace(temporary, self.beside)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return error.strerror or str(error)
        return ""

    def _read(self) -> bool:
        """Read what was kept; True where it is of another file, which began alike."""
        found = _load(self.beside)
        destinations = found.get("destinations")
        if not isinstance(destinations, dict):
            return False
        ours = destinations.get(self.destination)
        self._others = {
            name: kept for name, kept in destinations.items() if name != self.destination
        }
        if ours is None:
            return False
        try:
            lines, parts = (
                Ranges(ours["lines"]),
                {int(line): Ranges(kept) for line, kept in ours["parts"].items()},
            )
            last = ours["last"]
            if last is not None and self._digest(last[0], last[1]) != last[2]:
                self._others = {}
                return True
        except (KeyError, TypeError, ValueError, AttributeError):
            return True
        self.lines, self._parts, self._last = (
            lines,
            parts,
            (last[0], last[1]) if last is not None else None,
        )
        return False

    def _digest(self, start: int, end: int) -> str:
        """Of the text of the line in there, or of what it begins with; where the file is being read
        does not change.
        """
        text = os.pread(self._file.fileno(), min(end - start, _HEAD_BYTES), start)
        return hashlib.sha256(text.partition(b"\n")[0]).hexdigest()

    def _other_of_this_name(self) -> bool:
        if self.beside.exists():
            return False
        found = [_load(beside) for beside in self.path.parent.glob(_PATTERN)]
        return any(one.get("file") == self.path.name for one in found)


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}
