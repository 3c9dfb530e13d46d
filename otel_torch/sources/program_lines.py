"""Which frames of the stack are the program's, and which line of it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

ProgramLine = tuple[CodeType, int]

# names our own stubs, which run in place of the program's code
STUB = "_otel_torch_own"

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
# context managers, decorators and threads run between a program's line and torch
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


def current_line() -> ProgramLine | None:
    """Return the innermost line of the program that runs, None if unknown."""
    for frame in program_frames():
        return frame.f_code, frame.f_lineno
    return None


def program_frames() -> Iterator[FrameType]:
    """Yield the frames of the program that run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code):
            yield frame
        frame = frame.f_back


def place_of(line: ProgramLine | None) -> str:
    """Return `file:line`, "" if it is unknown."""
    return "" if line is None else f"{from_here(line[0].co_filename)}:{line[1]}"


def from_here(file: str) -> str:
    """Return the path of a file as an editor opens it from the current folder."""
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:  # that folder is gone
        return file


# by the identity of code, which takes long to hash; the code is kept, so that it stays unique
_known: dict[int, tuple[CodeType, bool]] = {}
_MOST_KNOWN = 4096


def _is_users(code: CodeType) -> bool:
    known = _known.get(id(code))
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[id(code)] = code, _is_of_program(code)
    return known[1]


def _is_of_program(code: CodeType) -> bool:
    """Return whether code is the program's, or that of a library outside of torch."""
    path = code.co_filename
    if STUB in code.co_varnames:  # it only calls the code whose name it has
        return False
    if path.startswith((_TORCH, _OWN, "<frozen", "<string>")):
        return False
    return not path.startswith(_PYTHON) or any(folder in path for folder in _INSTALLED)
