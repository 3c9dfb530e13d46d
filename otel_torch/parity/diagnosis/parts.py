"""Causes that are in one part of a tensor: one token, one head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.breakdown import Axis
from otel_torch.parity.diagnosis.clues import Clues
from otel_torch.parity.finding import Cause

Array = NDArray[Any]

# an element that is right may be off by this (relative to the largest)
_SAME = 1e-6
# what a factor may leave of the difference (relative L2)
_EXACT = 1e-3


def nonfinite(clues: Clues) -> Cause | None:
    """NaN and Inf are in a few tokens or channels of one program only."""
    pair = clues.raw_elements
    if pair is None:
        return None
    finite, port_finite = (np.isfinite(side) for side in pair)
    places = _places(finite != port_finite, clues)
    if not places:
        return None
    owner = "the reference's value" if (port_finite & ~finite).any() else clues.subject
    return Cause("part", True, f"{owner} is NaN or Inf in {' and in '.join(places)} only")


def concentrated(clues: Clues) -> Cause | None:
    """A few tokens or channels are wrong, and all others are right."""
    if clues.elements is None:
        return None
    reference, port = clues.elements
    differs = _differs(reference, port, clues.limit)
    places = _places(differs, clues)
    if not places:
        return None
    factor = _factor_in_part(reference[differs], port[differs])
    text = f"{clues.subject} is wrong in {' and in '.join(places)} only{factor}"
    return Cause("part", True, text)


def _differs(reference: Array, port: Array, limit: float) -> Array:
    slack = max(_SAME, 3 * limit) * float(np.abs(reference).max())
    differs: Array = np.abs(port - reference) > slack
    return differs


def _places(differs: Array, clues: Clues) -> list[str]:
    """Return the few indices of each axis that hold all differences, in words."""
    names = clues.axis_names(differs.shape)
    on_axes = (_place_on(axis, differs, name) for axis, name in enumerate(names))
    return [place for place in on_axes if place is not None]


def _place_on(axis: int, differs: Array, name: str) -> str | None:
    """Return the few indices of an axis that hold all differences, in words."""
    others = tuple(index for index in range(differs.ndim) if index != axis)
    wrong = np.asarray(differs.any(axis=others), dtype=np.float64)
    if not wrong.any() or wrong.all():
        return None
    return Axis(name, wrong, wrong / wrong.sum()).concentration()


def _factor_in_part(before: Array, after: Array) -> str:
    """Return the factor of the elements that differ, if it is one number."""
    if not after.any():
        return ": it is zero there"
    square = float(np.vdot(before, before).real)
    if before.size < 2 or not square:
        return ""
    factor = float(np.vdot(before, after).real) / square
    remainder = float(np.linalg.norm(after - factor * before))
    if remainder > _EXACT * float(np.linalg.norm(after - before)):
        return ""
    return f": it is the reference's times {factor:.4g} there"
