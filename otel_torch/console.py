"""The only place that speaks to the person running the program: one clear line on stderr, never
twice the same.

Called from signal handlers and forked children too, so it takes no lock.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_said: dict[str, object] = {}
_hidden: list[str] = []


def say(message: str) -> None:
    """Print `otel_torch: message` on stderr, in one write; a stderr that cannot take it is no
    error.
    """
    if any(part in message for part in _hidden):
        return
    rank = os.environ.get("RANK")
    prefix = f"otel_torch[rank {rank}]" if rank is not None else "otel_torch"
    try:
        sys.stderr.write(f"{prefix}: {message}\n")
        sys.stderr.flush()
    except (
        OSError,
        ValueError,
        AttributeError,
        RuntimeError,
    ):  # closed, missing, or in the middle of another write
        pass


def say_once(message: str) -> None:
    """Like `say`, but the same message is printed only once a process."""
    token = object()
    if _said.setdefault(message, token) is token:
        say(message)


@contextmanager
def hidden(part: str) -> Iterator[None]:
    """Inside, nothing is said that names `part`: a file of our own, of which no person has heard."""
    _hidden.append(part)
    try:
        yield
    finally:
        _hidden.remove(part)
