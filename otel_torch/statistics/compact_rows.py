"""The compact rows of the compiled observer: a tensor's numbers, shape and dtype as bytes.

`native.h` has their layout. `statistics` and `lines` of `lines.c` encode them without any object
for each number; `unpack` is for whoever needs the numbers themselves.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.measure import Measurement, columns_of
from otel_torch.statistics.native_layout import ENCODED

# by the kernel's codes
DTYPE_NAMES = [str(dtype) for dtype in cpu_kernel.CODES]
_HEADER = struct.Struct("=qqiiii")


class CompactTensor(NamedTuple):
    """What a compact row says. call: the number of the call. time_ns: when it was seen."""

    call: int
    time_ns: int
    measurement: Measurement


def unpack(data: bytes) -> CompactTensor:
    """Return what a compact row says; its measurement has the row as a list of floats."""
    numel, time_ns, call, code, dimensions, wanted = _HEADER.unpack_from(data)
    shape = list(struct.unpack_from(f"={dimensions}q", data, _HEADER.size))
    start = _HEADER.size + 8 * dimensions
    row = list(struct.unpack_from(f"={(len(data) - start) // 8}d", data, start))
    measurement = Measurement(row, columns_of(wanted), numel, numel, shape, DTYPE_NAMES[code])
    return CompactTensor(call, time_ns, measurement)


def numbers_of(data: bytes) -> memoryview:
    """Return the bytes of the numbers of a compact row: its row as an array of float64."""
    *_, dimensions, _ = _HEADER.unpack_from(data)
    return memoryview(data)[_HEADER.size + 8 * dimensions :]


def encoding_plan(statistics: tuple[str, ...]) -> bytes | None:
    """Return the plan of a line with these statistics; None if `lines.c` lacks one of them."""
    if not set(statistics) <= set(ENCODED):
        return None
    return bytes(map(ENCODED.index, statistics))
