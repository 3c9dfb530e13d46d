"""Opens the files that a user names, so that no command waits for ever without a word.

A pipe has nothing to read until somebody writes to it, and a device such as /dev/zero never ends.
Most commands read a file more than once or remember a position in it, so they need a regular
file; one that reads once reads a pipe as well, and says so while it waits.
"""

from __future__ import annotations

import gzip
import io
import os
import select
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from otel_torch.process.console import say

GZIP_MAGIC = b"\x1f\x8b"
# milliseconds that a pipe may be silent before its reader says that it waits
_PATIENCE_MS = 500
_WITHOUT_RECORDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class NotReadable(ValueError):
    """A path that names no file that this command can read; one line."""


def require_regular_file(path: str | Path) -> None:
    """Raise an error for a pipe, a device or a socket, which cannot be read twice.

    Raises:
        OSError: The path does not exist or may not be looked at.
        NotReadable: It is no regular file and no folder.
    """
    if _is_pipe(path):
        raise NotReadable(f"{path}: is a pipe, which can be read only once; write it to a file")


def open_once(path: str | Path) -> BinaryIO:
    """Open a file or a pipe to read it once; say so while a pipe has no writer.

    What is compressed by gzip is read as what it was. Reading raises NotReadable if it is damaged.

    Raises:
        OSError: The file cannot be opened.
        NotReadable: It is a device or a socket.
    """
    file = _open_pipe(path) if _is_pipe(path) else open(path, "rb")  # noqa: SIM115
    if file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
        return cast(BinaryIO, io.BufferedReader(_Decompressed(path, file)))
    return file


def is_compressed(path: str | Path) -> bool:
    """Return whether a file is compressed by gzip.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


class _Decompressed(io.RawIOBase):
    """What a file that is compressed by gzip was before."""

    def __init__(self, path: str | Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._content = gzip.GzipFile(fileobj=file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._content.readinto(buffer)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise NotReadable(
                f"{self._path}: is compressed by gzip and cut off or damaged "
                f"({' '.join(str(error).split())}); zcat {self._path} > NEW keeps what is whole"
            ) from None

    def close(self) -> None:
        self._file.close()
        super().close()


def _is_pipe(path: str | Path) -> bool:
    """Return whether a path is a pipe, rather than a file or a folder.

    >>> _is_pipe("/")
    False
    """
    try:
        file_type = stat.S_IFMT(os.stat(path).st_mode)
    except ValueError as error:
        raise NotReadable(f"{str(path)!r}: not a path ({error})") from None
    if file_type in _WITHOUT_RECORDS:
        raise NotReadable(f"{path}: is {_WITHOUT_RECORDS[file_type]} and holds no records")
    return file_type == stat.S_IFIFO


def _open_pipe(path: str | Path) -> io.BufferedReader:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(_PATIENCE_MS):
        say(f"{path} is a pipe; waiting for somebody to write to it")
        poll.poll()
    os.set_blocking(descriptor, True)
    return open(descriptor, "rb")
