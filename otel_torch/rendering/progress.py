"""How far a long command is: one line in a terminal that is gone at the end. A pipe and a log file
see nothing of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

_EVERY = 0.1  # seconds


class Progress:
    """Called with a short text as often as one likes; shows it now and then.

    >>> with Progress() as progress:
    ...     progress("10 % read")
    """

    def __init__(self) -> None:
        self._due = 0.0
        self._shown = False
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal and now >= self._due:
            self._due, self._shown = now + _EVERY, True
            sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Wipe the line, for a message that is to stay."""
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
