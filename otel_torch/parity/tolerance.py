"""How much two tensors may differ and still be the same: what legal arithmetic does by itself.

A fixed threshold fails in bf16, where rounding alone is as large as many bugs. The floor of a
tensor is what the reference does to itself under half an ulp of noise, and never less than its
dtype can resolve.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

# the relative L2 error that another kernel may cause at once, by the coarsest type that took part
SINGLE = 1e-6  # of single precision, and as small as one can be
BASES = {
    "torch.float64": SINGLE,
    "torch.float32": SINGLE,
    "torch.float16": 1.5e-3,
    "torch.bfloat16": 1.2e-2,
}
_COARSE = {name: base for name, base in BASES.items() if base > SINGLE} | {
    # numbers of eight bits and fewer: half the distance of neighbours, and some for what is scaled
    "torch.float8_e4m3fn": 6e-2,
    "torch.float8_e5m2": 1.2e-1,
}
# how far beyond the error under noise a difference on the way is still chance (on clean ports it is
# 1.0 at the most), and how far one at the end, where many roundings average out (0.55)
NOISE_FACTOR, END_FACTOR = 1.5, 1.0
# noise of at least this share of a type's constant shows what that type does; the constant then is
# only a lower bound, half as large. Less noise is that of a reference which computes more finely
# than the port
SHOWN, LOWERED = 0.1, 0.5


class Typed(Protocol):
    """What has a row with a dtype."""

    @property
    def row(self) -> dict[str, Any]:
        """The row as recorded."""


@dataclass(slots=True)
class Tolerance:
    """The limits of one comparison. rtol: what a person gave instead of the dtype constants, None
    for those.
    """

    rtol: float | None = None

    def base(self, dtypes: Iterable[str]) -> float:
        """The limit for tensors in which numbers of these types took part.

        >>> Tolerance().base(["torch.float32", "torch.bfloat16"])
        0.012
        """
        coarsest = max((_COARSE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
        return max(coarsest, BASES["torch.float32"] if self.rtol is None else self.rtol)

    @staticmethod
    def with_noise(base: float, floor: float | None, factor: float = NOISE_FACTOR) -> float:
        """The limit for a tensor of which the error under noise is known: `floor`, None if it is
        not.

        >>> Tolerance.with_noise(0.012, 0.03), Tolerance.with_noise(0.012, None), Tolerance.with_noise(0.012, 1e-7)
        (0.045, 0.012, 0.012)
        """
        if floor is None:
            return base
        return max(base * LOWERED if floor >= SHOWN * base else base, factor * floor)

    def of_parameters(self, parameters: Iterable[Typed]) -> float:
        """The limit for parameters that were loaded, not computed."""
        return self.base(str(one.row.get("dtype", "")) for one in parameters)
