"""Run a model's forward without numbers and collect its calls.

The forward of a copy with fake tensors runs. An operator that needs values stops it; the result
then has all calls up to there, and where and why it stopped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from otel_torch.scanning.fake_model import (
    FakeCopies,
    FakeInPlaceWrites,
    default_device,
    disable_modes,
)
from otel_torch.scanning.forward_watcher import ForwardWatcher, bytes_of
from otel_torch.scanning.scanned_forward import ScannedForward
from otel_torch.scanning.stop_reason import describe_stop, needs_value
from otel_torch.sources.modules import call_stack
from otel_torch.sources.modules.module_names import class_name, core
from otel_torch.sources.nonfinite.global_state import preserved_global_state


def run_fake(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ScannedForward:
    """Run a module, or a bound method of one, without numbers.

    Raises:
        TypeError: `target` is something else.
        ValueError: The model has lazy modules without shapes.
    """
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise TypeError(
            "scan() takes a module or a bound method of one (model, vae.decode), "
            f"not {type(target).__name__}"
        )
    root = core(owner)
    with ExitStack() as stack:
        stack.enter_context(call_stack.unwatched())
        stack.enter_context(disable_modes())
        stack.enter_context(preserved_global_state())
        stack.enter_context(_silence_torch_logs())
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        copies = FakeCopies(mode, default_device(root, args, kwargs))
        forward: Any = copies.copy_model(root)
        if target is not owner:
            forward = MethodType(getattr(target, "__func__", target), forward)
        args, kwargs = copies.copy_inputs(args), copies.copy_inputs(kwargs)
        watcher = ForwardWatcher(root, copies)
        ended = None
        failed = False
        with mode, watcher, FakeInPlaceWrites(copies):
            try:
                forward(*args, **kwargs)
            except Exception as error:
                failed = not needs_value(error)
                ended = describe_stop(error, watcher.current_module())
    calls = watcher.calls()
    parameter_bytes, buffer_bytes = bytes_of(root)
    flops, dynamic = watcher.flops()
    return ScannedForward(
        model=class_name(root),
        modules=watcher.modules,
        calls=calls,
        parameter_bytes=parameter_bytes,
        buffer_bytes=buffer_bytes,
        flops=flops,
        dynamic=dynamic,
        ended=ended,
        failed=failed,
    )


class _ThreadFilter(logging.Filter):
    """Drops the log records of the thread that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextmanager
def _silence_torch_logs() -> Iterator[None]:
    """Drop the traceback that torch logs when a fake tensor needs a value; `Scan.ended` has the
    reason in one line.
    """
    thread_filter = _ThreadFilter()
    loggers = [logging.getLogger(cls.__module__) for cls in (FakeTensorMode, ShapeEnv)]
    for logger in loggers:
        logger.addFilter(thread_filter)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(thread_filter)
