"""Judge one forward: of all tensors that should be equal and are not, name those that made the
others wrong.

Both programs become [graphs](graph_of_calls.py), in which equal values are found and faults by them
(`otel_torch/graph`), whatever the modules are called. The pairs of the alignment say which tensors
should be equal, and where a fault is in the names of both programs.

For example, in a model `norm -> attn -> add -> mlp`:

    pair                    error    limit   state
    norm out                0        0.012   right
    attn in[0]              0        0.012   right
    attn out                0.3      0.012   wrong, all that attn reads is right: the fault
    mlp in[0]               0.2      0.012   wrong, inherited from `attn out`
    (root) out              0.2      0.012   wrong: the run does not end right

If the root's output were within its limit, the wrong pairs would be listed as healed, and the
forward would match.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import compress

import numpy as np

from otel_torch.graph.compare import GraphComparison, compare_known
from otel_torch.graph.ends import EndPair
from otel_torch.graph.states import DOUBTFUL, RIGHT, WRONG
from otel_torch.parity.align import Alignment
from otel_torch.parity.call_graph import ModuleCall, Program, Role, TensorValue
from otel_torch.parity.compared_calls import ComparedCalls
from otel_torch.parity.faults import Fault, Judgment, MissingModule
from otel_torch.parity.folds import with_folds
from otel_torch.parity.graph_of_calls import GraphOfCalls, graph_of_calls
from otel_torch.parity.name_faults import FaultNamer
from otel_torch.parity.parameters import ParameterPair
from otel_torch.parity.rules import Flags, Floats, Indices, grow_limits, right_at_the_end
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tolerance import END_FACTOR, SINGLE
from otel_torch.parity.values import Relation, shapes_match
from otel_torch.recording.isolation_pairing import Slot

# an error this much larger than a first fault's belongs to another fault, and how many are searched
_FORGIVEN, _MOST_FAULTS = 20.0, 20
# how much larger than every earlier error it must be
_JUMP = 5.0
# up to this size a first error may be legal: half of bf16's rounding
_MAY_BE_LEGAL = 2e-3


def judge(
    alignment: Alignment, missing: Sequence[MissingModule] = (), kept: Set[Slot] | None = None
) -> Judgment:
    """Judge one forward.

    Args:
        alignment: Limits of its pairs may grow (see `grow_limits`).
        missing: Modules that only one side calls.
        kept: Of a run whose modules computed from the reference's values, the tensors that were not
            exchanged.
    """
    if kept is not None:
        return _judge_isolated(alignment, missing, kept)
    judgment = _judge_once(alignment, missing)
    _add_larger_faults(alignment, judgment)
    return judgment


def _judge_once(alignment: Alignment, missing: Sequence[MissingModule]) -> Judgment:
    _grow_pairs(alignment)
    wrong = [pair for pair in alignment.pairs if not pair.is_right]
    ends = [] if not wrong or _ends_right(alignment) else _end_pairs(alignment)
    if not ends:
        return Judgment(False, healed=wrong)
    graphs = _graphs_of(alignment, ends)
    comparison = _compare(alignment, graphs, ends)
    is_open = [_is_open(pair, graphs, comparison) for pair in wrong]
    inherited = list(compress(wrong, is_open))
    healed = [pair for pair, is_it in zip(wrong, is_open, strict=True) if not is_it]
    folded, inside = with_folds(alignment, healed, inherited)
    if folded.folded != alignment.folded:
        judgment = _judge_once(folded, missing)
        return replace(judgment, healed=judgment.healed + inside)
    namer = FaultNamer(ComparedCalls(alignment, graphs, comparison), missing, inherited)
    faults = namer.faults() or [namer.placer.fault_of(min(wrong, key=lambda pair: pair.time))]
    return Judgment(True, faults, healed, inherited, _unjudged_weights(alignment, faults))


def _judge_isolated(
    alignment: Alignment, missing: Sequence[MissingModule], kept: Set[Slot]
) -> Judgment:
    """Judge a forward in which what is wrong was exchanged, so that nothing that follows reads it:
    each wrong value is an end by itself, and no difference heals.
    """
    wrong = [pair for pair in alignment.pairs if not pair.is_right]
    if not wrong:
        return Judgment(False)
    exchanged = {
        role
        for pair in wrong
        if not any((own.call.model, own.call.module, own.tensor) in kept for own in pair.port)
        for role in (*pair.reference, *pair.port)
    }
    graphs = _graphs_of(alignment, wrong, exchanged)
    comparison = _compare(alignment, graphs, wrong)
    compared = ComparedCalls(alignment, graphs, comparison)
    faults = FaultNamer(compared, missing, wrong).all_faults()
    return Judgment(bool(faults), faults, [], wrong)


# -- the two graphs
# --------------------------------------------------------------------------------------------------

_Graphs = Sides[GraphOfCalls]


def _graphs_of(
    alignment: Alignment, end_pairs: Sequence[TensorPair], exchanged: Set[Role] = frozenset()
) -> _Graphs:
    weights = list(_compared_weights(alignment))
    of_sides = Sides(
        [weight for pair in weights for weight in pair.reference],
        [weight for pair in weights for weight in pair.port],
    )
    programs, modules = Sides(alignment.reference, alignment.port), alignment.modules
    ends = Sides[list[TensorValue]]([], [])
    for pair in end_pairs:
        ends.reference.append(pair.reference[0].value)
        ends.port.append(pair.port[0].value)
    # calls that correspond do the same, whatever their classes are called
    operations = {port: reference.cls for reference, port in alignment.calls.items()}
    return Sides(
        *(
            graph_of_calls(*of_side, operations, exchanged)
            for of_side in zip(
                programs, of_sides, modules.uncalled, modules.order, ends, strict=True
            )
        )
    )


def _compared_weights(alignment: Alignment) -> Iterator[ParameterPair]:
    """Yield the weights that should be equal: in a fold they are others by right."""
    for modules, pairs in alignment.modules.weights.items():
        if modules not in alignment.folded:
            yield from pairs


def _end_pairs(alignment: Alignment) -> list[TensorPair]:
    """Return the pairs that count as results: what both programs return, if that is wrong; else
    what is wrong after all outputs that are right.
    """
    returned = [pair for pair in alignment.pairs if _is_returned(pair)]
    if returned and not _right_at_the_end(alignment, returned).all():
        return returned
    right = (pair.time for pair in alignment.pairs if pair.is_right and pair.is_output)
    last = max(right, default=-1)
    return [pair for pair in alignment.pairs if not pair.is_right and pair.time > last]


def _is_returned(pair: TensorPair) -> bool:
    is_known = all(map(_has_numbers, (*pair.reference, *pair.port)))
    return pair.basis == "outermost" and pair.is_output and is_known


def _compare(alignment: Alignment, graphs: _Graphs, pairs: Sequence[TensorPair]) -> GraphComparison:
    limits, closer = _limits(alignment, graphs)
    right = _right_at_the_end(alignment, pairs).tolist()
    ends = [
        EndPair("", place, place, error, pair.relation.limit, is_right)
        for place, (pair, error, is_right) in enumerate(
            zip(pairs, errors_of(pairs).tolist(), right, strict=True)
        )
    ]
    return compare_known(
        (graphs.reference.graph, graphs.port.graph),
        (limits.reference, limits.port),
        (closer.reference, closer.port),
        _expected(alignment, graphs),
        ends,
        list(_known_pairs(alignment, graphs)),
    )


def _limits(alignment: Alignment, graphs: _Graphs) -> tuple[Sides[Floats], Sides[Floats]]:
    """Return how far the values of both programs may be off, and above which error one is in doubt.

    The limits of a pair stand with the reference; of the port only a coarser dtype adds to them.
    """
    comparer = alignment.comparer
    limits, closer = (
        graphs.map(lambda side: np.full(len(side.births), SINGLE / 2)) for _ in range(2)
    )
    for value, number in graphs.reference.values.items():
        limits.reference[number] = comparer.limit(value, value)
        closer.reference[number] = comparer.limit(value, value, END_FACTOR)
    coarsest = max((comparer.base(value) for value in graphs.reference.values), default=0.0)
    for value, number in graphs.port.values.items():
        if comparer.base(value) > coarsest:
            limits.port[number] = closer.port[number] = comparer.base(value)
    for pair in alignment.pairs:
        if pair.is_single and pair.is_right:
            number = graphs.reference.values[pair.reference[0].value]
            limits.reference[number] = max(limits.reference[number], pair.relation.limit)
            grown = (
                limits.reference[number] if pair.reference[0].value not in comparer.floors else 0
            )
            closer.reference[number] = max(closer.reference[number], grown)
    return limits, closer


def _expected(alignment: Alignment, graphs: _Graphs) -> tuple[Indices, Indices]:
    """Return what is known of each value by its place: WRONG where its pair differs, DOUBTFUL where
    it should be in both programs, as it is paired or made by a call that is; RIGHT for others.
    """
    states = graphs.map(lambda side: np.full(len(side.births), RIGHT))
    for side, (state, graph) in enumerate(zip(states, graphs, strict=True)):
        folded = {modules[side] for modules in alignment.folded}
        for value, number in graph.values.items():
            maker = value.birth.call
            is_made = value.birth.side == "output" and maker in alignment.partner
            is_extra = alignment.is_extra(value.birth)
            if is_made and not is_extra and maker.module_path not in folded:
                state[number] = DOUBTFUL
    for weight in _compared_weights(alignment):
        for state, graph, parts in zip(
            states, graphs, (weight.reference, weight.port), strict=True
        ):
            state[[graph.parameters[part] for part in parts]] = DOUBTFUL
    harmless = _values_of_harmless_inputs(alignment)
    for pair in sorted(alignment.pairs, key=lambda pair: not pair.is_right):
        for state, graph, roles in zip(states, graphs, (pair.reference, pair.port), strict=True):
            if not pair.is_right:
                roles = [role for role in roles if not alignment.is_extra(role.value.birth)]
            numbers = [graph.values[role.value] for role in roles]
            if not pair.is_right:
                state[numbers] = WRONG
            elif not _is_known(pair):
                state[numbers] = RIGHT
    for state, graph in zip(states, graphs, strict=True):
        state[[number for value, number in graph.values.items() if value in harmless]] = RIGHT
    return states.reference, states.port


def _values_of_harmless_inputs(alignment: Alignment) -> set[TensorValue]:
    """Return the wrong inputs of blocks whose outputs are right, but for the input that is passed
    on: a mask that hides by another large number.
    """
    outputs: dict[ModuleCall, list[TensorPair]] = defaultdict(list)
    for pair in alignment.pairs:
        if pair.is_output and pair.is_single:
            outputs[pair.port[0].call].append(pair)
    harmless: set[TensorValue] = set()
    for pair in alignment.pairs:
        call = pair.port[0].call
        if pair.is_right or pair.is_output or not pair.is_single or not call.children:
            continue
        value = pair.port[0].value
        made = [output for output in outputs[call] if output.port[0].value is not value]
        if made and all(output.is_right for output in made):
            harmless |= {value, pair.reference[0].value}
    return harmless


def _known_pairs(alignment: Alignment, graphs: _Graphs) -> Iterator[tuple[int, int, float]]:
    """Yield the values, and the weights, that are known to be equal.

    Those that are by their sums alone may be in another order.
    """
    for pair in alignment.pairs:
        error = pair.relation.error
        if pair.is_right and error is not None and _is_known(pair):
            own = graphs.reference.values[pair.reference[0].value]
            yield own, graphs.port.values[pair.port[0].value], error
    for weight in _compared_weights(alignment):
        if weight.equal and not weight.is_fused:
            own = graphs.reference.parameters[weight.reference[0]]
            yield own, graphs.port.parameters[weight.port[0]], 0.0


def _is_known(pair: TensorPair) -> bool:
    """Return whether two tensors were compared by more than their sums, which show no order, and
    little of a small error: those of integers have none.
    """
    sketches = pair.reference[0].value.sketch, pair.port[0].value.sketch
    lengths = {None if sketch is None else len(sketch) for sketch in sketches}
    error = pair.relation.error
    return pair.is_single and error is not None and (len(lengths) == 1 or error == 0)


def _is_open(pair: TensorPair, graphs: _Graphs, comparison: GraphComparison) -> bool:
    """Return whether a wrong end is computed from a pair."""
    return any(
        graph.values[role.value] in values
        for graph, roles, values in zip(
            graphs, (pair.reference, pair.port), comparison.open_values, strict=True
        )
        for role in roles
    )


def _unjudged_weights(alignment: Alignment, faults: Sequence[Fault]) -> set[str]:
    """Return the names of weights that differ, if only wrong values are computed with them."""
    named = {fault.port.module for fault in faults if fault.port is not None}
    return {
        weight.full_name
        for pair in alignment.pairs
        if not pair.is_right and pair.is_output and pair.basis == "owner"
        if pair.port[0].call.module_path not in named
        for weights in alignment.unequal_weights(pair.reference[0].call, pair.port[0].call)
        if weights.differs
        for weight in weights.port
    }


# -- limits, and the end
# --------------------------------------------------------------------------------------------------


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
    error, limit = errors_of(pairs), np.array([pair.relation.limit for pair in pairs])
    right = np.array([pair.is_right for pair in pairs])
    for index, grown in grow_limits(error, limit, right, np.array(can_grow)):
        pairs[index].relation = Relation("equal", pairs[index].relation.error, grown)


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
        remaining = _judge_once(forgiven, ())
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
