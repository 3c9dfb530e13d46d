"""Reads a recording that is still being written: each call returns the lines that were appended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from otel_torch.recording.input_file import require_regular_file

_BLOCK_BYTES = 1 << 20


class GrowingFile:
    """A file to which another process appends lines.

    A file that became shorter, or was replaced by a new one at its path, is read from its start.

    Attributes:
        starts: how often reading has begun at the start of a file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.starts = path, 0
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line whose end is not written yet

    def read(self) -> list[bytes]:
        """Return complete lines that were appended, of about 1 MiB; [] if there are none now.

        Raises:
            OSError: the file exists and cannot be read.
            NotReadable: it is a pipe or a device.
        """
        if self._file is None and not self._open():
            return []
        assert self._file is not None
        block = self._file.read(_BLOCK_BYTES)
        if not block:
            if self._was_replaced():
                self.close()
                return self.read()
            return []
        *lines, self._rest = (self._rest + block).split(b"\n")
        return lines

    def close(self) -> None:
        """Close the file; the next call of `read` begins at its start."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _open(self) -> bool:
        try:
            require_regular_file(self.path)
            self._file = open(self.path, "rb")  # noqa: SIM115 - it stays open
        except FileNotFoundError:
            return False
        self.starts += 1
        return True

    def _was_replaced(self) -> bool:
        """Return whether the path names another file now, or the file became shorter."""
        assert self._file is not None
        opened = os.fstat(self._file.fileno())
        if opened.st_size < self._file.tell():
            return True
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False  # a new run is about to take the name
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)
