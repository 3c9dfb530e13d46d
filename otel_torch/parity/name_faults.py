"""Say where the faults of two graphs are, in the names of their programs.

A graph knows values and nodes. A finding names a tensor of a module on each side: where the wrong
value was first seen, or where a right one was passed to the wrong place. The pair of tensors that
shows it gives the other side, the error and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from otel_torch.graph.compare import GraphFault
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import RIGHT, WRONG
from otel_torch.parity.call_graph import ModuleCall, Role
from otel_torch.parity.compared_calls import ComparedCalls
from otel_torch.parity.explain import are_twins
from otel_torch.parity.faults import Fault, Location, MissingModule
from otel_torch.parity.left_out import LeftOutModules
from otel_torch.parity.misordered_parts import find_misordered_parts
from otel_torch.parity.pair_roles import has_equal_sum
from otel_torch.parity.place_faults import FaultPlacer
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.exchanged_parts import find_exchanged_parts
from otel_torch.parity.weights_at_fault import (
    kind_in_any_block,
    kinds_that_differ_in_all,
    weights_at,
)


class FaultNamer:
    """Names the faults of a comparison.

    Args:
        missing: Modules that only one side calls.
        wrong: Wrong pairs from which a wrong end is computed.
    """

    def __init__(
        self,
        compared: ComparedCalls,
        missing: Sequence[MissingModule],
        wrong: Sequence[TensorPair],
    ) -> None:
        self.compared, self.wrong = compared, wrong
        self.placer = FaultPlacer(compared)
        self._left_out = LeftOutModules(compared, self.placer, missing)

    def faults(self) -> list[Fault]:
        """Return the first fault that can be named, and what is wrong by itself."""
        named = (self._name(found) for found in self.compared.comparison.faults)
        first = next((fault for fault in named if fault is not None), None)
        if first is None:
            return []
        others = list(self._independent(first))
        # the numbers of exchanged weights are right, and so is what is made with them, elsewhere
        earlier = [
            fault
            for fault in others
            if _time(fault) < _time(first) and (fault.weights or self._is_right_elsewhere(fault))
        ]
        return [*earlier, first, *(fault for fault in others if fault not in earlier)]

    def _is_right_elsewhere(self, fault: Fault) -> bool:
        """Return whether the port's value should be another one: it is right, and the reference
        does not make it of the value that it should be.
        """
        if fault.reference is None or fault.port is None:
            return False
        expected, actual = fault.reference.role, fault.port.role
        if expected is None or actual is None or self.compared.state(1, actual.value) != RIGHT:
            return False
        graphs, (reference, port) = self.compared.graphs, self.compared.comparison.programs
        twin = int(port.side.partner[graphs.port.values[actual.value]])
        made_of = reference.reads[reference.maker[twin]] if reference.maker[twin] >= 0 else []
        return graphs.reference.values[expected.value] not in made_of

    def all_faults(self) -> list[Fault]:
        """Return all faults in the reference's order, those of a module in further blocks last."""
        first, repeated = [], []
        for found in self.compared.comparison.faults:
            fault = self._name(found)
            if fault is not None:
                first.append(fault)
            repeated += [fault for again in _repetitions(found) if (fault := self._name(again))]
        return [*sorted(first, key=_time), *sorted(repeated, key=_time)]

    def _independent(self, first: Fault) -> Iterator[Fault]:
        """Yield the modules that are wrong by themselves, each once: they make a wrong output from
        right inputs, or hold other weights, and not in all blocks.
        """
        seen = {first.port.module if first.port else None}
        alignment = self.compared.alignment
        changed_everywhere = kinds_that_differ_in_all(alignment)
        for pair in self.wrong:
            call = pair.port[0].call
            # where the shapes differ, all that follows differs in shape
            is_output = pair.is_output and pair.basis in ("owner", "alike")
            is_output = is_output and pair.relation.state != "shape"
            if not is_output or pair is first.pair or call.module_path in seen:
                continue
            if (pair.reference[0].call.module_path, call.module_path) in alignment.folded:
                continue
            inputs = [other for other in alignment.pairs if call in _receivers(other)]
            begins = not call.children and inputs and all(other.is_right for other in inputs)
            unequal = alignment.unequal_weights(pair.reference[0].call, call)
            weights = [weight for weight in unequal if weight.differs]
            is_changed = bool(weights) and not any(
                kind_in_any_block(weight) in changed_everywhere for weight in weights
            )
            if begins or is_changed:
                seen.add(call.module_path)
                yield self.placer.fault_of(pair, weights=weights)

    def _name(self, found: GraphFault) -> Fault | None:
        roles = self._left_over(found) or (
            self.compared.first_role(0, found.reference),
            self.compared.first_role(1, found.port),
        )
        weights = weights_at(self.compared, found)
        if not weights and (left_out := self._left_out.fault_of(found)) is not None:
            return left_out
        pairs = self._exchanged_input(found), self.compared.wrong_pair_of(*roles)
        pair = min(filter(None, pairs), key=lambda pair: pair.time, default=None)
        if pair is not None and (calls := self._exchanged_calls(found)) is not None:
            places = calls.map(lambda call: Location.of(call.inputs[0]))
            return Fault("value", places.reference, places.port, pair, pair.relation)
        for find in (find_misordered_parts, find_exchanged_parts):
            if pair is not None and (reordered := find(self.compared.alignment, pair)) is not None:
                return reordered
        if pair is None:
            is_right = bool(self.compared.right_roles & {*roles})
            return None if is_right else self.placer.fault_without_pair(roles, weights)
        fused = (p for p in self.wrong if p.basis == "fused" and p.relation.state == "order")
        # parts that are known to be in another order before anything else is wrong
        if (parts := next((p for p in fused if p.time < pair.time), None)) is not None:
            return self.placer.fault_of(parts)
        if pair.relation.state == "order" and pair.basis == "owner":
            weights = []  # the same numbers: parts, rows or heads in another order
        return self.placer.fault_of(pair, roles, weights)

    def _left_over(self, found: GraphFault) -> tuple[Role, Role] | None:
        """Return two unpaired values of one size before a fault, one in each program, if there are
        no others: they should have been equal.
        """
        sides = [
            {
                value.birth
                for node in (() if place is None else place.suspects)
                for made in (graph.graph.nodes.makes[node].tolist() if node >= 0 else ())
                if isinstance(birth := graph.births[made], Role)
                if (value := birth.value) not in self.compared.paired_values
            }
            for place, graph in zip(found.places, self.compared.graphs, strict=True)
        ]
        alike = [
            (reference, port)
            for reference, port in product(*sides)
            if reference.value.numel == port.value.numel
        ]
        return alike[0] if len(alike) == 1 else None

    def _exchanged_input(self, found: GraphFault) -> TensorPair | None:
        """Return the wrong input of a call that reads no wrong value: it was passed another one."""
        place = found.port
        if place is None or not place.nodes or place.leaf != NOTHING:
            return None
        node = place.nodes[0]
        program = self.compared.comparison.programs[1]
        if program.graph.nodes.is_vague[node]:
            return None
        births = self.compared.graphs.port.births
        read = [value for value in program.reads[node] if isinstance(births[value], Role)]
        if any(program.state[value] == WRONG for value in read):
            return None
        call, values = self.compared.graphs.port.calls[node], self.compared.graphs.port.values
        return next(
            (
                pair
                for pair in self.compared.wrong_pairs
                for role in pair.port
                if role.call is call and role.side == "input" and values[role.value] in read
            ),
            None,
        )

    def _exchanged_calls(self, found: GraphFault) -> Sides[ModuleCall] | None:
        """Return the calls of one module in two blocks that receive what the other one should."""
        nodes = [place.nodes[0] if place and place.nodes else NOTHING for place in found.places]
        if NOTHING in nodes:
            return None
        programs = self.compared.comparison.programs
        reads = [
            {group for group in program.operands(node) if group >= 0}
            for program, node in zip(programs, nodes, strict=True)
        ]
        first, second = (
            self.compared.graphs.reference.calls[nodes[0]],
            self.compared.graphs.port.calls[nodes[1]],
        )
        if first is None or second is None:
            return None
        calls = Sides(first, second)
        match = self.compared.alignment.partner.get(calls.reference)
        is_exchanged = match is not None and are_twins(match, calls.port)
        inputs = calls.reference.inputs, calls.port.inputs
        is_given = reads[0] & reads[1] or has_equal_sum(self.compared.alignment.comparer, *inputs)
        is_given = is_given and all(inputs)
        return calls if is_exchanged and is_given else None


def _repetitions(found: GraphFault) -> Iterator[GraphFault]:
    """Yield the same fault in further blocks."""
    reference, port = found.places
    if reference is None or port is None or found.begins_at_leaf:
        return
    for own, other in zip(reference.nodes[1:], port.nodes[1:], strict=False):
        yield replace(
            found,
            reference=replace(reference, nodes=(own,)),
            port=replace(port, nodes=(other,)),
        )


def _time(fault: Fault) -> float:
    return math.inf if fault.pair is None else fault.pair.time


def _receivers(pair: TensorPair) -> list[ModuleCall]:
    """Return the port's calls that receive a pair's tensors."""
    return [role.call for role in pair.port if role.side == "input"]
