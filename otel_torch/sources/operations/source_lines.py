"""Which line of the program an operation comes from.

The innermost frame outside of torch and of this package: a line of a library such as transformers
is what a person has to read, a line of `torch.nn.functional` is not.
"""

from __future__ import annotations

import linecache
import sys
from types import CodeType, FrameType
from typing import Any

from otel_torch.sources.program_lines import from_here, is_users


class SourceLines:
    """The table of lines, numbered in order of first sight."""

    def __init__(self) -> None:
        self._indices: dict[tuple[CodeType, int], int] = {}
        self._lines: list[tuple[CodeType, int]] = []

    def current(self) -> int | None:
        """Return the index of the innermost line of the program that runs, None if unknown."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if is_users(code):
                return self._index(code, frame.f_lineno)
            frame = frame.f_back
        return None

    def _index(self, code: CodeType, number: int) -> int:
        key = code, number
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._lines)
            self._lines.append(key)
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
