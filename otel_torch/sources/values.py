"""Finds the tensors inside a structured value and labels them: `out`, `out[0]`, `out.a[1][0]`.

Tuples and lists are walked by index, named tuples and dataclasses by field, mappings (including
Hugging Face's `ModelOutput`) by key. Other objects are not walked. No code of the program runs
here, neither properties nor lazy attributes, and a compiler can trace the walk.

>>> t = torch.ones(1)
>>> [label for label, tensor in walk({"a": (t, t), "b": [None, {"c": t}]}, "out")]
['out.a[0]', 'out.a[1]', 'out.b[1].c']
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict
from collections.abc import Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

import torch

from otel_torch.process.console import say_once

# bound the walk over self-referencing containers; no model needs as much
_MAX_DEPTH = 32
_MAX_VALUES = 100_000

# the usual neighbors of tensors. Tested first, because older compilers cannot look up attributes of
# these types
_PRIMITIVE_TYPES = (type(None), bool, int, float, str)


def walk(value: Any, label: str) -> list[tuple[str, torch.Tensor]]:
    """Return (label, tensor) for every tensor in `value`, in order. Never raises.

    >>> [name for name, _ in walk({"a": [torch.ones(1), (torch.ones(1), None)]}, "out")]
    ['out.a[0]', 'out.a[1][0]']
    """
    if type(value) is torch.Tensor:
        return [(label, value)]
    search = _Walk()
    if type(value) is not tuple or not search.try_flat_tuple(value, label):
        search.visit(value, label, ())
    return search.tensors


def walk_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (label, tensor) for every tensor in the arguments of a call.

    Positional arguments are labeled `in[0]`, keyword arguments `in.key`.

    >>> [name for name, _ in walk_inputs((torch.ones(1),), {"mask": torch.ones(1)})]
    ['in[0]', 'in.mask']
    """
    search = _Walk()
    for index, value in enumerate(args):
        search.visit(value, f"in[{index}]", ())
    for key, value in kwargs.items():
        search.visit(value, f"in.{key}", ())
    return search.tensors


def argument_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the positional parameters of forward; none if they cannot be read."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except Exception:  # the program may define its own signature
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def argument_name(label: str, names: Sequence[str]) -> str | None:
    """Return the name of an input according to forward's signature, or None.

    >>> argument_name("in[1].key", ["x", "cache"]), argument_name("in.mask", [])
    ('cache.key', 'mask')
    >>> argument_name("in[3]", ["x"]) is None
    True
    """
    if label.startswith("in."):
        return label.removeprefix("in.")
    number, _, rest = label.removeprefix("in[").partition("]")
    return names[int(number)] + rest if int(number) < len(names) else None


class _Walk:
    """The tensors found so far, and how many more values may be visited."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.remaining = _MAX_VALUES

    def try_flat_tuple(self, values: tuple[Any, ...], label: str) -> bool:
        """Add the tensors of a tuple without containers, such as a layer's output and its bias.

        This common case takes a fifth of the time of `visit`. For any other tuple returns False and
        adds nothing.
        """
        tensors = []
        for index, value in enumerate(values):
            if type(value) is torch.Tensor:
                tensors.append((f"{label}[{index}]", value))
            elif type(value) not in _PRIMITIVE_TYPES:
                return False
        self.tensors = tensors
        return True

    def visit(self, value: Any, label: str, ancestors: tuple[Any, ...]) -> None:
        """Add the tensors of `value`, which is inside `ancestors`."""
        # type(), because isinstance() would evaluate a lazy proxy to ask for its class
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self.tensors.append((label, value))
            return
        if kind in _PRIMITIVE_TYPES:
            return
        is_container = issubclass(kind, (tuple, list, dict, UserDict))
        if not is_container and not hasattr(kind, "__dataclass_fields__"):
            return
        if not torch.compiler.is_compiling():
            # older compilers cannot compare dicts by identity; there the depth bounds the walk
            for ancestor in ancestors:
                if value is ancestor:
                    return
        try:
            children = _children(value, kind)
        except Exception:
            return  # for instance a key without a text form
        self.remaining -= len(children)
        if self.remaining < 0 or len(ancestors) == _MAX_DEPTH:
            if not torch.compiler.is_compiling():
                say_once(
                    f"a value has more than {_MAX_VALUES} values or {_MAX_DEPTH} levels; "
                    "the tensors beyond these limits are not recorded"
                )
            return
        for name, child in children:
            self.visit(child, label + name, (*ancestors, value))


def _children(value: Any, kind: type) -> list[tuple[str, Any]]:
    """Return (label, value) of the direct children of a container or dataclass.

    Fields of a dataclass that are properties are left out.
    """
    if issubclass(kind, dict):
        return [(f".{key}", item) for key, item in dict.items(value)]
    if issubclass(kind, tuple):
        # avoids a custom `__iter__`; compilers before torch 2.13 cannot trace that
        items = list(value) if torch.compiler.is_compiling() else list(tuple.__iter__(value))
        fields = getattr(kind, "_fields", ())
        if len(fields) == len(items):
            return [(f".{fields[index]}", item) for index, item in enumerate(items)]
        return [(f"[{index}]", item) for index, item in enumerate(items)]
    if issubclass(kind, list):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if issubclass(kind, UserDict):  # last, because it is an abstract class and slower to test
        return [(f".{key}", item) for key, item in dict.items(value.__dict__["data"])]
    children = []
    for field in dataclasses.fields(value):
        # older compilers cannot look up a slot on its class; none runs a property it cannot trace
        descriptor = None if torch.compiler.is_compiling() else getattr(kind, field.name, None)
        is_property = (
            descriptor is not None
            and hasattr(type(descriptor), "__set__")
            and type(descriptor) is not MemberDescriptorType
        )
        if is_property:
            continue
        try:
            children.append((f".{field.name}", getattr(value, field.name)))
        except AttributeError:
            continue  # never set
    return children
