"""Calls modules whose only hook is our observer without torch's way for hooks, which takes longer
than what the observer does; `module_call.c` says when that is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from otel_torch import torch_private
from otel_torch.sources.modules.direct_forwards import own_forwards
from otel_torch.sources.modules.hooks import HOOK_LISTS, run_post_hooks
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
    before_list, after_list = HOOK_LISTS
    functions.set_call_objects(
        left_to_torch=LEFT_TO_TORCH,
        output_observer=output_observer,
        input_observer=input_observer,
        before_list=before_list,
        after_list=after_list,
        hooks="hooks",
        post_calls="post_calls",
        place="place",
        before="_forward_pre_hooks",
        after="_forward_hooks",
        backward="_backward_hooks",
        before_backward="_backward_pre_hooks",
        compiled="_compiled_call_impl",
        forward="forward",
        call="_call_impl",
        own_call=internals.method,
        global_tables=internals.global_tables,
        method_type=MethodType,
        function="__func__",
        bound_to="__self__",
        own_forwards=own_forwards,
        own_names=("__code__", "__defaults__", "__kwdefaults__"),
        tracing_state=internals.tracing_state,
        observe_inputs_in_python=input_observer.observe_inputs,
        observe_output_in_python=output_observer.observe_output,
        run_hooks=run_post_hooks,
    )
    return functions.call_module
