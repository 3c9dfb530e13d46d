"""Judge an isolated run: a port whose modules computed from the reference's values.

Nothing is inherited, so each wrong tensor is a fault by itself: no first fault explains the others,
and no difference heals. The exceptions are the few tensors that kept the port's
values, and the tensors computed from them before the next module received the reference's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from otel_torch.parity.align import Alignment, paired_container
from otel_torch.parity.call_graph import ModuleCall, Role, TensorValue, enclosing_names
from otel_torch.parity.faults import Fault, Judgment, Location, MissingModule, kind_of
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.recording.isolation_pairing import Slot


def is_isolated(meta: dict[str, Any]) -> bool:
    """Return whether a recording, by its metadata, is of an isolated run."""
    isolated = meta.get("isolated") or {}
    return bool(isolated.get("inputs") or isolated.get("outputs"))


def unexchanged_slots(meta: dict[str, Any]) -> set[Slot]:
    """Return the tensors of an isolated run that kept the port's values."""
    isolated = meta.get("isolated") or {}
    return {(model, module, tensor) for model, module, tensor, _ in isolated.get("stayed", ())}


def judge_isolated(
    alignment: Alignment, unexchanged: set[Slot], missing: Sequence[MissingModule] = ()
) -> Judgment:
    """Judge one forward of an isolated run.

    The faults of all modules are in the reference's order; those of a module that was listed for
    another block come at the end.

    Args:
        unexchanged: See `unexchanged_slots`.
        missing: Modules that only one side calls.
    """
    return _IsolatedJudge(alignment, unexchanged).judge(missing)


class _IsolatedJudge:
    def __init__(self, alignment: Alignment, unexchanged: set[Slot]) -> None:
        self._alignment, self._unexchanged = alignment, unexchanged
        self._right = {
            role.value
            for pair in alignment.pairs
            if pair.is_right
            for role in (*pair.reference, *pair.port)
        }
        # calls whose own code may use a wrong value, and from when on
        self._tainted_since: dict[ModuleCall | None, int] = {}

    def judge(self, missing: Sequence[MissingModule]) -> Judgment:
        wrong = sorted(
            (pair for pair in self._alignment.pairs if not pair.is_right), key=_port_time
        )
        faults = list(self._missing_faults(missing))
        blamed: set[TensorValue] = set()
        healed, inherited = [], []
        for pair in wrong:
            if self._is_other_module(pair):
                healed.append(pair)
                continue
            if self._is_inherited(pair) or pair.port[0].value in blamed:
                inherited.append(pair)
            else:
                faults.append(self._fault_of(pair))
            blamed.update(role.value for role in pair.port)
            self._taint(pair)
        faults.sort(key=_fault_time)
        introduced = [fault.pair for fault in faults if fault.pair]
        return Judgment(
            bool(faults), _first_of_each_module(faults), healed, [*inherited, *introduced]
        )

    # -- what is inherited
    # ----------------------------------------------------------------------------------------------

    def _is_inherited(self, pair: TensorPair) -> bool:
        """Return whether the code that made a tensor had used a wrong value before."""
        role = pair.port[0]
        since = self._tainted_since.get(self._maker(role))
        return since is not None and since < role.time

    def _taint(self, pair: TensorPair) -> None:
        """Record which code may use a wrong value from here on.

        A module's input is exchanged for that module only, not for the code around it.
        """
        for role in pair.port:
            is_unexchanged = self._is_unexchanged(role)
            is_wrong_input = role.side == "input" and role.value not in self._right
            if is_unexchanged or is_wrong_input:
                self._tainted_since.setdefault(self._paired_container(role.call), role.time)
            if is_unexchanged and role.side == "input":
                self._tainted_since.setdefault(role.call, role.time)

    def _taint_from_missing(self, missing: ModuleCall) -> None:
        """Record that the code around a call that the port does not make has another value."""
        container = self._paired_container(missing)
        before = [
            pair.port[0].time for pair in self._alignment.pairs if pair.time < missing.entered
        ]
        port_container = None if container is None else self._alignment.partner[container]
        self._tainted_since.setdefault(port_container, max(before, default=-1))

    def _is_unexchanged(self, role: Role) -> bool:
        return (role.call.model, role.call.module, role.tensor) in self._unexchanged

    def _maker(self, role: Role) -> ModuleCall | None:
        """Return the call whose own code made a tensor: of an input, the enclosing one."""
        return role.call if role.side == "output" else self._paired_container(role.call)

    def _paired_container(self, call: ModuleCall) -> ModuleCall | None:
        return paired_container(self._alignment.partner, call)

    def _is_other_module(self, pair: TensorPair) -> bool:
        """Return whether two modules have nothing in common but their name.

        They keep their own values. If they did the same work, the next tensor in the same code
        would be wrong, too.
        """
        role = pair.port[0]
        if pair.basis != "alike" or not self._is_unexchanged(role):
            return False
        container = self._paired_container(role.call)
        later = [
            other_pair
            for other_pair in self._alignment.pairs
            if other_pair.basis != "alike"
            and self._maker(other_pair.port[0]) is container
            and other_pair.port[0].time > role.time
        ]
        return all(later_pair.is_right for later_pair in later)

    # -- faults
    # ----------------------------------------------------------------------------------------------

    def _fault_of(self, pair: TensorPair) -> Fault:
        reference, port = pair.reference[0], self._wrong_role(pair.port)
        weights = []
        if port.side == "output":
            modules = reference.call.module_path, port.call.module_path
            all_weights = self._alignment.modules.weights.get(modules, ())
            weights = [weight for weight in all_weights if not weight.equal]
        kind = kind_of(pair.relation)
        locations = self._origin(reference), self._origin(port)
        if kind == "layout":
            earlier = self._reordered_before(port)
            if earlier is not None:
                locations = self._origin(earlier[0]), self._origin(earlier[1])
        return Fault("weights" if weights else kind, *locations, pair, pair.relation, weights)

    def _wrong_role(self, roles: Sequence[Role]) -> Role:
        """Return the first of several roles whose value is in no right pair, else the first."""
        return next((role for role in roles if role.value not in self._right), roles[0])

    def _origin(self, role: Role) -> Location:
        """Return where a tensor was made, or where a right one is used wrongly."""
        return Location.of(role if role.value in self._right else role.value.birth)

    def _reordered_before(self, role: Role) -> tuple[Role, Role] | None:
        """Return the first tensor in the same code with the reference's numbers in another order.

        Tensors that only the port has are not exchanged, and show by their order alone.
        """
        code, comparer = self._maker(role), self._alignment.comparer
        candidates = [
            value
            for value in self._alignment.port.values
            if value.numel > 1
            and not value.is_constant
            and not value.is_integer
            and value not in self._right
            and value.birth.time < role.time
            and self._paired_container(value.birth.call) is code
        ]
        for value in sorted(candidates, key=lambda value: value.birth.time):
            for reference in self._alignment.reference.values:
                if reference.numel != value.numel or reference.is_constant:
                    continue
                is_reordered = comparer.relation(reference, value).state == "order"
                if is_reordered and reference not in self._right:
                    return reference.birth, value.birth
        return None

    def _missing_faults(self, missing: Sequence[MissingModule]) -> Iterable[Fault]:
        """Yield modules that one side never calls, without those inside another missing one."""
        idle = {(module.reference, module.port_is_idle) for module in missing}
        for module in missing:
            model, name = module.reference
            containers = (((model, outer), module.port_is_idle) for outer in enclosing_names(name))
            if any(container in idle for container in containers):
                continue
            program = self._alignment.reference if module.port_is_idle else self._alignment.port
            call = next((c for c in program.calls if c.module_path == module.called), None)
            if call is not None:
                if module.port_is_idle:
                    self._taint_from_missing(call)
                yield module.fault(call)


def _port_time(pair: TensorPair) -> tuple[int, int]:
    return pair.port[0].time, pair.time


def _fault_time(fault: Fault) -> int:
    if fault.pair is not None:
        return fault.pair.time
    calls = [
        location.call
        for location in (fault.reference, fault.port)
        if location is not None and location.call is not None
    ]
    return min((call.entered for call in calls), default=0)


def _first_of_each_module(faults: list[Fault]) -> list[Fault]:
    """Move the faults of further blocks to the end: one bug shows in every block."""
    first: list[Fault] = []
    repeated: list[Fault] = []
    seen = set()
    for fault in faults:
        key = _key_in_any_block(fault.port or fault.reference)
        (repeated if key in seen else first).append(fault)
        seen.add(key)
    return first + repeated


def _key_in_any_block(location: Location | None) -> object:
    if location is None:
        return None
    tensor = None if location.role is None else location.role.tensor
    return pattern(location.module[1]), location.side, tensor
