"""Runs something when a module has been imported, without importing it: the lazy half of the
environment switch.

Standard library only and no import of its own until a watched module is: an enabled interpreter
that never imports torch pays for one list look-up an import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _Running(Loader):
    """Another loader, followed by what was to happen after it."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # the module must not notice: importlib.resources, pickle and inspect look at these two
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for action in _watch.actions.pop(self._name, ()):
            action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Watch(MetaPathFinder):
    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the others find. Nothing has happened yet: many only ask whether a module exists,
        and never load it.
        """
        if fullname not in self.actions:
            return None
        for finder in [
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        ]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Running(spec.loader, fullname)
                return spec
        return None


_watch = _Watch()


def after_import(name: str, action: Action) -> Callable[[], None]:
    """Call `action(module)` once `name` has been imported: now, if it has been already. Returns
    what calls that off.

    Actions run in the order in which they were asked for, in the importing thread; one that raises
    makes the import fail, so they must not.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    ):
        action(module)
        return lambda: None
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.actions.setdefault(name, []).append(action)

    def call_off() -> None:
        waiting = _watch.actions.get(name, [])
        if action in waiting:
            waiting.remove(action)
        if not waiting:
            _watch.actions.pop(name, None)
        if not _watch.actions and _watch in sys.meta_path:
            sys.meta_path.remove(_watch)

    return call_off
