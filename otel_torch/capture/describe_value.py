"""What a module returned, in a few words: dtypes and shapes instead of numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from otel_torch.capture.disk_spill import SpilledTensor

_MAX_LENGTH = 120


def describe_value(value: Any) -> str:
    """Return a value by the dtypes and shapes of its tensors.

    >>> import torch
    >>> describe_value((torch.ones(2, 3), None))
    '(float32[2, 3], None)'
    """
    if isinstance(value, (Tensor, SpilledTensor)):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, dict):
        items = (f"{key}: {describe_value(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe_value, value))})"
    if hasattr(value, "__dataclass_fields__"):
        fields = (getattr(value, name, None) for name in value.__dataclass_fields__)
        return f"{type(value).__name__}({', '.join(map(describe_value, fields))})"
    if isinstance(value, (type(None), bool, int, float)):
        return repr(value)
    return type(value).__name__


def describe_briefly(value: Any) -> str:
    """Return the start of the description, for one line."""
    text = describe_value(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"
