"""Copies of whole tensors, made when they exist: the next module may change them in place."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from otel_torch.console import say_once
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.torch_private import unobserved


def can_write_tensors() -> bool:
    """Whether safetensors is installed, without which no tensor is kept; says so where it is not."""
    if find_spec("safetensors") is None:
        say_once(
            "OTEL_TORCH_TENSORS needs safetensors, so no tensor is written: pip install 'otel-torch[tensors]'"
        )
        return False
    return True


@unobserved
def copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A dense copy of the tensor (of a DTensor, of its local shard) on its device; None where it
    cannot be had, and while a CUDA graph is captured: it would become a part of the graph.
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
