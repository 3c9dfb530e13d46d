"""How many floating-point operations an operator takes: torch's own table, and the products that
are missing in it.

On a CPU attention is one operator that torch's counter does not know, and so is a recurrent layer:
most of a video transformer's work would be missing. Its formula for other attention refuses fewer
heads of keys than of queries in torch 2.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Of tensors batch x heads x length x width; a causal mask saves nothing, as in torch's
    counter.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _matrix_by_vector(matrix: torch.Tensor, vector: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _recurrent(inputs: torch.Tensor, weights: Iterable[torch.Tensor]) -> int:
    """Of length x batch x width: every weight is multiplied at each of the places."""
    return (
        2
        * inputs.shape[0]
        * inputs.shape[1]
        * sum(weight.numel() for weight in weights if weight.dim() == 2)
    )


_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_attention_math_for_mps": _attention,
    "mv": _matrix_by_vector,
    "dot": _matrix_by_vector,
    "mkldnn_rnn_layer": lambda inputs, *weights, **_: _recurrent(inputs, weights[:2]),
    "_cudnn_rnn": lambda inputs, weights, *_, **__: _recurrent(inputs, weights),
    "addmv": lambda start, matrix, vector, **_: _matrix_by_vector(matrix, vector),
}
# those that this torch has
_OURS = {
    getattr(_aten, name): formula for name, formula in _FORMULAS.items() if hasattr(_aten, name)
}


def knows(operator: Any) -> bool:
    """Whether there is a formula for an operator, so that it need not be taken apart."""
    return operator.overloadpacket in _OURS or operator.overloadpacket in flop_registry


def count(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Operations of a call, 0 for what is no product, None where they cannot be told: sizes depend
    on the data.
    """
    packet = getattr(operator, "overloadpacket", None)
    try:
        if packet in _OURS:
            found = _OURS[packet](*args, **kwargs)
        elif packet in flop_registry:
            found = flop_registry[packet](*args, **kwargs, out_val=result)
        else:
            return 0
    except Exception:  # torch's formulas assert shapes; the forward itself has gone well
        return None
    return found if type(found) is int else None
