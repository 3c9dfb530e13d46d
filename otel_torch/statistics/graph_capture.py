"""What may be asked of a device while a CUDA graph is captured: nothing.

A single query would invalidate the program's graph. Copies and events wait until the capture is
over; other threads query the device in a mode that does not affect captures.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# cudaStreamCaptureModeThreadLocal and its equal in HIP
_THREAD_LOCAL = 1


def is_capturing() -> bool:
    """Return whether a graph is captured on this thread's current stream.

    Does not initialize CUDA.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """Return cudaThreadExchangeStreamCaptureMode, if torch has loaded it."""
    if not (torch.version.cuda or torch.version.hip):
        return None
    runtime = "cuda" if torch.version.cuda else "hip"
    try:
        library = ctypes.CDLL(None)
        exchange: Callable[[Any], int]
        exchange = getattr(library, f"{runtime}ThreadExchangeStreamCaptureMode")
        return exchange
    except (OSError, AttributeError):
        return None


@contextmanager
def thread_local_capture_mode() -> Iterator[None]:
    """Query a device without invalidating a graph that another thread is capturing.

    By default a capture forbids such queries to all threads.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # leaves the previous mode in `mode`
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
