"""Sees every operation of the program, and lets it run as it would have.

Whatever goes wrong here ends the graph, never the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from otel_torch import torch_private
from otel_torch.process.console import say_once
from otel_torch.sources.operations.fused_operations import decomposition_of, is_too_large
from otel_torch.sources.operations.operation_kinds import OperationKind, kind_of
from otel_torch.sources.operations.operation_recorder import OperationRecorder, Started

# of tensors whose class does not handle operations itself
_PLAIN = torch.Tensor.__torch_dispatch__


class _Launching(threading.local):
    """Whether this thread launches a kernel: what Triton itself computes is not recorded."""

    is_now = False


class GraphMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch has it
    """Records the operations of one thread.

    Args:
        recorder: makes their rows.
        fail: called with what recording has raised; the operations after it are not recorded.
        breaks_up: whether fused operations are computed again by plain ones.
        change: what is to happen to the results of operations that round, if anything.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recorder: OperationRecorder,
        fail: Callable[[Exception], None],
        breaks_up: bool,
        change: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self._fail, self._breaks_up = recorder, fail, breaks_up
        self._change = change
        self._launching = _Launching()
        self.is_on = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch not wrap the method below, which would import the compiler."""
        return False

    @torch_private.keep_out_of_frames
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on or self._launching.is_now or torch_private.is_faking():
            return func(*args, **kwargs)
        if types and any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a wrapper's own operations come next, on what it wraps
        kernel = _composite_kernel(func, args)
        if kernel is not None:
            with self:
                return kernel(*args, **kwargs)
        started = self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if started is not None:
            if self._change is not None and started.kind.rounds:
                self._change(result)
            self._after(started, result)
        return result

    @torch_private.unseen_by_function_modes
    def _before(
        self, func: Any, args: Any, kwargs: Any, kind: OperationKind | None = None
    ) -> Started | None:
        try:
            return self.recorder.before(func, args, kwargs, kind or kind_of(func))
        except Exception as error:
            self._end(error)
            return None

    @torch_private.unseen_by_function_modes
    def _after(self, started: Started, result: Any) -> None:
        try:
            self.recorder.after(started, result)
            if self._breaks_up and started.number is not None and started.operation is not None:
                self._break_up(started)
        except Exception as error:
            self._end(error)

    def launch(
        self, kind: OperationKind, run: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Record a kernel that the program launches past the dispatcher."""
        started = self._before_launch(kind, args, kwargs)
        self._launching.is_now = True
        try:
            result = run(*args, **kwargs)
        finally:
            self._launching.is_now = False
        if started is not None:
            self._after_launch(started)
        return result

    @torch_private.unobserved
    def _before_launch(self, kind: OperationKind, args: Any, kwargs: Any) -> Started | None:
        return self._before(None, args, kwargs, kind)

    @torch_private.unobserved
    def _after_launch(self, started: Started) -> None:
        self._after(started, None)

    @torch_private.unobserved
    def forget(self) -> None:
        """Forget what tensors hold: something has run that is not seen."""
        try:
            self.recorder.forget()
        except Exception as error:
            self._end(error)

    def _break_up(self, started: Started) -> None:
        """Compute a fused operation again by plain ones, for their rows alone."""
        with_products = self.recorder.parts > 1
        decomposition = decomposition_of(started.operation, with_products=with_products)
        if decomposition is None or is_too_large(started.operation, started.args):
            return
        numbers = self.recorder.inside.numbers
        numbers.append(started.number)
        try:
            with torch.no_grad(), self:
                decomposition(*started.args, **started.kwargs)
        except Exception as error:
            say_once(
                f"the graph shows {started.kind.name} as a whole, it cannot be broken up: "
                f"{type(error).__name__}: {error}"
            )
        finally:
            numbers.pop()

    def _end(self, error: Exception) -> None:
        self.is_on = False
        self._fail(error)


def _composite_kernel(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return the kernel of an operation that consists of others, None for any other one."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    for value in args:
        if isinstance(value, torch.Tensor):
            return torch_private.composite_kernel(func, value.device.type)
    return torch_private.composite_kernel(func, "cpu")
