"""Statistics of a whole tensor from those of its parts, or of the terms of a sum."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import sketch_bytes

ShardColumns = dict[str, list[Any]]  # field -> its value in each part

STATISTICS = (
    "numel",
    "abs_mean",
    "sum",
    "min",
    "max",
    "std",
    "l2",
    "rms",
    "mean",
    "nonfinite",
    "zeros",
    "sketch",
    "row_sketch",
)
# what remains right of a sum that is multiplied, and all that a factor multiplies
LINEAR = ("sum", "mean")
SCALING = (*LINEAR, "abs_mean", "min", "max", "std", "l2", "rms")


def merge_statistics(
    parts: ShardColumns, sizes: list[int], numel: int, is_sum: bool
) -> dict[str, Any]:
    """Return the statistics of the whole tensor that follow from those of its parts.

    The terms of a sum determine only the linear statistics.

    Args:
        parts: By statistic; None where a part does not have it.
        sizes: The elements of each part.
        numel: The elements of the whole.
        is_sum: Whether the parts are terms of a sum.
    """
    complete = {
        name: parts[name] for name in STATISTICS if name in parts and None not in parts[name]
    }
    merged: dict[str, Any] = {"numel": numel}
    if "sum" in complete:
        merged["sum"] = float(np.sum(complete["sum"]))
        merged["mean"] = merged["sum"] / max(numel, 1)
    for name in ("nonfinite",) if is_sum else ("nonfinite", "zeros"):
        if name in complete:
            merged[name] = sum(complete[name])
    for name in ("sketch", "row_sketch"):
        sketch = _add_sketches(complete.get(name, []))
        if sketch is not None:
            merged[name] = sketch
    if not is_sum:
        merged |= _merge_nonlinear(complete, np.array(sizes, dtype=np.float64), numel)
    return merged


def encode_sketch(values: np.ndarray[Any, Any]) -> str:
    """Encode a sketch for a recording."""
    return b64encode(values.astype("<f4").tobytes()).decode("ascii")


def _add_sketches(texts: list[str]) -> str | None:
    sketches = [sketch_bytes(text) for text in texts]
    if not sketches or sketches[0] is None:
        return None
    if any(sketch is None or len(sketch) != len(sketches[0]) for sketch in sketches):
        return None
    content = b"".join(sketch or b"" for sketch in sketches)
    values = np.frombuffer(content, "<f4").reshape(len(sketches), -1)
    return encode_sketch(values.sum(axis=0, dtype=np.float64))


def _merge_nonlinear(
    complete: ShardColumns, sizes: np.ndarray[Any, Any], numel: int
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    if "abs_mean" in complete:
        merged["abs_mean"] = float(np.dot(complete["abs_mean"], sizes)) / max(numel, 1)
    if "l2" in complete or "rms" in complete:
        if "l2" in complete:
            squares = np.square(complete["l2"])
        else:
            squares = np.square(complete["rms"]) * sizes
        merged["l2"] = float(np.sqrt(squares.sum()))
        merged["rms"] = float(np.sqrt(squares.sum() / max(numel, 1)))
    if "std" in complete and "mean" in complete and numel > 1:
        merged["std"] = _merge_std(complete["std"], complete["mean"], sizes, numel)
    for name, extreme in (("min", np.min), ("max", np.max)):
        if name in complete:
            merged[name] = float(extreme(complete[name]))
    return merged


def _merge_std(
    stds: list[float], means: list[float], sizes: np.ndarray[Any, Any], numel: int
) -> float:
    """Return the standard deviation of all elements: variance within the parts plus between them.

    >>> round(_merge_std([1.0, 1.0], [0.0, 2.0], np.array([2.0, 2.0]), 4), 4)
    1.4142
    """
    deviations = np.array(means) - np.dot(means, sizes) / numel
    squares = np.square(stds) * (sizes - 1) + sizes * np.square(deviations)
    return float(np.sqrt(squares.sum() / (numel - 1)))
