"""Constants and encoding of sketches, for recording and comparison alike. Imports no torch."""

from __future__ import annotations

import hashlib
from array import array
from base64 import b64encode
from collections.abc import Sequence

# numbers in a sketch: an estimated distance then has a standard deviation of 9 %
SIZE = 64
# dimensions along which a tensor may be a part of a larger one
PART_DIMS = 4
# frequencies of a row sketch; each contributes one complex number
FREQUENCIES = 32


def make_turns() -> tuple[float, ...]:
    """Return the frequencies of a row sketch, in turns per row.

    Each has 24 bits, so that the phase of a row is exact in float64.

    >>> len(make_turns()), 0 <= min(make_turns()), max(make_turns()) < 1
    (32, True, True)
    """
    stream = hashlib.shake_256(b"otel_torch rows").digest(3 * FREQUENCIES)
    words = [stream[3 * index : 3 * index + 3] for index in range(FREQUENCIES)]
    return tuple(int.from_bytes(word, "little") / 2**24 for word in words)


TURNS = make_turns()


def encode(numbers: Sequence[float], kind: str = "f") -> str:
    """Encode numbers for a recording: base64, little-endian, of a type code of `array`.

    >>> encode([1.0, 0.0])
    'AACAPwAAAAA='
    """
    packed = array(kind, numbers)
    if array("H", [1]).tobytes() != b"\x01\x00":
        packed.byteswap()
    return b64encode(packed.tobytes()).decode()
