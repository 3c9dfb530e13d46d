"""What a scored comparison is: two programs, a fault or none, and the place where it first shows.

A corpus is any tuple of `Case`; the scoreboard needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a wrong tensor is first seen.

    side: "output": `module` made it; "input": it entered `module` already wrong, so the glue in
    front is at fault; "parameter": a weight of `module` differs before any forward.
    """

    side: str
    module: str

    def __str__(self) -> str:
        return f"{self.side} {self.module or '(root)'}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two programs, each run once by `python PROGRAM *ARGUMENTS --dtype DTYPE`.

    expected: the places in the port's names that are exactly right, the best one first; empty for a
    clean pair. expected_reference: likewise in the reference's names, where these are others.
    error: relative L2 at that place in fp32, of the faulty port against the clean one; inf where
    there is no such number. final: relative L2 of the final output against the reference, by dtype.
    above_rounding: whether `error` is more than 3 times what bf16 alone does to that tensor.
    environment: what the programs themselves need set.
    """

    name: str
    family: str
    bug: str
    program: Path
    reference: tuple[str, ...]
    port: tuple[str, ...]
    expected: tuple[Place, ...] = ()
    expected_reference: tuple[Place, ...] = ()
    error: float = 0.0
    final: Mapping[str, float] = field(default_factory=dict)
    above_rounding: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not self.expected

    @property
    def noise(self) -> tuple[str, ...]:
        """Arguments of the recording that measures the floor: the reference once more, under
        OTEL_TORCH_NOISE.
        """
        return self.reference

    @property
    def places_in_reference(self) -> tuple[Place, ...]:
        return self.expected_reference or self.expected
