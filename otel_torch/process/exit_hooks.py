"""Ends a recording with its process: at exit, and in children of multiprocessing."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable


def stop_at_exit(stop: Callable[[], None]) -> None:
    """Call `stop` when this process, or a child of multiprocessing that it forks, ends normally.

    Such a child clears the exit functions that it inherits, and most never run atexit.
    """
    from multiprocessing import process, util

    def stop_at_end(_: object) -> None:
        util.Finalize(None, stop, exitpriority=0)

    atexit.register(stop)
    util.register_after_fork(stop, stop_at_end)
    if process.parent_process() is not None:
        stop_at_end(None)


_dying_pids: set[int] = set()


def note_dying_process() -> None:
    """Note that this process is about to end without the functions of `atexit`."""
    _dying_pids.add(os.getpid())


def is_process_dying() -> bool:
    """Return whether this process is about to end without the functions of `atexit`."""
    return os.getpid() in _dying_pids


def is_interpreter_ending() -> bool:
    """Return whether the functions of `atexit` run, or have run: no thread pool can be started."""
    return sys.is_finalizing() or not threading.main_thread().is_alive()
