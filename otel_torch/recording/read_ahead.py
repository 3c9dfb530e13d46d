"""Read a long recording in another thread, while this one works on what was read."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

Item = TypeVar("Item")


def iterate_ahead(items: Generator[Item], most: int) -> Generator[Item]:
    """Yield the items of a generator that runs in a thread of its own.

    This is worth it for a generator that works without the interpreter's lock. An error in it is
    raised here, and it is closed with this iterator.

    Args:
        most: Items that may wait.

    >>> list(iterate_ahead((number**2 for number in range(5)), most=2))
    [0, 1, 4, 9, 16]
    """
    ready: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(most)
    is_abandoned = threading.Event()

    def run() -> None:
        end: BaseException | None = None
        try:
            with closing(items):
                for item in items:
                    ready.put((item,))
                    if is_abandoned.is_set():
                        return
        except BaseException as error:
            end = error
        ready.put(end)

    thread = threading.Thread(target=run, name="otel_torch-read", daemon=True)
    thread.start()
    try:
        while isinstance(entry := ready.get(), tuple):
            yield entry[0]
        if entry is not None:
            raise entry
    finally:
        is_abandoned.set()
        while thread.is_alive():
            while not ready.empty():
                ready.get()  # so that the thread, which may wait for room, goes on and ends
            thread.join(0.01)
