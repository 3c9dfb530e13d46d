"""Causes that change how many elements a tensor has: a token too many, a part left out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.breakdown import plural
from otel_torch.parity.diagnosis.clues import Clues
from otel_torch.parity.finding import Cause

Array = NDArray[Any]


def other_length(clues: Clues) -> Cause | None:
    """The two shapes differ on one axis; with elements, say which indices are left out."""
    shape, port_shape = clues.reference.shape, clues.port.shape
    if len(shape) != len(port_shape):
        return None
    axes = [
        axis for axis, sizes in enumerate(zip(shape, port_shape, strict=True)) if len({*sizes}) > 1
    ]
    if len(axes) != 1:
        return None
    axis = axes[0]
    size, port_size = shape[axis], port_shape[axis]
    name = clues.axis_names(shape)[axis]
    end = _agreeing_end(clues, axis, min(size, port_size))
    count = abs(size - port_size)
    noun = name if count == 1 else plural(name)
    if port_size < size:
        text = f"{clues.subject} lacks {count} of the reference's {size} {plural(name)}{end}"
    else:
        text = f"{clues.subject} has {count} {noun} more than the reference's {size}{end}"
    return Cause("length", True, text)


def _agreeing_end(clues: Clues, axis: int, length: int) -> str:
    """Return at which end the two agree, in words; empty if at neither or not known."""
    reference, port = clues.reference.elements, clues.port.elements
    if reference is None or port is None or reference.ndim != port.ndim:
        return ""
    for word, start in ((" at the end", 0), (" at the start", None)):
        parts = [_part(side, axis, length, start) for side in (reference, port)]
        slack = max(1e-6, 3 * clues.limit) * float(np.abs(reference).max())
        if float(np.abs(parts[0] - parts[1]).max()) <= slack:
            return word
    return ""


def _part(array: Array, axis: int, length: int, start: int | None) -> Array:
    """Return the first `length` indices of an axis; the last ones if `start` is None."""
    begin = array.shape[axis] - length if start is None else start
    return np.take(array, range(begin, begin + length), axis=axis)
