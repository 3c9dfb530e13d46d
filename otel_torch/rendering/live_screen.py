"""Draws lines over each other in a terminal, and leaves it as it was."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

from otel_torch.rendering.table import encodable

# the alternate screen, without a cursor and without wrapping long lines
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_TO_THE_TOP, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class LiveScreen:
    """The alternate screen of a terminal, for as long as the context lasts.

    What was on the terminal before is there again afterwards, also after Ctrl-C and SIGTERM.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> LiveScreen:
        # a resize wakes up `wait`, which a handler of Python alone would not
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._wakeup_descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._handlers = {
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda number, frame: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, _exit),
            signal.SIGHUP: signal.signal(signal.SIGHUP, _exit),
        }
        self._write(_ENTER)
        return self

    def __exit__(self, *error: object) -> None:
        self._write(_LEAVE)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_descriptor)
        os.close(self._wake)
        os.close(self._awake)

    def draw(self, lines: Sequence[str]) -> None:
        """Show the lines, which hold no control characters but colors."""
        body = f"{_CLEAR_LINE}\r\n".join(lines)
        self._write(f"{_TO_THE_TOP}{body}{_CLEAR_LINE}{_CLEAR_BELOW}")

    def wait(self, seconds: float) -> None:
        """Wait, or return earlier if the terminal was resized."""
        ready, _, _ = select.select([self._awake], [], [], seconds)
        if ready:
            os.read(self._awake, 1024)

    def _write(self, text: str) -> None:
        self._stream.write(encodable(text, self._stream))
        self._stream.flush()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
