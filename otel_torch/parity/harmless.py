"""Rules for harmless mismatches: wrong tensors from which right ones were computed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter

import numpy as np

from otel_torch.parity.align import enclosing_calls
from otel_torch.parity.call_graph import ModuleCall, Program, Role, Sketch, summed_sketch
from otel_torch.parity.evidence import Evidence, is_informative
from otel_torch.parity.parameter_names import pattern
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.token_norms import have_equal_token_norms

# how many of the next tensors are searched for a value that is made later
LOOKAHEAD = 4


def is_harmless(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a wrong tensor does not matter downstream.

    It does not if a module computes right outputs from it, if the right value follows a little
    later, or if it is what the reference makes a little later. A module that fails with it, or
    because of it, overrides that.
    """
    if any(rule(evidence, pair) for rule in _MOVED_BY_CODE):
        return True
    if evidence.is_wrong_from_right_inputs(pair) or _makes_module_wrong(evidence, pair):
        return False
    if _has_right_use(evidence, pair):
        return True
    return pair.is_output and _is_made_later(evidence, pair)


def _has_right_use(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a module that receives the wrong value returns only right outputs.

    A norm also hides a wrong scale, so a scaled value counts as used rightly only beside other
    inputs, which are right: an attention takes the scale that its queries lack. Of a value that is
    right elsewhere, only the uses inside this call count.
    """
    for role in pair.port:
        is_misplaced = role.side == "input" and role.value in evidence.right
        for use in role.value.roles:
            is_own_output = use.call is role.call and role.side == "output"
            if use.side != "input" or is_own_output:
                continue
            if is_misplaced and role.call not in (use.call, *enclosing_calls(use.call)):
                continue
            if not _returns_right_values(evidence, use):
                continue
            if not _is_scaled(pair) or _has_other_right_inputs(evidence, use):
                return True
    return False


def _returns_right_values(evidence: Evidence, use: Role) -> bool:
    """Return whether all outputs of a call are right: in their pairs, without any as later inputs.

    Without pairs, this input must be the only wrong one: queries and keys that are rotated alike by
    a wrong angle have right scores, and a fault that is worth naming. The value that the call
    received does not count as an output: it may be handed on.
    """
    pairs = [p for p in evidence.output_pairs(use.call) if p.port[0].value is not use.value]
    if pairs:
        return all(pair.is_right for pair in pairs)
    if evidence.output_pairs(use.call) or use.call.children:
        return False
    if not _has_other_right_inputs(evidence, use):
        return False
    outputs = [output for output in use.call.outputs if is_informative(output)]
    return bool(outputs) and all(
        output.value in evidence.right and output.value is not use.value for output in outputs
    )


def _has_other_right_inputs(evidence: Evidence, use: Role) -> bool:
    others = [given for given in use.call.inputs if given.value is not use.value]
    computed = [given for given in others if is_informative(given)]
    return bool(computed) and all(map(evidence.is_right_role, computed))


def _makes_module_wrong(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether the module that receives the wrong input returns only wrong outputs."""
    if pair.is_output:
        return False
    if pair.basis not in ("owner", "fused") and not _is_only_input(pair):
        return False
    outputs = evidence.output_pairs(pair.port[0].call)
    return bool(outputs) and not any(output.is_right for output in outputs)


def _is_only_input(pair: TensorPair) -> bool:
    """Return whether both modules have no other input of this size, so the two correspond."""
    return all(
        _count_of_size(role.call, role.value.numel) == 1
        for role in (pair.reference[0], pair.port[0])
    )


def _count_of_size(call: ModuleCall, numel: int) -> int:
    return sum(role.value.numel == numel and is_informative(role) for role in call.inputs)


def _is_scaled(pair: TensorPair) -> bool:
    """Return whether the wrong value is the right one times a number."""
    reference, port = _finite_sketch(pair.reference), _finite_sketch(pair.port)
    if reference is None or port is None or len(reference) != len(port):
        return False
    square = float(reference @ reference)
    scale = float(reference @ port) / square if square else 0.0
    rest = port - reference * scale
    size = float(port @ port)
    return bool(size) and float(rest @ rest) <= (4 * pair.relation.limit) ** 2 * size


def _finite_sketch(roles: Sequence[Role]) -> Sketch | None:
    """Return the sketch of one tensor, or of the sum of several; None if unknown or not finite."""
    if len({role.value.numel for role in roles}) > 1:
        return None
    total = summed_sketch(roles)
    return total if total is not None and np.isfinite(total).all() else None


def _is_made_later(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether the right value is made shortly after this output.

    An activation was moved out of the module.
    """
    call = evidence.alignment.partner.get(pair.reference[0].call)
    expected = pair.reference[0].value
    return call is not None and any(
        candidate.value is not pair.port[0].value
        and candidate.value.birth is candidate
        and evidence.comparer.is_equal(expected, candidate.value)
        for candidate in islice(tensors_after(call), LOOKAHEAD)
    )


def _is_made_early(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a module returns what the reference makes shortly after it, where it is right.

    A scale or an activation was moved into the module.
    """
    value, births = pair.port[0].value, (pair.reference[0].value.birth, pair.port[0].value.birth)
    if any(birth.side != "output" for birth in births) or value not in evidence.right:
        return False
    if evidence.alignment.partner.get(births[0].call) is not births[1].call:
        return False  # another module's output, which was taken by mistake
    made = (role.value for role in tensors_after(births[0].call) if role.value.birth is role)
    is_made = any(
        expected in evidence.right and evidence.comparer.is_equal(expected, value)
        for expected in islice(made, LOOKAHEAD)
    )
    return is_made and not _fails_in_use(evidence, pair.port[0])


def _is_scaled_by_code(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether code between modules gives this output its scale.

    No module receives it as it is, a whole block that runs after it is right, and what is wrong
    next was made from right values.
    """
    own = pair.port[0]
    if not pair.is_output or _is_received(pair) or not _is_scaled(pair):
        return False
    later = [other for other in evidence.alignment.pairs if other.time > pair.time]
    wrong = next((other for other in later if not other.is_right), None)
    if wrong is not None and not _is_made_from_right_values(evidence, wrong):
        return False
    return any(
        other.is_right and other.is_output and _is_block_after(own.call, other.port[0].call)
        for other in later[: None if wrong is None else later.index(wrong)]
    )


def _is_scaled_next(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether code scales this output to what is compared with the same reference value.

    No module receives it as it is, and the scaled value is closer. If that one is wrong, too, the
    code is at fault and not the module.
    """
    error = pair.relation.error
    if not pair.is_output or not pair.is_single or _is_received(pair) or error is None:
        return False
    return _is_scaled(pair) and any(
        other.time > pair.time
        and other.is_single
        and other.reference[0].value is pair.reference[0].value
        and other.port[0].value.birth.side == "input"
        and other.relation.error is not None
        and other.relation.error < error
        for other in evidence.alignment.pairs
    )


def _is_received(pair: TensorPair) -> bool:
    """Return whether a module of the port receives the tensor as it is."""
    return any(use.side == "input" for role in pair.port for use in role.value.roles)


def _is_made_from_right_values(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a leaf module made this value, and received right ones only."""
    birth = pair.port[0].value.birth
    given = [role.value for role in birth.call.inputs if is_informative(role)]
    is_of_leaf = birth.side == "output" and not birth.call.children
    return is_of_leaf and bool(given) and all(value in evidence.right for value in given)


def _contains_another_step(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether one side's module calls a module that the other side calls after it.

    A gate was moved into the module, whose output is then what the other side makes later.
    """
    call, match = pair.reference[0].call, pair.port[0].call
    if not pair.is_output or evidence.alignment.partner.get(call) is not match:
        return False
    reference, port = evidence.alignment.reference, evidence.alignment.port
    partner = evidence.alignment.partner
    return any(
        inner in partner and partner[inner].entered > there.exited
        for program, here, there in ((reference, call, match), (port, match, call))
        for inner in _calls_inside(program, here)
    )


def _calls_inside(program: Program, call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield the calls during a call, also those of modules that it does not own."""
    if call.exited - call.entered > 1:
        yield from (inner for inner in program.calls if _is_inside(inner, call))


def _is_inside(inner: ModuleCall, call: ModuleCall) -> bool:
    return call.entered < inner.entered and inner.exited < call.exited


def _is_read_reordered(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether code reads this output in an order of its own, as that of fused heads.

    Its tokens have the reference's norms, and no module receives it as it is. What the same module
    computes afterwards is right, in this block or in another one, with an input among it that this
    output was needed for.
    """
    return _is_another_order(pair) and any(
        _is_used_rightly(evidence, other)
        for other in evidence.alignment.pairs
        if _block_names(other) == _block_names(pair) and _is_another_order(other)
    )


def _is_another_order(pair: TensorPair) -> bool:
    if not pair.is_output or not pair.is_single or pair.is_right or _is_received(pair):
        return False
    return have_equal_token_norms(pair.reference[0], pair.port[0], pair.relation.limit)


def _block_names(pair: TensorPair) -> tuple[str, str]:
    return pattern(pair.reference[0].call.module), pattern(pair.port[0].call.module)


def _is_used_rightly(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether what the calling module computes after an output, and of it, is right."""
    own = pair.port[0]
    later = [
        other
        for other in evidence.alignment.pairs
        if other.port[0].call.parent is own.call.parent and other.port[0].time > own.time
    ]
    return all(other.is_right for other in later) and any(
        not other.is_output and other.port[0].value.birth.time > own.time for other in later
    )


def _is_block_after(call: ModuleCall, later: ModuleCall) -> bool:
    """Return whether the same module calls both, the second one after the first."""
    return later.parent is call.parent and bool(later.children) and later.entered >= call.exited


def tensors_after(call: ModuleCall) -> Iterator[Role]:
    """Yield the tensors of what the same module calls afterwards, and then its outputs."""
    if call.parent is None:
        return
    siblings = call.parent.children
    start = bisect_left(siblings, call.exited, key=attrgetter("entered"))
    for sibling in islice(siblings, start, None):
        yield from sibling.inputs
        yield from sibling.outputs
    yield from call.parent.outputs


def _fails_in_use(evidence: Evidence, role: Role) -> bool:
    """Return whether a module that takes a value for another one returns something wrong."""
    return any(
        use.side == "input"
        and not evidence.is_right_role(use)
        and not all(output.is_right for output in evidence.output_pairs(use.call))
        for use in role.value.roles
    )


def _is_folded_into_users(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a module lacks a part of its weights that the modules which take its output
    have in theirs: these return right outputs.
    """
    alignment = evidence.alignment
    calls = pair.reference[0].call, pair.port[0].call
    if not pair.is_output or not pair.is_single or not alignment.unequal_weights(*calls):
        return False
    users = [use.call for use in pair.port[0].value.roles if use.side == "input"]
    return bool(users) and all(
        user in alignment.partner
        and bool(alignment.unequal_weights(alignment.partner[user], user))
        and all(output.is_right for output in evidence.output_pairs(user))
        for user in users
    )


# rules for steps that a program takes in one module where the other one takes them elsewhere
_MOVED_BY_CODE = (
    _is_made_early,
    _is_scaled_by_code,
    _is_scaled_next,
    _contains_another_step,
    _is_read_reordered,
    _is_folded_into_users,
)
