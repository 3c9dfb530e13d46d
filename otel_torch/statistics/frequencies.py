"""The frequencies of a row sketch: what records and what compares must agree on them, and the
latter knows no torch.
"""

from __future__ import annotations

import hashlib

# frequencies of a row sketch, each a complex number
FREQUENCIES = 32


def make_turns() -> tuple[float, ...]:
    """The frequencies, in turns a row, each with 24 bits so that a row's phase is exact in float64.

    >>> len(make_turns()), 0 <= min(make_turns()), max(make_turns()) < 1
    (32, True, True)
    """
    stream = hashlib.shake_256(b"otel_torch rows").digest(3 * FREQUENCIES)
    return tuple(
        int.from_bytes(stream[3 * j : 3 * j + 3], "little") / 2**24 for j in range(FREQUENCIES)
    )


TURNS = make_turns()
