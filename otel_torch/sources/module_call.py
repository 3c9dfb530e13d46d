"""Calls modules whose only hook is our observer without torch's way for hooks, which takes longer
than what the observer does; `module_call.c` says when that is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from otel_torch import torch_private
from otel_torch.sources.direct_forwards import own_forwards
from otel_torch.sources.hooks import HOOK_LISTS, run_post_hooks
from otel_torch.statistics import cpu_kernel

# what a direct call returns if torch has to make the call
LEFT_TO_TORCH = object()


def direct_call(
    output_observer: Any, input_observer: Any
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None:
    """Return a function that calls a module or returns LEFT_TO_TORCH, or None without a kernel.

    Args:
        output_observer: the class of hooks that observe outputs.
        input_observer: that of hooks that observe inputs and outputs.
    """
    kernel, internals = cpu_kernel.load(), torch_private.module_call()
    functions = None if kernel is None else kernel.objects
    if functions is None or internals is None:
        return None
    functions.set_call_objects(
        LEFT_TO_TORCH,
        output_observer,
        input_observer,
        *HOOK_LISTS,
        "hooks",
        "post_calls",
        "_place",
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_compiled_call_impl",
        "forward",
        "_call_impl",
        internals.method,
        internals.global_tables,
        MethodType,
        "__func__",
        "__self__",
        own_forwards,
        ("__code__", "__defaults__", "__kwdefaults__"),
        internals.tracing_state,
        input_observer.observe_inputs,
        output_observer.observe_output,
        run_post_hooks,
    )
    return functions.call_module
