"""Groups the calls of a model's parts into forwards, if the model itself is never called.

`vae.decode(z)` runs the decoder of `vae` but never calls `vae`, perhaps once per tile. All calls
from one run of such a method are one forward of the model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

from otel_torch.sources.modules.module_names import class_forward


class _Mark:
    """A trace function that does nothing: its presence identifies the frame."""

    def __call__(self, *args: Any) -> None:
        return None


class RootMethodRun:
    """The run of a root's method that the current calls come from, one for each thread.

    The run is identified by a mark on its frame, which lives as long as the run. Holding the frame
    itself would keep the program's tensors alive.
    """

    def __init__(self, root: nn.Module) -> None:
        self._codes = frozenset(method_codes(type(root)))
        self._of_thread = threading.local()

    def is_running(self) -> bool:
        """Return whether the marked run is still on the stack of this thread."""
        mark = getattr(self._of_thread, "mark", None)
        return mark is not None and any(
            frame is mark or frame.f_trace is mark for frame in _frames()
        )

    def mark(self, root: nn.Module) -> bool:
        """Mark the outermost run of a root's method on this thread's stack.

        Returns False, and marks nothing, if no method of the root is running.
        """
        self.forget()
        # the class, or the module itself, may have got another forward since
        forwards = vars(root).get("forward"), class_forward(type(root))
        codes = self._codes.union(
            *(with_inner(code) for forward in forwards for code in _codes_of(forward))
        )
        outermost = None
        for frame in _frames():
            if frame.f_code in codes:
                outermost = frame
        if outermost is None:
            return False
        if outermost.f_trace is None and sys.gettrace() is None:
            self._of_thread.mark = outermost.f_trace = _Mark()
        else:
            self._of_thread.mark = outermost  # a debugger is tracing, and holds frames anyway
        return True

    def forget(self) -> None:
        self._of_thread.mark = None


def running_owner(roots: list[nn.Module]) -> nn.Module | None:
    """Return the root of which a method is running in this thread, the innermost; None without."""
    codes = frozenset(code for root in roots for code in method_codes(type(root)))
    for frame in _frames():
        if frame.f_code in codes and frame.f_code.co_argcount:
            owner: object = frame.f_locals.get(frame.f_code.co_varnames[0])
            for root in roots:
                if owner is root:
                    return root
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def method_codes(cls: type) -> Iterator[CodeType]:
    """Yield the code of every method below nn.Module, decorated ones included."""
    for base in cls.__mro__:
        if base is nn.Module:
            return
        for member in vars(base).values():
            yield from _codes_of(member)


def _codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, and that of each function that it decorates or binds."""
    while function is not None:
        function = getattr(function, "__func__", getattr(function, "func", function))
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code
        function = getattr(function, "__wrapped__", None)


def with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_inner(constant)
