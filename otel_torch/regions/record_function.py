"""`torch.profiler.record_function` ranges that a program already has become scopes, where
OTEL_TORCH_REGIONS asks for them.

Torch offers Python no observer of ranges, so the two methods of the one class that every range goes
through are wrapped: the class stays what it is, for Dynamo, TorchScript and those who imported it
before. Ranges that torch opens from C++, or by `_RecordFunctionFast`, which it enters only while a
profiler runs, are not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from otel_torch import session
from otel_torch.console import say_once
from otel_torch.recorder import Recorder
from otel_torch.records import Scope
from otel_torch.regions.entry import pop_last_of_thread
from otel_torch.regions.registry import bounded_span_name, clear_unregistered_names

# the profiler's own marks, which say in a torch trace what a region's span says already
_MARKS = ("fastvideo.region::", "fastvideo.profiler.")
# entered at one turn of a loop and left at the next, around whatever else is open
_UNNESTED = "ProfilerStep#"
# how generators and loops end, which is no error
_ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit)
_OPEN = "_otel_torch_open"

_originals: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def install() -> None:
    """Begin to turn ranges into scopes; nothing where no pattern asks for any, or where it is done
    already.
    """
    global _originals
    running = session.current()
    if _originals is not None or running is None or not running.settings.regions.patterns:
        return
    cls: Any = torch.autograd.profiler.record_function
    _originals = enter, leave = cls.__enter__, cls.__exit__

    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        result = enter(self)
        if not torch.compiler.is_compiling():
            _open(self)
        return result

    @functools.wraps(leave)
    def leaving(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        if not torch.compiler.is_compiling():
            _close(self, exc_value)
        return leave(self, exc_type, exc_value, traceback)

    cls.__enter__, cls.__exit__ = entering, leaving


def uninstall() -> None:
    """Put everything back as it was before `install`."""
    global _originals
    if _originals is not None:
        cls: Any = torch.autograd.profiler.record_function
        cls.__enter__, cls.__exit__ = _originals
        _originals = None
    clear_unregistered_names()


@functools.lru_cache(maxsize=4096)
def _wants(name: str, names: Any) -> bool:
    return names.matches(name) and not name.startswith(_MARKS)


def _open(entered: Any) -> None:
    try:
        running = session.current()
        opened: tuple[Recorder, Scope] | None = None
        name = entered.name
        if running is not None and _wants(name, running.settings.regions):
            scope = Scope(
                "region",
                bounded_span_name(name),
                not name.startswith(_UNNESTED),
                {"torch.region": name},
            )
            running.recorder.open(scope)
            opened = running.recorder, scope
        if opened is not None or _OPEN in entered.__dict__:
            entered.__dict__.setdefault(_OPEN, []).append((threading.get_ident(), opened))
    except Exception as error:
        say_once(f"a record_function range could not be recorded: {type(error).__name__}: {error}")


def _close(left: Any, error: BaseException | None) -> None:
    try:
        opened = pop_last_of_thread(left.__dict__.get(_OPEN, []))
        if opened is not None:
            recorder, scope = opened
            recorder.close(scope, None if isinstance(error, _ENDINGS) else error)
    except Exception as problem:
        say_once(
            f"a record_function range could not be recorded: {type(problem).__name__}: {problem}"
        )
