"""Checks an output path before a long run, so that the run does not fail at its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError, with the path and the reason, if no file can be written at `path`."""
    folder = path.parent
    if path.is_dir():
        code = errno.EISDIR
    elif not folder.exists():
        code = errno.ENOENT
    elif not folder.is_dir():
        code = errno.ENOTDIR
    elif not os.access(path if path.exists() else folder, os.W_OK):
        code = errno.EACCES
    else:
        return
    raise OSError(code, f"cannot be written: {os.strerror(code)}", str(path))
