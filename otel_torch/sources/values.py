"""Which tensors a structured value holds, and what each is called: `out`, `out[0]`, `out.key`,
`out.a[1][0]`.

FastVideo's own walk gives no record for a dataclass and loses the field names of a named tuple.
What runs here is never the program's code (no property, no lazy attribute), and a compiler can
trace it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

import torch

from otel_torch.console import say_once

# what no model's value needs, so that a list that holds itself twice ends
_MAX_DEPTH = 32
_MAX_VALUES = 100_000


def walk(value: Any, label: str) -> list[tuple[str, torch.Tensor]]:
    """(label, tensor) of every tensor in `value`, in order; never raises.

    Tuples and lists are walked by index, named tuples and dataclasses by field, mappings (Hugging
    Face's `ModelOutput` among them) by key; any other object gives nothing.

    >>> [name for name, _ in walk({"a": [torch.ones(1), (torch.ones(1), None)]}, "out")]
    ['out.a[0]', 'out.a[1][0]']
    """
    if type(value) is torch.Tensor:
        return [(label, value)]
    search = _Search()
    if type(value) is not tuple or not search.enter_flat(value, label):
        search.enter(value, label, ())
    return search.found


def walk_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """(label, tensor) of a call's arguments: `in[0]` for positional ones, `in.key` for those given
    by keyword.

    >>> [name for name, _ in walk_inputs((torch.ones(1),), {"mask": torch.ones(1)})]
    ['in[0]', 'in.mask']
    """
    search = _Search()
    for index, value in enumerate(args):
        search.enter(value, f"in[{index}]", ())
    for key, value in kwargs.items():
        search.enter(value, f"in.{key}", ())
    return search.found


def argument_names(module: torch.nn.Module) -> list[str]:
    """The names of a forward's positional parameters, in order; none where its signature cannot be
    read.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except Exception:  # a signature may be of the program's own making
        return []
    return [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]


def argument_name(label: str, names: Sequence[str]) -> str | None:
    """What forward's signature calls an input, None where it does not say.

    >>> argument_name("in[1].key", ["x", "cache"]), argument_name("in.mask", []), argument_name("in[3]", ["x"])
    ('cache.key', 'mask', None)
    """
    if label.startswith("in."):
        return label.removeprefix("in.")
    number, _, rest = label.removeprefix("in[").partition("]")
    return names[int(number)] + rest if int(number) < len(names) else None


# what most often stands beside tensors; asked first, because older compilers cannot look for
# attributes of these
_PLAIN = (type(None), bool, int, float, str)


class _Search:
    """What has been found so far, and how many values may still be looked at."""

    def __init__(self) -> None:
        self.found: list[tuple[str, torch.Tensor]] = []
        self.left = _MAX_VALUES

    def enter_flat(self, values: tuple[Any, ...], label: str) -> bool:
        """The usual case, a layer's output and its bias, in a fifth of the time; False, and
        nothing, for any other.
        """
        found = []
        for index, value in enumerate(values):
            if type(value) is torch.Tensor:
                found.append((f"{label}[{index}]", value))
            elif type(value) not in _PLAIN:
                return False
        self.found = found
        return True

    def enter(self, value: Any, label: str, above: tuple[Any, ...]) -> None:
        """Add the tensors of `value`; `above` are the values that it lies in."""
        # by type(), because isinstance() asks a lazy proxy for its class, which makes it evaluate
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self.found.append((label, value))
            return
        if kind in _PLAIN:
            return
        if not (
            issubclass(kind, (tuple, list, dict, UserDict)) or hasattr(kind, "__dataclass_fields__")
        ):
            return
        if (
            not torch.compiler.is_compiling()
        ):  # older ones cannot compare dicts by identity; the depth is bounded anyway
            for outer in above:
                if value is outer:
                    return
        try:
            children = _children(value, kind)
        except Exception:
            return  # a key that cannot be written
        self.left -= len(children)
        if self.left < 0 or len(above) == _MAX_DEPTH:
            if not torch.compiler.is_compiling():
                say_once(
                    f"a value holds more than {_MAX_VALUES} values or {_MAX_DEPTH} levels; what lies beyond is not recorded"
                )
            return
        for name, child in children:
            self.enter(child, label + name, (*above, value))


def _children(value: Any, kind: type) -> list[tuple[str, Any]]:
    if issubclass(kind, dict):
        return [(f".{key}", item) for key, item in dict.items(value)]
    if issubclass(kind, tuple):
        # past an `__iter__` of its own, which compilers before torch 2.13 cannot trace
        items = list(value) if torch.compiler.is_compiling() else list(tuple.__iter__(value))
        fields = getattr(kind, "_fields", ())
        if len(fields) == len(items):
            return [(f".{fields[index]}", item) for index, item in enumerate(items)]
        return [(f"[{index}]", item) for index, item in enumerate(items)]
    if issubclass(kind, list):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if issubclass(kind, UserDict):  # an abstract class, which takes longer to ask
        return [(f".{key}", item) for key, item in dict.items(value.__dict__["data"])]
    children = []
    for field in dataclasses.fields(value):
        # older compilers cannot look a slot up on its class, and none runs a property that it does
        # not trace
        computed = None if torch.compiler.is_compiling() else getattr(kind, field.name, None)
        if (
            computed is not None
            and hasattr(type(computed), "__set__")
            and type(computed) is not MemberDescriptorType
        ):
            continue  # a property that stands for the field
        try:
            children.append((f".{field.name}", getattr(value, field.name)))
        except AttributeError:
            continue  # never set
    return children
