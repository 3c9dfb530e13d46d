"""Opens the files that a user names, so that no command waits for ever without a word.

A pipe has nothing to read until somebody writes to it, and a device such as /dev/zero never ends.
Most commands read a file more than once or remember a position in it, so they need a regular
file; one that reads once reads a pipe as well, and says so while it waits.
"""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

from otel_torch.process.console import say

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

    Raises:
        OSError: The file cannot be opened.
        NotReadable: It is a device or a socket.
    """
    return _open_pipe(path) if _is_pipe(path) else open(path, "rb")


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


def _open_pipe(path: str | Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(_PATIENCE_MS):
        say(f"{path} is a pipe; waiting for somebody to write to it")
        poll.poll()
    os.set_blocking(descriptor, True)
    return open(descriptor, "rb")
