"""Find where the port first differs from the reference in order alone, or in precision alone,
before what a trial has healed.

A weight that was put together wrongly reorders heads or channels, a time that was rounded makes
other waves, and the first wrong value comes some lines later. If restoring the order or the
precision heals as much, the lines between are not at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from otel_torch.bisecting.compared import ComparedRank, Exchange, Exchanges
from otel_torch.bisecting.trials import Attempt, Trial
from otel_torch.graph.compare import FaultPlace, GraphFault
from otel_torch.graph.cut import OperationLine, moved_from, operation_line
from otel_torch.graph.explanation import Explanation, Kind
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import (
    ComparedProgram,
    Programs,
    is_open,
    is_rounded,
    made_from,
    reordered_partner,
    unrounded_partner,
)


def earlier_attempts(rank: ComparedRank, trial: Trial) -> Iterator[Attempt]:
    """Yield attempts that give the port the reference's order, or its precision, where it first has
    another one, wherever that line runs, if that is before what a trial has exchanged.
    """
    fault, *others = trial.attempt.faults
    is_code = not others and not fault.begins_at_leaf and fault.explanation.kind not in _DIFFERENCES
    if not is_code or rank.is_divided or rank.comparison.has_rows:
        return
    port = rank.comparison.programs[1]
    # behind the trial's exchange the numbers of later layers can be told, too
    after = trial.compared.of_rank(rank.rank)
    for difference in _DIFFERENCES.values():
        first = _first(rank, trial.attempt, difference)
        if first is None:
            continue
        exchanges = _exchanges(after, operation_line(port, port.maker[first]), difference)
        if exchanges:
            earlier = difference.begin(fault, rank.comparison.programs, first)
            yield replace(trial.attempt, faults=(earlier,), exchanges=exchanges, ends_region=True)


class _LoneDifference(NamedTuple):
    """In what alone two values may differ.

    Attributes:
        partner: Returns the reference's value of one of the port's; NOTHING without.
        passes: Returns whether the difference may come through one of the port's values.
        begin: Returns a fault with the places where a value of the port begins to have it.
    """

    partner: Callable[[Programs, int], int]
    passes: Callable[[Programs, int], bool]
    begin: Callable[[GraphFault, Programs, int], GraphFault]


def _first(rank: ComparedRank, attempt: Attempt, difference: _LoneDifference) -> int | None:
    """Return the port's first value before an exchange that differs from one of the reference in
    one thing alone.
    """
    programs, names = rank.comparison.programs, rank.values_of_port
    exchanged = {names[key] for key in attempt.exchanges if key in names}
    before = made_from(programs[1], exchanged, lambda value: difference.passes(programs, value))
    places = [
        (programs[1].maker[value], value)
        for value in moved_from(programs[1], before - exchanged)
        if difference.partner(programs, value) != NOTHING
    ]
    return min(places)[1] if places else None


def _exchanges(rank: ComparedRank, line: OperationLine, difference: _LoneDifference) -> Exchanges:
    """Return what takes the difference from the values of a line."""
    programs = rank.comparison.programs
    exchanges: Exchanges = {}
    for node, makes in enumerate(programs[1].makes[: programs[1].own_nodes]):
        if makes and operation_line(programs[1], node) == line:
            partner = difference.partner(programs, makes[0])
            if partner != NOTHING:
                key = rank.port_key(makes[0])
                exchanges[key] = Exchange(rank.reference_key(partner), None, None)
    return exchanges


def _reordered_partner(programs: Programs, value: int) -> int:
    return reordered_partner(programs, 1, value, may_merge=True)


def _begin_at_order(fault: GraphFault, programs: Programs, value: int) -> GraphFault:
    reference, port = programs
    return replace(
        fault,
        reference=_reordering(reference, _reordered_partner(programs, value)),
        port=_reordering(port, value),
        explanation=Explanation("order"),
    )


def _reordering(program: ComparedProgram, value: int) -> FaultPlace | None:
    """Return the place of a value in another order: all before it that is not right, from where
    something is made of right values alone.
    """
    before = made_from(program, [value], lambda own: is_open(program, own))
    region = {program.maker[own] for own in before if is_open(program, own)} - {NOTHING}
    if not region:
        return None
    begins = [
        node for node in region if not any(is_open(program, own) for own in program.reads[node])
    ]
    return FaultPlace((min(begins or region),), NOTHING, tuple(sorted(region)))


def _begin_at_rounding(fault: GraphFault, programs: Programs, value: int) -> GraphFault:
    """Return a fault of the operations that had a value while it was in a coarser dtype."""
    port = programs[1]
    values = port.graph.values

    def is_coarser(own: int) -> bool:
        return bool(own == value or values.roundoff[own] > values.roundoff[value])

    coarser = filter(is_coarser, made_from(port, [value], is_coarser))
    region = tuple(sorted({port.maker[own] for own in coarser} - {NOTHING}))
    dtype = port.graph.dtypes[values.dtype[port.makes[region[0]][0]]].removeprefix("torch.")
    return replace(
        fault,
        port=FaultPlace(region[:1], NOTHING, region),
        explanation=Explanation("rounded", (), (dtype,)),
    )


_DIFFERENCES: dict[Kind, _LoneDifference] = {
    "order": _LoneDifference(
        _reordered_partner,
        lambda programs, value: is_open(programs[1], value),
        _begin_at_order,
    ),
    "rounded": _LoneDifference(
        unrounded_partner,
        lambda programs, value: is_open(programs[1], value) or is_rounded(programs, value),
        _begin_at_rounding,
    ),
}
