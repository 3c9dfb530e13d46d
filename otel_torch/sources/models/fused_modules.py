"""Says which modules are not recorded because the module that holds them computes without them.

`nn.TransformerEncoderLayer` does if no module inside of it has a hook, and ours are hidden from it
(`hidden_hooks.py`). Which way it takes, it decides in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

from otel_torch.process.console import say_once
from otel_torch.sources.models.model import Model, ModuleSite
from otel_torch.sources.modules.module_names import all_modules, class_name


class FusedModules:
    """The modules that ask for hooks, and the recorded modules inside of them."""

    def __init__(self) -> None:
        # of each module that asks: its site, and the names of the modules inside
        self._parts: WeakKeyDictionary[Model, list[tuple[ModuleSite, list[str]]]]
        self._parts = WeakKeyDictionary()
        self._unreported: list[Model] = []

    def add(self, model: Model, is_observed: Callable[[nn.Module], bool]) -> None:
        watched = []
        for site in model.asking_for_hooks:
            module = site.module()
            inside = all_modules(module) if module is not None else ()
            names = [
                part.names[0][0]
                for inner in inside
                if inner is not module
                and (part := model.sites.get(id(inner))) is not None
                and part.names
                and is_observed(inner)
            ]
            if names:
                watched.append((site, names))
        if watched:
            self._parts[model] = watched
            if model not in self._unreported:
                self._unreported.append(model)

    def is_inside(self, site: ModuleSite) -> bool:
        """Return whether a module may be left uncalled."""
        watched = self._parts.get(site.model, ())
        return bool(site.names) and any(site.names[0][0] in names for _, names in watched)

    def report(self) -> None:
        """Say it, after the first forward of a model in which modules were not called."""
        for model in self._unreported.copy():
            if model.root() is None:
                self._unreported.remove(model)
                continue
            context = model.forward_context
            calls = {} if context is None else context.calls
            uncalled = [
                (site, names)
                for site, names in self._parts[model]
                if site.names and site.names[0][0] in calls and calls.keys().isdisjoint(names)
            ]
            if not uncalled:
                continue
            self._unreported.remove(model)
            site, names = uncalled[0]
            module = site.module()
            kind = "it" if module is None else class_name(module)
            count = sum(len(names) for _, names in uncalled)
            say_once(
                f"{model.name}: {count} modules are not recorded (for example {names[-1]!r}): "
                f"{kind} does not call the modules inside it where none has a hook of the program"
            )
