"""Replace the tensors inside a structured value and leave everything else as it is.

tensor_tracker's `rmap_tensor` cannot rebuild a named tuple or a dataclass with slots, and raises
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
    """Return `value` with every instance of `kind` in it replaced by `change(instance)`.

    Tuples, named tuples, lists and mappings keep their type; keys of a plain dict are replaced too.
    Dataclasses are copied field by field, without calling `__init__`. Anything else is returned as
    it is, not copied.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(replace_leaves(item, kind, change) for item in value)  # type: ignore[attr-defined]
    if isinstance(value, (tuple, list)):
        changed = [replace_leaves(item, kind, change) for item in value]
        return type(value)(changed)
    if type(value) is dict:
        return {
            replace_leaves(key, kind, change): replace_leaves(item, kind, change)
            for key, item in value.items()
        }
    # before dataclasses: the outputs of Hugging Face models are both
    if isinstance(value, (dict, UserDict)):
        filled = copy.copy(value)
        for key, item in list(value.items()):
            filled[key] = replace_leaves(item, kind, change)
        return filled
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                changed = replace_leaves(getattr(value, field.name), kind, change)
                object.__setattr__(rebuilt, field.name, changed)  # works on frozen dataclasses too
        return rebuilt
    return value


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first positional argument of a call, else its first keyword argument, or None."""
    return args[0] if args else next(iter(kwargs.values()), None)


def join_tensors(tensors: Sequence[tuple[str, Tensor]]) -> Any:
    """Return the tensors of a compiled call as one value: the only tensor, or a list."""
    return tensors[0][1] if len(tensors) == 1 else [tensor for _, tensor in tensors]


def rmap_tensor(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Return `value` with every tensor in it replaced by `fn(tensor)`.

    Tuples, named tuples, lists and mappings keep their type; keys of a plain dict are replaced too.
    Dataclasses are rebuilt field by field. Anything else is returned as it is.

    Examples:
        >>> import torch
        >>> rmap_tensor({"a": [torch.ones(2), None]}, lambda t: t.shape[0])
        {'a': [2, None]}
    """
    return replace_leaves(value, Tensor, fn)
