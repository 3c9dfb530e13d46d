"""Canonical names: what a module and a model are called, whatever wraps them."""

from __future__ import annotations

import torch
from torch import nn

# attributes under which wrappers keep the module that they wrap: DDP and DataParallel,
# torch.compile, FSDP1, checkpointing
_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper wraps, None for a module that is none of the known wrappers."""
    for cls in type(module).__mro__:
        attribute = _WRAPPED.get(cls.__name__)
        if attribute is not None and cls.__module__.startswith("torch."):
            return module._modules.get(attribute)
    return None


def core(module: nn.Module) -> nn.Module:
    """What is left of a module when all wrappers around it are looked through."""
    inner = wrapped(module)
    while inner is not None:
        module, inner = inner, wrapped(inner)
    return module


def class_name(module: nn.Module) -> str:
    """The class a module was written as: FSDP2 gives it a subclass named `FSDP...`, TorchScript a
    class of its own.
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
    """Every (canonical name, module) under `root`, itself included as `""`, in order, wrappers left
    out.

    A shared module stands there once for each of its names. What contains itself is walked once.
    """
    found: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, name: str, above: frozenset[int]) -> None:
        inner = wrapped(module)
        if inner is not None:
            if id(inner) not in above:
                walk(inner, name, above | {id(module)})
            return
        found.append((name, module))
        above |= {id(module)}
        for key, child in module._modules.items():
            if child is not None and id(child) not in above:
                walk(child, f"{name}.{key}" if name else key, above)

    walk(root, "", frozenset())
    return found


def first_names(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same with every module once, by its first name."""
    found = {id(module): (name, module) for name, module in reversed(named_modules(root))}
    return list(reversed(found.values()))
