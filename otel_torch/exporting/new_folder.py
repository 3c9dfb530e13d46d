"""A folder that one export fills: a failed one leaves nothing in it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from otel_torch.exporting.exported_recording import ExportError
from otel_torch.rendering.writable import check_writable


def check_new_folder(folder: str) -> None:
    """Raise if a folder cannot be made or written, or holds something.

    Raises:
        ExportError, OSError: With one line to print.
    """
    path = Path(folder)
    if not path.is_dir():
        check_writable(path)
        if path.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    elif any(path.iterdir()):
        raise ExportError(f"{folder}: holds something, maybe another export; give a new folder")
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)


@contextmanager
def new_folder(folder: str) -> Iterator[Path]:
    """Make the folder, and empty it again if the block raises."""
    check_new_folder(folder)
    path = Path(folder)
    was_there = path.is_dir()
    path.mkdir(exist_ok=True)
    try:
        yield path
    except BaseException:
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not was_there:
            path.rmdir()
        raise
