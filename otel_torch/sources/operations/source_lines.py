"""Which line of the program an operation comes from.

The innermost frame outside of torch and of this package: a line of a library such as transformers
is what a person has to read, a line of `torch.nn.functional` is not.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# context managers, decorators and threads run between a program's line and torch
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


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
            if _is_users(code):
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
        here = os.getcwd() + os.sep
        return [
            [
                code.co_filename.removeprefix(here),
                number,
                getattr(code, "co_qualname", code.co_name),
                linecache.getline(code.co_filename, number).strip(),
            ]
            for code, number in self._lines
        ]


def current_place() -> str | None:
    """Return `file:line` of the innermost line of the program that runs, None if unknown."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{frame.f_code.co_filename.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _is_users(code: CodeType) -> bool:
    path = code.co_filename
    if path.startswith((_TORCH, _OWN, "<frozen", "<string>")):
        return False
    return not path.startswith(_PYTHON) or any(folder in path for folder in _INSTALLED)
