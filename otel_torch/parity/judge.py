"""Name the first fault: of all tensors that should be equal and are not, the one that made the
others wrong.

A fault is the birth of a value. If the value was first seen as an output, its module made it; as an
input, the code before that module did. Each side is named in its own terms.

For example, in a model `norm -> attn -> add -> mlp`:

    pair                    error    limit   rule
    norm out                0        0.012   right
    attn in[0]              0        0.012   right
    attn out                0.3      0.012   wrong from right inputs: the first fault
    mlp in[0]               0.2      0.012   wrong, inherited from `attn out`
    (root) out              0.2      0.012   wrong: the run does not end right

The judgment is one fault, the output of `attn`. If the root's output were within its limit, the
pairs above would be listed as healed, and the forward would match.

Rules that make a wrong pair harmless are in `harmless`, rules that find a fault before the first
wrong pair in `earlier_faults`. To add one, write a function of an `Evidence`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from otel_torch.parity.absent_modules import find_absent
from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import Program, Role
from otel_torch.parity.earlier_faults import (
    find_misordered_parts,
    find_own_weights,
    find_reordered,
    find_unlike_siblings,
)
from otel_torch.parity.evidence import Evidence
from otel_torch.parity.exchanged_modules import find_exchanged_modules
from otel_torch.parity.faults import Fault, Judgment, MissingModule
from otel_torch.parity.folds import outside_folds
from otel_torch.parity.harmless import is_harmless
from otel_torch.parity.missing_modules import first_missing
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.read_weights import find_read_weights
from otel_torch.parity.rules import Flags, Floats, Indices, grow_limits, right_at_the_end
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tokens.exchanged_parts import find_exchanged_parts
from otel_torch.parity.tolerance import END_FACTOR, SINGLE
from otel_torch.parity.values import Relation, shapes_match

# an error this much larger than a first fault's belongs to another fault, and how many are searched
_FORGIVEN, _MOST_FAULTS = 20.0, 20
# how much larger than every earlier error it must be
_JUMP = 5.0
# up to this size a first error may be legal: half of bf16's rounding
_MAY_BE_LEGAL = 2e-3
# how much more than another operation attention may be off in single precision: a rounding error
# of a score is a relative error of its exponential, whatever the size of the score
_SCORES_GROWTH = 10.0
# rules that find a fault before the first wrong pair
_EARLIER = (
    find_absent,
    find_exchanged_modules,
    find_misordered_parts,
    find_exchanged_parts,
    find_own_weights,
    find_read_weights,
    find_unlike_siblings,
    find_reordered,
)


def judge(alignment: Alignment, missing: Sequence[MissingModule] = ()) -> Judgment:
    """Judge one forward.

    Args:
        alignment: Limits of its pairs may grow (see `grow_limits`).
        missing: Modules that only one side calls.
    """
    judgment = _judge_once(alignment, missing)
    _add_larger_faults(alignment, judgment)
    return judgment


def _judge_once(
    alignment: Alignment, missing: Sequence[MissingModule], search_earlier: bool = True
) -> Judgment:
    """Judge by the pairs' limits.

    Args:
        search_earlier: Whether to search for a fault before the first wrong pair.
    """
    _grow_pairs(alignment)
    evidence = Evidence(alignment)
    missing_fault = first_missing(evidence, missing)
    wrong = [pair for pair in alignment.pairs if not pair.is_right]
    if not wrong and missing_fault is None:
        return Judgment(False)
    if _ends_right(alignment):
        return Judgment(False, healed=wrong)
    harmful = [pair for pair in wrong if not is_harmless(evidence, pair)]
    harmful = outside_folds(evidence, wrong, harmful) or harmful
    first = _first_fault(evidence, harmful, missing_fault, search_earlier)
    if first is None:
        return Judgment(bool(harmful), healed=wrong)
    do_harm = set(harmful)
    healed = [pair for pair in wrong if pair not in do_harm]
    faults = [first, *_independent_faults(evidence, first, harmful)]
    return Judgment(True, faults, healed, harmful, _unjudged_weights(evidence, harmful, faults))


def _grow_pairs(alignment: Alignment) -> None:
    """Raise the limits of pairs without recorded noise, in place (see `grow_limits`)."""
    pairs, floors = alignment.pairs, alignment.comparer.floors
    if all(pair.is_right for pair in pairs):
        return
    can_grow = [
        pair.relation.state == "different"
        and not any(role.value in floors for role in pair.reference)
        for pair in pairs
    ]
    _grow_attention(list(compress(pairs, can_grow)))
    error, limit = errors_of(pairs), np.array([pair.relation.limit for pair in pairs])
    right = np.array([pair.is_right for pair in pairs])
    for index, grown in grow_limits(error, limit, right, np.array(can_grow)):
        pairs[index].relation = Relation("equal", pairs[index].relation.error, grown)


def _grow_attention(pairs: Sequence[TensorPair]) -> None:
    """Raise the limits of attention in single precision, in place."""
    for pair in pairs:
        error, limit = pair.relation.error, _SCORES_GROWTH * pair.relation.limit
        is_close = error is not None and error <= limit <= _SCORES_GROWTH * SINGLE
        if is_close and _is_made_by_attention(pair.reference):
            pair.relation = Relation("equal", error, limit)


def _is_made_by_attention(roles: Sequence[Role]) -> bool:
    """Return whether tensors are outputs of a call that receives a query and a key."""
    births = [role.value.birth for role in roles]
    return all(
        birth.side == "output"
        and {"query", "key"} <= {given.row.get("argument") for given in birth.call.inputs}
        for birth in births
    )


def errors_of(pairs: Sequence[TensorPair]) -> Floats:
    """Return the errors of pairs, NaN for None."""
    errors = [pair.relation.error for pair in pairs]
    return np.array([math.nan if error is None else error for error in errors])


# -- the end
# --------------------------------------------------------------------------------------------------


def final_outputs(alignment: Alignment) -> Sides[Indices | None]:
    """Return the pairs of each side's final outputs, None if one of them cannot be compared.

    It is in no pair, or one side has no numbers of it, as of logits that ranks pad.
    """
    index_of = {
        id(role): index
        for index, pair in enumerate(alignment.pairs)
        if pair.basis == "outermost" and pair.is_output
        if all(map(_has_numbers, (*pair.reference, *pair.port)))
        for role in (*pair.reference, *pair.port)
    }

    def of_side(program: Program) -> Indices | None:
        outputs = [role for call in program.outermost for role in call.outputs]
        indices = [index_of[id(role)] for role in outputs if id(role) in index_of]
        if not indices or len(indices) < len(outputs):
            return None
        return np.array(indices, dtype=np.int64)

    return Sides(alignment.reference, alignment.port).map(of_side)


def _has_numbers(role: Role) -> bool:
    value = role.value
    if value.sketch is not None or not value.numel:
        return True
    return any(name in value.row for name in ("l2", "sum", "abs_mean"))


def _ends_right(alignment: Alignment) -> bool:
    """Return whether all final outputs of one side are right; no earlier mismatch matters then."""
    return any(
        indices is not None
        and bool(_right_at_the_end(alignment, [alignment.pairs[i] for i in indices.tolist()]).all())
        for indices in final_outputs(alignment)
    )


def _right_at_the_end(alignment: Alignment, pairs: Sequence[TensorPair]) -> Flags:
    comparer = alignment.comparer
    values = [(pair.reference[0].value, pair.port[0].value) for pair in pairs]
    is_strict = [
        pair.is_single and pair.relation.state == "equal" and reference in comparer.floors
        for pair, (reference, _) in zip(pairs, values, strict=True)
    ]
    end_limit = [comparer.limit(*sides, END_FACTOR) for sides in values]
    right = np.array([pair.is_right for pair in pairs])
    return right_at_the_end(right, errors_of(pairs), np.array(end_limit), np.array(is_strict))


# -- the first fault, and independent ones
# --------------------------------------------------------------------------------------------------


def _first_fault(
    evidence: Evidence,
    harmful: Sequence[TensorPair],
    missing: Fault | None,
    search_earlier: bool,
) -> Fault | None:
    # integers, whose limit is 0, come first: they are never wrong by rounding
    first = min(harmful, key=lambda pair: (pair.time, pair.relation.limit > 0), default=None)
    if missing is not None and (first is None or _entry_time(missing) <= first.time):
        return missing
    if first is None:
        return None
    if search_earlier:
        for find in _EARLIER:
            fault = find(evidence, first)
            if fault is not None:
                return fault
    return evidence.fault_of(first)


def _entry_time(missing: Fault) -> int:
    location = missing.reference
    return -1 if location is None or location.call is None else location.call.entered


def _independent_faults(
    evidence: Evidence, first: Fault, harmful: Sequence[TensorPair]
) -> Iterator[Fault]:
    """Yield modules besides the first fault's that are wrong by themselves.

    They make a wrong output from right inputs, or were loaded with other numbers.
    """
    seen = {first.port.module if first.port else None}
    for pair in harmful:
        if pair is first.pair or not pair.is_output:
            continue
        if evidence.is_wrong_from_right_inputs(pair) or _has_wrong_weights(evidence, pair):
            fault = evidence.fault_of(pair)
            if fault.port is not None and fault.port.module not in seen:
                seen.add(fault.port.module)
                yield fault


def _has_wrong_weights(evidence: Evidence, pair: TensorPair) -> bool:
    """Return whether the modules of a pair hold parameters that differ, unlike those of others.

    A weight that differs in all blocks may have been changed by right: a norm is folded into it.
    """
    weights = _known_to_differ(evidence, pair)
    return bool(weights) and not any(map(evidence.differs_in_all, weights))


def _known_to_differ(evidence: Evidence, pair: TensorPair) -> list[ParameterPair]:
    if pair.basis != "owner":
        return []
    weights = evidence.alignment.unequal_weights(pair.reference[0].call, pair.port[0].call)
    return [weight for weight in weights if weight.differs]


def _unjudged_weights(
    evidence: Evidence, harmful: Sequence[TensorPair], faults: Sequence[Fault]
) -> set[str]:
    """Return the names of weights that differ, if only wrong values are computed with them."""
    named = {fault.port.module for fault in faults if fault.port is not None}
    return {
        parameter.full_name
        for pair in harmful
        if pair.is_output and pair.port[0].call.module_path not in named
        for weight in _known_to_differ(evidence, pair)
        for parameter in weight.port
    }


# -- larger faults downstream
# --------------------------------------------------------------------------------------------------


def _add_larger_faults(alignment: Alignment, judgment: Judgment) -> None:
    """Add faults whose errors are too large to come from the first fault.

    Errors up to a multiple of the first fault's are forgiven, and the rest is judged again, until
    nothing is wrong. What then remains is another fault, unless its error grew on the way.
    """
    remaining, forgiven_error = judgment, 0.0
    forgiven = alignment
    while remaining.faults and len(judgment.faults) < _MOST_FAULTS:
        error = _FORGIVEN * _error_of(remaining.faults[0])
        if not forgiven_error < error < 1:
            break
        forgiven, forgiven_error = _forgive(forgiven, error), error
        remaining = _judge_once(forgiven, (), search_earlier=False)
        for fault in remaining.faults:
            if fault.port is not None and _enters(judgment.faults[0], fault):
                continue
            if fault.port is not None and _is_jump(alignment, fault):
                _insert_larger(judgment.faults, fault)


def _enters(first: Fault, fault: Fault) -> bool:
    """Return whether the first fault is an input that enters the call that shows the larger one.

    A module may make much of a small error, as a sine of a large number does.
    """
    if first.port is None or first.port.role is None or first.port.side != "input":
        return False
    if fault.port is None or fault.port.call is None:
        return False
    return any(given.value is first.port.role.value for given in fault.port.call.inputs)


def _insert_larger(faults: list[Fault], fault: Fault) -> None:
    """Insert a larger fault, or move it up if it is listed already.

    It goes to the front if the first error is so small that it may be legal: one program rounds
    where the other does not.
    """
    listed = next((f for f in faults if _port_place(f) == _port_place(fault)), None)
    if listed is faults[0]:
        return
    if listed is not None:
        faults.remove(listed)
    faults.insert(0 if _may_be_legal(faults[0]) else len(faults), listed or fault)


def _port_place(fault: Fault) -> object:
    return None if fault.port is None else (fault.port.side, fault.port.module)


def _error_of(fault: Fault) -> float:
    """Return the error of a fault; integers are never wrong by rounding, so theirs is infinite."""
    relation = fault.relation
    if relation is None or relation.limit == 0 or relation.error is None:
        return math.inf
    return relation.error


def _is_jump(alignment: Alignment, fault: Fault) -> bool:
    """Return whether an error is far larger than all errors before it."""
    pair = fault.pair
    if pair is None or pair.basis not in ("owner", "fused"):
        return False
    if not pair.is_single or not shapes_match(pair.reference[0].value, pair.port[0].value):
        return False  # errors from sums are too rough
    earlier = (p.relation.error for p in alignment.pairs if p.time < pair.time and not p.is_right)
    largest = max((error for error in earlier if error is not None), default=0.0)
    return _error_of(fault) > _JUMP * largest


def _may_be_legal(fault: Fault) -> bool:
    # the error of a fused output comes from its sums and is too rough
    if fault.pair is None or fault.pair.basis == "fused":
        return False
    return _error_of(fault) < _MAY_BE_LEGAL


def _forgive(alignment: Alignment, error: float) -> Alignment:
    """Return the alignment with differences up to `error` made equal."""

    def forgive(pair: TensorPair) -> TensorPair:
        relation = pair.relation
        if pair.is_right or relation.error is None or relation.limit <= 0:
            return pair
        if relation.error > error:
            return pair
        return replace(pair, relation=Relation("equal", relation.error, error))

    return replace(alignment, pairs=[forgive(pair) for pair in alignment.pairs])
