"""Progress of a long command: one line in a terminal, wiped at the end; nothing in a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import time

from otel_torch.process.console import as_given

_INTERVAL = 0.1  # seconds between two updates of the line


class Progress:
    """Shows the latest text at most ten times a second; can be called as often as convenient.

    >>> with Progress() as progress:
    ...     progress("10 % read")
    """

    def __init__(self) -> None:
        self._next_update = 0.0
        self._shown = False
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal and now >= self._next_update:
            self._next_update, self._shown = now + _INTERVAL, True
            shown = as_given(text)[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r\x1b[K{shown}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Wipe the line, so that a message can be printed in its place."""
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
