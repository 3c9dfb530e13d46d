"""Modules by name, as people write them: with or without what wraps them, and what may have been
meant.
"""

from __future__ import annotations

from torch import nn

from otel_torch.sources.module_names import core


def title(name: str) -> str:
    """What people call a module: with the root's name in front.

    >>> title("h.0"), title("")
    ('model.h.0', 'model')
    """
    return f"model.{name}" if name else "model"


def without_root(path: str) -> str:
    """The other way round.

    >>> without_root("model.h.0"), without_root("model"), without_root("h")
    ('h.0', '', 'h')
    """
    return "" if path == "model" else path.removeprefix("model.")


def candidates(place: str, path: str) -> list[str]:
    """The names that `path`, said at `place`, may mean: below it, then below the root; as it is,
    then without the root's.
    """
    return [
        ".".join(part for part in (start, one) if part)
        for start in dict.fromkeys((place, ""))
        for one in dict.fromkeys((path, without_root(path)))
    ]


def find_name(model: nn.Module, place: str, path: str) -> str | None:
    """The canonical name of the module at `path` below `place`, or below the root; None where there
    is none.
    """
    return next((name for name in candidates(place, path) if _exists(model, name)), None)


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
