"""Index one aligned forward for the rules of the judge."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from otel_torch.parity.align import Alignment, enclosing_calls
from otel_torch.parity.call_graph import ModuleCall, Role, TensorValue
from otel_torch.parity.faults import Fault, Location, kind_of
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.rules import GROWTH
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair

# how closely a value of the port matches the reference's values: not at all, in the order of
# another layout, exactly
_UNMATCHED, _REORDERED, _MATCHED = 0, 1, 2
_MATCH_LEVELS = {"equal": _MATCHED, "layout": _REORDERED}


class Evidence:
    """An alignment, indexed by call, value and tensor name.

    Attributes:
        right: The values of either side that are in a right pair.
    """

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.comparer = alignment.comparer
        self.right: set[TensorValue] = set()
        self._right_roles: set[Role] = set()
        self._input_pairs: dict[ModuleCall, list[TensorPair]] = {}
        self._output_pairs: dict[ModuleCall, list[TensorPair]] = {}
        self._values_by_size: dict[int, list[TensorValue]] = {}
        self._roles_by_name: dict[tuple[str, str, str], list[Role]] = {}
        self._match_levels: dict[TensorValue, int] = {}
        for role in alignment.port.roles:
            self._roles_by_name.setdefault(_name_in_any_block(role), []).append(role)
        for value in alignment.reference.values:
            self._values_by_size.setdefault(value.numel, []).append(value)
        for pair in alignment.pairs:
            for role in (*pair.reference, *pair.port):
                # a value that leaves one program's module may enter one of the other's
                by_call = self._output_pairs if role.side == "output" else self._input_pairs
                by_call.setdefault(role.call, []).append(pair)
                if pair.is_right:
                    self.right.add(role.value)
                    self._right_roles.add(role)
        legal = (pair.relation.error for pair in alignment.pairs if pair.is_right)
        self._largest_legal_error = max(filter(None, legal), default=0.0)
        self._differing_kinds: set[object] | None = None
        self._classes = Sides(alignment.reference, alignment.port).map(
            lambda program: {call.module_path: call.cls for call in program.calls}
        )

    # -- tensors of a call

    def input_pairs(self, call: ModuleCall) -> list[TensorPair]:
        """Return the pairs of inputs that a call takes part in."""
        return self._input_pairs.get(call, [])

    def output_pairs(self, call: ModuleCall) -> list[TensorPair]:
        """Return the pairs of outputs that a call takes part in."""
        return self._output_pairs.get(call, [])

    def is_wrong_from_right_inputs(self, pair: TensorPair) -> bool:
        """Return whether a leaf module makes this wrong output from right inputs."""
        call = pair.port[0].call
        if not pair.is_output or call.children or pair.basis not in ("owner", "alike"):
            return False
        inputs = self.input_pairs(call)
        return bool(inputs) and all(input_pair.is_right for input_pair in inputs)

    def is_right_role(self, role: Role) -> bool:
        """Return whether a tensor is in a right pair in this place."""
        return role in self._right_roles

    # -- the same module in other blocks

    def sibling_calls(self, call: ModuleCall) -> list[ModuleCall]:
        """Return the port's calls of the same module in other blocks, and its own other calls."""
        name = pattern(call.module)
        return [
            sibling
            for sibling in self.alignment.port.calls
            if sibling is not call and sibling.cls == call.cls and pattern(sibling.module) == name
        ]

    def sibling_roles(self, role: Role) -> list[Role]:
        """Return the same tensor of the port's same module in other blocks, and its other calls."""
        roles = self._roles_by_name.get(_name_in_any_block(role), ())
        return [sibling for sibling in roles if sibling is not role]

    # -- values

    def is_matched(self, value: TensorValue) -> bool:
        """Return whether the reference has this value of the port, too."""
        return self.match_level(value) == _MATCHED

    def match_level(self, value: TensorValue) -> int:
        """Return how closely the reference has a value of the port; more is closer.

        Its error may have grown from legal ones, as in `grow_limits`.
        """
        level = self._match_levels.get(value)
        if level is None:
            level = _MATCHED if value in self.right else _UNMATCHED
            for candidate in self._values_by_size.get(value.numel, ()):
                if level == _MATCHED:
                    break
                relation = self.comparer.relation(candidate, value)
                grown = relation.limit + GROWTH * self._largest_legal_error
                is_close = relation.error is not None and relation.error <= grown
                is_equal = relation.state == "different" and is_close
                state = "equal" if is_equal else relation.state
                level = max(level, _MATCH_LEVELS.get(state, _UNMATCHED))
            self._match_levels[value] = level
        return level

    # -- weights

    def differs_in_all(self, weight: ParameterPair) -> bool:
        """Return whether a weight differs in all blocks, or in all modules of one class.

        Or it does in a block where what is computed with it is right.
        """
        if self._differing_kinds is None:
            self._differing_kinds = self._find_differing_kinds()
        return not self._differing_kinds.isdisjoint(self._kinds_of(weight))

    def _find_differing_kinds(self) -> set[object]:
        equal: dict[object, list[bool]] = {}
        for weights in self.alignment.modules.weights.values():
            for weight in weights:
                for kind in self._kinds_of(weight):
                    equal.setdefault(kind, []).append(weight.equal)
        everywhere = {kind for kind, flags in equal.items() if len(flags) > 1 and not any(flags)}
        return everywhere | {
            self._kinds_of(weight)[0]
            for pair in self.alignment.pairs
            if pair.is_right and pair.is_output and pair.basis == "owner"
            for weight in self.alignment.unequal_weights(pair.reference[0].call, pair.port[0].call)
        }

    def _kinds_of(self, weight: ParameterPair) -> list[object]:
        """Return what names a weight in any block, and in any module of its class."""
        parts = (*weight.reference, *weight.port)
        kinds: list[object] = [tuple(pattern(part.full_name) for part in parts)]
        reference, port = self._classes
        classes = [
            *(reference.get(part.module_path) for part in weight.reference),
            *(port.get(part.module_path) for part in weight.port),
        ]
        if None not in classes:
            kinds.append((*classes, *(part.name for part in parts)))
        return kinds

    # -- faults

    def fault_of(self, pair: TensorPair) -> Fault:
        """Return the fault that a wrong pair shows, where either program's value goes wrong."""
        reference, port = wrong_role(pair.reference, self.right), wrong_role(pair.port, self.right)
        weights = (
            self.alignment.unequal_weights(reference.call, port.call) if pair.is_output else []
        )
        if weights or self.is_wrong_from_right_inputs(pair):
            # even if the module returns its input, it is the module that is wrong
            locations = Location.of(reference), Location.of(port)
        else:
            locations = self.place_of(reference), self._origin(port)
        kind = "weights" if weights else kind_of(pair.relation)
        return Fault(kind, *locations, pair, pair.relation, weights)

    def place_of(self, role: Role) -> Location:
        """Return where a wrong tensor begins: where its value is born, or handed to a wrong place.

        A value that is right elsewhere goes wrong on its way into the outermost call that receives
        it as `role` does. So does a second output of a module that the reference has elsewhere.
        """
        if role.value not in self.right and not self._is_right_elsewhere(role):
            return Location.of(role.value.birth)
        for call in enclosing_calls(role.call):
            received = [
                given
                for given in call.inputs
                if given.value is role.value and given not in self._right_roles
            ]
            if role.side == "output" or not received:
                break
            role = received[0]
        return Location.of(role)

    def _is_right_elsewhere(self, role: Role) -> bool:
        """Return whether the reference has a value that the port's module returns besides others.

        A fused norm returns the residual, too, which is no output of the reference's norm.
        """
        birth = role.value.birth
        return (
            birth.side == "output"
            and birth is not role
            and not any(birth in (*pair.reference, *pair.port) for pair in self.alignment.pairs)
            and bool(self.output_pairs(birth.call))
            and self.is_matched(role.value)
        )

    def wrong_use(self, value: TensorValue) -> Role | None:
        """Return the first role in which a value may be wrong, None if it is right in all."""
        if value not in self.right:
            return value.birth
        after = itertools.dropwhile(lambda role: role not in self._right_roles, value.roles)
        return next((role for role in after if role not in self._right_roles), None)

    def _origin(self, port: Role) -> Location:
        """Return where the port's value goes wrong.

        That may be a module that returns its input unchanged.
        """
        value = port.value
        passed_on = [
            role
            for role in sorted(value.roles, key=lambda role: -role.time)
            if role.side == "output"
            and role.time <= port.time
            and role is not value.birth
            and role.call is not port.call
            and role not in self._right_roles
            and returns_input(role)
        ]
        for role in passed_on:
            if self._is_skipped(role.call):
                return Location.of(role)
        if value in self.right and passed_on and not self._is_used_rightly_after(passed_on[0]):
            return Location.of(passed_on[0])
        return self.place_of(port)

    def _is_used_rightly_after(self, role: Role) -> bool:
        return any(use in self._right_roles for use in role.value.roles if use.time > role.time)

    def _is_skipped(self, call: ModuleCall) -> bool:
        """Return whether a leaf returns its input, though its siblings compute something."""
        if call.children:
            return False
        siblings = [s for s in self.sibling_calls(call) if s.outputs and s.inputs]
        return any(not any(map(returns_input, sibling.outputs)) for sibling in siblings)


def is_informative(role: Role) -> bool:
    """Return whether a tensor was computed, so that equality is not a coincidence."""
    value = role.value
    return not value.is_constant and not value.is_integer and value.numel > 1


def returns_input(role: Role) -> bool:
    """Return whether an output is one of the call's inputs."""
    return any(given.value is role.value for given in role.call.inputs)


def wrong_role(roles: Sequence[Role], right: set[TensorValue]) -> Role:
    """Return the first of several roles whose value is in no right pair, else the first."""
    return next((role for role in roles if role.value not in right), roles[0])


def _name_in_any_block(role: Role) -> tuple[str, str, str]:
    return pattern(role.call.module), role.side, role.tensor
