"""Causes that change each element by itself: another precision, dropout, a clamp.

The extremes of a tensor are recorded exactly, so they show what happened to two of its elements
even if no elements were kept.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.call_graph import Role
from otel_torch.parity.diagnosis.clues import Clues
from otel_torch.parity.finding import Cause

Floats = NDArray[np.float64]

# dtype -> explicit bits of its significand, the coarsest first
_PRECISIONS = {"float8_e5m2": 2, "float8_e4m3fn": 3, "bfloat16": 7, "float16": 10}
# the relative L2 error of a rounding, as a part of half a unit in the last place: 0.29 to 0.58,
# estimated by a sketch
_LEAST_ROUNDING, _MOST_ROUNDING = 0.25, 0.65
# two numbers that rounding alone keeps apart (relative)
_SAME = 1e-5
_FEWEST = 8
# 1, and the usual number of training steps, by which diffusion models multiply a noise level
_SCALES = (1.0, 1000.0)
# so far from 1 may the ratio of two sums of squares be by chance, times the root of their number
_CHANCE = 8.0
# the part of the elements that are rounded as usual; the smallest ones lose more bits
_MOST = 0.9


def round_to(values: Floats, bits: int) -> Floats:
    """Round to a number of explicit bits of the significand, to even.

    >>> round_to(np.array([1.0, 1.001, 3.14159]), 7)
    array([1.      , 1.      , 3.140625])
    """
    fraction, exponent = np.frexp(values)
    scale = 2.0 ** (bits + 1)
    return np.ldexp(np.round(fraction * scale) / scale, exponent)


def rounded(clues: Clues) -> Cause | None:
    """The port's numbers are the reference's, rounded to another dtype."""
    is_rounded = _are_extremes_rounded if clues.elements is None else _is_rounded_everywhere
    dtypes = [
        dtype
        for dtype, bits in _PRECISIONS.items()
        if _are_few_rounded(clues, bits) or is_rounded(clues, bits)
    ]
    if len(dtypes) != 1:
        return None
    return Cause("rounded", True, f"{clues.subject} is the reference's rounded to {dtypes[0]}")


def _are_few_rounded(clues: Clues, bits: int) -> bool:
    """Return whether each of a few known numbers is the reference's rounded, bit by bit.

    They may have been rounded before they were multiplied, as the noise level of a diffusion model
    is by its steps of training.
    """
    sides = _few_numbers(clues)
    if sides is None:
        return False
    reference, port = sides
    for scale in _SCALES:
        before = reference / scale
        after = np.asarray(round_to(before, bits) * scale)
        is_coarser = not np.isclose(reference, after, rtol=2.0**-20, atol=0).any()
        if is_coarser and np.allclose(port, after, rtol=2.0**-22, atol=0):
            return True
    return False


def _few_numbers(clues: Clues) -> tuple[Floats, Floats] | None:
    """Return the distinct elements of two tensors if these are few and known, else None."""
    if clues.elements is not None and not np.iscomplexobj(clues.elements[0]):
        reference, port = (side.ravel() for side in clues.elements)
    elif clues.reference.numel <= len(clues.reference.extremes) or all(
        low == high for low, high in (clues.reference.extremes, clues.port.extremes)
    ):
        reference, port = np.array(clues.reference.extremes), np.array(clues.port.extremes)
    else:
        return None
    pairs = np.unique(np.stack([reference, port]), axis=1)
    if pairs.shape[1] >= _FEWEST or not (np.isfinite(pairs).all() and pairs.all()):
        return None
    return pairs[0], pairs[1]


def _is_rounded_everywhere(clues: Clues, bits: int) -> bool:
    elements = clues.elements
    if elements is None or np.iscomplexobj(elements[0]) or elements[0].size < _FEWEST:
        return False
    reference, port = elements
    if not np.array_equal(round_to(port, bits), port):
        return False
    if np.array_equal(round_to(reference, bits), reference):
        return False
    step = np.abs(reference) * 2.0**-bits
    return bool((np.abs(port - reference) <= step * 0.51).mean() > _MOST)


def _are_extremes_rounded(clues: Clues, bits: int) -> bool:
    reference = np.array(clues.reference.extremes)
    port = np.array(clues.port.extremes)
    if not (np.isfinite(reference).all() and np.isfinite(port).all()):
        return False
    if np.isclose(reference, round_to(reference, bits), rtol=2.0**-20, atol=0).any():
        return False
    if not np.array_equal(port, round_to(reference, bits)):
        return False
    error = _relative_error(clues)
    half_unit = 2.0 ** -(bits + 1)
    return _LEAST_ROUNDING * half_unit <= error <= _MOST_ROUNDING * half_unit


def _relative_error(clues: Clues) -> float:
    reference, port = clues.reference.sketch, clues.port.sketch
    if reference is None or port is None or len(reference) != len(port):
        return math.nan
    size = float(np.linalg.norm(reference))
    return float(np.linalg.norm(port - reference)) / size if size else math.nan


def dropout_module(clues: Clues) -> Cause | None:
    """The tensor is the output of a dropout module that is active in one program, or in both."""
    role, port_role = clues.role, clues.port_role
    if role is None or port_role is None or port_role.side != "output":
        return None
    if not (role.call.cls.startswith("Dropout") or port_role.call.cls.startswith("Dropout")):
        return None
    is_active = [
        all(given.value is not side.value for given in side.call.inputs)
        for side in (role, port_role)
    ]
    if all(is_active) and role.call.cls == port_role.call.cls:
        return _other_random_numbers(clues, port_role)
    if is_active[0] == is_active[1]:
        return None
    if clues.elements is not None:
        before, after = clues.elements if is_active[1] else clues.elements[::-1]
        if _dropout_in_elements(before, after) is None:
            return None
    owner = "port" if is_active[1] else "reference"
    name = port_role.call.module or port_role.call.model
    text = f"dropout is active in the {owner} ({name}): it is in training mode"
    return Cause("dropout", clues.elements is not None, text)


def _other_random_numbers(clues: Clues, port_role: Role) -> Cause | None:
    """Both programs drop at one rate: the squares of what is left differ by chance alone."""
    reference, port = clues.reference, clues.port
    if not keeps_squares(reference.statistic("l2"), port.statistic("l2"), reference.numel):
        return None
    name = port_role.call.module or port_role.call.model
    text = (
        f"{name} drops other elements: the programs draw other random numbers, as they do with "
        "another seed, or in compiled code without torch._inductor.config.fallback_random"
    )
    return Cause("random_stream", False, text)


def keeps_squares(norm: float, other_norm: float, numel: int) -> bool:
    """Return whether two norms differ by chance alone, as where other elements were dropped."""
    return abs((other_norm / norm) ** 2 - 1) < _CHANCE / math.sqrt(numel)


def dropout(clues: Clues) -> Cause | None:
    """Some elements are zero, and the others are larger by 1 / (1 - p)."""
    if clues.elements is not None:
        return _dropout_in_elements(*clues.elements)
    return _dropout_in_statistics(clues)


def _dropout_in_elements(reference: Floats, port: Floats) -> Cause | None:
    if np.iscomplexobj(reference):
        return None
    alive = reference != 0
    dropped = alive & (port == 0)
    survivors = alive & ~dropped
    share = float(dropped.sum()) / max(int(alive.sum()), 1)
    if not 0.005 < share < 0.95 or survivors.sum() < _FEWEST:
        return None
    factors = port[survivors] / reference[survivors]
    factor = float(np.median(factors))
    if factor <= 1 or np.quantile(np.abs(factors - factor), 0.99) > 1e-3 * factor:
        return None
    rate = 1 - 1 / factor
    spread = 5 * math.sqrt(rate * (1 - rate) / alive.sum())
    if abs(share - rate) > spread + 0.01:
        return None
    text = f"dropout is active: {share:.1%} of the elements are 0, the others times {factor:.4g}"
    return Cause("dropout", True, text)


def _dropout_in_statistics(clues: Clues) -> Cause | None:
    """Guess from both extremes having grown by the same factor, and the squares likewise."""
    reference, port = clues.reference, clues.port
    low, high = (
        after / before if before else math.nan
        for before, after in zip(reference.extremes, port.extremes, strict=True)
    )
    if not (1.005 < low < 4 and abs(low - high) <= _SAME * low):
        return None
    squares = (port.statistic("l2") / reference.statistic("l2")) ** 2
    magnitudes = port.statistic("abs_mean") / reference.statistic("abs_mean")
    if not (abs(squares / low - 1) < 0.1 * (low - 1) + 0.05 and abs(magnitudes - 1) < 0.1):
        return None
    return Cause("dropout", False, f"dropout is active, with a rate of {1 - 1 / low:.2g}")


def clamped(clues: Clues) -> Cause | None:
    """The port's numbers are the reference's, limited to a range."""
    if clues.elements is None or np.iscomplexobj(clues.elements[0]):
        return None
    reference, port = clues.elements
    low, high = float(port.min()), float(port.max())
    slack = _SAME * float(np.abs(reference).max())
    outside = (reference < low - slack) | (reference > high + slack)
    if (
        not 2 <= outside.sum() <= reference.size / 2
        or np.abs(np.clip(reference, low, high) - port).max() > slack
    ):
        return None
    bounds = f"{low:.4g} to {high:.4g}"
    return Cause("clamped", True, f"{clues.subject} is the reference's limited to {bounds}")
