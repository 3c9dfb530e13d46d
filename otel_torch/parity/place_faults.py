"""Where the tensors of a wrong pair first go wrong, in each program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from otel_torch.graph.states import RIGHT
from otel_torch.parity.align import enclosing_calls
from otel_torch.parity.call_graph import Role
from otel_torch.parity.compared_calls import ComparedCalls
from otel_torch.parity.faults import Fault, Location, kind_of
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.tensor_pair import TensorPair


@dataclass
class FaultPlacer:
    """Places the faults that wrong pairs show."""

    compared: ComparedCalls

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
            places = _owned(places, weights)
        kind = "weights" if weights else kind_of(pair.relation)
        return Fault(kind, places[0], places[1], pair, pair.relation, list(weights))

    def fault_without_pair(
        self, roles: tuple[Role | None, Role | None], weights: list[ParameterPair]
    ) -> Fault | None:
        """Return the fault of tensors that were not paired."""
        reference, port = roles
        if reference is None and port is None:
            return None
        places = [None if role is None else Location.of(role) for role in roles]
        relation = pair = None
        if reference is not None and port is not None:
            relation = self.compared.alignment.comparer.relation(reference.value, port.value)
            if relation.is_right:
                relation = None
            else:
                pair = TensorPair([reference], [port], "alike", relation)
        kind = "weights" if weights else "value" if relation is None else kind_of(relation)
        return Fault(kind, places[0], places[1], pair, relation, weights)

    def _place(self, side: int, role: Role | None, pair: TensorPair) -> Location:
        """Return where a tensor of a wrong pair goes wrong: where it was made, or passed to the
        wrong place.
        """
        own = (pair.reference, pair.port)[side]
        wrong = next((r for r in own if self.compared.state(side, r.value) != RIGHT), own[0])
        is_shown = role is not None and (role.value is wrong.value or self._is_before(role, wrong))
        if role is not None and is_shown and role not in self.compared.right_roles:
            return Location.of(role)
        birth = wrong.value.birth
        is_right = (
            self.compared.state(side, wrong.value) == RIGHT or birth in self.compared.right_roles
        )
        if not is_right and not self.compared.alignment.is_extra(birth):
            return Location.of(birth)
        received = wrong.call.inputs if wrong.side == "input" else [wrong]
        expected = (pair.reference, pair.port)[1 - side][0]
        again = [role for own in received for role in self._returned_again(own)]
        if again := again or self._returned_instead(wrong, expected):
            return Location.of(again[0])
        # a right value goes wrong where the outermost call receives it
        for call in enclosing_calls(wrong.call):
            given = next((r for r in call.inputs if r.value is wrong.value), None)
            if wrong.side == "output" or given is None or given in self.compared.right_roles:
                break
            wrong = given
        return Location.of(wrong)

    def _is_before(self, role: Role, wrong: Role) -> bool:
        """Return whether a tensor that is in no pair was made before a wrong one."""
        return role.time < wrong.time and role.value not in self.compared.paired_values

    def _returned_again(self, given: Role) -> list[Role]:
        """Return the outputs of a module that are a right value again, in a wrong place: another
        output, or an input that its class would change.
        """
        birth = given.value.birth
        return [
            role
            for role in given.value.roles
            if role.side == "output" and not role.call.children
            if role is not birth
            and role not in self.compared.right_roles
            and role.time <= given.time
            if role.call is birth.call or self._is_usually_made(role)
        ]

    def _is_usually_made(self, returned: Role) -> bool:
        """Return whether another module of a class makes what one returned as it was given."""
        side = 0 if returned.call in self.compared.alignment.calls else 1
        program = (self.compared.alignment.reference, self.compared.alignment.port)[side]
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
        call = self.compared.alignment.partner.get(maker.call) if maker.side == "output" else None
        return [
            role
            for role in wrong.value.roles
            if role.call is call and role.side == "output" and role not in self.compared.right_roles
            if not self.compared.alignment.is_extra(role)
        ]


def _owned(
    places: Sequence[Location | None], weights: Sequence[ParameterPair]
) -> list[Location | None]:
    """Return places with the modules that own the weights: others may read them."""
    owners = weights[0].reference[0].module_path, weights[0].port[0].module_path
    return [
        None if place is None else replace(place, module=owner)
        for place, owner in zip(places, owners, strict=True)
    ]
