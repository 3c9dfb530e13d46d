"""Judges a port that ran from its reference's values: nothing is inherited, so each wrong tensor is
a fault of its own.

There is no first that explains the others, no difference that heals and no final output that tells
whether one matters. What remains to be told apart is the little that could not be put right, and
what comes of it before the next module is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from otel_torch.parity.align import Alignment, TensorPair
from otel_torch.parity.call_graph import ModuleCall, Role, TensorValue
from otel_torch.parity.judge import Fault, Judgment, Location, kind_of, location_of
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.parameters import pattern
from otel_torch.recording.isolation_pairing import Slot


def is_isolated(meta: dict[str, Any]) -> bool:
    """Whether a recording, by its metadata, is of a port that ran from its reference's values."""
    isolated = meta.get("isolated")
    return isinstance(isolated, dict) and bool(isolated.get("inputs") or isolated.get("outputs"))


def not_put_right(meta: dict[str, Any]) -> set[Slot]:
    """The places of such a port that kept their own values."""
    isolated = meta.get("isolated")
    stayed = isolated.get("stayed") if isinstance(isolated, dict) else None
    entries = stayed if isinstance(stayed, list) else []
    return {
        (str(one[0]), str(one[1]), str(one[2]))
        for one in entries
        if isinstance(one, list) and len(one) >= 3
    }


def judge_isolated(
    alignment: Alignment,
    stayed: set[Slot],
    never_called: Sequence[tuple[ModulePath, ModulePath, int]] = (),
) -> Judgment:
    """Judge one stretch of an isolated run. Its faults are those of every module, in the
    reference's order; of modules alike (the same one in other blocks) the first stand in front, all
    others behind.

    stayed: see `not_put_right`. never_called: (reference's module, port's module, side on which it
    is never called).
    """
    return _Isolated(alignment, stayed).judge(never_called)


class _Isolated:
    def __init__(self, alignment: Alignment, stayed: set[Slot]) -> None:
        self._alignment, self._stayed = alignment, stayed
        self._right = {
            role.value
            for one in alignment.pairs
            if one.is_right
            for role in (*one.reference, *one.port)
        }
        # the calls in whose code a wrong value is at large, with the time since when
        self._at_large: dict[ModuleCall | None, int] = {}

    def judge(self, never_called: Sequence[tuple[ModulePath, ModulePath, int]]) -> Judgment:
        wrong = sorted((one for one in self._alignment.pairs if not one.is_right), key=_time)
        found: list[Fault] = list(self._missing(never_called))
        named: set[TensorValue] = set()
        healed, inherited = [], []
        for one in wrong:
            if self._is_another_thing(one):
                healed.append(one)
                continue
            if self._is_inherited(one) or one.port[0].value in named:
                inherited.append(one)
            else:
                found.append(self._fault(one))
            named.update(role.value for role in one.port)
            self._let_loose(one)
        found.sort(key=lambda fault: _spot_time(fault))
        return Judgment(
            bool(found),
            _first_of_each_kind(found),
            healed,
            [*inherited, *(f.pair for f in found if f.pair)],
        )

    # -- what is inherited
    # ---------------------------------------------------------------------------------------------

    def _is_inherited(self, one: TensorPair) -> bool:
        role = one.port[0]
        since = self._at_large.get(self._code(role))
        return since is not None and since < role.time

    def _let_loose(self, one: TensorPair) -> None:
        """Note where a wrong value may be used from here on: what enters a module is put right for
        it, not for others.
        """
        for role in one.port:
            stays = self._stays(role)
            around = self._paired_above(role.call)
            if stays or (role.side == "input" and role.value not in self._right):
                self._at_large.setdefault(around, role.time)
            if stays and role.side == "input":
                self._at_large.setdefault(role.call, role.time)

    def _let_loose_without(self, missing: ModuleCall) -> None:
        """Note that from where the reference makes a call that the port does not make, the code
        around it has another value.
        """
        around = self._paired_above(missing)
        before = [one.port[0].time for one in self._alignment.pairs if one.time < missing.entered]
        self._at_large.setdefault(
            None if around is None else self._alignment.partner[around], max(before, default=-1)
        )

    def _stays(self, role: Role) -> bool:
        return (role.call.model, role.call.module, role.tensor) in self._stayed

    def _code(self, role: Role) -> ModuleCall | None:
        """The call whose own code made the tensor: of an output, the module's; of an input, that of
        what encloses it.
        """
        return role.call if role.side == "output" else self._paired_above(role.call)

    def _paired_above(self, call: ModuleCall) -> ModuleCall | None:
        above = call.parent
        while above is not None and above not in self._alignment.partner:
            above = above.parent
        return above

    def _is_another_thing(self, one: TensorPair) -> bool:
        """Whether two modules are alike in name only: these are given and keep their own values,
        and if they were what they seem, the next tensor in the same code would be wrong too.
        """
        role = one.port[0]
        if one.basis != "alike" or not self._stays(role):
            return False
        around = self._paired_above(role.call)
        later = [
            other
            for other in self._alignment.pairs
            if other.basis != "alike"
            and self._code(other.port[0]) is around
            and other.port[0].time > role.time
        ]
        return all(other.is_right for other in later)

    # -- faults
    # ----------------------------------------------------------------------------------------------

    def _fault(self, one: TensorPair) -> Fault:
        reference, port = one.reference[0], self._wrong_role(one.port)
        weights = []
        if port.side == "output":
            places = reference.call.module_path, port.call.module_path
            weights = [
                pair for pair in self._alignment.modules.weights.get(places, ()) if not pair.equal
            ]
        kind = kind_of(one.relation)
        spots = self._made(reference), self._made(port)
        if kind == "layout" and (earlier := self._disordered_before(port)) is not None:
            spots = self._made(earlier[0]), self._made(earlier[1])
        return Fault("weights" if weights else kind, *spots, one, one.relation, weights)

    def _wrong_role(self, roles: list[Role]) -> Role:
        return next((role for role in roles if role.value not in self._right), roles[0])

    def _made(self, role: Role) -> Location:
        """Where the tensor was made, unless it is a right one that is used wrongly."""
        return location_of(role if role.value in self._right else role.value.birth)

    def _disordered_before(self, role: Role) -> tuple[Role, Role] | None:
        """The first tensor in the same code that holds the reference's numbers in another order:
        what only one program has is not put right, and order is all that tells.
        """
        code, comparer = self._code(role), self._alignment.comparer
        values = [
            value
            for value in self._alignment.port.values
            if value.numel > 1
            and not value.is_constant
            and not value.is_integer
            and value not in self._right
            if value.birth.time < role.time and self._paired_above(value.birth.call) is code
        ]
        for value in sorted(values, key=lambda value: value.birth.time):
            for other in self._alignment.reference.values:
                if (
                    other.numel == value.numel
                    and not other.is_constant
                    and comparer.relation(other, value).state == "order"
                ):
                    return other.birth, value.birth
        return None

    def _missing(
        self, never_called: Sequence[tuple[ModulePath, ModulePath, int]]
    ) -> Iterable[Fault]:
        """Modules that one side never calls, the outermost of those that lie in each other."""
        idle = {(one, side) for one, _, side in never_called}
        for one, other, side in never_called:
            if any(((one[0], above), side) in idle for above in _holders(one[1])):
                continue
            place, calls = (
                (one, self._alignment.reference.calls)
                if side
                else (other, self._alignment.port.calls)
            )
            call = next((call for call in calls if call.module_path == place), None)
            if call is not None:
                if side:
                    self._let_loose_without(call)
                spots = (
                    Location(one, "output", None, call if side else None),
                    Location(other, "output", None, None if side else call),
                )
                yield Fault("missing", *spots, None, None)


def _holders(module: str) -> Iterable[str]:
    while module:
        module = module.rpartition(".")[0]
        yield module


def _time(one: TensorPair) -> tuple[int, int]:
    """Port's order: what was made earlier there, inputs before outputs."""
    return one.port[0].time, one.time


def _spot_time(fault: Fault) -> int:
    if fault.pair is not None:
        return fault.pair.time
    calls = [
        spot.call
        for spot in (fault.reference, fault.port)
        if spot is not None and spot.call is not None
    ]
    return min((call.entered for call in calls), default=0)


def _first_of_each_kind(faults: list[Fault]) -> list[Fault]:
    """The first of modules alike in front: one bug in a block's code shows in every block."""
    first: list[Fault] = []
    others: list[Fault] = []
    seen = set()
    for fault in faults:
        spot = fault.port or fault.reference
        kind = (
            None
            if spot is None
            else (
                pattern(spot.module[1]),
                spot.side,
                None if spot.role is None else spot.role.tensor,
            )
        )
        (others if kind in seen else first).append(fault)
        seen.add(kind)
    return first + others
