"""Turns `torch.profiler.record_function` ranges of a program into scopes.

OTEL_TORCH_REGIONS selects them by name. Torch offers Python no observer of ranges, so `__enter__`
and `__exit__` of their class are wrapped. The class itself stays the same for Dynamo, TorchScript
and modules that have imported it already. Ranges that torch opens from C++ or through
`_RecordFunctionFast` (only under a profiler) are not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from otel_torch import session
from otel_torch.process.console import say_once
from otel_torch.records import Scope
from otel_torch.regions.entry import pop_last_of_thread
from otel_torch.regions.registry import PLAIN_NAMES, bounded_span_name, clear_unregistered_names

if TYPE_CHECKING:
    from otel_torch.recorder import Recorder

# marks that the profiler's controller sets; the region's span has the same information
_PROFILER_MARKS = ("fastvideo.region::", "fastvideo.profiler.")
# entered in one iteration of a loop and left in the next, so not nested
_UNNESTED = "ProfilerStep#"
# raised when generators and loops end, not errors
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit)
# attribute of a range: what was opened for it, by thread
_OPENED = "_otel_torch_open"

_original_methods: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def install() -> None:
    """Turn the selected ranges into scopes from now on, if the settings have a name pattern."""
    global _original_methods
    current = session.current()
    if _original_methods is not None or current is None or not current.settings.regions.patterns:
        return
    cls: Any = torch.autograd.profiler.record_function
    _original_methods = original_enter, original_exit = cls.__enter__, cls.__exit__

    @functools.wraps(original_enter)
    def enter(self: Any) -> Any:
        result = original_enter(self)
        if not torch.compiler.is_compiling():
            _open(self)
        return result

    @functools.wraps(original_exit)
    def exit(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        if not torch.compiler.is_compiling():
            _close(self, exc_value)
        return original_exit(self, exc_type, exc_value, traceback)

    cls.__enter__, cls.__exit__ = enter, exit


def uninstall() -> None:
    """Restore the class as it was before `install`."""
    global _original_methods
    if _original_methods is not None:
        cls: Any = torch.autograd.profiler.record_function
        cls.__enter__, cls.__exit__ = _original_methods
        _original_methods = None
    clear_unregistered_names()


@functools.lru_cache(maxsize=4096)
def _is_selected(name: str, names: Any) -> bool:
    is_mark = name.startswith(_PROFILER_MARKS) or name in PLAIN_NAMES.values()
    return not is_mark and names.matches(name)


def _open(entered_range: Any) -> None:
    try:
        current = session.current()
        opened: tuple[Recorder, Scope] | None = None
        name = entered_range.name
        if current is not None and _is_selected(name, current.settings.regions):
            lexical = not name.startswith(_UNNESTED)
            scope = Scope("region", bounded_span_name(name), lexical, {"torch.region": name})
            current.recorder.open(scope)
            opened = current.recorder, scope
        if opened is not None or _OPENED in entered_range.__dict__:
            opened_by_thread = entered_range.__dict__.setdefault(_OPENED, [])
            opened_by_thread.append((threading.get_ident(), opened))
    except Exception as error:
        _report_failure(error)


def _close(exited_range: Any, error: BaseException | None) -> None:
    try:
        opened = pop_last_of_thread(exited_range.__dict__.get(_OPENED, []))
        if opened is not None:
            recorder, scope = opened
            recorder.close(scope, None if isinstance(error, _CONTROL_FLOW) else error)
    except Exception as problem:
        _report_failure(problem)


def _report_failure(error: Exception) -> None:
    say_once(f"a record_function range could not be recorded: {type(error).__name__}: {error}")
