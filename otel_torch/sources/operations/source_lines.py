"""Which line of the program an operation comes from.

The innermost frame outside of torch and of this package: a line of a library such as transformers
is what a person has to read, a line of `torch.nn.functional` is not.
"""

from __future__ import annotations

import linecache
from typing import Any

from otel_torch.sources.program_lines import ProgramLine, current_line, from_here


class SourceLines:
    """The table of lines, numbered in order of first sight."""

    def __init__(self) -> None:
        self._indices: dict[ProgramLine, int] = {}
        self._lines: list[ProgramLine] = []

    def current(self) -> int | None:
        """Return the index of the innermost line of the program that runs, None if unknown."""
        line = current_line()
        if line is None:
            return None
        index = self._indices.get(line)
        if index is None:
            index = self._indices[line] = len(self._lines)
            self._lines.append(line)
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
            for code, number in self._lines
        ]
