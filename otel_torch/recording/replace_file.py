"""Replaces a small file atomically, in folders where others may have planted links."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

# for every file that is made here: a link that somebody else has planted is not followed
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def replace_file(target: Path, text: str) -> None:
    """Write `text` to `target`, as `replace_bytes` does."""
    # a name that is not valid Unicode becomes an escape of JSON, which reads back as it was
    replace_bytes(target, text.encode(errors="backslashreplace"))


def replace_bytes(target: Path, content: bytes) -> None:
    """Write `content` to `target`: a reader sees the previous version or this one.

    Raises:
        OSError: the folder cannot be written; the previous version is unchanged.
    """
    # a name that nobody can guess; the bytes of `secrets` are not those of the program's generators
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, NEW_FILE, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
