"""Replaces functions of torch by wrappers, and restores them when the session ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Replacements:
    """The attributes that one source has replaced.

    >>> import types
    >>> namespace, replacements = types.SimpleNamespace(double=lambda x: 2 * x), Replacements()
    >>> replacements.replace(namespace, "double", lambda double: lambda x: double(x) + 1)
    >>> namespace.double(3), replacements.restore(), namespace.double(3)
    (7, None, 6)
    """

    def __init__(self) -> None:
        self._restore: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Set an attribute to `wrap(its value)`."""
        original = getattr(owner, name)
        replacement = functools.wraps(original)(wrap(original))
        setattr(owner, name, replacement)

        def restore() -> None:
            # someone else may have wrapped the replacement meanwhile
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

        self._restore.append(restore)

    def on_restore(self, function: Callable[[], None]) -> None:
        """Call `function` when the attributes are restored."""
        self._restore.append(function)

    def restore(self) -> None:
        """Restore every attribute, the last one first."""
        while self._restore:
            self._restore.pop()()
