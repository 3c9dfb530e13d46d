"""`trace_step`: the program says itself which step a block of code is."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from otel_torch import session
from otel_torch.process.import_hooks import catch_up

# The `trace_step` blocks of a thread or task. `_newest` is shared, so that a worker thread started
# inside a block sees its step.
_traced: ContextVar[tuple[int, ...]] = ContextVar("otel_torch.trace_step", default=())
_newest: list[int] = []


def current_step_idx() -> int | None:
    """Return the step of the innermost `trace_step` block of this thread.

    A thread without a block gets the newest block of any thread; None if there is no block.
    """
    if stack := _traced.get():
        return stack[-1]
    return _newest[-1] if _newest else None


class trace_step:  # lower case: a context manager that reads as a verb, as in FastVideo
    """Declare which step a block is: `with trace_step(i): ...`.

    Blocks nest, and leaving one restores the step around it. A step that is not larger than the
    last one begins the next loop.

    Examples:
        >>> with trace_step(3):
        ...     current_step_idx()
        3
    """

    __slots__ = ("_active", "_step")

    def __init__(self, step_idx: int) -> None:
        self._step = int(step_idx)
        self._active: Any = None

    def __enter__(self) -> None:
        _traced.set((*_traced.get(), self._step))
        _newest.append(self._step)
        catch_up()
        running = session.current()
        if running is not None and running.step_tracker is not None:
            depth = len(_traced.get())
            self._active = running.step_tracker.begin_traced_step(self._step, depth)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        running = session.current()
        if running is not None and running.step_tracker is not None and self._active is not None:
            running.step_tracker.end_step(self._active, error)
        _traced.set(_traced.get()[:-1])
        if self._step in _newest:
            _newest.reverse()
            _newest.remove(self._step)
            _newest.reverse()
