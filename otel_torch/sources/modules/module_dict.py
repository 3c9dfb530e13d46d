"""A dictionary by module, which keeps no module alive and runs none of its code.

Modules may define `__eq__`, `__hash__` and `__getattr__` as they like; torch's
`WeakIdKeyDictionary` asks them for an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar
from weakref import ref

from torch import nn

_V = TypeVar("_V")


class ModuleRef(ref[nn.Module]):
    """A weak reference to a module, with its id; `forget` gets it when the module is deleted.

    Each module gets as few objects as possible: every object makes the garbage collector traverse
    the whole program more often. A callback that knows the id would be a function, its cells and
    their tuple for each module.
    """

    __slots__ = ("key",)

    key: int

    def __new__(cls, module: nn.Module, forget: Callable[[Any], None]) -> Self:
        made = super().__new__(cls, module, forget)
        made.key = id(module)
        return made


class _Entry(ModuleRef, Generic[_V]):
    """A weak reference to a module, with its value."""

    __slots__ = ("value",)

    value: _V


class ModuleDict(Generic[_V]):
    """Values by the identity of modules; an entry is removed with its module."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[_V]] = {}
        entries = self._entries

        def forget(entry: _Entry[_V]) -> None:
            if entries.get(entry.key) is entry:
                del entries[entry.key]

        self._forget: Callable[[_Entry[_V]], None] = forget

    def __setitem__(self, module: nn.Module, value: _V) -> None:
        entry: _Entry[_V] = _Entry(module, self._forget)
        entry.value = value
        self._entries[entry.key] = entry

    def get(self, module: nn.Module | None) -> _V | None:
        entry = self._entries.get(id(module))
        return None if entry is None else entry.value

    def setdefault(self, module: nn.Module, value: _V) -> _V:
        if id(module) not in self._entries:
            self[module] = value
        return self._entries[id(module)].value

    def __contains__(self, module: nn.Module | None) -> bool:
        return id(module) in self._entries

    def __iter__(self) -> Iterator[nn.Module]:
        for entry in list(self._entries.values()):
            module = entry()
            if module is not None:
                yield module

    def pop(self, module: nn.Module) -> _V | None:
        entry = self._entries.pop(id(module), None)
        return None if entry is None else entry.value

    def values(self) -> list[_V]:
        return [entry.value for entry in list(self._entries.values())]

    def clear(self) -> None:
        self._entries.clear()
