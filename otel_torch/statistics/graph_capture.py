"""While a CUDA graph is captured nothing may be asked of the device: one question, and the
program's graph is spoilt.

What is measured is put off until the capture is over; what a thread of ours asks goes past captures
of other threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def capturing() -> bool:
    """Whether a graph is captured in this thread's current stream. Starts no driver, costs nothing
    where none runs.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """The driver's function, where torch has loaded it."""
    if not (torch.version.cuda or torch.version.hip):
        return None
    try:
        library = ctypes.CDLL(None)
        runtime = "cuda" if torch.version.cuda else "hip"
        exchange: Callable[[Any], int] = getattr(
            library, f"{runtime}ThreadExchangeStreamCaptureMode"
        )
        return exchange
    except (OSError, AttributeError):
        return None


@contextmanager
def beside_captures() -> Iterator[None]:
    """Ask a device without harm to a graph that another thread is capturing just now: by default a
    capture forbids that to all threads, and is spoilt by it.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(1)  # forbidden to this thread only what this thread captures
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))  # it holds what was there before
