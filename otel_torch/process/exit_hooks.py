"""Ends a recording with its process: at exit, in children of multiprocessing, and on SIGTERM."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

# How long a SIGTERM may wait for `stop` if the device hangs: less than launchers wait before they
# send SIGKILL.
SIGTERM_S = 5.0
# How long the interrupted thread waits for `stop`, so that it runs no further step: it would lack
# records. Then it goes on, as it may hold a lock that `stop` needs.
_HOLD_S = 1.5


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


def is_interpreter_ending() -> bool:
    """Return whether the functions of `atexit` run, or have run: no thread pool can be started."""
    return sys.is_finalizing() or not threading.main_thread().is_alive()


def stop_on_sigterm(
    stop: Callable[[], None], hold: Callable[[Callable[[], object]], None]
) -> Callable[[], None]:
    """Call `stop` on SIGTERM, then die of the signal; return what removes the handler.

    Does nothing outside the main thread, or if the program has a handler of its own.

    Args:
        hold: calls its argument, which waits for `stop`, once the interrupted thread holds no lock
            that `stop` needs.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return lambda: None

    handled_in: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if handled_in != [os.getpid()]:
            handled_in[:] = [os.getpid()]
            try:
                thread = threading.Thread(
                    target=_stop_and_die, args=(stop,), name="otel_torch-sigterm"
                )
                thread.start()
                hold(lambda: thread.join(_HOLD_S))
            except RuntimeError:  # the interpreter is ending, and the recording with it
                _die()

    def restore() -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is handle
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    return restore


def _stop_and_die(stop: Callable[[], None]) -> None:
    """Run `stop` for at most SIGTERM_S, then die.

    In threads, because the signal may have interrupted the main thread while it held any lock.
    """
    stopping = threading.Thread(target=stop, name="otel_torch-stop", daemon=True)
    stopping.start()
    stopping.join(SIGTERM_S)
    _die()


def _die() -> None:
    """Die of SIGTERM now. Python itself resets a signal handler in the main thread only."""
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, 0)
    os.kill(os.getpid(), signal.SIGTERM)
