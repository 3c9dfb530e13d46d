"""Ends a recording on SIGTERM, whichever handler the program has for it.

While a session runs, the installed handler is ours, and the program still sees its own: what it
sets by `signal.signal` is kept here, and `signal.getsignal` returns that.

    program's handler        what happens on SIGTERM
    none (SIG_DFL)           the recording ends, then the process dies of the signal
    a function               what is recorded so far is sent, then the function is called
    SIG_IGN                  nothing; ours is not installed

A program's function may end the process at once, or set a flag and restore SIG_DFL to die of the
signal later, as uvicorn's does. If the signal comes while `stop` runs in the main thread, the
function is called afterwards: an exception that it raises would cut `stop` short. A second signal
does not wait.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from otel_torch.process.exit_hooks import note_dying_process

# How long a SIGTERM may wait for `stop` if the device hangs: less than launchers wait before they
# send SIGKILL.
SIGTERM_S = 5.0
# How long a SIGTERM waits for the program to leave a lock that `stop` needs.
_HOLD_S = 1.0
# How long the program's handler waits for what is recorded to be sent.
FLUSH_S = 1.0


class SigtermWatch:
    """Installs our handler in front of the program's, in the main thread only.

    Args:
        stop: ends the recording.
        flush: sends what is recorded so far; called in a thread of its own with what `is_busy`
            returned.
        is_busy: returns whether the calling thread holds a lock that `stop` needs, as the signal
            may have interrupted it anywhere.
    """

    def __init__(
        self, stop: Callable[[], None], flush: Callable[[bool], None], is_busy: Callable[[], bool]
    ) -> None:
        self._stop, self._flush, self._is_busy = stop, flush, is_busy
        self._is_active = False
        self._is_stopping = self._is_deferred = False
        self._program_handler: Any = signal.SIG_DFL
        self._endings: dict[int, _Ending] = {}  # by process; a forked child inherits its parent's
        self._signal, self._getsignal = signal.signal, signal.getsignal
        self._ours = self._handle  # compared by identity
        self._set_observed = _observed(self._signal, self._set)
        self._get_observed = _observed(self._getsignal, self._get)

    def install(self) -> None:
        """Handle SIGTERM from now on, and observe which handler the program sets for it."""
        self._is_active = True
        if _is_main_thread():
            handler = self._getsignal(signal.SIGTERM)
            if _can_be_preceded(handler):
                self._program_handler = handler
                self._signal(signal.SIGTERM, self._ours)
        signal.signal = self._set_observed
        signal.getsignal = self._get_observed

    def begin_stop(self) -> None:
        """Let the program's handler wait for `restore`, if `stop` runs in the main thread."""
        self._is_stopping = _is_main_thread()

    def restore(self) -> None:
        """Install the program's handler. If a SIGTERM came during `stop`, obey it now.

        Python sets handlers in the main thread only: elsewhere ours remains, and does nothing but
        call the program's.
        """
        self._is_active = False
        if not _is_main_thread():
            return
        if self._getsignal(signal.SIGTERM) is self._ours:
            self._signal(signal.SIGTERM, self._program_handler)
            if os.getpid() in self._endings:
                _die()
        if signal.signal is self._set_observed:
            signal.signal = self._signal
        if signal.getsignal is self._get_observed:
            signal.getsignal = self._getsignal
        if self._is_deferred:
            signal.raise_signal(signal.SIGTERM)

    # -- in place of the functions of `signal`

    def _set(self, signalnum: int, handler: Any) -> Any:
        if signalnum != signal.SIGTERM:
            return self._signal(signalnum, handler)
        is_preceded = self._is_active and _can_be_preceded(handler)
        before = self._signal(signalnum, self._ours if is_preceded else handler)
        if before is self._ours:
            before = self._program_handler
        self._program_handler = handler if callable(handler) else signal.SIG_DFL
        return before

    def _get(self, signalnum: int) -> Any:
        handler = self._getsignal(signalnum)
        return self._program_handler if handler is self._ours else handler

    # -- the handler

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        handler = self._program_handler
        if callable(handler):
            if self._is_stopping and not self._is_deferred:
                self._is_deferred = True
                return None
            if self._is_active:
                self._flush_briefly()
            return handler(number, frame)
        if not self._is_active and os.getpid() not in self._endings:
            _die()
        self._end()
        return None

    def _flush_briefly(self) -> None:
        thread = threading.Thread(
            target=self._flush, args=[self._is_busy()], name="otel_torch-flush", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and the recording with it
            return
        thread.join(FLUSH_S)

    def _end(self) -> None:
        """Stop, then die. The program is held meanwhile: a further step would lack records."""
        if os.getpid() not in self._endings:
            self._endings[os.getpid()] = ending = _Ending(self._stop)
            try:
                ending.start()
            except RuntimeError:  # the interpreter is ending, and the recording with it
                if not self._is_busy():
                    _die()
        if not self._is_busy():
            self._endings[os.getpid()].hold_program()


def _observed(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that looks like `function` and does `call`."""

    @functools.wraps(function)
    def observed(*arguments: Any, **keywords: Any) -> Any:
        return call(*arguments, **keywords)

    return observed


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _can_be_preceded(handler: Any) -> bool:
    """Return whether ours may be installed in front of a handler: SIG_DFL, or a function."""
    return callable(handler) or handler is signal.SIG_DFL or handler == int(signal.SIG_DFL)


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
        note_dying_process()
        self._stopping.start()
        self._stopping.join(SIGTERM_S)
        _die()


def _die() -> None:
    """Die of SIGTERM now. Python itself resets a signal handler in the main thread only."""
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, 0)
    os.kill(os.getpid(), signal.SIGTERM)
