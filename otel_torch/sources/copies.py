"""Copies whole tensors as soon as they exist, because later modules may change them in place."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from otel_torch.process.console import say_once
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.torch_private import unobserved


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

    None if it cannot be copied, and while a CUDA graph is captured, which would record the copy.
    """
    if tensor.is_cuda and is_capturing():
        return None
    try:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_quantized:
            local = local.dequantize()
        if local.layout is not torch.strided:
            local = local.to_dense()
        return local.detach().clone(memory_format=torch.contiguous_format)
    except Exception:
        return None
