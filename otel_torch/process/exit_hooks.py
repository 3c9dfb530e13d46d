"""Ends a recording with its process: at exit, in children of multiprocessing, and on SIGTERM."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

# How long a SIGTERM may wait for `stop` if the device hangs: less than launchers wait before they
# send SIGKILL.
SIGTERM_S = 5.0
# How long a SIGTERM waits for the program to leave a lock that `stop` needs.
_HOLD_S = 1.0


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


def stop_on_sigterm(stop: Callable[[], None], is_busy: Callable[[], bool]) -> Callable[[], None]:
    """Call `stop` on SIGTERM, then die of the signal; return what removes the handler.

    The program is held meanwhile: a further step would lack records. Does nothing outside the main
    thread, or if the program has a handler of its own.

    Args:
        is_busy: returns whether the calling thread holds a lock that `stop` needs, as the handler
            may have interrupted it anywhere.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return lambda: None

    endings: dict[int, _Ending] = {}  # of this process; a forked child inherits its parent's

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() not in endings:
            endings[os.getpid()] = ending = _Ending(stop)
            try:
                ending.start()
            except RuntimeError:  # the interpreter is ending, and the recording with it
                if not is_busy():
                    _die()
        if not is_busy():
            endings[os.getpid()].hold_program()

    def restore() -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is handle
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if os.getpid() in endings:  # it came during `stop`, which is over now
                _die()

    signal.signal(signal.SIGTERM, handle)
    return restore


class _Ending(threading.Thread):
    """Runs `stop` for at most SIGTERM_S, then dies.

    In threads, because the signal may have interrupted the main thread while it held any lock. As
    long as it does, the signal is sent to it again.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(name="otel_torch-sigterm")
        self._stopping = threading.Thread(target=stop, name="otel_torch-stop", daemon=True)
        self._is_program_held = threading.Event()

    def hold_program(self) -> None:
        """Keep the calling thread from running on."""
        self._is_program_held.set()
        self.join(SIGTERM_S)

    def run(self) -> None:
        deadline = time.monotonic() + _HOLD_S
        while not self._is_program_held.wait(0.01) and time.monotonic() < deadline:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self._stopping.start()
        self._stopping.join(SIGTERM_S)
        _die()


def _die() -> None:
    """Die of SIGTERM now. Python itself resets a signal handler in the main thread only."""
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, 0)
    os.kill(os.getpid(), signal.SIGTERM)
