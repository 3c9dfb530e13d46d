"""Breaks fused operations up, so that two programs meet inside of them.

One program calls `scaled_dot_product_attention`, the other computes scores, softmax and their
product. The fused operation hides the scores. Here it is computed again by plain operations, for
the graph alone: the program keeps the result of the fused one, to the bit.

No random number is drawn: attention with dropout is broken up as far as its probabilities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from otel_torch import torch_private

# Norms and losses of which torch has decompositions. Functions of single elements and softmax stay
# whole, since there is nothing to choose inside of them, and so do products with a bias (`addmm`),
# unless ranks may have terms of the product: they are most of a model's work, which is done twice.
_BY_TORCH = (
    "native_layer_norm", "_fused_rms_norm", "native_group_norm", "nll_loss_forward",
    "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
# Larger results are not computed again: of 2**24 numbers of fp32, the four that are alive at a time
# take 256 MB, and recording may take 300 MB.
_MAX_NUMEL = 2**24

Decomposition = Callable[..., Any]


@functools.cache
def decomposition_of(operation: Any, *, with_products: bool = False) -> Decomposition | None:
    """Return a function that computes an operation by others; None if it is not broken up.

    It takes the arguments of the operation and raises nothing that it would not.

    Args:
        with_products: Break up products with a bias, too.
    """
    namespace, _, name = str(operation).partition(".")
    base = name.partition(".")[0]
    if namespace != "aten":
        return None
    if base in _ATTENTIONS:
        return functools.partial(_attention, operation)
    if base == "addmm" and with_products:
        return _product_with_bias
    if base in _BY_TORCH:
        return torch_private.decomposition_of(operation)
    return None


def is_too_large(operation: Any, args: Any) -> bool:
    """Return whether the parts of an operation are too large to compute again."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    largest = max((tensor.numel() for tensor in tensors), default=0)
    if "scaled_dot_product" in str(operation) and len(tensors) > 1:
        query, key = tensors[:2]
        largest = max(largest, query.numel() // max(1, query.shape[-1]) * key.shape[-2])
    return largest > _MAX_NUMEL


def _product_with_bias(
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> None:
    if beta == alpha == 1:
        torch.mm(left, right) + bias


def _attention(operation: Any, *args: Any, **kwargs: Any) -> None:
    def argument(name: str) -> Any:
        return torch_private.argument(operation, name, args, kwargs)

    query, key, value = args[:3]
    mask = argument("attn_mask")
    mask = argument("attn_bias") if mask is None else mask
    scale = argument("scale")
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if repeats > 1:  # a group of query heads has one key head
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    scores = torch.matmul(query, key.transpose(-2, -1))
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if argument("is_causal"):
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.tril().logical_not(), -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if not argument("dropout_p"):
        torch.matmul(weights, value)
