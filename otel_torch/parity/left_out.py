"""Modules that one program leaves out: is what they make what the other one lacks?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from otel_torch.graph.compare import FaultPlace, GraphFault
from otel_torch.graph.states import RIGHT, made_from
from otel_torch.parity.align import enclosing_calls, paired_container
from otel_torch.parity.call_graph import ModuleCall, Role, Sketch
from otel_torch.parity.compared_calls import ComparedCalls
from otel_torch.parity.explain import called_instead
from otel_torch.parity.faults import Fault, MissingModule
from otel_torch.parity.modules import counterpart
from otel_torch.parity.place_faults import FaultPlacer
from otel_torch.parity.tensor_pair import TensorPair

# errors of sums of tensors, as a multiple of the limit of one
_SUM = 3.0


@dataclass
class LeftOutModules:
    """Finds modules that one program leaves out.

    Args:
        missing: Modules that only one side calls.
    """

    compared: ComparedCalls
    placer: FaultPlacer
    missing: Sequence[MissingModule]

    def fault_of(self, found: GraphFault) -> Fault | None:
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
                if called_instead(self.compared.alignment, left_out) or self._is_without(
                    side, left_out, found
                ):
                    if (pair := self._skipping_container(left_out)) is not None:
                        return self.placer.fault_of(pair)
                    return self._widened(idle[left_out.module_path], left_out)
        return None

    def _has_partner(self, call: ModuleCall) -> bool:
        """Return whether a call, or one inside it, has a counterpart."""
        return call in self.compared.alignment.partner or any(map(self._has_partner, call.children))

    def _skipping_container(self, call: ModuleCall) -> TensorPair | None:
        """Return the wrong output of the module around a missing one, if that is called and calls
        nothing: it computes something else then.
        """
        around = paired_container(self.compared.alignment.partner, call)
        partner = None if around is None else self.compared.alignment.partner[around]
        if partner is None or partner.children or not partner.module:
            return None
        outputs = (
            pair
            for pair in self.compared.wrong_pairs
            if any(r.call is partner and r.side == "output" for r in (*pair.reference, *pair.port))
        )
        return next(outputs, None)

    def _widened(self, module: MissingModule, call: ModuleCall) -> Fault:
        """Return the fault of a missing module, or of the outermost one around it that is missing
        as well.
        """
        if module.port_is_idle:
            matched = self.compared.alignment.modules.matched
            called = {own.module_path for own in self.compared.alignment.port.calls}
            for outer in enclosing_calls(call):
                place = counterpart(outer.module_path, matched)
                is_called = place in called or self._has_partner(outer)
                if called_instead(self.compared.alignment, outer) is None and (
                    is_called or len(outer.children) < 2
                ):
                    break
                module, call = MissingModule(outer.module_path, place, True), outer
        return module.fault(call)

    def _absent(self) -> list[MissingModule]:
        """Return the modules that the port lacks together with their weights, and has nothing with
        other weights in their place.
        """
        modules, partner = self.compared.alignment.modules, self.compared.alignment.partner
        unpaired = modules.owners.reference - modules.paired.reference - modules.unpaired[0]
        own = modules.owners.port - modules.paired.port
        called = {call.module_path for call in self.compared.alignment.port.calls}
        absent = []
        for call in self.compared.alignment.reference.calls:
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
        program, calls = self.compared.comparison.programs[side], self.compared.graphs[side].calls
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
            self.compared.first_role(side, found.places[side]),
            self.compared.first_role(1 - side, found.places[1 - side]),
        )
        if own is None or other is None:
            return True
        pair = self.compared.wrong_pair_of(*((own, other) if side == 0 else (other, own)))
        if pair is not None:
            own, other = (pair.reference[0], pair.port[0])[:: 1 if side == 0 else -1]
        if (
            self.compared.state(1 - side, other.value) == RIGHT
            or own.value.numel != other.value.numel
        ):
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
        limit = _SUM * self.compared.alignment.comparer.limit(own.value, own.value)
        size = limit * float(np.linalg.norm(expected))
        return any(float(np.linalg.norm(each - without)) <= size for each in candidates)

    def _sketches_read(self, side: int, place: FaultPlace | None) -> list[Sketch | None]:
        """Return the sketches of what a fault's first node may read."""
        if place is None or not place.nodes:
            return []
        births = self.compared.graphs[side].births
        reads = self.compared.comparison.programs[side].reads[place.nodes[0]]
        return [
            birth.value.sketch
            for birth in map(births.__getitem__, reads)
            if isinstance(birth, Role)
        ]


def _as_long(sketches: Iterable[Sketch | None], like: Sketch) -> list[Sketch]:
    """Return the sketches that have the length of another: those of tokens have several."""
    return [each for each in sketches if each is not None and len(each) == len(like)]
