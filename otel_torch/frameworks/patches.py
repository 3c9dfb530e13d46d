"""Wraps methods and functions of a framework, and restores them when the session ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from otel_torch.process.console import say_once
from otel_torch.sources.replacements import Replacements, Wrap


class Patches(Replacements):
    """The wrapped methods of one framework.

    >>> class Trainer:
    ...     def step(self): return 1
    >>> patches, seen = Patches(), []
    >>> patches.before(Trainer, "step", lambda trainer: seen.append("step"))
    >>> Trainer().step(), patches.restore(), Trainer().step(), seen
    (1, None, 1, ['step'])
    """

    def before(self, cls: Any, name: str, notice: Callable[[Any], None]) -> None:
        """Call `notice(instance)` before every call of a method that the class defines."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                _report(notice, instance)
                return method(instance, *args, **kwargs)

            return call

        self.replace(cls, name, wrap)

    def after(self, cls: Any, name: str, notice: Callable[[Any], None]) -> None:
        """Call `notice(instance)` after every call of a method that the class defines."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
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
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                with surround(instance):
                    return method(instance, *args, **kwargs)

            return call

        self.replace(cls, name, wrap)

    def replace_in_subclasses(self, base: Any, wraps: Mapping[str, Wrap]) -> None:
        """Replace methods of a class wherever a subclass defines them, later ones included."""
        original = vars(base).get("__init_subclass__")

        def replace_in(cls: Any) -> None:
            for name, wrap in wraps.items():
                if callable(vars(cls).get(name)):
                    self.replace(cls, name, wrap)

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            if original is not None:
                original.__func__(cls, **kwargs)
            else:
                super(base, cls).__init_subclass__(**kwargs)
            replace_in(cls)

        def restore() -> None:
            if original is not None:
                base.__init_subclass__ = original
            else:
                del base.__init_subclass__

        pending, found = [base], {base: None}
        while pending:
            new = [cls for cls in pending.pop().__subclasses__() if cls not in found]
            found.update(dict.fromkeys(new))
            pending += new
        for cls in found:
            replace_in(cls)
        base.__init_subclass__ = classmethod(init_subclass)
        self.on_restore(restore)

    def add(self, functions: list[Any], function: Any, *, first: bool = False) -> None:
        """Add a function to a list that sources ask in order; at its end by default."""
        if function in functions:
            return
        functions.insert(0 if first else len(functions), function)

        def remove() -> None:
            if function in functions:
                functions.remove(function)

        self.on_restore(remove)


def _report(notice: Callable[[Any], None], instance: Any) -> None:
    try:
        notice(instance)
    except Exception as error:
        name, reason = type(instance).__name__, f"{type(error).__name__}: {error}"
        say_once(f"the steps of {name} are not followed: {reason}")
