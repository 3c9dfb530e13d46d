"""Look up modules by the paths people type: `model.h.0` or `h.0`, absolute or relative to a module.

Names are canonical throughout: those of wrappers (`module.`, `_orig_mod.`) are left out.
"""

from __future__ import annotations

from torch import nn

from otel_torch.rendering.near_name import near_name
from otel_torch.sources.modules.module_names import core, named_modules


def with_root(name: str) -> str:
    """Return a module's name with the root's in front, as messages show it.

    >>> with_root("h.0"), with_root("")
    ('model.h.0', 'model')
    """
    return f"model.{name}" if name else "model"


def without_root(path: str) -> str:
    """Remove the root's name from a path, the inverse of `with_root`.

    >>> without_root("model.h.0"), without_root("model"), without_root("h")
    ('h.0', '', 'h')
    """
    return "" if path == "model" else path.removeprefix("model.")


def possible_names(parent: str, path: str) -> list[str]:
    """Return the names that `path` may mean, best first: below `parent` before below the root,
    literally before without a leading `model`.

    >>> possible_names("h.0", "model.mlp")
    ['h.0.model.mlp', 'h.0.mlp', 'model.mlp', 'mlp']
    """
    return [
        ".".join(part for part in (start, end) if part)
        for start in dict.fromkeys((parent, ""))
        for end in dict.fromkeys((path, without_root(path)))
    ]


def find_module_name(model: nn.Module, parent: str, path: str) -> str | None:
    """Return the canonical name of the module at `path`, relative to `parent` or to the root, or
    None.
    """
    names = possible_names(parent, path)
    return next((name for name in names if _get_submodule(model, name) is not None), None)


def describe_missing_module(model: nn.Module, parent: str, path: str) -> str:
    """Return the error message for a path without a module, with the names that do exist."""
    module = _get_submodule(model, parent)
    names = [] if module is None else [name for name, _ in named_modules(module)]
    label = parent or type(core(model)).__name__
    return f"{label} has no module {path!r}{near_name(path, names, is_regex=False)}"


def _get_submodule(model: nn.Module, name: str) -> nn.Module | None:
    module = core(model)
    for part in name.split(".") if name else ():
        child = module._modules.get(part)
        if child is None:
            return None
        module = core(child)
    return module
