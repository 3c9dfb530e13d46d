"""The comparison of two forwards' calls, with the recorded tensors behind its values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from otel_torch.graph.compare import FaultPlace, GraphComparison
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import RIGHT
from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Role, TensorValue
from otel_torch.parity.graph_of_calls import GraphOfCalls
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair


@dataclass
class ComparedCalls:
    """Two forwards, paired and compared.

    Attributes:
        alignment: Their pairs.
        graphs: Their calls as graphs.
        comparison: Of these graphs.
    """

    alignment: Alignment
    graphs: Sides[GraphOfCalls]
    comparison: GraphComparison

    @cached_property
    def right_roles(self) -> set[Role]:
        """The tensors of right pairs."""
        return {
            role
            for pair in self.alignment.pairs
            if pair.is_right
            for role in (*pair.reference, *pair.port)
        }

    @cached_property
    def wrong_pairs(self) -> list[TensorPair]:
        """The pairs that differ, in the reference's order."""
        return [pair for pair in self.alignment.pairs if not pair.is_right]

    @cached_property
    def paired_values(self) -> set[TensorValue]:
        """The values that are in a pair."""
        pairs = self.alignment.pairs
        return {role.value for pair in pairs for role in (*pair.reference, *pair.port)}

    def state(self, side: int, value: TensorValue) -> int:
        """Return the state of a value of one side: RIGHT, DOUBTFUL or WRONG."""
        return int(self.comparison.states[side][self.graphs[side].values[value]])

    def first_role(self, side: int, place: FaultPlace | None) -> Role | None:
        """Return where the first wrong value of a place was first seen."""
        if place is None:
            return None
        graph, births = self.comparison.graphs[side], self.graphs[side].births
        leaf = None if place.leaf == NOTHING else births[place.leaf]
        if isinstance(leaf, Role):
            return leaf
        # of all that a weight is read for, some may be right
        nodes = place.nodes[:1] if place.leaf == NOTHING else place.nodes
        made = [value for node in nodes for value in graph.nodes.makes[node].tolist()]
        state = self.comparison.programs[side].state
        first = min(made, key=lambda value: state[value] == RIGHT, default=None)
        birth = None if first is None else births[first]
        return birth if isinstance(birth, Role) else None

    def wrong_pair_of(self, reference: Role | None, port: Role | None) -> TensorPair | None:
        """Return the first wrong pair that shows one of two values."""
        shown = (
            pair
            for pair in self.wrong_pairs
            if any(
                role is not None and any(own.value is role.value for own in side)
                for role, side in ((reference, pair.reference), (port, pair.port))
            )
        )
        return min(shown, key=lambda pair: pair.time, default=None)
