"""What torch and the program hold for a thread, carried into another: a model must not compute
otherwise there.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch


def carried(function: Callable[[], None]) -> Callable[[], None]:
    """`function`, to be called in another thread with this one's grad and inference mode, autocast,
    default device, current streams and context variables. (The default dtype is the process's.)
    """
    variables = contextvars.copy_context()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    autocasts = [
        (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            torch.is_autocast_cache_enabled(),
        )
        for kind in kinds
    ]
    device = torch.get_default_device()
    stream: Any = None if accelerator is None else torch.accelerator.current_stream()

    def inside() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype, enabled, caches in autocasts:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches)
                )
            if device != torch.device("cpu"):
                stack.enter_context(device)
            if stream is not None:
                stack.enter_context(stream)
            function()

    return lambda: variables.run(inside)
