"""Wraps methods and functions of a framework, and restores them when the session ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from otel_torch.process.console import say_once


class Patches:
    """The wrapped methods of one framework.

    >>> class Trainer:
    ...     def step(self): return 1
    >>> patches, seen = Patches(), []
    >>> patches.before(Trainer, "step", lambda trainer: seen.append("step"))
    >>> Trainer().step(), patches.undo(), Trainer().step(), seen
    (1, None, 1, ['step'])
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def before(self, cls: Any, name: str, notice: Callable[[Any], None]) -> None:
        """Call `notice(instance)` before every call of a method that the class defines."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                _report(notice, instance)
                return method(instance, *args, **kwargs)

            return call

        self.replace(cls, name, wrap)

    def after(self, cls: Any, name: str, notice: Callable[[Any], None]) -> None:
        """Call `notice(instance)` after every call of a method that the class defines."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                result = method(instance, *args, **kwargs)
                _report(notice, instance)
                return result

            return call

        self.replace(cls, name, wrap)

    def around(
        self, cls: Any, name: str, surround: Callable[[Any], AbstractContextManager[Any]]
    ) -> None:
        """Run every call of a method that the class defines inside `surround(instance)`."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                with surround(instance):
                    return method(instance, *args, **kwargs)

            return call

        self.replace(cls, name, wrap)

    def add(self, functions: list[Any], function: Any, *, first: bool = False) -> None:
        """Add a function to a list that sources ask in order; at its end by default."""
        if function in functions:
            return
        functions.insert(0 if first else len(functions), function)

        def remove() -> None:
            if function in functions:
                functions.remove(function)

        self._undo.append(remove)

    def undo(self) -> None:
        """Restore every method, and remove every function that was added."""
        while self._undo:
            self._undo.pop()()

    def replace(
        self, cls: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Call `wrap(method)` in place of a method that the class, or a function that the module
        defines.
        """
        method = vars(cls)[name]
        replacement = wrap(method)
        setattr(cls, name, replacement)

        def restore() -> None:
            if vars(cls).get(name) is replacement:
                setattr(cls, name, method)

        self._undo.append(restore)


def _report(notice: Callable[[Any], None], instance: Any) -> None:
    try:
        notice(instance)
    except Exception as error:
        name, reason = type(instance).__name__, f"{type(error).__name__}: {error}"
        say_once(f"the steps of {name} are not followed: {reason}")
