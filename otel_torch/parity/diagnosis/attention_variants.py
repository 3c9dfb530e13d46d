"""Computes attention in NumPy, as one of several variants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.diagnosis.attention_inputs import AttentionInputs

Array = NDArray[Any]

# of the paper that introduced rotary embeddings; a model with another one is not recomputed
_USUAL_BASE = 10000.0


@dataclass(frozen=True)
class Variant:
    """How attention is computed.

    Attributes:
        order: Which of the three tensors is used as query, key and value.
        rotary: `none`, `halves` or `pairs`; `halves back` in the other direction; `halves q` and
            `halves k` of one of the two only.
            scale: Of the products of queries and keys.
        window: How many keys a query may see, itself included; 0 for all before it, -1 for all.
        repeat: Whether keys of grouped heads are `grouped` (0 0 1 1) or `tiled` (0 1 0 1).
    """

    head_size: int
    scale: float
    order: str = "qkv"
    rotary: str = "none"
    window: int = -1
    repeat: str = "grouped"


def attend(inputs: AttentionInputs, variant: Variant) -> Array | None:
    """Return the output, shape (tokens, channels), or None if the shapes do not fit."""
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    q, k, v = (tensors[part] for part in variant.order)
    size = variant.head_size
    if k.shape != v.shape or q.shape[1] % size or k.shape[1] % size:
        return None
    q, k, v = (array.reshape(len(array), -1, size).transpose(1, 0, 2) for array in (q, k, v))
    if q.shape[0] % k.shape[0]:
        return None
    rotated = _rotate(q, k, inputs.tables, variant.rotary)
    if rotated is None:
        return None
    q, k = rotated
    times = q.shape[0] // k.shape[0]
    if times > 1:
        repeat = np.repeat if variant.repeat == "grouped" else _tile
        k, v = (repeat(array, times, axis=0) for array in (k, v))
    logits = q @ k.transpose(0, 2, 1) * variant.scale
    if variant.window >= 0:
        queries, keys = logits.shape[1:]
        distance = np.arange(queries)[:, None] + (keys - queries) - np.arange(keys)[None, :]
        hidden = distance < 0
        if variant.window:
            hidden |= distance >= variant.window
        logits = np.where(hidden, -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    result: Array = (weights @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)
    return result


def _tile(array: Array, times: int, axis: int) -> Array:
    return np.concatenate([array] * times, axis=axis)


def _rotate(
    q: Array, k: Array, tables: tuple[tuple[Array, Array], ...], rotary: str
) -> tuple[Array, Array] | None:
    """Return rotated queries and keys, shape (heads, tokens, head size)."""
    layout, _, change = rotary.partition(" ")
    if layout == "none":
        return q, k
    size = q.shape[-1]
    table = _table_for(tables, size, layout)
    if table is None and not tables:  # computed within the attention
        table = _usual_table(size, max(q.shape[1], k.shape[1]))
    if table is None or len(table[0]) < max(q.shape[1], k.shape[1]):
        return None
    cos, sin = table
    sin = -sin if change == "back" else sin
    turned = [
        array if change in ("q", "k") and change != part else _turn(array, cos, sin, layout)
        for part, array in (("q", q), ("k", k))
    ]
    return turned[0], turned[1]


def _turn(array: Array, cos: Array, sin: Array, layout: str) -> Array:
    tokens, half = array.shape[1], array.shape[-1] // 2
    cos, sin = cos[:tokens], sin[:tokens]
    first, second = (
        (array[..., :half], array[..., half:])
        if layout == "halves"
        else (array[..., ::2], array[..., 1::2])
    )
    turned = first * cos - second * sin, second * cos + first * sin
    if layout == "halves":
        return np.concatenate(turned, axis=-1)
    return np.stack(turned, axis=-1).reshape(array.shape)


def _table_for(
    tables: tuple[tuple[Array, Array], ...], size: int, layout: str
) -> tuple[Array, Array] | None:
    """Return cos and sin of the angles of a head, shape (tokens, head size / 2)."""
    for cos, sin in tables:
        if cos.shape[1] == size // 2:
            return cos, sin
        if cos.shape[1] == size:
            # each angle stands twice: one half after the other, or side by side
            if np.allclose(cos[:, : size // 2], cos[:, size // 2 :]):
                return cos[:, : size // 2], sin[:, : size // 2]
            return cos[:, ::2], sin[:, ::2]
    return None


def _usual_table(size: int, tokens: int) -> tuple[Array, Array]:
    """Return cos and sin of the angles that most models have."""
    angles = np.arange(tokens)[:, None] * _USUAL_BASE ** (-np.arange(0, size, 2) / size)
    return np.cos(angles), np.sin(angles)


def relative_error(made: Array | None, result: Array) -> float:
    """Return the relative L2 distance, infinite if the shapes differ."""
    if made is None or made.shape != result.shape:
        return math.inf
    return float(np.linalg.norm(made - result)) / (float(np.linalg.norm(result)) or 1.0)
