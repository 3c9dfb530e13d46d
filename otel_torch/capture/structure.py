"""A structured value with every tensor in it replaced, and everything else as it was.

tensor_tracker's `rmap_tensor` cannot rebuild a named tuple or a dataclass with slots, and says so
inside the user's forward.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def replace_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with `change(leaf)` in the place of every `kind` in it.

    Tuples, named tuples, lists and mappings keep their type (of a plain dict the keys are changed
    too); a dataclass is rebuilt field by field, without its `__init__`. Anything else stays what it
    was, unchanged and not copied.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(replace_leaves(one, kind, change) for one in value)  # type: ignore[attr-defined]
    if isinstance(value, (tuple, list)):
        changed = [replace_leaves(one, kind, change) for one in value]
        return type(value)(changed)
    if type(value) is dict:
        return {
            replace_leaves(key, kind, change): replace_leaves(one, kind, change)
            for key, one in value.items()
        }
    if isinstance(
        value, (dict, UserDict)
    ):  # Hugging Face's outputs among them, which are dataclasses too
        filled = copy.copy(value)
        for key, one in list(value.items()):
            filled[key] = replace_leaves(one, kind, change)
        return filled
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                # past a frozen class's refusal
                object.__setattr__(
                    rebuilt, field.name, replace_leaves(getattr(value, field.name), kind, change)
                )
        return rebuilt
    return value


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first positional argument of a call, else the first by keyword, else None."""
    return args[0] if args else next(iter(kwargs.values()), None)


def flat_value(tensors: Sequence[tuple[str, Tensor]]) -> Any:
    """What a compiled program hands over, as a value: a tensor, or a list of all tensors in it."""
    return tensors[0][1] if len(tensors) == 1 else [tensor for _, tensor in tensors]


def rmap_tensor(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`value` with `fn(tensor)` in the place of every tensor in it.

    Tuples, named tuples, lists and mappings keep their type (of a plain dict the keys are changed
    too); a dataclass is rebuilt field by field. Anything else stays what it was.

    >>> import torch
    >>> rmap_tensor({"a": [torch.ones(2), None]}, lambda t: t.shape[0])
    {'a': [2, None]}
    """
    return replace_leaves(value, Tensor, fn)
