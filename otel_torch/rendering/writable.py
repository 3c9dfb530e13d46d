"""Whether a command can write where it was told to: asked before the long work, and not found out
after it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError, with the path and the reason, where no file can be written to."""
    folder = path.parent
    if path.is_dir():
        fault = errno.EISDIR
    elif not folder.exists():
        fault = errno.ENOENT
    elif not folder.is_dir():
        fault = errno.ENOTDIR
    elif not os.access(path if path.exists() else folder, os.W_OK):
        fault = errno.EACCES
    else:
        return
    raise OSError(fault, f"cannot be written: {os.strerror(fault)}", str(path))
