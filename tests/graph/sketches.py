"""Sketches and statistics of numpy arrays, as a recording would hold them: no torch needed."""

from __future__ import annotations

import functools
import zlib

import numpy as np

WIDTH = 64
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "int64": 0.0, "bool": 0.0}


@functools.cache
def projection(numel: int) -> np.ndarray:
    """Return random signs, shape (numel, WIDTH), whose columns estimate lengths."""
    generator = np.random.default_rng(zlib.crc32(str(numel).encode()))
    return generator.choice([-1.0, 1.0], (numel, WIDTH)) / np.sqrt(WIDTH)


def measure(array: np.ndarray) -> tuple[np.ndarray, dict[str, float], int]:
    """Return the sketch, the statistics and the number of NaN and Inf of an array."""
    flat = array.astype(np.float64).ravel()
    is_finite = np.isfinite(flat)
    count = int(is_finite.sum())
    if count < flat.size:
        finite = flat[is_finite]
        flat = np.where(is_finite, flat, 0.0)
    else:
        finite = flat
    sketch = flat @ projection(flat.size)
    sketch = sketch.astype(np.float32).astype(np.float64)
    if not count:
        return sketch, {}, flat.size
    mean = float(finite.sum()) / count
    squares = float(((finite - mean) ** 2).sum())
    statistics = {
        "abs_mean": float(np.abs(finite).sum()) / count,
        "mean": mean,
        "std": (squares / max(count - 1, 1)) ** 0.5,
        "min": float(finite.min()),
        "max": float(finite.max()),
    }
    return sketch, statistics, flat.size - count


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Round float32 numbers to those that bfloat16 holds, to nearest even."""
    bits = array.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(array), rounded.view(np.float32), array).astype(np.float32)
