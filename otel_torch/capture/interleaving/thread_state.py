"""Run a function in another thread with the state that torch and Python keep for this one.

A model that runs in a second thread has to compute exactly what it would compute in the caller's.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch


def bind_thread_state(function: Callable[[], None]) -> Callable[[], None]:
    """Return `function` bound to the state of the calling thread, to be called in any thread.

    The state is grad and inference mode, autocast, default device, current stream and context
    variables. (The default dtype belongs to the process.)
    """
    variables = contextvars.copy_context()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_types = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    autocasts = [
        (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )
        for device_type in device_types
    ]
    device = torch.get_default_device()
    stream: Any = None if accelerator is None else torch.accelerator.current_stream()

    def run_with_state() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for device_type, dtype, enabled, caches in autocasts:
                stack.enter_context(
                    torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=caches)
                )
            if device != torch.device("cpu"):
                stack.enter_context(device)
            if stream is not None:
                stack.enter_context(stream)
            function()

    return lambda: variables.run(run_with_state)
