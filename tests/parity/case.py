"""A case for the scoreboard: two programs, and the place where a planted fault first shows, if any.

A corpus is a tuple of `Case`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The place where a wrong tensor is first seen.

    side: "output" of `module`, which computed it; "input" of `module`, so the code that calls the
    module is at fault; "parameter" of `module`, which differs before any forward.
    """

    side: str
    module: str

    def __str__(self) -> str:
        return f"{self.side} {self.module or '(root)'}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two programs, each run once as `python PROGRAM *ARGUMENTS --dtype DTYPE`.

    Args:
        expected: the right places by the port's names, best first; empty for a clean pair.
        expected_reference: the right places by the reference's names, if those differ.
        error: relative L2 of the faulty port against the clean port in fp32 at the first place;
            inf if the tensor is missing there.
        final: relative L2 of the final output against the reference, by dtype.
        above_rounding: whether `error` is more than 3 times the error of bf16 at that place.
        environment: variables that the programs need.
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
        """Arguments of the recording that measures noise: those of the reference."""
        return self.reference

    @property
    def places_in_reference(self) -> tuple[Place, ...]:
        return self.expected_reference or self.expected
