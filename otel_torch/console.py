"""The only place that speaks to the person running the program: one clear line on stderr, never twice the same."""

import os
import sys
import threading

_said: set[str] = set()
_lock = threading.Lock()


def say(message: str) -> None:
    """Print `otel_torch: message` on stderr; a closed or missing stderr is no error."""
    rank = os.environ.get("RANK")
    prefix = f"otel_torch[rank {rank}]: " if rank is not None else "otel_torch: "
    try:
        print(prefix + message, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass


def say_once(message: str) -> None:
    """Like `say`, but the same message is printed only once a process."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    say(message)
