"""Canonical names: what a module and a model are called, whatever wraps them."""

from __future__ import annotations

import torch
from torch import nn

# The attribute under which each wrapper class holds the module that it wraps.
_WRAPPED_ATTRIBUTES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",  # FSDP1
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper wraps, or None if `module` is no known wrapper."""
    for cls in type(module).__mro__:
        attribute = _WRAPPED_ATTRIBUTES.get(cls.__name__)
        if attribute is not None and cls.__module__.startswith("torch."):
            return module._modules.get(attribute)
    return None


def core(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers, `module` itself if there are none."""
    inner = wrapped(module)
    while inner is not None:
        module, inner = inner, wrapped(inner)
    return module


def class_name(module: nn.Module) -> str:
    """Return the name of the class that a module was written as.

    FSDP2 gives a module a subclass named `FSDP...`, TorchScript an unrelated class.
    """
    cls = type(module)
    if cls.__name__.startswith("FSDP") and any(
        base.__name__ == "FSDPModule" for base in cls.__mro__
    ):
        cls = next((base for base in cls.__mro__[1:] if base.__name__ != "FSDPModule"), cls)
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", "") or cls.__name__)
    return cls.__name__


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every (canonical name, module) under `root`, without wrappers, in order.

    `root` is included as `""`. A shared module appears once for each of its names. A module that
    contains itself is walked once.

    >>> [name for name, _ in named_modules(nn.DataParallel(nn.Sequential(nn.ReLU())))]
    ['', '0']
    """
    named: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, name: str, enclosing: frozenset[int]) -> None:
        inner = wrapped(module)
        if inner is not None:
            if id(inner) not in enclosing:
                walk(inner, name, enclosing | {id(module)})
            return
        named.append((name, module))
        enclosing |= {id(module)}
        for key, child in module._modules.items():
            if child is not None and id(child) not in enclosing:
                walk(child, f"{name}.{key}" if name else key, enclosing)

    walk(root, "", frozenset())
    return named


def first_names(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `named_modules` does, but every module once, by its first name."""
    by_id = {id(module): (name, module) for name, module in reversed(named_modules(root))}
    return list(reversed(by_id.values()))
