"""Ends a recording before `os._exit`, which runs no exit functions.

Workers of many servers and pools end so. Code that has imported the bare function before recording
began (`from os import _exit`), and code in C, still ends the process at once.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from otel_torch.process.exit_hooks import note_dying_process

# How long `os._exit` waits if the recording cannot end, because a device hangs or the caller holds
# a lock that is needed. An endpoint is given up earlier.
OS_EXIT_S = 2.0


def end_before_os_exit(
    end: Callable[[], AbstractContextManager[None]], is_needed: Callable[[], bool]
) -> Callable[[], None]:
    """End the recording before `os._exit` ends the process; return what restores `os._exit`.

    Args:
        end: ends the recording when it is entered, in a thread of its own. The process ends inside
            of it, so that it may hold locks until then.
        is_needed: returns whether there is anything to end.
    """
    exit_process = os._exit
    is_active = True

    def end_and_wait(is_over: threading.Event, released: threading.Event) -> None:
        with end():
            is_over.set()
            released.wait()

    @functools.wraps(exit_process)
    def end_and_exit(status: int) -> None:
        released = threading.Event()
        if is_active and is_needed():
            note_dying_process()
            is_over = threading.Event()
            thread = threading.Thread(
                target=end_and_wait, args=[is_over, released], name="otel_torch-end", daemon=True
            )
            try:
                thread.start()
                is_over.wait(OS_EXIT_S)
            except RuntimeError:
                pass  # the interpreter is ending, and the recording has ended with it
        try:
            exit_process(status)
        finally:
            released.set()  # the program had replaced `os._exit` by a function that returns

    def restore() -> None:
        nonlocal is_active
        is_active = False
        if os._exit is end_and_exit:
            os._exit = exit_process

    end_and_exit.__module__ = os.__name__  # where pickle looks for it
    os._exit = end_and_exit  # type: ignore[assignment]
    return restore
