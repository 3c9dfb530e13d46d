"""Tables of numbers as text for a page: a third of the size of JSON, and unpacked when needed."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from otel_torch.show.grid import Floats

_DROPPED_BITS = 40  # of 64: sign, exponent and 12 bits of the mantissa remain, four digits
_LARGEST = np.uint64(0x7FEFFF << _DROPPED_BITS)


def pack(values: Floats) -> str:
    """Return base64 of the deflated values: the three highest bytes of each, one plane a byte.

    Numbers are rounded to four digits. NaN and Inf remain what they are.
    """
    bits = np.ascontiguousarray(values, dtype=np.float64).reshape(-1).view(np.uint64)
    sign, magnitude = bits & np.uint64(1 << 63), bits & np.uint64((1 << 63) - 1)
    is_finite = np.isfinite(values).reshape(-1)
    rounded = np.minimum(magnitude + np.uint64(1 << (_DROPPED_BITS - 1)), _LARGEST)
    kept = (sign | np.where(is_finite, rounded, magnitude)) >> np.uint64(_DROPPED_BITS)
    planes = np.stack([kept >> np.uint64(shift) for shift in (16, 8, 0)]).astype(np.uint8)
    return base64.b64encode(zlib.compress(planes.tobytes())).decode()
