"""Which line of the program an operation comes from, and which lines called it.

The innermost frame outside of torch and of this package: a line of a library such as transformers
is what a person has to read, a line of `torch.nn.functional` is not.
"""

from __future__ import annotations

import linecache
from types import CodeType
from typing import Any

from otel_torch.sources.program_lines import from_here, program_frames

_Entry = tuple[int | None, CodeType, int]
# of an entry's caller, code and instruction; code by its identity, for it takes long to hash
_Key = tuple[int | None, int, int]


class SourceLines:
    """The table of lines, numbered in order of first sight: one entry for each way to a line."""

    def __init__(self) -> None:
        # by the instruction, whose line takes long to find, and by the negative line
        self._indices: dict[_Key, int] = {}
        self._codes: dict[int, CodeType] = {}  # kept, so that identities stay unique
        self._lines: list[_Entry] = []

    def current(self) -> int | None:
        """Return the index of the innermost line of the program that runs, None if unknown."""
        index: int | None = None
        for frame in reversed(list(program_frames())):
            code = frame.f_code
            key = index, id(code), frame.f_lasti
            known = self._indices.get(key)
            if known is None:
                self._codes[id(code)] = code
                known = self._indices[key] = self._add((index, code, frame.f_lineno))
            index = known
        return index

    def _add(self, entry: _Entry) -> int:
        key = entry[0], id(entry[1]), -entry[2]  # instructions are not negative
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._lines)
            self._lines.append(entry)
        return index

    def describe(self) -> list[list[Any]]:
        """Return [file, line, function, text] of each line, as an editor opens it from here."""
        return [
            [
                from_here(code.co_filename),
                number,
                getattr(code, "co_qualname", code.co_name),
                linecache.getline(code.co_filename, number).strip(),
            ]
            for _, code, number in self._lines
        ]

    def callers(self) -> list[int | None]:
        """Return, for each line, which line has called its function; None if that is unknown."""
        return [caller for caller, *_ in self._lines]
