"""Notes which functions of some folders run, each once, with the one that called it first.

A line is written when a function first runs, so that a killed process has lost none.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
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

    @cache
    def is_watched(file: str) -> bool:
        path = os.path.realpath(file)
        return any(path == root or path.startswith(root + os.sep) for root in watched)

    def note(frame: FrameType) -> None:
        if not is_watched(frame.f_code.co_filename):
            return
        caller = frame.f_back
        while caller is not None and not is_watched(caller.f_code.co_filename):
            caller = caller.f_back
        line = [*_name(frame), *(("", "") if caller is None else _name(caller))]
        # a process that was forked writes a file of its own
        with open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a") as stream:
            stream.write(json.dumps(line) + "\n")

    if sys.version_info >= (3, 12):
        _monitor(note)
    else:
        _profile(note)


def _name(frame: FrameType) -> tuple[str, str]:
    return os.path.realpath(frame.f_code.co_filename), frame.f_code.co_qualname


def _profile(note: Callable[[FrameType], None]) -> None:
    # by identity, which is cheaper than equality; kept, so that no identity is used again
    seen: dict[int, CodeType] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and id(frame.f_code) not in seen:
            seen[id(frame.f_code)] = frame.f_code
            note(frame)

    threading.setprofile(profile)
    sys.setprofile(profile)


def _monitor(note: Callable[[FrameType], None]) -> None:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009 - mypy checks as Python 3.11
    tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise RuntimeError("six tools monitor this process already")

    def started(code: CodeType, offset: int) -> Any:
        note(sys._getframe(1))
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, _TOOL)
    monitoring.register_callback(tool, monitoring.events.PY_START, started)
    monitoring.set_events(tool, monitoring.events.PY_START)
