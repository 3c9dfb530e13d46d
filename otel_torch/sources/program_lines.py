"""Which frames of the stack are the program's, and which line of it runs."""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
# context managers, decorators and threads run between a program's line and torch
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


def current_place() -> str | None:
    """Return `file:line` of the innermost line of the program that runs, None if unknown."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{from_here(frame.f_code.co_filename)}:{frame.f_lineno}"


def from_here(file: str) -> str:
    """Return the path of a file as an editor opens it from the current folder."""
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:  # that folder is gone
        return file


@functools.lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Return whether code is the program's, or that of a library outside of torch."""
    path = code.co_filename
    if path.startswith((_TORCH, _OWN, "<frozen", "<string>")):
        return False
    return not path.startswith(_PYTHON) or any(folder in path for folder in _INSTALLED)
