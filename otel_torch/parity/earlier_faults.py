"""The rules that find a fault before the first wrong pair, in tensors that only the port has.

A pair of tensors exists only where both programs have the value. A fault may be earlier, in code
whose tensors the reference does not record. There the port's other blocks show what is usual.
"""

from __future__ import annotations

from collections.abc import Sequence

from otel_torch.parity.call_graph import ModuleCall, Role, TensorValue
from otel_torch.parity.evidence import Evidence, is_informative, returns_input, wrong_role
from otel_torch.parity.faults import Fault, Location, kind_of
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.values import Relation

# distance from 1 up to which the ratio of two norms may be that of a rotation
KEEPS_NORM = 1e-5
# distance from 1 at which the ratio of two norms counts as different
_CHANGES_NORM = 1e-3
# a value that is not passed on is off by this many limits, and by this share of the first error
_NOT_PASSED_ON, _SIMILAR = 20.0, 0.25


def find_own_weights(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return the module whose own parameters differ, and whose code made the first wrong input.

    A module with submodules uses its own parameters between them: scales, sinks, states.
    """
    if first.is_output:
        return None
    reference, port = first.reference[0].call.parent, first.port[0].call.parent
    if reference is None or port is None:
        return None
    weights = [
        pair
        for pair in evidence.alignment.unequal_weights(reference, port)
        if pair.error is not None
    ]
    if not weights:
        return None
    place = Location.of_module(reference.module_path, reference)
    port_place = Location.of_module(port.module_path, port)
    return Fault("weights", place, port_place, first, first.relation, weights)


def find_unlike_siblings(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return an earlier value that only the port has and that differs from other blocks, or None.

    The same module of other blocks has a value that the reference has too, keeps the norm of what
    it receives, or passes it on; this one does not. The first wrong pair was computed from it.
    """
    fault = evidence.fault_of(first)
    if fault.port is None or fault.port.role is None:
        return None
    until = fault.port.role.time
    for role in evidence.alignment.port.roles:
        if role.time > until or role is fault.port.role:
            break
        if not is_informative(role):
            continue
        is_unlike = _is_unlike_siblings(evidence, role, first)
        did_no_harm = is_unlike and (
            _makes_right_outputs(evidence, role)
            or _is_followed_by_right_value(evidence, role.call.parent, until)
        )
        if is_unlike and not did_no_harm:
            kind = kind_of(first.relation)
            return Fault(kind, fault.reference, Location.of(role), first, first.relation)
    return None


def _is_unlike_siblings(evidence: Evidence, role: Role, first: TensorPair) -> bool:
    siblings = [s for s in evidence.sibling_roles(role) if is_informative(s)]
    if _fails_to_pass_on(evidence, role, siblings, first):
        return True
    if role.value.birth is not role or evidence.is_matched(role.value):
        return False
    return _differs_from_siblings(evidence, role, siblings) or _breaks_sibling_pattern(
        evidence, role, siblings
    )


def _differs_from_siblings(evidence: Evidence, role: Role, siblings: Sequence[Role]) -> bool:
    """Return whether the reference has a sibling's value more closely than this one."""
    level = evidence.match_level(role.value)
    return any(evidence.match_level(sibling.value) > level for sibling in siblings)


def _breaks_sibling_pattern(evidence: Evidence, role: Role, siblings: Sequence[Role]) -> bool:
    """Return whether a value changes its norm, though all siblings keep theirs.

    A rotation keeps the norm, an identity the value itself.
    """
    if role.side == "output" and role.call in evidence.alignment.partner:
        return False
    if role.side == "output" and siblings and all(map(returns_input, siblings)):
        return not returns_input(role)
    if not siblings:
        return False
    ratios = _norm_ratios(role)
    sibling_ratios = [_norm_ratios(sibling) for sibling in siblings]
    slack = max(_CHANGES_NORM, 4 * evidence.comparer.limit(role.value, role.value))
    return any(
        abs(ratio - 1) > slack
        and all(abs(ratios_.get(source, 0.0) - 1) < KEEPS_NORM for ratios_ in sibling_ratios)
        for source, ratio in ratios.items()
    )


def _fails_to_pass_on(
    evidence: Evidence, role: Role, siblings: Sequence[Role], first: TensorPair
) -> bool:
    """Return whether siblings return what the reference's module receives, and this one does not.

    A fused norm also returns the sum of its inputs: the residual.
    """
    if role.side != "output" or not siblings or first.relation.error is None:
        return False
    received = _received_by_partner(evidence, role)
    is_paired = any(role in pair.port for pair in evidence.output_pairs(role.call))
    if is_paired or not received:
        return False
    comparer = evidence.comparer
    relations = [comparer.relation(value, role.value) for value in received]
    error = min((r.error for r in relations if r.error is not None), default=0.0)
    limit = max(relation.limit for relation in relations)
    if error < max(_NOT_PASSED_ON * limit, _SIMILAR * first.relation.error):
        return False
    return any(
        comparer.is_equal(value, sibling.value)
        for sibling in siblings
        if sibling.call.cls == role.call.cls
        for value in _received_by_partner(evidence, sibling)
    )


def _received_by_partner(evidence: Evidence, role: Role) -> list[TensorValue]:
    """Return what the reference's call receives that could be this output."""
    partner = evidence.alignment.partner.get(role.call)
    inputs = [] if partner is None else partner.inputs
    return [
        given.value
        for given in inputs
        if given.value.numel == role.value.numel and is_informative(given)
    ]


def _norm_ratios(role: Role) -> dict[tuple[str, str], float]:
    """Return the norm of a value over that of each value of its size that it may be made from.

    An output may be made from the call's inputs, an input from what was computed before it in the
    enclosing call. The sources are named by module and tensor, in any block.
    """
    norm = role.row.get("l2")
    if not isinstance(norm, int | float):
        return {}
    ratios = {}
    for source in possible_sources(role):
        source_norm = source.row.get("l2")
        if source.value.numel != role.value.numel:
            continue
        if isinstance(source_norm, int | float) and source_norm:
            name = pattern(source.call.module), source.tensor
            ratios[name] = float(norm) / float(source_norm)
    return ratios


def possible_sources(role: Role) -> list[Role]:
    """Return what an output may be made from in its call, or an input in the enclosing call."""
    if role.side == "output":
        return role.call.inputs
    parent = role.call.parent
    if parent is None:
        return []
    return [
        output
        for call in parent.children
        if call.exited < role.call.entered
        for output in call.outputs
    ]


def _makes_right_outputs(evidence: Evidence, role: Role) -> bool:
    """Return whether a call that receives a value returns nothing but right values."""
    right = {
        output
        for pair in evidence.output_pairs(role.call)
        if pair.relation.state == "equal"
        for output in pair.port
    }
    outputs = [output for output in role.call.outputs if is_informative(output)]
    return role.side == "input" and bool(outputs) and right.issuperset(outputs)


def _is_followed_by_right_value(evidence: Evidence, call: ModuleCall | None, until: int) -> bool:
    """Return whether a right value was made after a call and before the first wrong pair."""
    if call is None or call.parent is None:
        return False
    return any(
        call.exited < role.value.birth.time < until
        for pair in evidence.alignment.pairs
        if pair.relation.state == "equal"
        for role in pair.port
        if is_informative(role)
    )


def find_misordered_parts(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return the fault of a fused module that holds its parts in another order, or None.

    Its output adds up to that of the parts, so its pair looks right. The first wrong pair shows the
    order: it has one part where the reference has another, and the reference calls its parts in
    another order than the port's weight holds them.
    """
    reference, port = first.reference[0], first.port[0]
    for pair in evidence.output_pairs(reference.value.birth.call):
        if pair.basis != "fused" or len(pair.port) != 1:
            continue
        by_call = sorted(pair.reference, key=lambda role: role.call.entered)
        is_other_part = any(
            part.value is not reference.value and evidence.comparer.is_equal(part.value, port.value)
            for part in by_call
        )
        if is_other_part and by_call != pair.reference:
            pair.relation = Relation("order", first.relation.error, pair.relation.limit)
            places = Location.of(reference.value.birth), Location.of(pair.port[0])
            return Fault("layout", *places, pair, pair.relation)
    return None


def find_reordered(evidence: Evidence, first: TensorPair) -> Fault | None:
    """Return an earlier value with the right numbers in another order, or None.

    This is visible only where both programs have the value.
    """
    values = evidence.alignment.port.values
    until = first.port[0].value.birth.time
    candidates = [
        value
        for value in values
        if is_informative(value.birth) and value not in evidence.right and value.birth.time <= until
    ]
    for value in sorted(candidates, key=lambda value: value.birth.time):
        reference = _reordered_reference(evidence, value, first)
        if reference is not None:
            relation = evidence.comparer.relation(reference, value)
            role = evidence.wrong_use(reference) or wrong_role(first.reference, evidence.right)
            pair = TensorPair([role], [value.birth], "alike", relation)
            places = evidence.place_of(role), Location.of(value.birth)
            return Fault("layout", *places, pair, relation)
    return None


def _reordered_reference(
    evidence: Evidence, value: TensorValue, first: TensorPair
) -> TensorValue | None:
    """Return the reference's value with the same numbers in another order, or None."""
    for reference in evidence.alignment.reference.values:
        birth = reference.birth
        if reference.numel != value.numel or birth.time > first.time or reference.is_constant:
            continue
        are_outputs = value.birth.side == birth.side == "output"
        if are_outputs and not _correspond(evidence, birth.call, value.birth.call):
            continue
        if evidence.comparer.relation(reference, value).state == "order":
            return reference
    return None


def _correspond(evidence: Evidence, reference: ModuleCall, port: ModuleCall) -> bool:
    """Return whether two calls are paired, or their modules have the same short name."""
    if evidence.alignment.partner.get(reference) is port:
        return True
    return reference.module.rpartition(".")[2] == port.module.rpartition(".")[2]
