"""Remembers which lines of an OTLP file were acknowledged, in a small hidden file beside it, so
that a delivery that was cut off continues and sends nothing twice.

The hidden file is named after the first document of the OTLP file and not after its path, because a
later run renames the files of an earlier one. It is replaced atomically.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from otel_torch.recording.replace_file import replace_file

SCHEMA = "otel_torch.sent/1"
_PATTERN = ".otel-torch-sent.*.json"
# bytes of a line that are hashed to recognize it
_DIGEST_BYTES = 65536


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def _last(pair: tuple[int, int]) -> int:
    return pair[1]


class Ranges:
    """A set of integers as ranges [first, last), which stay few if integers are added in order.

    >>> ranges = Ranges([(0, 3), (5, 9)])
    >>> ranges.add(3, 4)
    >>> list(ranges), list(ranges.missing(0, 10))
    ([(0, 4), (5, 9)], [(4, 5), (9, 10)])
    """

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for first, last in ranges:
            self.add(first, last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def add(self, first: int, last: int) -> None:
        start = bisect.bisect_left(self._ranges, first, key=_last)
        end = bisect.bisect_right(self._ranges, last, key=_first)
        touching = self._ranges[start:end]
        merged_first = min([first, *map(_first, touching)])
        merged_last = max([last, *map(_last, touching)])
        self._ranges[start:end] = [(merged_first, merged_last)]

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the integers of [first, last) that are not in the set, as ranges."""
        index = bisect.bisect_right(self._ranges, first, key=_last)
        for range_first, range_last in self._ranges[index:]:
            if range_first >= last:
                break
            if first < range_first:
                yield first, range_first
            first = max(first, range_last)
        if first < last:
            yield first, last

    def covers(self, first: int, last: int) -> bool:
        return next(self.missing(first, last), None) is None


class SendProgress:
    """What a destination has acknowledged of one file: whole lines by their byte ranges, and parts
    of lines by their items. A document that is printed over many lines counts as a line.

    Args:
        first: Start and end of the file's first document.

    Attributes:
        is_replaced: another file had this name when it was last sent.
    """

    def __init__(
        self, path: Path, destination: str, file: BinaryIO, first: tuple[int, int]
    ) -> None:
        self.path, self.destination = path, destination
        self.lines = Ranges()
        self._parts: dict[int, Ranges] = {}  # by the start of the line
        self._last_line: tuple[int, int] | None = None
        self._file = file
        digest = self._digest(*first)[:16]
        self.progress_path = path.with_name(_PATTERN.replace("*", digest))
        self._other_destinations: dict[str, Any] = {}
        self.is_replaced = self._load() or self._has_predecessor()

    def acknowledged_items(self, line_start: int) -> Ranges:
        """Return which items of a partly acknowledged line have arrived."""
        return self._parts.get(line_start, Ranges())

    def acknowledge(self, start: int, end: int, first: int, last: int, items: int) -> None:
        """Remember that the items [first, last) of the line at bytes [start, end) have arrived; the
        line holds `items` of them.
        """
        parts = self._parts.setdefault(start, Ranges())
        parts.add(first, last)
        if parts.covers(0, items):
            del self._parts[start]
            self.lines.add(start, end)
            self._last_line = start, end

    def clear(self) -> None:
        """Forget what was acknowledged, so that all lines are sent again."""
        self.lines, self._parts, self._last_line = Ranges(), {}, None

    def save(self) -> str:
        """Replace the hidden file. Return the error's text, "" without one."""
        last_line = None
        if self._last_line:
            last_line = [*self._last_line, self._digest(*self._last_line)]
        acknowledged = {
            "lines": list(self.lines),
            "parts": {str(start): list(ranges) for start, ranges in self._parts.items()},
            "last": last_line,
        }
        content = {
            "schema": SCHEMA,
            "file": self.path.name,
            "destinations": self._other_destinations | {self.destination: acknowledged},
        }
        try:
            replace_file(self.progress_path, json.dumps(content) + "\n")
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _load(self) -> bool:
        """Load the hidden file. Return whether it is of another file with the same beginning."""
        destinations = _read_progress(self.progress_path).get("destinations")
        if not isinstance(destinations, dict):
            return False
        self._other_destinations = {
            name: value for name, value in destinations.items() if name != self.destination
        }
        acknowledged = destinations.get(self.destination)
        if acknowledged is None:
            return False
        try:
            lines = Ranges(acknowledged["lines"])
            parts = {int(start): Ranges(items) for start, items in acknowledged["parts"].items()}
            last_line = acknowledged["last"]
            if last_line is not None:
                start, end, digest = last_line[0], last_line[1], last_line[2]
                if self._digest(start, end) != digest:
                    self._other_destinations = {}
                    return True
        except (KeyError, TypeError, ValueError, AttributeError):
            return True
        self.lines, self._parts = lines, parts
        self._last_line = (last_line[0], last_line[1]) if last_line is not None else None
        return False

    def _digest(self, start: int, end: int) -> str:
        """Return a hash of the line that starts at `start`, or of its beginning. Does not move the
        file's position.
        """
        text = os.pread(self._file.fileno(), min(end - start, _DIGEST_BYTES), start)
        return hashlib.sha256(text.removesuffix(b"\n")).hexdigest()

    def _has_predecessor(self) -> bool:
        """Return whether a file of this name, with another beginning, was sent from this folder."""
        if self.progress_path.exists():
            return False
        siblings = self.path.parent.glob(_PATTERN)
        return any(_read_progress(path).get("file") == self.path.name for path in siblings)


def _read_progress(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_progress = isinstance(content, dict) and content.get("schema") == SCHEMA
    return content if is_progress else {}
