"""A model with the hooks that interleaved runs need, attached only while there are runs.

Several runs share one model: a hook reports to the run of the thread that calls it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.capture.cache import Cache
from otel_torch.capture.disable_compile import disable_compile
from otel_torch.capture.hook_names import unique_hook_name
from otel_torch.capture.interleaving.bodies import Bodies
from otel_torch.capture.interleaving.interleave_error import InterleaveError
from otel_torch.process.gc_pause import gc_paused
from otel_torch.sources.modules.hooks import ForwardHook, ModuleHookManager, remove_hooks
from otel_torch.sources.modules.module_names import first_names


class InterleavedModel:
    """What all runs of an interleaver share: the model, its hooks and caches, the bodies that run
    as functions, and the result of the last run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.bodies = Bodies()
        self.last_result: Any = None
        self.hook_name = unique_hook_name("interleave")
        self._lock = threading.Lock()
        self._runs = 0
        self._caches: list[Cache] = []
        self._hooked: list[nn.Module] = []
        # while a compiled body runs: the modules it has asked for, and those it may ask for
        self._requested: set[str] | None = None
        self._allowed: frozenset[str] | None = None

    def add_cache(self, cache: Cache) -> None:
        """Attach a cache during all runs from now on."""
        self._caches.append(cache)
        if self._runs:
            cache.attach(self.model)

    def enter_run(self) -> None:
        """Attach the caches when the first run starts."""
        with self._lock, contextlib.ExitStack() as undo:
            if not self._runs:
                for cache in self._caches:
                    undo.callback(cache.detach)
                    cache.attach(self.model)
            self._runs += 1
            undo.pop_all()

    def attach_hooks(self) -> None:
        """Hook the modules when a run first asks for a value; its forward has not started yet."""
        with self._lock, gc_paused():
            if self._hooked:
                return
            for name, module in first_names(self.model):
                if self._allowed is None or name in self._allowed:
                    hook = _InterleaveHook(self, name)
                    ModuleHookManager.get_from_or_default(module).append_forward_hook(hook)
                    self._hooked.append(module)

    def leave_run(self) -> None:
        """Detach hooks and caches when the last run ends."""
        with self._lock:
            self._runs -= 1
            if not self._runs:
                remove_hooks(self._hooked, self.hook_name)
                self._hooked.clear()
                for cache in reversed(self._caches):
                    cache.detach()

    def start_requests(self, allowed: frozenset[str] | None) -> None:
        """Start recording the modules that a compiled body asks for.

        Args:
            allowed: The modules that it asked for in its first call, or None during that call.
        """
        self._requested, self._allowed = set(), allowed

    def requested_modules(self) -> frozenset[str]:
        """Return the modules that the body has asked for."""
        return frozenset(self._requested or ())

    def stop_requests(self) -> None:
        """Stop recording the modules that bodies ask for."""
        self._requested = self._allowed = None

    def add_request(self, name: str) -> None:
        """Record that a body asks for a value of module `name`."""
        if self._requested is None:
            return
        self._requested.add(name)
        if self._allowed is not None and name not in self._allowed:
            self._allowed = None
            raise InterleaveError(
                f"the compiled body asks for {name!r}, which it did not in its first call; "
                "ask for it there too"
            )


class EventReceiver(Protocol):
    """A run that receives the events of its forward."""

    shared: InterleavedModel

    def count(self, module: str, field: str) -> int:
        """Return how many times the forward has reached this event."""

    def on_event(self, module: str, field: str, call: int, value: Any) -> Any:
        """Handle an event; return the value with which the forward continues."""


class _CurrentRun(threading.local):
    run: EventReceiver | None = None


current_run = _CurrentRun()
"""The run whose forward the current thread executes."""


class _InterleaveHook(ForwardHook):
    """Report to the run of this thread that its forward has reached a module."""

    intervenes = True

    def __init__(self, shared: InterleavedModel, title: str) -> None:
        self.shared, self.title = shared, title

    def name(self) -> str:  # type: ignore[override]
        return self.shared.hook_name

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = self._report("inputs", (args, kwargs))
        return inputs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return self._report("output", output)

    def _report(self, field: str, value: Any) -> Any:
        # an exported program keeps no hook; a compiled one runs `_report_event` eagerly
        if torch.compiler.is_compiling() and torch_private.is_exporting():
            return value
        return _report_event(self.shared, self.title, field, value)


@disable_compile
def _report_event(shared: InterleavedModel, title: str, field: str, value: Any) -> Any:
    run = current_run.run
    if run is None or run.shared is not shared:
        return value
    return run.on_event(title, field, run.count(title, field), value)
