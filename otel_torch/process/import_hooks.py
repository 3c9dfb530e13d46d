"""Runs an action once a module has been imported, without importing it.

Uses the standard library only, and imports nothing until a watched module is imported. An enabled
interpreter that never imports torch pays for one lookup per import.

A finder on `sys.meta_path` has the loaders of watched modules run the actions. Other finders may
hide a module from it, such as those before it that instrument what they find (typeguard,
jaxtyping). So every import, and `catch_up`, also looks for watched modules that have appeared in
`sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _WatchingFinder(MetaPathFinder):
    """Finds what the other finders find, and changes the loaders of watched modules."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        # the modules on which the actions have run: a program may import one of a name again
        self._done: dict[str, ModuleType] = {}
        self._module_count = 0

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a watched module, whose loader will run the actions.

        They wait for the load: many callers only ask whether a module exists.
        """
        self.catch_up()
        if fullname not in self.actions:
            return None
        was_loaded = fullname in sys.modules
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                module = sys.modules.get(fullname)
                if module is not None and not was_loaded:  # the finder has imported it
                    spec = getattr(module, "__spec__", None) or spec
                _act_after_loading(spec.loader)
                return spec
        return None

    def watch(self, name: str, action: Action) -> None:
        """Run `action` after every load of a module, and now if it is loaded."""
        self.catch_up()
        self.actions.setdefault(name, []).append(action)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        if (module := sys.modules.get(name)) is not None and _is_loaded(module):
            self._done[name] = module
            action(module)

    def act(self, name: str, module: ModuleType) -> None:
        """Run the actions of a module that has just been loaded."""
        self._done[name] = module
        for action in list(self.actions.get(name, ())):
            action(module)

    def catch_up(self) -> None:
        """Run the actions of modules that were loaded without this finder; return to the front."""
        if len(sys.modules) == self._module_count:
            return
        self._module_count = len(sys.modules)
        if self in sys.meta_path[1:]:
            sys.meta_path.remove(self)
            sys.meta_path.insert(0, self)
        for name in list(self.actions):
            module = sys.modules.get(name)
            if module is None or self._done.get(name) is module:
                continue
            if _is_loaded(module):
                self.act(name, module)
            else:
                self._module_count = 0  # look again, even if no other module comes


def _act_after_loading(loader: Any) -> None:
    """Have a loader run the actions of the modules that it loads.

    It keeps its type, which importlib.resources, pickle and inspect look at.
    """
    load = getattr(loader, "exec_module", None)
    # of a proxy (wrapt's), the loader behind it has been changed; for others there is `catch_up`
    set_attribute: Any = type(loader).__setattr__
    is_plain = set_attribute is object.__setattr__ and hasattr(loader, "__dict__")
    if load is not None and is_plain and not isinstance(load, partial):
        loader.exec_module = partial(_load_and_act, load)


def _load_and_act(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    if module.__name__ in _finder.actions and not _is_lazy(module):
        _finder.act(module.__name__, module)


_finder = _WatchingFinder()
catch_up = _finder.catch_up


def after_import(name: str, action: Action) -> Callable[[], None]:
    """Call `action(module)` whenever `name` has been imported, and now if it has been already.

    Actions run in the order of registration, in the importing thread, or in the one that calls
    `catch_up`. They must not raise, or the import fails.

    Returns:
        A function that cancels the action.
    """
    _finder.watch(name, action)

    def cancel() -> None:
        waiting = _finder.actions.get(name, [])
        if action in waiting:
            waiting.remove(action)
        if not waiting:
            _finder.actions.pop(name, None)
        if not _finder.actions and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)

    return cancel


def _is_lazy(module: ModuleType) -> bool:
    """Return whether importlib's LazyLoader will load a module when it is first used."""
    return type(module).__module__ == "importlib.util"


def _is_loaded(module: ModuleType) -> bool:
    """Return whether a module has been imported completely. Loads no lazy module."""
    if _is_lazy(module):
        return False
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)
