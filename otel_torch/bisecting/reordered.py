"""Find where the port's numbers first differ from the reference's in order alone, before what a
trial has healed.

A weight that was put together wrongly reorders heads or channels, and the first wrong value comes
some lines later. If restoring the order heals as much, the lines between are not at fault.
"""

from __future__ import annotations

from dataclasses import replace

from otel_torch.bisecting.compared import ComparedRank, Exchange, Exchanges
from otel_torch.bisecting.trials import Attempt, Trial
from otel_torch.graph.compare import FaultPlace
from otel_torch.graph.cut import OperationLine, moved_from, operation_line
from otel_torch.graph.explanation import Explanation
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import (
    ComparedProgram,
    is_open,
    made_from,
    moved_back,
    reordered_partner,
)


def in_the_order_of_the_reference(rank: ComparedRank, trial: Trial) -> Attempt | None:
    """Return an attempt that gives the port the reference's order where it first has another one,
    wherever that line runs; None if there is no such place before what the trial has exchanged.
    """
    fault, *others = trial.attempt.faults
    is_code = not others and not fault.begins_at_leaf and fault.explanation.kind != "order"
    if not is_code or rank.is_divided or rank.comparison.has_rows:
        return None
    first = _first_reordered(rank, trial.attempt)
    if first is None:
        return None
    reference, port = programs = rank.comparison.programs
    # behind the trial's exchange the numbers of later layers can be told, too
    after = trial.compared.of_rank(rank.rank)
    exchanges = _exchanges(after, operation_line(port, port.maker[first]))
    if not exchanges:
        return None
    ordered = replace(
        fault,
        reference=_place(reference, reordered_partner(programs, 1, first)),
        port=_place(port, first),
        explanation=Explanation("order"),
    )
    return replace(trial.attempt, faults=(ordered,), exchanges=exchanges, ends_region=True)


def _first_reordered(rank: ComparedRank, attempt: Attempt) -> int | None:
    """Return the port's first value before an exchange that has the numbers of one of the reference
    in another order, but in its shape.
    """
    programs, names = rank.comparison.programs, rank.values_of_port
    exchanged = {names[key] for key in attempt.exchanges if key in names}
    before = made_from(programs[1], exchanged, lambda value: is_open(programs[1], value))
    places = [
        (programs[1].maker[value], value)
        for value in moved_from(programs[1], before - exchanged)
        if reordered_partner(programs, 1, value) != NOTHING
    ]
    return min(places)[1] if places else None


def _exchanges(rank: ComparedRank, line: OperationLine) -> Exchanges:
    """Return what gives the values of a line the reference's order."""
    programs = rank.comparison.programs
    exchanges: Exchanges = {}
    for node, makes in enumerate(programs[1].makes[: programs[1].own_nodes]):
        if makes and operation_line(programs[1], node) == line:
            partner = reordered_partner(programs, 1, makes[0])
            if partner != NOTHING:
                key = rank.port_key(makes[0])
                exchanges[key] = Exchange(rank.reference_key(partner), None, None)
    return exchanges


def _place(program: ComparedProgram, value: int) -> FaultPlace | None:
    """Return the place of a value in another order: what first made it so, and all before it that
    is not right.
    """
    relation = program.side.relation
    ordered = [own for own in moved_back(program, [value]) if relation[own] == relation[value]]
    makers = {program.maker[own] for own in ordered} - {NOTHING}
    if not makers:
        return None
    before = made_from(program, [value], lambda own: is_open(program, own))
    region = {program.maker[own] for own in before if is_open(program, own)} - {NOTHING}
    return FaultPlace((min(makers),), NOTHING, tuple(sorted(region)))
