"""Causes inside attention: the scale, the mask, the rotary layout, the order of heads.

Attention is computed again from the queries, keys and values before it, as the reference would and
with one thing changed. If one change yields the port's tensor, that change is the cause. This needs
whole tensors of the attention's neighborhood.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.diagnosis.attention_inputs import AttentionInputs, possible_inputs
from otel_torch.parity.diagnosis.attention_variants import Variant, attend, relative_error
from otel_torch.parity.diagnosis.clues import Clues
from otel_torch.parity.finding import Cause

Array = NDArray[Any]

# a variant that fits is this close (relative L2)
_EXACT = 1e-4
# the same as a multiple of the limit of its dtype; the two programs differ by much more
_ROUNDING, _FAR = 1.5, 5.0
# of the first batch entry: queries × keys × channels
_MOST_PRODUCTS = 2**28
# scales are searched up to e^5 times larger or smaller, to this relative precision
_WIDEST_SCALE, _SCALES_TRIED, _SAME_SCALE = 5.0, 41, 1e-7
_GOLDEN = (math.sqrt(5) - 1) / 2
# how close a scale comes to the number that it is named after
_SAME_NAME = 1e-3
_HEAD_SIZES = (64, 128, 32, 16, 8, 24, 40, 80, 96, 48, 72, 160, 256, 4)


class _Change(NamedTuple):
    """A variant, the kind of cause that it is, and how it differs from the usual one, in words."""

    kind: str
    text: str
    variant: Variant


def attention(clues: Clues) -> Cause | None:
    """The port computes attention in another way than the reference."""
    role, tensors = clues.role, clues.tensors
    if role is None or tensors is None or clues.elements is None:
        return None
    reference, port = map(_tokens, clues.elements)
    limit = max(_EXACT, _ROUNDING * clues.limit)
    if reference is None or port is None or relative_error(port, reference) < _FAR * limit:
        return None
    # a window of one of the two ends before the first token in which they differ
    window = _agreeing_tokens(reference, port, limit)
    for inputs in possible_inputs(clues, tensors.reference, reference.shape):
        for usual in _usual(inputs, reference.shape[1], window):
            made = attend(inputs, usual)
            if relative_error(made, reference) <= limit:
                return _changed(inputs, usual, reference, port, limit, "port", "reference")
            if relative_error(made, port) <= limit:
                return _changed(inputs, usual, port, reference, limit, "reference", "port")
    return None


def _changed(
    inputs: AttentionInputs,
    usual: Variant,
    right: Array,
    changed: Array,
    limit: float,
    subject: str,
    other: str,
) -> Cause | None:
    """Return the one change to the usual way that yields the changed tensor."""
    variants = [
        (relative_error(attend(inputs, variant), changed), kind, text.format(other=other))
        for kind, text, variant in _changes(usual, inputs, right, changed, limit)
    ]
    error, kind, text = min(variants)
    if error > limit:
        scale = _other_scale(inputs, usual, changed)
        if relative_error(attend(inputs, replace(usual, scale=scale)), changed) > limit:
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


def _agreeing_tokens(right: Array, changed: Array, limit: float) -> int:
    """Return how many tokens agree before the first one that does not; 0 if all do."""
    agrees = np.abs(changed - right).max(axis=1) <= limit * np.abs(right).max()
    return int(np.argmin(agrees))


def _usual(inputs: AttentionInputs, channels: int, window: int) -> Iterator[Variant]:
    """Yield how attention is usually computed, the likely ways first."""
    windows = (0, -1, window) if window else (0, -1)
    width = inputs.k.shape[1]
    sizes = [size for size in _HEAD_SIZES if channels % size == 0 and width % size == 0]
    table_sizes = {table.shape[1] for pair in inputs.tables for table in pair}
    sizes.sort(key=lambda size: size not in table_sizes and 2 * size not in table_sizes)
    if len(inputs.q) * len(inputs.k) * channels > _MOST_PRODUCTS:
        return
    for size in sizes:
        for rotary in ("halves", "pairs", "none"):
            for seen in windows:
                yield Variant(size, size**-0.5, rotary=rotary, window=seen)


def _changes(
    usual: Variant, inputs: AttentionInputs, right: Array, changed: Array, limit: float
) -> Iterator[_Change]:
    """Yield the usual way with one thing changed."""
    yield from _rotary_changes(usual)
    yield from _mask_changes(usual, right, changed, limit)
    if inputs.q.shape[1] != inputs.k.shape[1]:
        text = "repeats the key heads as 0 1 0 1, the {other} as 0 0 1 1"
        yield _Change("heads", text, replace(usual, repeat="tiled"))
    names = {"q": "queries", "k": "keys", "v": "values"}
    for order in map("".join, itertools.permutations("qkv")):
        if order != usual.order:
            used = ", ".join(names[part] for part in order)
            text = f"uses the {{other}}'s {used} as queries, keys, values"
            yield _Change("parts_exchanged", text, replace(usual, order=order))


def _rotary_changes(usual: Variant) -> Iterator[_Change]:
    layouts = {"halves": "halves", "pairs": "interleaved pairs"}
    if usual.rotary == "none":
        for layout, name in layouts.items():
            text = f"rotates queries and keys ({name}), the {{other}} does not"
            yield _Change("rope", text, replace(usual, rotary=layout))
        return
    other = "pairs" if usual.rotary == "halves" else "halves"
    names = layouts[other], layouts[usual.rotary]
    texts = {
        other: f"rotates {names[0]} of a head's channels, the {{other}} {names[1]}",
        "none": "has no rotary embedding",
        f"{usual.rotary} back": "rotates in the other direction",
        f"{usual.rotary} q": "rotates the queries only",
        f"{usual.rotary} k": "rotates the keys only",
    }
    for rotary, text in texts.items():
        yield _Change("rope", text, replace(usual, rotary=rotary))


def _mask_changes(usual: Variant, right: Array, changed: Array, limit: float) -> Iterator[_Change]:
    if usual.window == -1:
        yield _Change("mask", "is causal, the {other}'s is not", replace(usual, window=0))
        return
    yield _Change("mask", "has no causal mask", replace(usual, window=-1))
    if usual.window:
        for window in range(usual.window + 1, len(right)):
            text = f"sees the last {window} tokens, the {{other}}'s the last {usual.window}"
            yield _Change("mask", text, replace(usual, window=window))
    # the first token that sees less than all before it
    elif window := _agreeing_tokens(right, changed, limit):
        text = f"sees the last {window} tokens only"
        yield _Change("mask", text, replace(usual, window=window))


def _other_scale(inputs: AttentionInputs, usual: Variant, changed: Array) -> float:
    """Return the scale that comes closest to the changed tensor: a golden-section search."""

    def error(exponent: float) -> float:
        return relative_error(attend(inputs, replace(usual, scale=math.exp(exponent))), changed)

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
