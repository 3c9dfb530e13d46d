"""Runs an action once a module has been imported, without importing it.

Uses the standard library only, and imports nothing until a watched module is imported. An enabled
interpreter that never imports torch pays for one lookup per import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _ActingLoader(Loader):
    """Wraps a module's loader, and runs the actions after it."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # The module gets its real loader back: importlib.resources, pickle and inspect look at it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for action in _finder.actions.pop(self._name, ()):
            action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _WatchingFinder(MetaPathFinder):
    """Finds what the other finders find, and wraps the loaders of watched modules."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a watched module with a wrapped loader.

        The action waits for the load: many callers only ask whether a module exists.
        """
        if fullname not in self.actions:
            return None
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        for finder in finders:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ActingLoader(spec.loader, fullname)
                return spec
        return None


_finder = _WatchingFinder()


def after_import(name: str, action: Action) -> Callable[[], None]:
    """Call `action(module)` once `name` has been imported, or now if it has been already.

    Actions run in the order of registration, in the importing thread. They must not raise, or the
    import fails.

    Returns:
        A function that cancels the action.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    ):
        action(module)
        return lambda: None
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.actions.setdefault(name, []).append(action)

    def cancel() -> None:
        waiting = _finder.actions.get(name, [])
        if action in waiting:
            waiting.remove(action)
        if not waiting:
            _finder.actions.pop(name, None)
        if not _finder.actions and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)

    return cancel
