"""Forwards that nest deeply: recording steps aside before it uses up the program's recursion limit.

A recorded call takes five frames of the stack, six if its class is watched for forwards that are
called directly; a bare one takes three, and one that steps aside two.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.sources.modules.hooks import TorchHook

# no model nests so deeply unless it calls itself; below, nothing is checked
DEEP = 24


def is_limit_near() -> bool:
    """Return whether three eighths of the frames that this thread may have are in use.

    From there on, calls that step aside make up for the frames of the recorded ones.
    """
    remaining = sys.getrecursionlimit() * 3 // 8
    frame: FrameType | None = sys._getframe()
    while frame is not None and remaining:
        frame, remaining = frame.f_back, remaining - 1
    return not remaining


def nest_too_deeply(forwards: int) -> bool:
    """Return whether forwards are nested too deeply to record another direct call.

    A recorded one takes four frames and a bare one takes one, so no later call makes up for them.
    """
    return forwards * 32 >= sys.getrecursionlimit()


def has_only_our_hooks(module: nn.Module) -> bool:
    """Return whether `module.forward` does what calling the module does, but for our hooks."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        all(isinstance(hook, TorchHook) for hook in hooks)
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and module._compiled_call_impl is None
        and not torch_private.has_global_hooks()
        and torch._C._get_tracing_state() is None
    )
