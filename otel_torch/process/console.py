"""Messages to the person who runs the program: single lines on stderr.

Takes no lock, because it is called from signal handlers and forked children.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_printed: dict[str, object] = {}
_suppressed: list[str] = []
_shown_as: dict[str, str] = {}


def escape(text: str) -> str:
    r"""Return the text with every non-printable character spelled out.

    Names can hold anything, including escape codes that a terminal would execute.

    >>> escape("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def say(message: str) -> None:
    """Print `otel_torch: message` on stderr as one line; errors of stderr are ignored."""
    if any(part in message for part in _suppressed):
        return
    rank = os.environ.get("RANK")
    prefix = f"otel_torch[rank {rank}]" if rank is not None else "otel_torch"
    try:
        sys.stderr.write(f"{prefix}: {escape(as_given(message))}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass  # closed, missing, or interrupted in another write


def show_as(path: str, name: str) -> None:
    """From now on, name what the user gave instead of the path of a temporary copy of it."""
    _shown_as[path] = name


def as_given(text: str) -> str:
    """Return a text for the user with the names that `show_as` knows."""
    for path, name in _shown_as.items():
        text = text.replace(path, name)
    return text


def say_once(message: str) -> None:
    """Print a message as `say` does, but only once per process."""
    token = object()
    if _printed.setdefault(message, token) is token:
        say(message)


@contextmanager
def suppress(part: str) -> Iterator[None]:
    """Suppress messages that contain `part`, such as the path of a temporary file."""
    _suppressed.append(part)
    try:
        yield
    finally:
        _suppressed.remove(part)
