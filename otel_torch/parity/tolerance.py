"""Limits within which two tensors count as equal: the error of legal arithmetic alone.

A fixed threshold fails in bf16, where rounding alone is as large as many bugs. The floor of a
tensor is the error of the reference under half an ulp of noise, and never less than its dtype can
resolve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

# the relative L2 error that another kernel alone may cause, by the coarsest dtype that took part
SINGLE = 1e-6  # of single precision, and the smallest limit
BASES = {
    "torch.float64": SINGLE,
    "torch.float32": SINGLE,
    "torch.float16": 1.5e-3,
    "torch.bfloat16": 1.2e-2,
}
_COARSE = {name: base for name, base in BASES.items() if base > SINGLE} | {
    # eight bits and fewer: half the distance of neighboring numbers, plus a margin for scaling
    "torch.float8_e4m3fn": 6e-2,
    "torch.float8_e5m2": 1.2e-1,
}
# half an ulp, by dtype: how far one operation may round
_ROUNDING = {
    "torch.float64": 2.0**-53,
    "torch.float32": 2.0**-24,
    "torch.float16": 2.0**-11,
    "torch.bfloat16": 2.0**-8,
    "torch.float8_e4m3fn": 2.0**-4,
    "torch.float8_e5m2": 2.0**-3,
}
# how far beyond its error under noise a difference is still chance: on the way (at most 1.0 on
# clean ports) and at the end, where many roundings average out (0.55)
NOISE_FACTOR, END_FACTOR = 1.5, 1.0
# noise of at least SHOWN times a dtype's constant was computed in that dtype; the limit may then go
# down to LOWERED times the constant. Less noise means that the reference computes in a finer dtype
# than the port
SHOWN, LOWERED = 0.1, 0.5

# how much a difference of the parameters may grow in the tensors that are computed with them
_DRIFT_GROWTH = 10.0


def coarser(dtypes: Iterable[str]) -> str:
    """Return the dtype that rounds most, "" if none of them rounds.

    >>> coarser(["torch.float32", "torch.bfloat16", "torch.int64"])
    'torch.bfloat16'
    """
    return max(dtypes, key=lambda dtype: _ROUNDING.get(dtype, 0.0), default="")


def noise_scale(noise: str, reference: str, port: str) -> float:
    """Return the factor of an error under noise, by the coarsest dtypes of the three programs.

    Noise in the dtype of the reference, coarser in the port: only the port rounds to its dtype, so
    the errors of two programs do not add up. Noise finer than the reference: what was measured is
    the reference's own rounding, which is less than noise of half an ulp and adds to the port's.

    >>> noise_scale("torch.bfloat16", "torch.bfloat16", "torch.float32")
    1.0
    >>> round(noise_scale("torch.float32", "torch.float32", "torch.bfloat16"))
    46341
    >>> noise_scale("torch.float32", "torch.bfloat16", "torch.bfloat16")
    2.0
    """
    ratio = 1.0
    if rounds_more(port, coarser([noise, reference])):
        ratio = _ROUNDING[port] / _ROUNDING[coarser([noise, reference])]
    if rounds_more(reference, noise):
        return 2 * ratio
    return max(1.0, ratio / math.sqrt(2))


def half_ulp(dtypes: Iterable[str]) -> float:
    """Return the relative error of rounding to the coarsest of some dtypes.

    >>> half_ulp(["torch.bfloat16"])
    0.00390625
    """
    return _ROUNDING.get(coarser(dtypes), _ROUNDING["torch.float32"])


def rounds_more(dtype: str, than: str) -> bool:
    """Return whether both dtypes round, the first one more."""
    return _ROUNDING.get(dtype, 0.0) > _ROUNDING.get(than, math.inf)


class HasRow(Protocol):
    """An object with a recorded row, which has a dtype."""

    @property
    def row(self) -> dict[str, Any]:
        """The row as recorded."""


@dataclass(slots=True)
class Tolerance:
    """The limits of one comparison.

    Args:
        rtol: The user's limit, which replaces the constants of the dtypes, or None.
    """

    rtol: float | None = None

    def with_drift(self, drift: float) -> Tolerance:
        """Return the limits of a forward whose parameters are apart by `drift`, relative L2."""
        if not drift:
            return self
        rtol = SINGLE if self.rtol is None else self.rtol
        return Tolerance(rtol + _DRIFT_GROWTH * drift)

    def base(self, dtypes: Iterable[str]) -> float:
        """Return the limit for tensors computed from numbers of these dtypes.

        >>> Tolerance().base(["torch.float32", "torch.bfloat16"])
        0.012
        """
        coarsest = max((_COARSE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
        return max(coarsest, BASES["torch.float32"] if self.rtol is None else self.rtol)

    def of_parameters(self, parameters: Iterable[HasRow]) -> float:
        """Return the limit for parameters, which are loaded and not computed."""
        return self.base(str(parameter.row.get("dtype", "")) for parameter in parameters)
