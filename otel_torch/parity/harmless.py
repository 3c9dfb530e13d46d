"""Rules for harmless mismatches: wrong tensors from which right ones were computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from otel_torch.parity.align import enclosing_calls
from otel_torch.parity.call_graph import ModuleCall, Role, Sketch, summed_sketch
from otel_torch.parity.evidence import Evidence, is_informative
from otel_torch.parity.tensor_pair import TensorPair

# how many of the next tensors are searched for a value that is made later
_LOOKAHEAD = 4


def is_harmless(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a wrong tensor does not matter downstream.

    It does not if a module computes right outputs from it, or if the right value follows a little
    later. A module that fails with it, or because of it, overrides that.
    """
    if evidence.is_wrong_from_right_inputs(pair) or _makes_module_wrong(evidence, pair):
        return False
    if _has_right_use(evidence, pair):
        return True
    return pair.is_output and _is_made_later(evidence, pair)


def _has_right_use(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether a module that receives the wrong value returns only right outputs.

    A norm also hides a wrong scale, so a scaled value never counts as used rightly. Of a value that
    is right elsewhere, only the uses inside this call count.
    """
    for role in pair.port:
        is_misplaced = role.side == "input" and role.value in evidence.right
        for use in role.value.roles:
            is_own_output = use.call is role.call and role.side == "output"
            if use.side != "input" or is_own_output:
                continue
            if is_misplaced and role.call not in (use.call, *enclosing_calls(use.call)):
                continue
            outputs = evidence.output_pairs(use.call)
            if outputs and all(output.is_right for output in outputs) and not _is_scaled(pair):
                return True
    return False


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

    An activation was moved across a module's boundary.
    """
    role, expected = pair.port[0], pair.reference[0].value
    call = evidence.alignment.partner.get(pair.reference[0].call)
    if call is None or call.parent is None:
        return False
    later = [
        candidate
        for sibling in call.parent.children
        if sibling.entered >= call.exited
        for candidate in (*sibling.inputs, *sibling.outputs)
    ]
    return any(
        candidate.value is not role.value
        and evidence.comparer.is_equal(expected, candidate.value)
        and candidate.value.birth is candidate
        for candidate in later[:_LOOKAHEAD]
    )
