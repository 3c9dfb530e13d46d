"""Tells a framework's own forwards, on dummy inputs, from those of the program.

Frameworks run a model to profile its memory, to compile it or to learn its shapes. `frameworks/*`
put `warming_up` around that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from otel_torch import session

PHASE = "warmup"


class _Blocks(threading.local):
    """The blocks that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0


_blocks = _Blocks()


def is_warming_up() -> bool:
    """Return whether this thread is in a block of `warming_up`."""
    return _blocks.depth > 0


@contextmanager
def warming_up() -> Iterator[None]:
    """Give the outermost forwards of this thread in the block the phase `warmup`.

    A block is one step; the steps of warm-ups count from 0 and, inside `trace_step`, are those of
    the program. All other forwards have the steps, calls and phases that they would have without
    the block. Blocks may nest: the outermost counts.

    >>> with warming_up():
    ...     is_warming_up()
    True
    """
    _divide()
    _blocks.depth += 1
    try:
        yield
    finally:
        _blocks.depth -= 1
        _divide()


def _divide() -> None:
    """End what runs before or in an outermost block: nothing of it continues on the other side."""
    running = session.current()
    tracker = None if running is None else running.step_tracker
    if tracker is not None and not _blocks.depth:
        tracker.end_pending_forward()
        tracker.end_warm_up()
