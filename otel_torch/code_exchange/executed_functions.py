"""Notes which functions of some folders run, each once, with the one that called it first.

A line is written when a function first runs, so that a killed process has lost none.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

_TOOL = "otel_torch: executed functions"


def note_executed(watched: Sequence[str], folder: str) -> None:
    """Begin to note functions.

    Args:
        watched: Folders and files.
        folder: Receives a file of lines [file, function, caller's file, caller's function].
    """
    os.makedirs(folder, exist_ok=True)
    notes = _Notes(tuple(watched), folder)
    if sys.version_info >= (3, 12):
        _monitor(notes)
    else:
        profile = _make_profile(notes)
        threading.setprofile(profile)
        sys.setprofile(profile)


class _Notes:
    def __init__(self, watched: tuple[str, ...], folder: str) -> None:
        self._watched, self._folder = watched, folder
        self._is_watched: dict[str, bool] = {}
        # by identity, which is cheaper than equality; kept, so that no identity is used again
        self.seen: dict[int, CodeType] = {}

    def is_watched(self, file: str) -> bool:
        known = self._is_watched.get(file)
        if known is None:
            path = os.path.realpath(file)
            known = any(path == root or path.startswith(root + os.sep) for root in self._watched)
            self._is_watched[file] = known
        return known

    def add(self, frame: FrameType) -> None:
        """Note the function of a frame, the first time that it runs."""
        code = frame.f_code
        self.seen[id(code)] = code
        if not self.is_watched(code.co_filename):
            return
        caller = frame.f_back
        while caller is not None and not self.is_watched(caller.f_code.co_filename):
            caller = caller.f_back
        line = [*_name(code), *(("", "") if caller is None else _name(caller.f_code))]
        # a process that was forked writes a file of its own
        with open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "a") as stream:
            stream.write(json.dumps(line) + "\n")


def _name(code: CodeType) -> tuple[str, str]:
    return os.path.realpath(code.co_filename), code.co_qualname


def _make_profile(notes: _Notes) -> Callable[[FrameType, str, Any], None]:
    seen, add = notes.seen, notes.add

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and id(frame.f_code) not in seen:
            add(frame)

    return profile


def _monitor(notes: _Notes) -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009 - mypy checks as Python 3.11
    tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise RuntimeError("six tools monitor this process already")

    def started(code: CodeType, offset: int) -> Any:
        notes.add(sys._getframe(1))
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, _TOOL)
    monitoring.register_callback(tool, monitoring.events.PY_START, started)
    monitoring.set_events(tool, monitoring.events.PY_START)
