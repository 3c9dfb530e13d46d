"""Copies a module and its arguments, so that a forward of the copies changes nothing of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from otel_torch import torch_private
from otel_torch.sources.modules.hooks import HOOK_TABLES

_HOOKS = (*HOOK_TABLES, "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class NotReplayable(Exception):
    """A forward cannot be run again without an effect on the program; the message says why."""


def replica_of(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return a module with the same parameters, buffers of its own and no hooks, recursively.

    Raises:
        NotReplayable: its forward belongs to one object and would run there.
    """
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        raise NotReplayable(f"the forward of {type(module).__name__} is not that of its class")
    replica: nn.Module = object.__new__(type(module))
    copies[id(module)] = replica
    attributes = dict(vars(module))
    attributes |= {name: type(attributes[name])() for name in _HOOKS if name in attributes}
    attributes["_compiled_call_impl"] = None
    attributes["_parameters"] = dict(module._parameters)
    attributes["_buffers"] = {
        name: None if buffer is None else buffer.detach().clone()
        for name, buffer in module._buffers.items()
    }
    attributes["_modules"] = {
        name: None if child is None else replica_of(child, copies)
        for name, child in module._modules.items()
    }
    vars(replica).update(attributes)
    return replica


def copy_of_arguments(value: Any, copies: dict[int, Tensor]) -> Any:
    """Return a value with copies of its tensors, which are added to `copies`.

    Raises:
        NotReplayable: it holds an object that the forward could change, such as a cache.
    """
    kind = type(value)
    if isinstance(value, _PLAIN):
        return value
    if kind in (Tensor, nn.Parameter):
        if torch_private.is_fake(value):
            raise NotReplayable("its inputs have no memory")
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]
    if kind in (list, tuple):
        return kind(copy_of_arguments(item, copies) for item in value)
    if kind is dict:
        return {key: copy_of_arguments(item, copies) for key, item in value.items()}
    raise NotReplayable(f"an argument is of class {kind.__name__}, which the forward could change")
