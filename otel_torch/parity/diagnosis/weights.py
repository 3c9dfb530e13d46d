"""Causes that only weights have: not loaded, absent, loaded from another place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.diagnosis.clues import Clues, Measured
from otel_torch.parity.finding import Cause
from otel_torch.parity.parameters import ParameterPair

# how close the extremes of uniform numbers come to their bound
_NEAR_BOUND = 0.02
_FEWEST_FOR_A_SHAPE = 256


def constant(clues: Clues) -> Cause | None:
    """The port's parameter is all zeros or all ones, as before loading."""
    low, high = clues.port.extremes
    reference_low, reference_high = clues.reference.extremes
    if low != high or low not in (0.0, 1.0) or reference_low == reference_high:
        return None
    text = f"{clues.subject} is all {'ones' if low else 'zeros'}"
    if low == 0 and clues.port.name.rpartition(".")[2] == "bias":
        return Cause("bias_absent", True, f"{text}: this bias is absent")
    return Cause("not_loaded", True, f"{text}, as before loading")


def one_number(clues: Clues) -> Cause | None:
    """A parameter of one number is another one: any two numbers are a multiple of each other."""
    if clues.reference.numel != 1 or clues.port.numel != 1:
        return None
    (before, _), (after, _) = clues.reference.extremes, clues.port.extremes
    text = f"{clues.subject} is {after:.6g}, and the reference's {before:.6g}"
    return Cause("number", True, text)


def from_another_place(clues: Clues) -> Cause | None:
    """A parameter holds the numbers of another one of the reference."""
    if clues.weight is None or clues.weight.is_fused:
        return None
    reference, port = clues.weight.reference[0], clues.weight.port[0]
    source = _equal_to(port, clues.parameters.reference, clues.limit)
    if source is None or source.full_name == reference.full_name:
        return None
    text = f"{clues.subject} holds the numbers of the reference's {source.full_name}"
    place = _equal_to(reference, clues.parameters.port, clues.limit)
    if place is None or place.full_name == port.full_name:
        return Cause("other_weight", True, text)
    if _are_exchanged(clues.pairs, source, place):
        return Cause(
            "exchanged", True, f"{text}, and {place.full_name} those of {reference.full_name}"
        )
    return Cause("other_weight", True, text)


def rotary_base(clues: Clues) -> Cause | None:
    """The frequencies of a rotary embedding have another base."""
    bases = [_rotary_base_of(measured) for measured in (clues.reference, clues.port)]
    if None in bases or bases[0] == bases[1]:
        return None
    text = f"{clues.subject} has the rotary base {bases[1]:,}, the reference's has {bases[0]:,}"
    return Cause("rotary_base", True, text)


def default_initialization(clues: Clues) -> Cause | None:
    """The port's weight looks as `nn.Linear` and `nn.Conv2d` make it, the reference's does not."""
    if clues.port.numel < _FEWEST_FOR_A_SHAPE or len(clues.port.shape) < 2:
        return None
    if not _is_default(clues.port) or _is_default(clues.reference):
        return None
    text = f"{clues.subject} was never loaded: its numbers are those of torch's initialization"
    return Cause("not_loaded", False, text)


def _equal_to(
    parameter: Parameter, candidates: Sequence[Parameter], limit: float
) -> Parameter | None:
    """Return the only candidate with the same numbers; None if several have them, or none."""
    if parameter.sketch is None or not parameter.sketch.any():
        return None
    size = max(limit, 1e-6) * float(np.linalg.norm(parameter.sketch))
    equal = {
        candidate.row.get("value", id(candidate)): candidate
        for candidate in candidates
        if candidate.numel == parameter.numel
        and candidate.sketch is not None
        and float(np.linalg.norm(candidate.sketch - parameter.sketch)) <= size
    }
    return next(iter(equal.values())) if len(equal) == 1 else None


def _are_exchanged(pairs: Sequence[ParameterPair], source: Parameter, place: Parameter) -> bool:
    """Return whether `source` of the reference belongs at the place of `place`."""
    return any(pair.reference == (source,) and pair.port == (place,) for pair in pairs)


def _rotary_base_of(measured: Measured) -> int | None:
    """Return b if the numbers are b^(-2i/d) for i = 0 … d/2 - 1: from 1 down, and their mean."""
    low, high = measured.extremes
    count = measured.numel
    if count < 4 or not 0 < low < high or abs(high - 1) > 1e-6:
        return None
    base = low ** (-count / (count - 1))
    expected = float(np.mean(base ** (-np.arange(count) / count)))
    mean = measured.statistic("mean")
    if abs(expected - mean) > 1e-4 * expected:
        return None
    rounded = round(base)
    return rounded if abs(rounded - base) < 1e-3 * base else None


def _is_default(measured: Measured) -> bool:
    """Return whether the numbers fill the range ± 1/√(inputs) evenly, as `nn.Linear` starts."""
    shape, count = measured.shape, measured.numel
    if len(shape) < 2:
        return False
    bound = math.sqrt(1 / (count / shape[0]))
    low, high = measured.extremes
    std = measured.statistic("std")
    near = (1 - _NEAR_BOUND) * bound
    return (
        near <= high <= bound * (1 + 1e-6)
        and near <= -low <= bound * (1 + 1e-6)
        and abs(std * math.sqrt(3) / bound - 1) < _NEAR_BOUND * 2
    )
