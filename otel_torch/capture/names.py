"""Modules by name, as people write them: with or without what wraps them, and what may have been meant."""

from __future__ import annotations

from torch import nn

from otel_torch.sources.names import core


def find_name(model: nn.Module, place: str, path: str) -> str | None:
    """The canonical name of the module at `path` below `place`, or below the root; None where there is none."""
    bare = "" if path == "model" else path.removeprefix("model.")
    for start in dict.fromkeys((place, "")):
        for one in dict.fromkeys((path, bare)):
            name = ".".join(part for part in (start, one) if part)
            if _exists(model, name):
                return name
    return None


def no_module(model: nn.Module, place: str, path: str) -> str:
    """That there is no such module, and which there are."""
    here = core(model)
    for part in place.split(".") if place else ():
        here = core(here._modules[part])  # type: ignore[arg-type]
    children = ", ".join(list(here._modules)[:8]) or "none"
    return f"{place or type(core(model)).__name__} has no module {path!r}; it has {children}"


def _exists(model: nn.Module, name: str) -> bool:
    here = core(model)
    for part in name.split(".") if name else ():
        child = here._modules.get(part)
        if child is None:
            return False
        here = core(child)
    return True
