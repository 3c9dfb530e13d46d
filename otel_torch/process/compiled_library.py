"""The libraries that are compiled when the package is installed, beside their sources."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def source_version(folder: Path, sources: Iterable[str]) -> bytes:
    """Return what a library that was built from these sources says of itself.

    Raises:
        OSError: A source cannot be read.
    """
    content = b"".join((folder / name).read_bytes() for name in sources)
    return hashlib.sha256(content).hexdigest().encode()
