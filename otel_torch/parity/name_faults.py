"""Say where the faults of two graphs are, in the names of their programs.

A graph knows values and nodes. A finding names a tensor of a module on each side: where the wrong
value was first seen, or where a right one was passed to the wrong place. The pair of tensors that
shows it gives the other side, the error and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from otel_torch.graph.compare import FaultPlace, GraphComparison, GraphFault
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import RIGHT, WRONG, made_from
from otel_torch.parity.align import Alignment, enclosing_calls, paired_container
from otel_torch.parity.call_graph import ModuleCall, Parameter, Role, Sketch, TensorValue
from otel_torch.parity.explain import called_instead
from otel_torch.parity.faults import Fault, Location, MissingModule, kind_of
from otel_torch.parity.graph_of_calls import GraphOfCalls
from otel_torch.parity.misordered_parts import find_misordered_parts
from otel_torch.parity.modules import counterpart
from otel_torch.parity.pair_roles import has_equal_sum
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.exchanged_parts import find_exchanged_parts

# errors of sums of tensors, as a multiple of the limit of one
_SUM = 3.0


@dataclass(slots=True)
class FaultNamer:
    """Names the faults of a comparison.

    Args:
        missing: Modules that only one side calls.
        wrong: Wrong pairs from which a wrong end is computed.
    """

    alignment: Alignment
    graphs: Sides[GraphOfCalls]
    comparison: GraphComparison
    missing: Sequence[MissingModule]
    wrong: Sequence[TensorPair]
    _right: set[Role] = field(init=False)
    _paired: set[TensorValue] = field(init=False)

    def __post_init__(self) -> None:
        roles = [
            (role, pair.is_right)
            for pair in self.alignment.pairs
            for role in (*pair.reference, *pair.port)
        ]
        self._right = {role for role, is_right in roles if is_right}
        self._paired = {role.value for role, _ in roles}

    def faults(self) -> list[Fault]:
        """Return the first fault that can be named, and what is wrong by itself."""
        named = (self._name(found) for found in self.comparison.faults)
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
        """Return whether the port's value is a right one, which should be another."""
        role = None if fault.port is None else fault.port.role
        if role is None:
            return False
        state = self.comparison.programs[1].state
        return bool(state[self.graphs.port.values[role.value]] == RIGHT)

    def all_faults(self) -> list[Fault]:
        """Return all faults in the reference's order, those of a module in further blocks last."""
        first, repeated = [], []
        for found in self.comparison.faults:
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
        changed_everywhere = self._kinds_that_differ_in_all()
        for pair in self.wrong:
            call = pair.port[0].call
            # where the shapes differ, all that follows differs in shape
            is_output = pair.is_output and pair.basis in ("owner", "alike")
            is_output = is_output and pair.relation.state != "shape"
            if not is_output or pair is first.pair or call.module_path in seen:
                continue
            if (pair.reference[0].call.module_path, call.module_path) in self.alignment.folded:
                continue
            inputs = [other for other in self.alignment.pairs if call in _receivers(other)]
            begins = not call.children and inputs and all(other.is_right for other in inputs)
            unequal = self.alignment.unequal_weights(pair.reference[0].call, call)
            weights = [weight for weight in unequal if weight.differs]
            is_changed = bool(weights) and not any(
                _kind(weight) in changed_everywhere for weight in weights
            )
            if begins or is_changed:
                seen.add(call.module_path)
                yield self.fault_of(pair, weights=weights)

    def _kinds_that_differ_in_all(self) -> set[str]:
        """Return the weights, by their names in any block, that differ in all of several blocks:
        they may have been changed by right.
        """
        equal: dict[str, list[bool]] = {}
        for weights in self.alignment.modules.weights.values():
            for weight in weights:
                equal.setdefault(_kind(weight), []).append(weight.equal)
        return {kind for kind, flags in equal.items() if len(flags) > 1 and not any(flags)}

    def _name(self, found: GraphFault) -> Fault | None:
        roles = self._left_over(found) or (
            self._role(0, found.reference),
            self._role(1, found.port),
        )
        weights = self._weights(found)
        left_out = self._left_out(found)
        if left_out is not None and not weights:
            return left_out
        shown = [pair for pair in (self._exchanged_input(found), self._pair_of(*roles)) if pair]
        pair = min(shown, key=lambda pair: pair.time, default=None)
        if pair is not None and (calls := self._exchanged_calls(found)) is not None:
            places = calls.map(lambda call: Location.of(call.inputs[0]))
            return Fault("value", places.reference, places.port, pair, pair.relation)
        for find in (find_misordered_parts, find_exchanged_parts):
            if pair is not None and (reordered := find(self.alignment, pair)) is not None:
                return reordered
        if pair is None:
            return None if self._right & {*roles} else self._without_pair(roles, weights)
        fused = (p for p in self.wrong if p.basis == "fused" and p.relation.state == "order")
        # parts that are known to be in another order before anything else is wrong
        if (parts := next((p for p in fused if p.time < pair.time), None)) is not None:
            return self.fault_of(parts)
        if pair.relation.state == "order" and pair.basis == "owner":
            weights = []  # the same numbers: parts, rows or heads in another order
        return self.fault_of(pair, roles, weights)

    def fault_of(
        self,
        pair: TensorPair,
        roles: tuple[Role | None, Role | None] = (None, None),
        weights: Sequence[ParameterPair] = (),
    ) -> Fault:
        """Return the fault that a wrong pair shows.

        Args:
            roles: Where its values were first seen, as far as that is known.
            weights: Those that it begins with.
        """
        places: list[Location | None] = [self._place(side, roles[side], pair) for side in (0, 1)]
        if weights:
            places = self._owned(places, weights)
        kind = "weights" if weights else kind_of(pair.relation)
        return Fault(kind, places[0], places[1], pair, pair.relation, list(weights))

    def _left_over(self, found: GraphFault) -> tuple[Role, Role] | None:
        """Return the one value before a fault that each program has no counterpart of, if they have
        the same size: they should have been equal.
        """
        sides = [
            {
                value.birth
                for node in (() if place is None else place.suspects)
                for made in (graph.graph.nodes.makes[node].tolist() if node >= 0 else ())
                if isinstance(birth := graph.births[made], Role)
                if (value := birth.value) not in self._paired
            }
            for place, graph in zip(found.places, self.graphs, strict=True)
        ]
        if any(len(side) != 1 for side in sides):
            return None
        (reference,), (port,) = sides
        return (reference, port) if reference.value.numel == port.value.numel else None

    def _role(self, side: int, place: FaultPlace | None) -> Role | None:
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

    def _weights(self, found: GraphFault) -> list[ParameterPair]:
        """Return the weights that a fault begins with, with all of their module that differ.

        What differs and is read there is at fault before the code that reads it.
        """
        for side, place in enumerate(found.places):
            if place is None:
                continue
            births = self.graphs[side].births
            leaves = [-1 - origin for origin in (-1 - place.leaf, *place.suspects) if origin < 0]
            if place.nodes:
                leaves += self._read_surely(side, place.nodes[0])
            for leaf in leaves:
                birth = births[leaf] if leaf != NOTHING else None
                differ = self._that_differ(birth) if isinstance(birth, Parameter) else []
                if any(weight.differs for weight in differ):
                    return differ
        role = self._role(1, found.port)
        return [] if role is None else self._tied(role)

    def _read_surely(self, side: int, node: int) -> list[int]:
        """Return the weights that a node reads: of code between calls, those of its own module."""
        graph = self.graphs[side]
        call = graph.calls[node]
        return [
            value
            for value in self.comparison.programs[side].reads[node]
            if isinstance(birth := graph.births[value], Parameter)
            if call is not None and birth.module_path == call.module_path
        ]

    def _tied(self, made: Role) -> list[ParameterPair]:
        """Return the weights that differ of a module that returns what it should, if they may be
        those of a head as well: one row for each channel of the output.
        """
        shape = made.row.get("shape")
        if made.side != "output" or not isinstance(shape, list) or not shape:
            return []
        if not made.call.children and made.call.module_path in self.alignment.modules.owners.port:
            return []
        for (_, module), weights in self.alignment.modules.weights.items():
            differ = [weight for weight in weights if weight.differs]
            is_wide = any(
                weight.port[0].shape[:1] == (shape[-1],) and len(weight.port[0].shape) > 1
                for weight in differ
            )
            outputs = [
                pair
                for pair in self.alignment.pairs
                if pair.is_output and pair.port[0].call.module_path == module
            ]
            if is_wide and outputs and all(pair.is_right for pair in outputs):
                return differ
        return []

    def _that_differ(self, parameter: Parameter) -> list[ParameterPair]:
        """Return the weights of a parameter's module that are not known to be equal."""
        for weights in self.alignment.modules.weights.values():
            if any(parameter in (*pair.reference, *pair.port) for pair in weights):
                return [pair for pair in weights if not pair.equal]
        return []

    def _owned(
        self, places: Sequence[Location | None], weights: Sequence[ParameterPair]
    ) -> list[Location | None]:
        """Return places with the modules that own the weights: others may read them."""
        owners = weights[0].reference[0].module_path, weights[0].port[0].module_path
        return [
            None if place is None else replace(place, module=owner)
            for place, owner in zip(places, owners, strict=True)
        ]

    def _left_out(self, found: GraphFault) -> Fault | None:
        """Return the fault of the outermost module that only one program calls, if what it makes is
        what the other one lacks.
        """
        for side, place in enumerate(found.places):
            idle = {module.called: module for module in self.missing if module.port_is_idle != side}
            if side == 0:
                idle |= {module.called: module for module in self._absent()}
            for call in self._calls_before(side, place):
                around = [call, *enclosing_calls(call)][::-1]
                left_out = next((c for c in around if c.module_path in idle), None)
                if left_out is None or self._has_partner(left_out):
                    continue
                if called_instead(self.alignment, left_out) or self._is_without(
                    side, left_out, found
                ):
                    if (pair := self._skipping_container(left_out)) is not None:
                        return self.fault_of(pair)
                    return self._widened(idle[left_out.module_path], left_out)
        return None

    def _has_partner(self, call: ModuleCall) -> bool:
        """Return whether a call, or one inside it, has a counterpart."""
        return call in self.alignment.partner or any(map(self._has_partner, call.children))

    def _skipping_container(self, call: ModuleCall) -> TensorPair | None:
        """Return the wrong output of the module around a missing one, if that is called and calls
        nothing: it computes something else then.
        """
        around = paired_container(self.alignment.partner, call)
        partner = None if around is None else self.alignment.partner[around]
        if partner is None or partner.children or not partner.module:
            return None
        outputs = (
            pair
            for pair in self.alignment.pairs
            if not pair.is_right
            and any(r.call is partner and r.side == "output" for r in (*pair.reference, *pair.port))
        )
        return next(outputs, None)

    def _widened(self, module: MissingModule, call: ModuleCall) -> Fault:
        """Return the fault of a missing module, or of the outermost one around it that is missing
        as well.
        """
        if module.port_is_idle:
            matched = self.alignment.modules.matched
            called = {own.module_path for own in self.alignment.port.calls}
            for outer in enclosing_calls(call):
                place = counterpart(outer.module_path, matched)
                is_called = place in called or self._has_partner(outer)
                if called_instead(self.alignment, outer) is None and (
                    is_called or len(outer.children) < 2
                ):
                    break
                module, call = MissingModule(outer.module_path, place, True), outer
        return module.fault(call)

    def _absent(self) -> list[MissingModule]:
        """Return the modules that the port lacks together with their weights, and has nothing with
        other weights in their place.
        """
        modules, partner = self.alignment.modules, self.alignment.partner
        unpaired = modules.owners.reference - modules.paired.reference - modules.unpaired[0]
        own = modules.owners.port - modules.paired.port
        called = {call.module_path for call in self.alignment.port.calls}
        absent = []
        for call in self.alignment.reference.calls:
            place = counterpart(call.module_path, modules.matched)
            container = None if call.parent is None else partner.get(call.parent)
            if call.module_path not in unpaired or place in called or container is None:
                continue
            if all(child.module_path not in own for child in container.children):
                absent.append(MissingModule(call.module_path, place, port_is_idle=True))
        return absent

    def _calls_before(self, side: int, place: FaultPlace | None) -> list[ModuleCall]:
        """Return the calls in which a fault begins, or in what is in doubt before it."""
        if place is None or not place.nodes:
            return []
        program, calls = self.comparison.programs[side], self.graphs[side].calls
        in_doubt = made_from(
            program,
            [read for read in program.reads[place.nodes[0]] if program.state[read] != RIGHT],
            lambda value: program.state[value] != RIGHT,
        )
        makers = {program.maker[value] for value in in_doubt if program.state[value] != RIGHT}
        nodes = sorted(node for node in {*makers, place.nodes[0]} if node >= 0)
        before = (calls[node] for node in nodes)
        return [call for call in before if call is not None and not call.children]

    def _is_without(self, side: int, call: ModuleCall, found: GraphFault) -> bool:
        """Return whether the other program's value is what there is without a module's output: a
        value that was there before, one of another size, or the same sum without this term.
        """
        own, other = (
            self._role(side, found.places[side]),
            self._role(1 - side, found.places[1 - side]),
        )
        if own is None or other is None:
            return True
        pair = self._pair_of(*((own, other) if side == 0 else (other, own)))
        if pair is not None:
            own, other = (pair.reference[0], pair.port[0])[:: 1 if side == 0 else -1]
        state, values = self.comparison.programs[1 - side].state, self.graphs[1 - side].values
        if state[values[other.value]] == RIGHT or own.value.numel != other.value.numel:
            return True
        made = [role.value for role in call.outputs]
        keeps_size = any(role.value.numel == value.numel for role in call.inputs for value in made)
        if keeps_size and own.value not in made:
            return True
        expected, without = own.value.sketch, other.value.sketch
        if expected is None or without is None:
            return False
        known = self._sketches_read(1 - side, found.places[1 - side])
        candidates = [first + second for first, second in combinations(_as_long(known, without), 2)]
        terms = [value.sketch for value in made if value.numel == own.value.numel]
        if len(expected) == len(without):
            candidates += [expected - term for term in _as_long(terms, without)]
        limit = _SUM * self.alignment.comparer.limit(own.value, own.value)
        size = limit * float(np.linalg.norm(expected))
        return any(float(np.linalg.norm(each - without)) <= size for each in candidates)

    def _sketches_read(self, side: int, place: FaultPlace | None) -> list[Sketch | None]:
        """Return the sketches of what a fault's first node may read."""
        if place is None or not place.nodes:
            return []
        births = self.graphs[side].births
        read = [births[value] for value in self.comparison.programs[side].reads[place.nodes[0]]]
        return [birth.value.sketch for birth in read if isinstance(birth, Role)]

    def _exchanged_input(self, found: GraphFault) -> TensorPair | None:
        """Return the wrong input of a call that reads no wrong value: it was passed another one."""
        place = found.port
        if place is None or not place.nodes or place.leaf != NOTHING:
            return None
        node = place.nodes[0]
        program = self.comparison.programs[1]
        if program.graph.nodes.is_vague[node]:
            return None
        births = self.graphs.port.births
        read = [value for value in program.reads[node] if isinstance(births[value], Role)]
        if any(program.state[value] == WRONG for value in read):
            return None
        call, values = self.graphs.port.calls[node], self.graphs.port.values
        wrong = (pair for pair in self.alignment.pairs if not pair.is_right)
        return next(
            (
                pair
                for pair in wrong
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
        programs = self.comparison.programs
        reads = [
            {group for group in program.operands(node) if group >= 0}
            for program, node in zip(programs, nodes, strict=True)
        ]
        first, second = self.graphs.reference.calls[nodes[0]], self.graphs.port.calls[nodes[1]]
        if first is None or second is None:
            return None
        calls = Sides(first, second)
        match = self.alignment.partner.get(calls.reference)
        is_other = match is not None and match.module_path != calls.port.module_path
        are_alike = match is not None and pattern(match.module) == pattern(calls.port.module)
        inputs = calls.reference.inputs, calls.port.inputs
        is_given = reads[0] & reads[1] or has_equal_sum(self.alignment.comparer, *inputs)
        is_given = is_given and all(inputs)
        return calls if is_other and are_alike and is_given else None

    def _pair_of(self, reference: Role | None, port: Role | None) -> TensorPair | None:
        """Return the first wrong pair that shows one of two values."""
        shown = (
            pair
            for pair in self.alignment.pairs
            if not pair.is_right
            and any(
                role is not None and any(own.value is role.value for own in side)
                for role, side in ((reference, pair.reference), (port, pair.port))
            )
        )
        return min(shown, key=lambda pair: pair.time, default=None)

    def _place(self, side: int, role: Role | None, pair: TensorPair) -> Location:
        """Return where a tensor of a wrong pair goes wrong: where it was made, or passed to the
        wrong place.
        """
        own = (pair.reference, pair.port)[side]
        state, values = self.comparison.programs[side].state, self.graphs[side].values
        wrong = next((r for r in own if state[values[r.value]] != RIGHT), own[0])
        is_shown = role is not None and (role.value is wrong.value or self._is_before(role, wrong))
        if role is not None and is_shown and role not in self._right:
            return Location.of(role)
        birth = wrong.value.birth
        is_right = state[values[wrong.value]] == RIGHT or birth in self._right
        if not is_right and not self.alignment.is_extra(birth):
            return Location.of(birth)
        received = wrong.call.inputs if wrong.side == "input" else [wrong]
        expected = (pair.reference, pair.port)[1 - side][0]
        again = [role for own in received for role in self._returned_again(own)]
        if again := again or self._returned_instead(wrong, expected):
            return Location.of(again[0])
        # a right value goes wrong where the outermost call receives it
        for call in enclosing_calls(wrong.call):
            given = next((r for r in call.inputs if r.value is wrong.value), None)
            if wrong.side == "output" or given is None or given in self._right:
                break
            wrong = given
        return Location.of(wrong)

    def _is_before(self, role: Role, wrong: Role) -> bool:
        """Return whether a tensor that is in no pair was made before a wrong one."""
        return role.time < wrong.time and role.value not in self._paired

    def _returned_again(self, given: Role) -> list[Role]:
        """Return the outputs of a module that are a right value again, in a wrong place: another
        output, or an input that its class would change.
        """
        birth = given.value.birth
        return [
            role
            for role in given.value.roles
            if role.side == "output" and not role.call.children
            if role is not birth and role not in self._right and role.time <= given.time
            if role.call is birth.call or self._is_usually_made(role)
        ]

    def _is_usually_made(self, returned: Role) -> bool:
        """Return whether another module of a class makes what one returned as it was given."""
        side = 0 if returned.call in self.alignment.calls else 1
        program = (self.alignment.reference, self.alignment.port)[side]
        return any(
            role.tensor == returned.tensor and role.value.birth is role
            for call in program.calls
            if call.cls == returned.call.cls
            for role in call.outputs
        )

    def _returned_instead(self, wrong: Role, expected: Role) -> list[Role]:
        """Return the outputs that are a right value where the same call of the other program
        returns the expected one.
        """
        maker = expected.value.birth
        call = self.alignment.partner.get(maker.call) if maker.side == "output" else None
        return [
            role
            for role in wrong.value.roles
            if role.call is call and role.side == "output" and role not in self._right
            if not self.alignment.is_extra(role)
        ]

    def _without_pair(
        self, roles: tuple[Role | None, Role | None], weights: list[ParameterPair]
    ) -> Fault | None:
        """Return the fault of tensors that were not paired."""
        reference, port = roles
        if reference is None and port is None:
            return None
        places = [None if role is None else Location.of(role) for role in roles]
        relation = pair = None
        if reference is not None and port is not None:
            relation = self.alignment.comparer.relation(reference.value, port.value)
            if relation.is_right:
                relation = None
            else:
                pair = TensorPair([reference], [port], "alike", relation)
        kind = "weights" if weights else "value" if relation is None else kind_of(relation)
        return Fault(kind, places[0], places[1], pair, relation, weights)


def _time(fault: Fault) -> float:
    return math.inf if fault.pair is None else fault.pair.time


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


def _kind(weight: ParameterPair) -> str:
    return pattern(weight.port[0].full_name)


def _as_long(sketches: Iterable[Sketch | None], like: Sketch) -> list[Sketch]:
    """Return the sketches that have the length of another: those of tokens have several."""
    return [each for each in sketches if each is not None and len(each) == len(like)]


def _receivers(pair: TensorPair) -> list[ModuleCall]:
    """Return the port's calls that receive a pair's tensors."""
    return [role.call for role in pair.port if role.side == "input"]
