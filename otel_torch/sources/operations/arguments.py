"""The arguments of an operation as JSON: tensors as the numbers of their values.

>>> to_json([1, torch.float32, float("inf")], lambda tensor: None)
[1, 'torch.float32', 'Infinity']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from otel_torch.records import json_safe

# the text of these objects has an address in it, or all their elements
_NAMELESS = (torch.Generator, torch.ScriptObject, torch.UntypedStorage, torch.TypedStorage)
_KEPT = (bool, int, str, type(None))


def describe_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], number_of: Callable[[torch.Tensor], int | None]
) -> list[Any]:
    """Return the positional arguments, and behind them the keyword arguments as one object.

    In that object the argument `value` is called `value=`: `{"value": 1}` is a tensor.

    Args:
        number_of: returns the number of a tensor's value; None if it has none yet.
    """
    described = [to_json(value, number_of) for value in args]
    named = {
        "value=" if name == "value" else name: to_json(value, number_of)
        for name, value in kwargs.items()
        if value is not None
    }
    return [*described, named] if named else described


def to_json(value: Any, number_of: Callable[[torch.Tensor], int | None]) -> Any:
    kind = type(value)
    if kind in _KEPT:
        return value
    if kind is float:
        return json_safe(value)
    if isinstance(value, torch.Tensor):
        return {"value": number_of(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item, number_of) for item in value]
    if isinstance(value, _NAMELESS):
        return kind.__name__
    return str(value)
