"""Finds the modules that a model holds where torch does not look: in a list, a dict or an object.

    self.prepare = Compose([Resize(), Normalize()])  # no module, and neither are its steps' holders

Such a module, if it holds no tensor, cannot be told from one that a forward makes and drops
(`nn.Softmax(-1)(x)`) by what it is. It is a part of the model if attributes of the model lead to
it: its name is the path (`prepare.steps.0`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any
from weakref import ref

import torch
from torch import nn

from otel_torch.sources.modules.module_dict import ModuleDict
from otel_torch.sources.modules.module_names import children_of
from otel_torch.sources.modules.uncalled_roots import with_inner

_Place = tuple[CodeType, int, type]

# So many attributes and items are looked at in one search: more than models hold, but for their
# data. It takes some 20 ms, once for each place of a program that makes modules in a forward.
_VISITED_MAX = 50_000
# what holds no module, what leads to all of the program, and what has a search of its own
_LEFT_OUT = (
    str, bytes, int, float, complex, NoneType, torch.Tensor, type, ModuleType, nn.Module,
)  # fmt: skip
_EMPTY = CellType()
# what `nn.Module.__init__` makes
_OF_TORCH = frozenset(vars(nn.Module()))


class PlainParts:
    """The modules that were found, by the modules that hold them."""

    def __init__(self) -> None:
        self._of: ModuleDict[dict[str, ref[nn.Module]]] = ModuleDict()
        # where a module of a class was called that no attribute leads to: its code makes it
        self._made_in: set[_Place] = set()

    def find(self, module: nn.Module) -> dict[str, nn.Module] | None:
        """Return the parts of a module, torch's children included; None if it has no others."""
        held = self._of.get(module)
        if held is None:
            return None
        parts = {
            name: part for name, reference in held.items() if (part := reference()) is not None
        }
        return children_of(module) | parts

    def holder_of(
        self, module: nn.Module, holders: Iterable[nn.Module], caller: FrameType
    ) -> tuple[nn.Module, str] | None:
        """Return which of `holders` leads to a module, and by what name; add it to its parts.

        Args:
            caller: the frame that calls the module. For a module that its code makes in each call,
                nothing is searched again.
        """
        place = caller.f_code, caller.f_lasti, type(module)
        if place in self._made_in:
            return None
        found = _search(holders, module)
        if found is None:
            self._made_in.add(place)
        else:
            holder, name = found
            self._of.setdefault(holder, {})[name] = ref(module)
        return found


def _search(holders: Iterable[nn.Module], module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the first module that leads to another one, with the attributes and keys between.

    >>> net = nn.Module()
    >>> net.steps = {"first": [nn.ReLU(), act := nn.GELU()]}
    >>> _search([net], act)
    (Module(), 'steps.first.1')
    """
    seen: set[int] = set()
    visited = 0
    for holder in holders:
        pending = deque(_held_by(holder))
        while pending and visited < _VISITED_MAX:
            visited += 1
            name, value = pending.popleft()
            if value is module:
                return holder, name
            if not issubclass(type(value), _LEFT_OUT) and id(value) not in seen:
                seen.add(id(value))
                pending.extend((f"{name}.{key}", inner) for key, inner in _contents(value))
    return None


def _held_by(holder: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds beside what torch knows, and what its class does."""
    for name, value in list(vars(holder).items()):
        if name not in _OF_TORCH:
            yield name, value
    bases = type(holder).__mro__
    for base in bases[: bases.index(nn.Module)]:
        for name, value in list(vars(base).items()):
            if issubclass(type(value), nn.Module | list | tuple | dict):
                yield name, value
            elif issubclass(type(value), FunctionType):
                named = {each for code in with_inner(value.__code__) for each in code.co_names}
                for name in named & value.__globals__.keys():
                    if issubclass(type(value.__globals__[name]), nn.Module | list | tuple | dict):
                        yield name, value.__globals__[name]


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an object holds, by key, index or attribute. None of its own code runs."""
    kind = type(value)
    if issubclass(kind, dict):
        yield from itertools.islice(list(dict.items(value)), _VISITED_MAX)
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        yield from enumerate(itertools.islice(list(value), _VISITED_MAX))
    elif issubclass(kind, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif issubclass(kind, MethodType):
        yield "self", value.__self__
    elif issubclass(kind, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != _EMPTY:
                yield name, cell.cell_contents
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from list(attributes.items())
        for base in kind.__mro__:
            for name, slot in list(vars(base).items()):
                if isinstance(slot, MemberDescriptorType) and hasattr(value, name):
                    yield name, slot.__get__(value)
