"""The rule for modules that one side calls and the other side never does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from otel_torch.parity.align import Alignment, enclosing_calls
from otel_torch.parity.call_graph import ModuleCall, Program, Role, TensorValue, enclosing_names
from otel_torch.parity.earlier_faults import possible_sources
from otel_torch.parity.evidence import Evidence, is_informative
from otel_torch.parity.faults import Fault, Location, MissingModule
from otel_torch.parity.modules import ModulePath, counterpart
from otel_torch.parity.parameter_names import pattern

# errors of sums of tensors, as a multiple of the limit of one
_SUM = 3.0


def first_missing(evidence: Evidence, missing: Sequence[MissingModule]) -> Fault | None:
    """Return the fault of the first missing module (the outermost of nested ones), or None."""
    faults: list[tuple[int, int, Fault]] = []
    done_otherwise = {
        pattern(module.reference[1]) for module in missing if _is_done_otherwise(evidence, module)
    }
    for module in missing:
        if not _is_missing_with_owners(evidence, module, missing):
            continue
        if pattern(module.reference[1]) in done_otherwise:
            continue
        program = _calling_program(evidence, module)
        call = next((call for call in program.calls if call.module_path == module.called), None)
        if call is None or _may_be_read(evidence, module, call):
            continue
        fault = (
            _skipping_container(evidence, module)
            or widened_fault(evidence, module, call)
            or module.fault(call)
        )
        faults.append((call.entered, len(module.called[1]), fault))
    return min(faults, key=lambda item: item[:2])[2] if faults else None


def _is_done_otherwise(evidence: Evidence, module: MissingModule) -> bool:
    """Return whether the module around a missing one returns the right values without it.

    It computes with the missing module's weights itself, and does so in other blocks, too.
    """
    call = _called_container(evidence, module)
    pairs = [] if call is None else evidence.output_pairs(call)
    return bool(pairs) and all(pair.is_right for pair in pairs)


def _may_be_read(evidence: Evidence, module: MissingModule, call: ModuleCall) -> bool:
    """Return whether the side that never calls a module may read its weights.

    A module that returns another size than it receives, as a table does, cannot be left out without
    a trace. Of one that keeps the size, its output would be its input.
    """
    alignment = evidence.alignment
    made = [role.value for role in call.outputs if not role.value.is_constant]
    makes_size = bool(made) and all(role.value.numel != made[0].numel for role in call.inputs)
    weights = alignment.modules.weights.get((module.reference, module.port), ())
    differs = any(weight.differs for weight in weights)
    side = 0 if module.port_is_idle else 1
    wrong = [
        ((pair.reference, pair.port)[side][0], (pair.reference, pair.port)[1 - side][0])
        for pair in alignment.pairs
        if not pair.is_right and pair.is_single
    ]
    after = [roles for roles in wrong if roles[0].time >= call.exited]
    expected, idle = min(after, key=lambda roles: roles[0].time, default=(None, None))
    if not made or expected is None or idle is None:
        return False
    if not (makes_size or differs or expected.value is made[0]):
        return False
    is_handed_on = any(evidence.comparer.is_equal(role.value, idle.value) for role in call.inputs)
    return not (is_handed_on or _is_made_without(evidence, expected, idle, made[0]))


def _is_made_without(evidence: Evidence, expected: Role, idle: Role, made: TensorValue) -> bool:
    """Return whether a wrong tensor is what there is without the output of a module.

    It has another size than with it, was there before, or is the sum of what was. Or it lacks just
    this term.
    """
    value = idle.value
    was_there = value.birth.side == "output" and value.birth is not idle
    if was_there or value.numel != expected.value.numel:
        return True
    rest = value.sketch
    if rest is None:
        return False
    known, terms = (
        [each.sketch for each in values if each.numel == value.numel and each.sketch is not None]
        for values in ([role.value for role in possible_sources(idle)], [expected.value, made])
    )
    candidates = [first + second for first, second in itertools.combinations(known, 2)]
    if len(terms) == 2:
        candidates.append(terms[0] - terms[1])
    limit = _SUM * evidence.comparer.limit(expected.value, value) * float(np.linalg.norm(rest))
    return any(
        len(each) == len(rest) and float(np.linalg.norm(each - rest)) <= limit
        for each in candidates
    )


def _called_container(evidence: Evidence, module: MissingModule) -> ModuleCall | None:
    """Return the first call of the innermost called module around a missing one, or None."""
    alignment = evidence.alignment
    program = alignment.port if module.port_is_idle else alignment.reference
    model, name = module.idle
    for outer in enclosing_names(name):
        call = next((call for call in program.calls if call.module_path == (model, outer)), None)
        if call is not None:
            return call
    return None


def _calling_program(evidence: Evidence, module: MissingModule) -> Program:
    alignment = evidence.alignment
    return alignment.reference if module.port_is_idle else alignment.port


def _is_missing_with_owners(
    evidence: Evidence, module: MissingModule, missing: Sequence[MissingModule]
) -> bool:
    """Return whether no module with parameters inside a missing one is called either.

    A container alone may be bypassed: a Sequential whose children are called one by one.
    """
    idle = {m.reference for m in missing if m.port_is_idle == module.port_is_idle}
    modules = evidence.alignment.modules
    owners = [
        path
        for path in modules.matched
        if path not in modules.containers and is_inside_or_same(path, module.reference)
    ]
    return bool(owners) and all(owner in idle for owner in owners)


def is_inside_or_same(path: ModulePath, container: ModulePath) -> bool:
    """Return whether a module is a container or inside it.

    >>> is_inside_or_same(("DiT", "blocks.0.attn"), ("DiT", "blocks.0"))
    True
    """
    if path[0] != container[0]:
        return False
    name = container[1]
    return not name or path[1] == name or path[1].startswith(f"{name}.")


def widened_fault(evidence: Evidence, module: MissingModule, call: ModuleCall) -> Fault | None:
    """Return the fault of the outermost module around a missing one that is not called either.

    Another block's may be called in its place. A module around one call only adds nothing.
    """
    if not module.port_is_idle:
        return None
    for outer in reversed((call, *enclosing_calls(call))):
        place = counterpart(outer.module_path, evidence.alignment.modules.matched)
        is_idle = len(outer.children) > 1 and _is_idle(evidence, outer, place)
        if is_idle or called_instead(evidence.alignment, outer) is not None:
            return MissingModule(outer.module_path, place, port_is_idle=True).fault(outer)
    return None


def _is_idle(evidence: Evidence, call: ModuleCall, place: ModulePath) -> bool:
    """Return whether the port calls nothing in place of a call of the reference, or inside it."""
    alignment = evidence.alignment
    calls = alignment.port.calls
    return not _has_partner(alignment, call) and not any(
        is_inside_or_same(called.module_path, place) for called in calls
    )


def _has_partner(alignment: Alignment, call: ModuleCall) -> bool:
    """Return whether a call, or one inside it, has a partner."""
    return call in alignment.partner or any(
        _has_partner(alignment, child) for child in call.children
    )


def called_instead(alignment: Alignment, call: ModuleCall) -> ModuleCall | None:
    """Return the port's call of another block's module in place of the reference's, if any."""
    partner = alignment.partner
    place = counterpart(call.module_path, alignment.modules.matched)
    parent = None if call.parent is None else partner.get(call.parent)
    candidates = [partner[call]] if call in partner else [] if parent is None else parent.children
    for candidate in candidates:
        is_free = partner.get(candidate) in (None, call)
        is_same_module = pattern(candidate.module) == pattern(place[1])
        if is_free and is_same_module and candidate.module_path != place:
            return candidate
    return None


def _skipping_container(evidence: Evidence, module: MissingModule) -> Fault | None:
    """Return the fault of the container of a missing module that is called but calls no child.

    The container then computes something else, and it is at fault, not the missing module.
    """
    alignment = evidence.alignment
    call = _called_container(evidence, module)
    outputs = [] if call is None else [role for role in call.outputs if is_informative(role)]
    if call is None or call.children or not call.module or not outputs:
        return None
    location = Location.of(outputs[0])
    partner = alignment.partner.get(call)
    if partner is not None and partner.outputs:
        partner_location = Location.of(partner.outputs[0])
    else:
        match = alignment.modules.matched.get(call.module_path, call.module_path)
        partner_location = Location.of_module(match)
    pair = next(iter(evidence.output_pairs(call)), None)
    relation = None if pair is None else pair.relation
    sides = (partner_location, location) if module.port_is_idle else (location, partner_location)
    return Fault("value", *sides, pair, relation)
