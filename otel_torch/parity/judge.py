"""Names the first wrong place: of all tensors that should be equal and are not, the one that made
the others wrong.

A verdict is always the birth of a value: made by a module if it was first seen as an output, by the
code in front of a module if it was first seen as an input. That says on each side, in its own
names, which of several nested modules is meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from otel_torch.parity.align import Alignment, TensorPair
from otel_torch.parity.call_graph import ModuleCall, Role, RoleSide, Sketch, TensorValue
from otel_torch.parity.finding import Kind
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameters import ParameterPair, pattern
from otel_torch.parity.tolerance import END_FACTOR
from otel_torch.parity.values import Relation, RelationState, shapes_match

# how much larger than all error so far an error may be, beyond the constant of its dtype, where no
# noise was recorded
GROWTH = 1.5
# how much larger than a first fault's error another error must be to be another fault's, and how
# many are looked for
_FORGIVEN, _MOST_FAULTS = 20.0, 20
# how much larger than every earlier error it must be, and up to which size a first one may be
# legal: half of bf16's rounding
_JUMP, _MAY_BE_LEGAL = 5.0, 2e-3

# what a fault is called by how its tensors compare; the others have other values
_KINDS: dict[RelationState, Kind] = {"order": "layout", "shape": "shape", "nonfinite": "nonfinite"}
_KINSHIP = {"equal": 2, "layout": 1}
_SAME = 2


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """A place on one side: an input or output of a call; of a module that was never called, without
    a call.
    """

    module: ModulePath
    side: RoleSide | None
    role: Role | None
    call: ModuleCall | None


@dataclass(slots=True, eq=False)
class Fault:
    """Where a difference begins, on both sides. expectation: the pair of tensors that told; None
    for a missing call.
    """

    kind: Kind
    reference: Location | None
    port: Location | None
    pair: TensorPair | None
    relation: Relation | None
    weights: list[ParameterPair] = field(default_factory=list)


def location_of(role: Role) -> Location:
    """Where a tensor was seen."""
    return Location(role.call.module_path, role.side, role, role.call)


def kind_of(relation: Relation) -> Kind:
    """What is wrong with two tensors that are not what they should be."""
    return _KINDS.get(relation.state, "value")


@dataclass(slots=True)
class Judgment:
    """faults: the first one first, then independent ones. healed: mismatches of which nothing
    comes. wrong: all others.
    """

    diverged: bool
    faults: list[Fault] = field(default_factory=list)
    healed: list[TensorPair] = field(default_factory=list)
    wrong: list[TensorPair] = field(default_factory=list)


def judge(
    alignment: Alignment, never_called: Sequence[tuple[ModulePath, ModulePath, int]] = ()
) -> Judgment:
    """Judge one stretch of run. never_called: (reference's module, port's module, side on which it
    is never called).
    """
    found = _Judge(alignment, never_called).judge()
    # what is left when errors of the first fault's size are forgiven is not its doing, unless it
    # grew to that on the way
    forgiven, rest, forgiven_error = alignment, found, 0.0
    while (
        rest.faults
        and forgiven_error < (error := _FORGIVEN * _size(rest.faults[0])) < 1
        and len(found.faults) < _MOST_FAULTS
    ):
        forgiven, forgiven_error = _forgive(forgiven, error), error
        rest = _Judge(forgiven, (), plainly=True).judge()
        for fault in rest.faults:
            if fault.port is None or not _stands_out(alignment, fault):
                continue
            place = fault.port.side, fault.port.module
            listed = next(
                (
                    one
                    for one in found.faults
                    if one.port and (one.port.side, one.port.module) == place
                ),
                None,
            )
            if listed is found.faults[0]:
                continue
            if listed is not None:
                found.faults.remove(listed)
            # so small an error may be legal (one program rounds where the other does not), and this
            # one dwarfs it
            found.faults.insert(
                0 if _may_be_legal(found.faults[0]) else len(found.faults), listed or fault
            )
    return found


def _size(fault: Fault) -> float:
    error = None if fault.relation is None or fault.relation.limit == 0 else fault.relation.error
    return (
        math.inf if error is None else error
    )  # what holds whole numbers is never wrong by rounding


def _stands_out(alignment: Alignment, fault: Fault) -> bool:
    """Whether an error is a jump from all that were there before it."""
    if fault.pair is None or fault.pair.basis not in ("owner", "fused"):
        return False
    one = fault.pair
    if len(one.reference) + len(one.port) > 2 or not shapes_match(
        one.reference[0].value, one.port[0].value
    ):
        return False  # by sums an error is known too roughly
    earlier = (
        one.relation.error
        for one in alignment.pairs
        if one.time < fault.pair.time and not one.is_right
    )
    return _size(fault) > _JUMP * max(
        (error for error in earlier if error is not None), default=0.0
    )


def _may_be_legal(fault: Fault) -> bool:
    # that of a fused output is known by its sums alone, and larger than these say
    return _size(fault) < _MAY_BE_LEGAL and fault.pair is not None and fault.pair.basis != "fused"


def _forgive(alignment: Alignment, error: float) -> Alignment:
    """The same alignment, in which differences up to `error` are none."""
    expectations = [
        replace(one, relation=Relation("equal", one.relation.error, error))
        if not one.is_right
        and one.relation.error is not None
        and one.relation.error <= error
        and one.relation.limit > 0
        else one
        for one in alignment.pairs
    ]
    return replace(alignment, pairs=expectations)


class _Judge:
    def __init__(
        self,
        alignment: Alignment,
        never_called: Sequence[tuple[ModulePath, ModulePath, int]],
        plainly: bool = False,
    ) -> None:
        self._plainly = plainly  # by pairs of tensors alone: what only one program has is wrong by the first fault already
        self._alignment = alignment
        self._never_called = never_called
        self._comparer = alignment.comparer
        self._by_call: dict[ModuleCall, list[TensorPair]] = {}
        self._right: tuple[set[TensorValue], set[TensorValue]] = set(), set()
        self._known: dict[TensorValue, int] = {}
        self._by_size: dict[int, list[TensorValue]] = {}
        self._slots: dict[tuple[str, str, str], list[Role]] = {}
        for role in alignment.port.roles:
            self._slots.setdefault(_slot(role), []).append(role)
        for value in alignment.reference.values:
            self._by_size.setdefault(value.numel, []).append(value)
        self._let_grow()
        for one in alignment.pairs:
            for role in (*one.reference, *one.port):
                self._by_call.setdefault(role.call, []).append(one)
            if one.is_right:
                self._right[0].update(role.value for role in one.reference)
                self._right[1].update(role.value for role in one.port)

    def judge(self) -> Judgment:
        wrong = [one for one in self._alignment.pairs if not one.is_right]
        if not wrong and not self._missing:
            return Judgment(False)
        if self._ends_right():
            return Judgment(False, healed=wrong)
        live = [one for one in wrong if not self._exonerated(one)]
        first = self._first(live)
        if first is None:
            return Judgment(bool(live), healed=wrong)
        found = Judgment(True, [first], [one for one in wrong if one not in live], live)
        found.faults += self._independent(first, live)
        return found

    def _let_grow(self) -> None:
        """Where no noise was recorded, error that is there already may grow on its way: what enters
        adds to a tensor's limit.
        """
        largest = 0.0
        for one in self._alignment.pairs:
            relation = one.relation
            if relation.error is None or not math.isfinite(relation.error) or relation.limit == 0:
                continue
            if one.is_right:
                largest = max(largest, relation.error)
            elif relation.state == "different" and not any(
                role.value in self._comparer.floors for role in one.reference
            ):
                limit = relation.limit + GROWTH * largest
                if relation.error <= limit:
                    one.relation = Relation("equal", relation.error, limit)
                    largest = max(largest, relation.error)

    # -- the end
    # ----------------------------------------------------------------------------------------------

    def _ends_right(self) -> bool:
        """Whether all final outputs of one side are right: nothing that differs on the way then
        matters.
        """
        finals = [
            one
            for one in self._alignment.pairs
            if one.basis == "outermost" and self._is_output(one)
        ]
        if not finals:
            return False
        for side in (0, 1):
            program = (self._alignment.reference, self._alignment.port)[side]
            outputs = [role for call in program.outermost for role in call.outputs]
            partners = {
                role: one for one in finals for role in (one.reference if side == 0 else one.port)
            }
            known = [partners[role] for role in outputs if role in partners]
            if (
                known
                and len(known) == len(outputs)
                and all(self._is_right_at_the_end(one) for one in known)
            ):
                return True
        return False

    def _is_right_at_the_end(self, one: TensorPair) -> bool:
        """Errors on the way average out in the end, where less is chance."""
        if (
            one.relation.state != "equal"
            or one.relation.error is None
            or len(one.reference) + len(one.port) > 2
        ):
            return one.is_right
        first, second = one.reference[0].value, one.port[0].value
        if first not in self._comparer.floors:
            return True
        return one.relation.error <= self._comparer.limit(first, second, END_FACTOR)

    @staticmethod
    def _is_output(one: TensorPair) -> bool:
        return one.reference[0].side == "output"

    # -- what does not count
    # -------------------------------------------------------------------------------------------

    def _exonerated(self, one: TensorPair) -> bool:
        """Whether somebody uses the wrong value and is right all the same."""
        if self._made_wrong_from_right(one) or self._harms(one):
            return False
        for role in one.port:
            for use in role.value.roles:
                call = use.call
                if use.side != "input" or (call is role.call and role.side == "output"):
                    continue
                outputs = [
                    other
                    for other in self._by_call.get(call, ())
                    if self._is_output(other) and call in _calls(other)
                ]
                if outputs and all(other.is_right for other in outputs) and not self._scaled(one):
                    return True
        return self._is_output(one) and self._born_later(one)

    def _harms(self, one: TensorPair) -> bool:
        """Whether the very module that is given the wrong value, though the value may be right
        elsewhere, makes a wrong one.
        """
        call = one.port[0].call
        if self._is_output(one) or (
            one.basis not in ("owner", "fused") and not self._only_input(one)
        ):
            return False
        outputs = [
            other
            for other in self._by_call.get(call, ())
            if self._is_output(other) and call in _calls(other)
        ]
        return bool(outputs) and not any(other.is_right for other in outputs)

    def _only_input(self, one: TensorPair) -> bool:
        """Whether it is all that both modules are given of this size: it is the same thing to
        both.
        """
        first, second = one.reference[0], one.port[0]
        rivals = [
            role
            for role in first.call.inputs
            if role.value.numel == first.value.numel and self._counts(role)
        ]
        others = [
            role
            for role in second.call.inputs
            if role.value.numel == second.value.numel and self._counts(role)
        ]
        return len(rivals) == len(others) == 1

    def _made_wrong_from_right(self, one: TensorPair) -> bool:
        """A leaf with right inputs and another output."""
        call = one.port[0].call
        if not self._is_output(one) or call.children or one.basis not in ("owner", "alike"):
            return False
        inputs = [other for other in self._by_call.get(call, ()) if not self._is_output(other)]
        return bool(inputs) and all(other.is_right for other in inputs)

    def _scaled(self, one: TensorPair) -> bool:
        """Whether the wrong value is the right one times a number: a norm behind it hides that."""
        first, second = _together(one.reference), _together(one.port)
        if first is None or second is None:
            return False
        square = float(first @ first)
        rest = second - first * (float(first @ second) / square if square else 0.0)
        size = float(second @ second)
        return bool(size) and float(rest @ rest) <= (4 * one.relation.limit) ** 2 * size

    def _born_later(self, one: TensorPair) -> bool:
        """Whether the right value comes a little later: an activation was moved across a module's
        boundary.
        """
        role = one.port[0]
        wanted = one.reference[0].value
        call = self._alignment.partner.get(one.reference[0].call)
        if call is None or call.parent is None:
            return False
        later = [
            other
            for sibling in call.parent.children
            if sibling.entered >= call.exited
            for other in (*sibling.inputs, *sibling.outputs)
        ]
        return any(
            other.value is not role.value
            and self._comparer.is_equal(wanted, other.value)
            and other.value.birth is other
            for other in later[:4]
        )

    # -- the first
    # ----------------------------------------------------------------------------------------------

    def _first(self, live: list[TensorPair]) -> Fault | None:
        first = min(live, key=lambda one: (one.time, one.relation.limit > 0), default=None)
        missing = self._missing
        if missing is not None and (first is None or self._time_of(missing) <= first.time):
            return missing
        if first is None:
            return None
        for earlier in () if self._plainly else (self._unlike_its_sisters, self._order_fault):
            found = earlier(first)
            if found is not None:
                return found
        return self._fault(first)

    def _time_of(self, fault: Fault) -> int:
        spot = fault.reference
        return spot.call.entered if spot is not None and spot.call is not None else -1

    @cached_property
    def _missing(self) -> Fault | None:
        """The first module that one side never calls although its counterpart is called; the
        outermost such.
        """
        found: list[tuple[int, int, Fault]] = []
        for one, other, side in self._never_called:
            if not self._owns_nothing_that_runs(one, side):
                continue
            calls = (self._alignment.port, self._alignment.reference)[side == 1].calls
            place = one if side == 1 else other
            call = next((call for call in calls if call.module_path == place), None)
            if call is None:
                continue
            skipped = self._empty_holder(other if side == 1 else one, side)
            if skipped is not None:
                found.append((call.entered, len(place[1]), skipped))
                continue
            spots = (
                Location(one, "output", None, call if side == 1 else None),
                Location(other, "output", None, call if side == 0 else None),
            )
            found.append((call.entered, len(place[1]), Fault("missing", *spots, None, None)))
        return min(found, key=lambda item: item[:2])[2] if found else None

    def _empty_holder(self, place: ModulePath, side: int) -> Fault | None:
        """The module around a never called one that runs, but calls nothing of what it holds: then
        that one is at fault.
        """
        program = (self._alignment.reference, self._alignment.port)[side]
        model, module = place
        while module:
            module = module.rpartition(".")[0]
            call = next(
                (call for call in program.calls if call.module_path == (model, module)), None
            )
            if call is None:
                continue
            outputs = [role for role in call.outputs if self._counts(role)]
            if call.children or not module or not outputs:
                return None
            partner = self._alignment.partner.get(call)
            mine = location_of(outputs[0])
            if partner is not None and partner.outputs:
                theirs = location_of(partner.outputs[0])
            else:
                theirs = Location(
                    self._alignment.modules.matched.get((model, module), (model, module)),
                    "output",
                    None,
                    None,
                )
            expectation = next(
                (one for one in self._by_call.get(call, ()) if self._is_output(one)), None
            )
            relation = None if expectation is None else expectation.relation
            spots = (theirs, mine) if side == 1 else (mine, theirs)
            return Fault("value", *spots, expectation, relation)
        return None

    def _owns_nothing_that_runs(self, reference: ModulePath, side: int) -> bool:
        """Whether all owners in a module are never called either: a container alone may be passed
        by (a Sequential whose parts are called one by one).
        """
        idle = {one for one, _, idle_side in self._never_called if idle_side == side}
        model, module = reference
        owners = [
            place
            for place in self._alignment.modules.matched
            if place not in self._alignment.modules.containers
            and place[0] == model
            and (place[1] == module or place[1].startswith(f"{module}.") or not module)
        ]
        return bool(owners) and all(owner in idle for owner in owners)

    def _order_fault(self, first: TensorPair) -> Fault | None:
        """An earlier value that holds the right numbers in another order: seen only where both
        programs have it.
        """
        time = first.port[0].value.birth.time
        earlier = [
            value
            for value in self._alignment.port.values
            if self._may_be_an_order_fault(value) and value.birth.time <= time
        ]
        for value in sorted(earlier, key=lambda value: value.birth.time):
            for other in self._alignment.reference.values:
                if other.numel != value.numel or other.birth.time > first.time or other.is_constant:
                    continue
                if value.birth.side == other.birth.side == "output" and not self._are_one(
                    other.birth.call, value.birth.call
                ):
                    continue
                relation = self._comparer.relation(other, value)
                if relation.state == "order":
                    one = TensorPair([other.birth], [value.birth], "alike", relation)
                    return Fault(
                        "layout", self._born(other.birth), self._born(value.birth), one, relation
                    )
        return None

    def _are_one(self, one: ModuleCall, other: ModuleCall) -> bool:
        """Whether two calls are of modules that correspond, or go by one name."""
        names = (call.module.rpartition(".")[2] for call in (one, other))
        return self._alignment.partner.get(one) is other or len(set(names)) == 1

    def _may_be_an_order_fault(self, value: TensorValue) -> bool:
        return (
            value.numel > 1
            and not value.is_constant
            and not value.is_integer
            and value not in self._right[1]
        )

    def _unlike_its_sisters(self, first: TensorPair) -> Fault | None:
        """An earlier value that only the port has, where the same module of other blocks has what
        the reference has too (or keeps the size of what it is given): what the first wrong pair of
        tensors was made from.
        """
        fault = self._fault(first)
        if fault.port is None or fault.port.role is None:
            return None
        until = fault.port.role.time
        for role in self._alignment.port.roles:
            if role.time > until or role is fault.port.role:
                break
            if (
                role.value.birth is not role
                or not self._counts(role)
                or self._kinship(role.value) == _SAME
            ):
                continue
            sisters = self._slots.get(_slot(role), ())
            own = self._kinship(role.value)
            strange = any(
                self._counts(other) and self._kinship(other.value) > own
                for other in sisters
                if other is not role
            )
            if (strange or self._breaks_a_habit(role, sisters)) and not self._was_right_behind(
                role.call.parent, until
            ):
                reference = self._born(self._wrong_role(first.reference, 0))
                return Fault(
                    kind_of(first.relation), reference, location_of(role), first, first.relation
                )
        return None

    def _was_right_behind(self, call: ModuleCall | None, until: int) -> bool:
        """Whether something right was made of what a call returned: after it, and before the first
        wrong pair.
        """
        if call is None or call.parent is None:
            return False
        behind = (
            role.value.birth
            for one in self._alignment.pairs
            if one.relation.state == "equal"
            for role in one.port
            if self._counts(role)
        )
        return any(call.exited < birth.time < until for birth in behind)

    @staticmethod
    def _counts(role: Role) -> bool:
        return not role.value.is_constant and not role.value.is_integer and role.value.numel > 1

    def _breaks_a_habit(self, role: Role, sisters: Sequence[Role]) -> bool:
        """Whether the port makes something of another size than what it is made from, though
        everywhere else it keeps the size (a rotation) or the very value (an identity).
        """
        if role.side == "output" and role.call in self._alignment.partner:
            return False
        others = [other for other in sisters if other is not role and self._counts(other)]
        if role.side == "output" and others and all(_hands_on(other) for other in others):
            return not _hands_on(role)
        habits = [_sources(other) for other in others]
        own = _sources(role)
        kept = [
            name
            for name in own
            if habits and all(abs(habit.get(name, 0.0) - 1) < 1e-5 for habit in habits)
        ]
        return any(
            abs(own[name] - 1) > max(1e-3, 4 * self._comparer.coarse.get(role.value, 0.0))
            for name in kept
        )

    def _sisters(self, call: ModuleCall) -> list[ModuleCall]:
        """The calls of the same module in other blocks, and its own other calls."""
        name = pattern(call.module)
        return [
            other
            for other in self._alignment.port.calls
            if other is not call and other.cls == call.cls and pattern(other.module) == name
        ]

    def _kinship(self, value: TensorValue) -> int:
        """Whether the reference has this value too, or one of the same numbers in the order of
        another layout.
        """
        known = self._known.get(value)
        if known is None:
            known = _SAME if value in self._right[1] else 0
            for other in self._by_size.get(value.numel, ()):
                if known == _SAME:
                    break
                known = max(known, _KINSHIP.get(self._comparer.relation(other, value).state, 0))
            self._known[value] = known
        return known

    def _fault(self, one: TensorPair) -> Fault:
        reference, port = self._wrong_role(one.reference, 0), self._wrong_role(one.port, 1)
        weights: list[ParameterPair] = []
        if self._is_output(one):
            places = reference.call.module_path, port.call.module_path
            weights = [
                pair for pair in self._alignment.modules.weights.get(places, ()) if not pair.equal
            ]
        if self._made_wrong_from_right(
            one
        ):  # whatever else the value is: a module that hands on its input, too
            spots = location_of(reference), location_of(port)
        else:
            spots = self._born(reference), self._passed(port)
        return Fault(
            "weights" if weights else kind_of(one.relation), *spots, one, one.relation, weights
        )

    def _wrong_role(self, roles: list[Role], side: int) -> Role:
        """Of several that make one value together, the one that is not known to be right."""
        return next((role for role in roles if role.value not in self._right[side]), roles[0])

    @staticmethod
    def _born(role: Role) -> Location:
        return location_of(role.value.birth)

    def _passed(self, port: Role) -> Location:
        """Where the port's value comes from. If it was right where it was made, the module that
        handed it on unchanged, or the code that took it, is wrong.
        """
        value = port.value
        handed_on = [
            role
            for role in sorted(value.roles, key=lambda role: -role.time)
            if role.side == "output"
            and role.time <= port.time
            and role is not value.birth
            and role.call is not port.call
            if _hands_on(role)
        ]
        for role in handed_on:
            if self._is_skipped(role.call):
                return location_of(role)
        if value not in self._right[1]:
            return self._born(port)
        return location_of(next(iter(handed_on), port))

    def _is_skipped(self, call: ModuleCall) -> bool:
        """Whether a call hands its input on though its sisters make something of theirs."""
        sisters = [sister for sister in self._sisters(call) if sister.outputs and sister.inputs]
        return (
            any(not any(map(_hands_on, sister.outputs)) for sister in sisters) and not call.children
        )

    # -- further ones
    # ----------------------------------------------------------------------------------------------

    def _independent(self, first: Fault, live: list[TensorPair]) -> Iterator[Fault]:
        """Modules that make a wrong output of right inputs, and such as were loaded with other
        numbers, besides the first.
        """
        seen = {first.port.module if first.port else None}
        for one in live:
            if one is first.pair or not self._is_output(one):
                continue
            if self._made_wrong_from_right(one) or (
                one.basis == "owner" and self._loaded_wrong(one)
            ):
                fault = self._fault(one)
                if fault.port is not None and fault.port.module not in seen:
                    seen.add(fault.port.module)
                    yield fault

    def _loaded_wrong(self, one: TensorPair) -> list[ParameterPair]:
        """The parameters of a pair of modules that are known to hold other numbers."""
        places = one.reference[0].call.module_path, one.port[0].call.module_path
        return [
            pair
            for pair in self._alignment.modules.weights.get(places, ())
            if not pair.equal and pair.error is not None
        ]


def _together(roles: Sequence[Role]) -> Sketch | None:
    """The sketch of one tensor, or of the sum of several; None where there is none to compute
    with.
    """
    sketches = [role.value.sketch for role in roles]
    if any(sketch is None for sketch in sketches) or len({role.value.numel for role in roles}) > 1:
        return None
    total = np.sum([sketch for sketch in sketches if sketch is not None], axis=0)
    return total if np.isfinite(total).all() else None


def _slot(role: Role) -> tuple[str, str, str]:
    """What the same role of the same module in other blocks has in common with it."""
    return pattern(role.call.module), role.side, role.tensor


def _hands_on(role: Role) -> bool:
    """Whether an output is one of the call's inputs."""
    return any(one.value is role.value for one in role.call.inputs)


def _sources(role: Role) -> dict[tuple[str, str], float]:
    """How much larger a value is than each of those of its size that it may be made from, by what
    these are called: for an output the call's inputs, for an input what was made before it in the
    same call.
    """
    size = role.row.get("l2")
    if not isinstance(size, int | float):
        return {}
    call, above = role.call, role.call.parent
    if role.side == "output":
        makers = call.inputs
    else:
        makers = (
            []
            if above is None
            else [out for one in above.children if one.exited < call.entered for out in one.outputs]
        )
    found = {}
    for one in makers:
        given = one.row.get("l2")
        if one.value.numel == role.value.numel and isinstance(given, int | float) and given:
            found[pattern(one.call.module), one.tensor] = float(size) / float(given)
    return found


def _calls(one: TensorPair) -> Iterable[ModuleCall]:
    return [role.call for role in (*one.reference, *one.port)]
