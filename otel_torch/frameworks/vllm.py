"""Support for vLLM: one engine step is one step, whatever runs in it.

The model's forward, its logits and the sampler are separate calls, which would count for
themselves. Dummy runs, which measure memory and compile, have the phase `warmup`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from otel_torch.frameworks.patches import Patches
from otel_torch.sources import forwards, steps
from otel_torch.sources.warm_ups import warming_up

_patches = Patches()


class _Engine(threading.local):
    """The engine of this thread. `hint`: what the next forward is part of."""

    def __init__(self) -> None:
        self.steps = 0
        self.hint: forwards.Hint | None = None


_engine = _Engine()


def _hint() -> forwards.Hint | None:
    return _engine.hint


@contextmanager
def _executing(runner: Any) -> Iterator[None]:
    """Begin an engine step. It goes on after the block if the tokens are sampled later."""
    _engine.hint = forwards.Hint(_engine.steps, bounded=False)
    _engine.steps += 1
    try:
        yield
    finally:
        if getattr(runner, "execute_model_state", None) is None:
            _end_step()


@contextmanager
def _sampling(runner: Any) -> Iterator[None]:
    try:
        yield
    finally:
        _end_step()


def _end_step() -> None:
    _engine.hint = None
    tracker = steps.current_step_tracker()
    if tracker is not None:
        tracker.end_pending_forward()
        tracker.end_framework_step()


def _warming_up(runner: Any) -> AbstractContextManager[None]:
    return warming_up()


_METHODS = {"execute_model": _executing, "sample_tokens": _sampling, "_dummy_run": _warming_up}


def _watch_runner(module: ModuleType) -> None:
    if _hint not in forwards.hint_providers:
        forwards.hint_providers.append(_hint)
    for name, surround in _METHODS.items():
        if name in vars(module.GPUModelRunner):
            _patches.around(module.GPUModelRunner, name, surround)


def uninstall() -> None:
    """Restore the model runner."""
    _patches.undo()
    if _hint in forwards.hint_providers:
        forwards.hint_providers.remove(_hint)


HOOKS = {"vllm.v1.worker.gpu_model_runner": _watch_runner}
