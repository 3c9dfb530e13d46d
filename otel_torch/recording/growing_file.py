"""Reads a recording that is still being written: each call returns the lines that were appended.

A file of gigabytes takes the memory of one block. A line is read once its end is written: until
then its writer may still take it back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from otel_torch.recording.input_file import require_regular_file

# bytes read at a time; a longer line is no record
BLOCK_BYTES = 1 << 20
# bytes in front of the position by which a file that was written anew is recognized
_TAIL_BYTES = 64


class GrowingFile:
    """A file to which another process appends lines.

    A file that was rewritten, or was replaced by a new one at its path, is read from its start.

    Attributes:
        starts: how often reading has begun at the start of a file.
        position: bytes of complete lines that were read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.starts, self.position = path, 0, 0
        self._descriptor = -1
        self._tail = b""
        self._is_in_long_line = False

    @property
    def size(self) -> int:
        """Bytes of the file now, 0 before it exists."""
        return 0 if self._descriptor < 0 else os.fstat(self._descriptor).st_size

    @property
    def silent_s(self) -> float:
        """Seconds since the file was last written to, 0 before it exists."""
        if self._descriptor < 0:
            return 0.0
        return time.time() - os.fstat(self._descriptor).st_mtime

    def read(self) -> list[bytes]:
        """Return complete lines that were appended, of about 1 MiB; [] if there are none now.

        Of a line that is longer only the beginning is returned.

        Raises:
            OSError: the file exists and cannot be read.
            NotReadable: it is a pipe or a device.
        """
        if self._descriptor < 0 and not self._open():
            return []
        block = self._read_block()
        while block and self._is_in_long_line:
            end = block.find(b"\n") + 1
            self._is_in_long_line = not end
            self._advance(block[: end or len(block)])
            block = self._read_block()
        end = 0 if block is None else block.rfind(b"\n") + 1
        if block is not None and end:
            self._advance(block[:end])
            return block[: end - 1].split(b"\n")
        if block is not None and len(block) == BLOCK_BYTES:
            self._is_in_long_line = True
            self._advance(block)
            return [block[:_TAIL_BYTES]]
        if block is None or self._was_replaced():
            self.close()
            return self.read()
        return []

    def read_unfinished_line(self) -> bytes:
        """Return what was written behind the last complete line."""
        if self._descriptor < 0 or self._is_in_long_line:
            return b""
        return os.pread(self._descriptor, BLOCK_BYTES, self.position)

    def close(self) -> None:
        """Close the file; the next call of `read` begins at its start."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> bool:
        try:
            require_regular_file(self.path)
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self.starts += 1
        self.position, self._tail, self._is_in_long_line = 0, b"", False
        return True

    def _read_block(self) -> bytes | None:
        """Return what follows the position; None if the file was rewritten in front of it."""
        start = self.position - len(self._tail)
        block = os.pread(self._descriptor, len(self._tail) + BLOCK_BYTES, start)
        return block[len(self._tail) :] if block.startswith(self._tail) else None

    def _advance(self, data: bytes) -> None:
        self.position += len(data)
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def _was_replaced(self) -> bool:
        """Return whether the path names another file now."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False  # a new run is about to take the name
        return not os.path.samestat(named, os.fstat(self._descriptor))
