"""Finds the tensors inside a structured value and labels them: `out`, `out[0]`, `out.a[1][0]`.

Tuples and lists are walked by index, named tuples and dataclasses by field, mappings (including
Hugging Face's `ModelOutput` and `TensorDict`) by key, other objects by attribute. An object in
another object's attribute is not walked: a cache holds the state of the whole model. No code of the
program runs here, neither properties nor lazy attributes, and a compiler can trace the walk.

>>> t = torch.ones(1)
>>> [label for label, tensor in walk({"a": (t, t), "b": [None, {"c": t}]}, "out")]
['out.a[0]', 'out.a[1]', 'out.b[1].c']
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import UserDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch

from otel_torch.process.console import say_once

# bound the walk over self-referencing containers; no model needs as much
_MAX_DEPTH = 32
_MAX_VALUES = 100_000

# the usual neighbors of tensors. Tested first, because older compilers cannot look up attributes of
# these types
_TYPES_WITHOUT_TENSORS = (
    type(None),
    bool,
    int,
    float,
    str,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
_CONTAINERS = (tuple, list, deque, dict, UserDict, Mapping)
# what holds tensors that are no part of a value
_NEVER_WALKED = (torch.nn.Module, type)


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


def unwalked_class(value: Any) -> str | None:
    """Return the name of a class in `value` whose objects are not walked, or None without any."""
    search = _Walk()
    search.visit(value, "", ())
    return None if search.unwalked is None else search.unwalked.__qualname__


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
    """A search for tensors.

    Attributes:
        tensors: what was found, as (label, tensor).
        remaining: how many more values may be visited.
        is_in_object: whether the visited value is in the attribute of an object.
        unwalked: the class of a value that may hold tensors and was not searched.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.remaining = _MAX_VALUES
        self.is_in_object = False
        self.unwalked: type | None = None

    def try_flat_tuple(self, values: tuple[Any, ...], label: str) -> bool:
        """Add the tensors of a tuple without containers, such as a layer's output and its bias.

        This common case takes a fifth of the time of `visit`. For any other tuple returns False and
        adds nothing.
        """
        tensors = []
        for index, value in enumerate(values):
            if type(value) is torch.Tensor:
                tensors.append((f"{label}[{index}]", value))
            elif type(value) not in _TYPES_WITHOUT_TENSORS:
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
        if kind in _TYPES_WITHOUT_TENSORS:
            return
        is_object = not _is_container(kind)
        if is_object and (self.is_in_object or issubclass(kind, _NEVER_WALKED)):
            self.unwalked = kind
            return
        if not torch.compiler.is_compiling():
            # older compilers cannot compare dicts by identity; there the depth bounds the walk
            for ancestor in ancestors:
                if value is ancestor:
                    return
        try:
            children = _children(value, kind)
        except Exception:
            children = []  # for instance a key without a text form
        if not children and not issubclass(kind, (tuple, list, dict)):
            self.unwalked = kind
        self.remaining -= len(children)
        if self.remaining < 0 or len(ancestors) == _MAX_DEPTH:
            if not torch.compiler.is_compiling():
                say_once(
                    f"a value has more than {_MAX_VALUES} values or {_MAX_DEPTH} levels; "
                    "the tensors beyond these limits are not recorded"
                )
            return
        enclosing, self.is_in_object = self.is_in_object, self.is_in_object or is_object
        for name, child in children:
            self.visit(child, label + name, (*ancestors, value))
        self.is_in_object = enclosing


def _is_container(kind: type) -> bool:
    return issubclass(kind, _CONTAINERS) or hasattr(kind, "__dataclass_fields__")


def _children(value: Any, kind: type) -> list[tuple[str, Any]]:
    """Return (label, value) of the direct children of a container or object."""
    if issubclass(kind, dict):
        return [(f".{key}", item) for key, item in dict.items(value)]
    if issubclass(kind, tuple):
        # avoids a custom `__iter__`; the compiler of torch 2.12 cannot trace that
        items = list(value) if torch.compiler.is_compiling() else list(tuple.__iter__(value))
        fields = getattr(kind, "_fields", ())
        if len(fields) == len(items):
            return [(f".{fields[index]}", item) for index, item in enumerate(items)]
        return [(f"[{index}]", item) for index, item in enumerate(items)]
    if issubclass(kind, (list, deque)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if issubclass(kind, UserDict):  # last, because it is an abstract class and slower to test
        return [(f".{key}", item) for key, item in dict.items(value.__dict__["data"])]
    if hasattr(kind, "__dataclass_fields__"):
        return _fields(value, kind)
    return _attributes(value, kind)


def _fields(value: Any, kind: type) -> list[tuple[str, Any]]:
    """Return (label, value) of the fields of a dataclass that are no properties."""
    children = []
    for field in dataclasses.fields(value):
        descriptor = getattr(kind, field.name, None)
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


def _attributes(value: Any, kind: type) -> list[tuple[str, Any]]:
    """Return (label, value) of what an object holds: a mapping its items, any other its attributes.

    Private attributes count where no public one can hold a tensor.
    """
    if not torch.compiler.is_compiling():
        attributes = _instance_dict(value, kind)
    elif hasattr(kind, "__weakref__"):
        attributes = value.__dict__
    else:
        return []  # the compiler traces through the dict of no builtin object
    if issubclass(kind, Mapping):
        dicts = [attribute for attribute in attributes.values() if type(attribute) is dict]
        if len(dicts) == 1:
            return [(f".{key}", item) for key, item in dicts[0].items()]
    held = [
        (f".{name}", item)
        for name, item in attributes.items()
        if issubclass(type(item), torch.Tensor) or _is_container(type(item))
    ]
    return [(name, item) for name, item in held if not name.startswith("._")] or held


def _instance_dict(value: Any, kind: type) -> dict[str, Any]:
    """Return the attributes that are set on an object, in slots and elsewhere."""
    attributes = {}
    for base in kind.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if type(member) is MemberDescriptorType:
                with suppress(AttributeError):  # never set
                    attributes[name] = member.__get__(value)
    with suppress(AttributeError):
        attributes |= object.__getattribute__(value, "__dict__")
    return attributes
