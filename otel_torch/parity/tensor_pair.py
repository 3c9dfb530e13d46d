"""Two tensors that should be equal, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from otel_torch.parity.call_graph import Role
from otel_torch.parity.values import Relation

# why two tensors should be equal, the surest first
Basis = Literal["owner", "fused", "container", "outermost", "alike"]


@dataclass(slots=True, eq=False)
class TensorPair:
    """Two tensors that should be equal.

    One side may have several: their sum, or their concatenation, equals the other side's tensor.
    """

    reference: list[Role]
    port: list[Role]
    basis: Basis
    relation: Relation

    @property
    def is_right(self) -> bool:
        """Whether they are equal."""
        return self.relation.is_right

    @property
    def is_output(self) -> bool:
        """Whether the reference's tensor is an output of a module."""
        return self.reference[0].side == "output"

    @property
    def is_single(self) -> bool:
        """Whether it is one tensor on each side."""
        return len(self.reference) == len(self.port) == 1

    @property
    def time(self) -> int:
        """When the reference reaches it."""
        return min(role.time for role in self.reference)
