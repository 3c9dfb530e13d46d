"""Copies whole tensors as soon as they exist, because later modules may change them in place."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from otel_torch.process.console import say_once
from otel_torch.statistics.unwrap_tensor import unwrap
from otel_torch.torch_private import unobserved

# A sparse tensor with more elements is not made dense.
_DENSE_MAX = 2**27


def can_write_tensors() -> bool:
    """Return whether safetensors is installed; log how to install it if not."""
    if find_spec("safetensors") is None:
        say_once(
            "OTEL_TORCH_TENSORS needs safetensors, so no tensor is written: "
            "pip install 'otel-torch[tensors]'"
        )
        return False
    return True


@unobserved
def copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a dense copy of a tensor, on its device; of a DTensor, a copy of its local shard.

    None if its values cannot be read (`unwrap`) or written to a file.
    """
    try:
        values = _dense_values(tensor)
        if values is None or not _is_writable(values.dtype):
            return None
        return values.detach().clone(memory_format=torch.contiguous_format)
    except Exception:
        return None


def _dense_values(tensor: torch.Tensor) -> torch.Tensor | None:
    unwrapped = unwrap(tensor)
    values = unwrapped.values
    if values is None or tensor.is_nested:
        return None
    if tensor.layout is not torch.strided:
        return tensor.to_dense() if unwrapped.numel <= _DENSE_MAX else None
    return values.dequantize() if values.is_quantized else values


@functools.cache
def _is_writable(dtype: torch.dtype) -> bool:
    """Return whether safetensors has a name for a dtype."""
    from safetensors.torch import save

    try:
        save({"": torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)})
    except Exception:
        return False
    return True
