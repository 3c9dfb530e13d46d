"""Keeps room on the disk for the metadata, which says what a full disk has cost."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

# tried in this order: on a small disk the recording needs the room as well
_SIZES = (2**16, 2**14, 2**13)


class DiskReserve:
    """Space in a folder, held by a file without a name: it is free once the process has ended."""

    def __init__(self) -> None:
        self._file: Any = None

    def take(self, folder: Path, size: int) -> None:
        """Hold room for two files of `size` bytes, one in place of the other; or nothing, if there
        is no room.
        """
        self.release()
        for room in _SIZES:
            with contextlib.suppress(OSError):
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is held
                os.posix_fallocate(self._file.fileno(), 0, max(room, 2 * size))
                return

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
