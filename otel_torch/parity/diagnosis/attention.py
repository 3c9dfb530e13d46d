"""Causes inside attention: the scale, the mask, the rotary layout, the order of heads.

Attention is computed again from the queries, keys and values before it, as the reference would and
with one thing changed. If one change yields the port's tensor, that change is the cause. This needs
whole tensors of the attention's neighborhood.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.call_graph import Role
from otel_torch.parity.diagnosis.clues import Clues, siblings_before
from otel_torch.parity.diagnosis.stored_tensors import StoredTensors
from otel_torch.parity.finding import Cause

Array = NDArray[Any]

# a variant that fits is this close (relative L2)
_EXACT = 1e-4
# the same as a multiple of the limit of its dtype; the two programs differ by much more
_ROUNDING, _FAR = 1.5, 5.0
# squares of a recorded cosine and sine add up to 1 within this, also in bf16
_ONE = 1e-2
# of the first batch entry: queries × keys × channels
_MOST_PRODUCTS = 2**28
# scales are searched up to e^5 times larger or smaller, to this relative precision
_WIDEST_SCALE, _SCALES_TRIED, _SAME_SCALE = 5.0, 41, 1e-7
_GOLDEN = (math.sqrt(5) - 1) / 2
# how close a scale comes to the number that it is named after
_SAME_NAME = 1e-3
_HEAD_SIZES = (64, 128, 32, 16, 8, 24, 40, 80, 96, 48, 72, 160, 256, 4)


@dataclass(frozen=True)
class _Variant:
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


@dataclass(frozen=True)
class _Inputs:
    """The tensors before the attention, of the first batch entry, and rotary tables if recorded.

    q, k, v: shape (tokens, channels). tables: pairs of cos and sin, shape (tokens, head size).
    """

    q: Array
    k: Array
    v: Array
    tables: tuple[tuple[Array, Array], ...]


def attention(clues: Clues) -> Cause | None:
    """The port computes attention in another way than the reference."""
    role, tensors = clues.role, clues.tensors
    if role is None or tensors is None or clues.elements is None:
        return None
    reference, port = map(_tokens, clues.elements)
    limit = max(_EXACT, _ROUNDING * clues.limit)
    if reference is None or port is None or _error(port, reference) < _FAR * limit:
        return None
    for inputs in _possible_inputs(clues, tensors.reference, reference.shape):
        for usual in _usual(inputs, reference.shape[1]):
            made = _attend(inputs, usual)
            if _error(made, reference) <= limit:
                return _changed(inputs, usual, reference, port, limit, "port", "reference")
            if _error(made, port) <= limit:
                return _changed(inputs, usual, port, reference, limit, "reference", "port")
    return None


def _changed(
    inputs: _Inputs,
    usual: _Variant,
    right: Array,
    changed: Array,
    limit: float,
    subject: str,
    other: str,
) -> Cause | None:
    """Return the one change to the usual way that yields the changed tensor."""
    variants = [
        (_error(_attend(inputs, variant), changed), kind, text.format(other=other))
        for kind, text, variant in _changes(usual, inputs, right, changed, limit)
    ]
    error, kind, text = min(variants)
    if error > limit:
        scale = _other_scale(inputs, usual, changed)
        if _error(_attend(inputs, replace(usual, scale=scale)), changed) > limit:
            return None
        names = _scale_name(scale), _scale_name(usual.scale)
        kind, text = "attention_scale", f"is scaled by {names[0]}, the {other}'s by {names[1]}"
    return Cause(kind, True, f"the {subject}'s attention {text}")


def _tokens(array: Array) -> Array | None:
    """Return the first batch entry as (tokens, channels), None if there are more axes."""
    if array.ndim == 3:
        first: Array = array[0]
        return first
    return array if array.ndim == 2 else None


def _possible_inputs(
    clues: Clues, tensors: StoredTensors, shape: tuple[int, ...]
) -> Iterator[_Inputs]:
    """Yield queries, keys and values among the tensors of the same module before this one."""
    assert clues.role is not None
    role = clues.role
    tokens = shape[0]
    call = role.call
    before = siblings_before(call, role.time) if role.side == "input" else []
    if not before and role.side == "output":
        before = [child for inner in call.children for child in inner.outputs]
        before.sort(key=lambda output: output.time)
        before = [output for output in before if output.time < role.time]
    given = _latest_versions(before)
    flat = (_flat(tensors.of_role(output), tokens) for output in given)
    arrays = [array for array in flat if array is not None]
    tables = _rotary_tables(clues, tensors, tokens)
    for array in arrays:  # a fused projection
        if array.shape[1] == 3 * shape[1]:
            q, k, v = np.split(array, 3, axis=1)
            yield _Inputs(q, k, v, tables)
    for first, second, third in itertools.combinations(arrays, 3):
        if first.shape[1] == shape[1] and second.shape == third.shape:
            yield _Inputs(first, second, third, tables)


def _latest_versions(roles: list[Role]) -> list[Role]:
    """Leave out what a later one of them was computed from, such as queries before their norm."""
    consumed = {
        given.value for role in roles for given in role.call.inputs if given.value is not role.value
    }
    return [role for role in roles if role.value not in consumed]


def _flat(array: Array | None, tokens: int) -> Array | None:
    """Return (tokens, channels) of the first batch entry, float64."""
    if array is None or array.dtype.kind != "f" or array.ndim < 2:
        return None
    first = array if array.ndim == 2 and array.shape[0] == tokens else array[0]
    if first.ndim == 3 and first.shape[1] == tokens and first.shape[0] != tokens:
        first = first.transpose(1, 0, 2)  # heads before tokens
    if first.ndim < 2:
        return None
    channels: Array = first.reshape(first.shape[0], -1).astype(np.float64)
    return channels


def _rotary_tables(
    clues: Clues, tensors: StoredTensors, tokens: int
) -> tuple[tuple[Array, Array], ...]:
    """Return recorded pairs of cos and sin: tensors of one call whose squares add up to 1."""
    assert clues.alignment is not None and clues.role is not None
    time = clues.role.time
    tables: list[tuple[Array, Array]] = []
    seen: set[int] = set()
    for call in clues.alignment.reference.calls:
        if call.entered > time or len(tables) >= 2:
            break
        for first, second in itertools.pairwise((*call.inputs, *call.outputs)):
            if first.value.numel != second.value.numel or first.value.numel % tokens:
                continue
            if id(first.value) in seen or first.side != second.side:
                continue
            seen.add(id(first.value))
            cos, sin = (_rows(tensors.of_role(role)) for role in (first, second))
            if cos is None or sin is None or cos.shape != sin.shape or len(cos) < tokens:
                continue
            if np.allclose(cos**2 + sin**2, 1, atol=_ONE):
                tables.append((cos[:tokens], sin[:tokens]))
    return tuple(tables)


def _rows(array: Array | None) -> Array | None:
    if array is None or array.dtype.kind != "f" or not array.ndim:
        return None
    rows: Array = array.astype(np.float64).reshape(-1, array.shape[-1])
    return rows


def _usual(inputs: _Inputs, channels: int) -> Iterator[_Variant]:
    """Yield how attention is usually computed, the likely ways first."""
    width = inputs.k.shape[1]
    sizes = [size for size in _HEAD_SIZES if channels % size == 0 and width % size == 0]
    table_sizes = {table.shape[1] for pair in inputs.tables for table in pair}
    sizes.sort(key=lambda size: size not in table_sizes and 2 * size not in table_sizes)
    if len(inputs.q) * len(inputs.k) * channels > _MOST_PRODUCTS:
        return
    for size in sizes:
        for rotary in ("halves", "pairs", "none"):
            for window in (0, -1):
                yield _Variant(size, size**-0.5, rotary=rotary, window=window)


def _changes(
    usual: _Variant, inputs: _Inputs, reference: Array, port: Array, limit: float
) -> Iterator[tuple[str, str, _Variant]]:
    """Yield (kind, description, variant) with one thing changed."""
    other = {"halves": "pairs", "pairs": "halves"}
    words = {"halves": "halves", "pairs": "interleaved pairs"}
    if usual.rotary != "none":
        layout = other[usual.rotary]
        yield (
            "rope",
            f"rotates {words[layout]} of a head's channels, the {{other}} {words[usual.rotary]}",
            replace(usual, rotary=layout),
        )
        yield "rope", "has no rotary embedding", replace(usual, rotary="none")
        yield (
            "rope",
            "rotates in the other direction",
            replace(usual, rotary=f"{usual.rotary} back"),
        )
        for part, name in (("q", "queries"), ("k", "keys")):
            yield (
                "rope",
                f"rotates the {name} only",
                replace(usual, rotary=f"{usual.rotary} {part}"),
            )
    else:
        for layout, name in words.items():
            yield (
                "rope",
                f"rotates queries and keys ({name}), the {{other}} does not",
                replace(usual, rotary=layout),
            )
    if usual.window == -1:
        yield "mask", "is causal, the {other}'s is not", replace(usual, window=0)
    else:
        yield "mask", "has no causal mask", replace(usual, window=-1)
    agree = np.abs(port - reference).max(axis=1) <= limit * np.abs(reference).max()
    if usual.window == 0 and not agree.all():
        window = int(np.flatnonzero(~agree)[0])
        if window:
            yield "mask", f"sees the last {window} tokens only", replace(usual, window=window)
    heads, key_heads = (array.shape[1] // usual.head_size for array in (inputs.q, inputs.k))
    if heads != key_heads:
        yield (
            "heads",
            "repeats the key heads as 0 1 0 1, the {other} as 0 0 1 1",
            replace(usual, repeat="tiled"),
        )
    for order in map("".join, itertools.permutations("qkv")):
        if order != "qkv":
            names = {"q": "queries", "k": "keys", "v": "values"}
            used = ", ".join(names[part] for part in order)
            yield (
                "parts_exchanged",
                f"uses the {{other}}'s {used} as queries, keys, values",
                replace(usual, order=order),
            )


def _other_scale(inputs: _Inputs, usual: _Variant, changed: Array) -> float:
    """Return the scale that comes closest to the changed tensor: a golden-section search."""

    def error(exponent: float) -> float:
        return _error(_attend(inputs, replace(usual, scale=math.exp(exponent))), changed)

    center = math.log(usual.scale)
    grid = np.linspace(center - _WIDEST_SCALE, center + _WIDEST_SCALE, _SCALES_TRIED)
    best = int(np.argmin([error(exponent) for exponent in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, _SCALES_TRIED - 1)]
    while high - low > _SAME_SCALE:
        first, second = high - (high - low) * _GOLDEN, low + (high - low) * _GOLDEN
        low, high = (low, second) if error(first) < error(second) else (first, high)
    return math.exp((low + high) / 2)


def _scale_name(scale: float) -> str:
    """Return a scale as people write it.

    >>> _scale_name(0.125), _scale_name(1.0), _scale_name(0.3)
    ('1/√64', '1 (no scale)', '0.3')
    """
    if abs(scale - 1) < _SAME_NAME:
        return "1 (no scale)"
    size = scale**-2
    is_root = size > 1 and abs(size - round(size)) < _SAME_NAME * size
    return f"1/√{round(size)}" if is_root else f"{scale:.4g}"


def _attend(inputs: _Inputs, variant: _Variant) -> Array | None:
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


def _error(made: Array | None, result: Array) -> float:
    """Return the relative L2 distance, infinite if the shapes differ."""
    if made is None or made.shape != result.shape:
        return math.inf
    return float(np.linalg.norm(made - result)) / (float(np.linalg.norm(result)) or 1.0)
