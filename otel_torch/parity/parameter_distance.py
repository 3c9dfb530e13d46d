"""How far the numbers of two parameters are apart, by their sketches or statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from otel_torch.parity.call_graph import Parameter, Sketch
from otel_torch.parity.tolerance import SINGLE
from otel_torch.statistics.sketch_format import TURNS


def distance(reference: Sketch, port: Sketch) -> float:
    """Return the estimated L2 distance of two tensors, relative to the norm of the reference.

    It is inf if only the reference is zero.
    """
    difference = float(np.linalg.norm(reference - port))
    if difference == 0:
        return 0.0
    size = float(np.linalg.norm(reference))
    return difference / size if size else float("inf")


def parameter_distance(reference: Parameter, port: Parameter) -> float | None:
    if reference.numel != port.numel:
        return None
    if reference.sketch is None or port.sketch is None:
        return 0.0 if has_equal_statistics(reference.row, port.row, SINGLE) else None
    return distance(reference.sketch, port.sketch)


def has_equal_statistics(
    reference: dict[str, object], port: dict[str, object], limit: float
) -> bool:
    """Return whether the statistics in both rows are equal, whatever the order of elements."""
    compared = 0
    for name in ("abs_mean", "l2", "min", "max", "sum"):
        expected, actual = reference.get(name), port.get(name)
        if isinstance(expected, int | float) and isinstance(actual, int | float):
            compared += 1
            # a sum of large elements may be close to zero
            abs_sum = _abs_sum(reference) if name == "sum" else 0.0
            scale = max(abs(expected), abs(actual), abs_sum)
            if abs(expected - actual) > limit * scale:
                return False
    return compared > 0


def is_padded(reference: Parameter, port: Parameter) -> bool:
    """Return whether one is the other with appended rows of zeros (a rounded-up vocabulary)."""
    squares = _squares(reference), _squares(port)
    is_same_norm = abs(squares[0] - squares[1]) <= SINGLE * max(squares)
    return reference.shape[1:] == port.shape[1:] and is_same_norm


def _abs_sum(row: dict[str, object]) -> float:
    mean, shape = row.get("abs_mean"), row.get("shape")
    if not isinstance(mean, int | float) or not isinstance(shape, list):
        return 0.0
    return float(mean) * math.sqrt(math.prod(shape))


def log_norm(parameter: Parameter) -> int:
    """Return the log of the norm in steps of about 1.5 %; equal parameters differ by at most 1."""
    squares = _squares(parameter)
    return round(32 * math.log(squares)) if squares > 0 and math.isfinite(squares) else -(10**6)


def _squares(parameter: Parameter) -> float:
    norm = parameter.row.get("l2")
    return float(norm) ** 2 if isinstance(norm, int | float) else float("nan")


def can_add_up(parts: Iterable[Parameter], whole: Parameter, limit: float) -> bool:
    total = sum(_squares(part) for part in parts)
    return abs(total - _squares(whole)) <= 2 * limit * _squares(whole)


def stacked_row_sketch(parts: Sequence[Parameter]) -> Sketch | None:
    """Return the row sketch of the concatenated parts."""
    total, rows = np.zeros(32, dtype=np.complex128), 0
    for part in parts:
        if part.row_sketch is None:
            return None
        half = part.row_sketch[:32] + 1j * part.row_sketch[32:]
        total = total + half * np.exp(2j * np.pi * np.mod(rows * np.array(TURNS), 1.0))
        rows += part.shape[0] if part.shape else 1
    return np.concatenate((total.real, total.imag))


def fused_error(parts: Sequence[Parameter], whole: Parameter) -> float | None:
    stacked = stacked_row_sketch(parts)
    if stacked is None or whole.row_sketch is None:
        return None
    return distance(whole.row_sketch, stacked)


def ordered_parts(parts: Sequence[Parameter], whole: Parameter) -> list[Parameter] | None:
    """Return the parts in the order in which they make the whole, or None."""

    def error_of(order: Sequence[Parameter]) -> float:
        error = fused_error(order, whole)
        return float("inf") if error is None else error

    best = min(itertools.permutations(parts), key=error_of)
    return list(best) if error_of(best) < 0.02 else None
