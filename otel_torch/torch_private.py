"""Torch's private names, once and each with a fallback: what recording needs so that the program cannot tell it runs.

A user's FLOP counter, default device, autocast, autograd, vmap or tracer must not see the arithmetic of a statistic.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

# below the layers that `ADInplaceOrView` tops (autograd, autocast, tracer, functorch, modes) these too change or watch
_WATCHERS = ("Python", "Fake", "Functionalize", "FuncTorchDynamicLayerBackMode", "PythonDispatcher")


def _layers_above_arithmetic() -> Any:
    """The dispatch keys of everything that watches or changes an operation, None where this torch has other names."""
    try:
        private = torch._C
        keys = private._dispatch_keyset_full() - private._dispatch_keyset_full_after(private.DispatchKey.ADInplaceOrView)
        for name in _WATCHERS:
            if (key := getattr(private.DispatchKey, name, None)) is not None:
                keys = keys | private.DispatchKeySet(key)
        with private.DisableTorchFunction(), private._ExcludeDispatchKeyGuard(keys):
            torch.zeros(1).sum()
        return keys
    except Exception:
        return None


_keys = _layers_above_arithmetic()


def unobserved(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run `function` below autograd, autocast, functorch, tracers and every function or dispatch mode of the user.

    Where torch's private guards are gone it runs under `no_grad` only: right, though a mode may see it.
    """
    if _keys is None:
        return torch.no_grad()(function)
    function_modes_off, layers_off, keys = torch._C.DisableTorchFunction, torch._C._ExcludeDispatchKeyGuard, _keys
    tracing: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)
    resume: Callable[[Any], None] = getattr(torch._C, "_set_tracing_state", lambda state: None)

    @functools.wraps(function)
    def below(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if (trace := tracing()) is not None:  # while `torch.jit` traces, sizes are tensors and every use of one a warning
            resume(None)
        try:
            with function_modes_off(), layers_off(keys):
                return function(*args, **kwargs)
        finally:
            if trace is not None:
                resume(trace)

    return below


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` only pretends to have memory, as those do with which a compiler tries a model."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def graph_task_id() -> int:
    """The number of the backward pass that runs in this thread, -1 outside of one (or where torch does not say)."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if current is None else int(current())
