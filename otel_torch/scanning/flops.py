"""Count the floating-point operations of an operator: torch's table of formulas, and the operators
that are missing in it.

On a CPU, attention and recurrent layers are single operators that torch's counter does not know:
most of a video transformer's work would be missing.
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
    """Count attention on tensors of batch x heads x length x width.

    A causal mask saves nothing, as in torch's counter.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _matrix_vector(matrix: torch.Tensor, vector: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _recurrent(inputs: torch.Tensor, weights: Iterable[torch.Tensor]) -> int:
    """Count a recurrent layer on length x batch x width: every weight is used at each position."""
    positions = inputs.shape[0] * inputs.shape[1]
    return 2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2)


_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_attention_math_for_mps": _attention,
    "mv": _matrix_vector,
    "dot": _matrix_vector,
    "mkldnn_rnn_layer": lambda inputs, *weights, **_: _recurrent(inputs, weights[:2]),
    "_cudnn_rnn": lambda inputs, weights, *_, **__: _recurrent(inputs, weights),
    "addmv": lambda start, matrix, vector, **_: _matrix_vector(matrix, vector),
}
# not every version of torch has all of them
_ADDED_FORMULAS = {
    getattr(_aten, name): formula for name, formula in _FORMULAS.items() if hasattr(_aten, name)
}


def has_formula(operator: Any) -> bool:
    """Return whether an operator has a formula, so that it need not be decomposed."""
    packet = operator.overloadpacket
    return packet in _ADDED_FORMULAS or packet in flop_registry


def count_flops(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int | None:
    """Return the operations of a call: 0 for an operator without a formula, None if sizes depend
    on the data.
    """
    packet = getattr(operator, "overloadpacket", None)
    try:
        if packet in _ADDED_FORMULAS:
            flops = _ADDED_FORMULAS[packet](*args, **kwargs)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        else:
            return 0
    except Exception:  # torch's formulas assert shapes; the operator itself has run
        return None
    return flops if type(flops) is int else None
