"""Which method of a root is running while its parts are called directly: `vae.decode(z)` never
calls `vae`.

All calls that come out of one run of such a method are one forward of the model, not one each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn


class _Mark:
    def __call__(self, *args: Any) -> None:
        return None


class Entry:
    """The run of a root's method that the current calls come out of.

    The run is known again by a mark on its frame, which lives as long as the run does: holding the
    frame itself would keep the program's tensors alive.
    """

    def __init__(self, root: nn.Module) -> None:
        self._codes = frozenset(_method_codes(type(root)))
        self._of_thread = threading.local()

    def running(self) -> bool:
        """Whether the marked run is still on this thread's stack."""
        mark = getattr(self._of_thread, "mark", None)
        return mark is not None and any(
            frame is mark or frame.f_trace is mark for frame in _frames()
        )

    def enter(self) -> bool:
        """Mark the outermost run of a method of the root on this thread's stack; False where there
        is none.
        """
        self.leave()
        outermost = None
        for frame in _frames():
            if frame.f_code in self._codes:
                outermost = frame
        if outermost is None:
            return False
        if outermost.f_trace is None and sys.gettrace() is None:
            self._of_thread.mark = outermost.f_trace = _Mark()
        else:
            self._of_thread.mark = outermost  # a debugger is at work, and holds frames itself
        return True

    def leave(self) -> None:
        """Forget the run."""
        self._of_thread.mark = None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _method_codes(cls: type) -> Iterator[CodeType]:
    for base in cls.__mro__:
        if base is nn.Module:
            return
        for member in vars(base).values():
            function = getattr(member, "__func__", member)
            while function is not None:
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType):
                    yield code
                function = getattr(function, "__wrapped__", None)
