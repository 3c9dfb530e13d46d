"""Limits within which two tensors count as equal: the error of legal arithmetic alone.

A fixed threshold fails in bf16, where rounding alone is as large as many bugs. The floor of a
tensor is the error of the reference under half an ulp of noise, and never less than its dtype can
resolve.
"""

from __future__ import annotations

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
# how far beyond its error under noise a difference is still chance: on the way (at most 1.0 on
# clean ports) and at the end, where many roundings average out (0.55)
NOISE_FACTOR, END_FACTOR = 1.5, 1.0
# noise of at least SHOWN times a dtype's constant was computed in that dtype; the limit may then go
# down to LOWERED times the constant. Less noise means that the reference computes in a finer dtype
# than the port
SHOWN, LOWERED = 0.1, 0.5


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
