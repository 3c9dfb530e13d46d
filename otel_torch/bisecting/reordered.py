"""Where the port first has the reference's numbers in another order, before what a trial heals.

A weight that was put together wrongly gives heads or channels another order, and some lines on
something becomes wrong of it. If all is right with the reference's order where the port first has
another one, nothing between is at fault.
"""

from __future__ import annotations

from dataclasses import replace

from otel_torch.bisecting.compared import ComparedRank, Exchange, Exchanges
from otel_torch.bisecting.trials import Attempt, Trial
from otel_torch.graph.compare import FaultPlace
from otel_torch.graph.cut import moved_from, operation_line
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
    port = rank.comparison.programs[1]
    (fault, *others), names = trial.attempt.faults, rank.values_of_port
    is_order = fault.explanation.kind == "order"
    if others or is_order or fault.begins_at_leaf or rank.is_divided or rank.comparison.has_rows:
        return None
    exchanged = [names[key] for key in trial.attempt.exchanges if key in names]
    before = made_from(port, exchanged, lambda value: is_open(port, value)).difference(exchanged)
    places = [
        (port.maker[value], value)
        for value in moved_from(port, before)
        if reordered_partner(rank.comparison.programs, 1, value) != NOTHING
    ]
    if not places:
        return None
    node, first = min(places)
    line = operation_line(port, node)
    # behind the trial's exchange the numbers of later layers can be told, too
    after = trial.compared.of_rank(rank.rank)
    programs = after.comparison.programs
    partners = {
        value: reordered_partner(programs, 1, value)
        for own, makes in enumerate(programs[1].makes[: programs[1].own_nodes])
        if makes and operation_line(programs[1], own) == line
        for value in makes[:1]
    }
    exchanges: Exchanges = {
        after.port_key(value): Exchange(after.reference_key(partner), None, None)
        for value, partner in partners.items()
        if partner != NOTHING
    }
    if not exchanges:
        return None
    reference = rank.comparison.programs[0]
    partner = reordered_partner(rank.comparison.programs, 1, first)
    ordered = replace(
        fault,
        reference=_place(reference, partner),
        port=_place(port, first),
        explanation=Explanation("order"),
    )
    return replace(trial.attempt, faults=(ordered,), exchanges=exchanges, ends_region=True)


def _place(program: ComparedProgram, value: int) -> FaultPlace | None:
    """Return the place of a value in another order: what first made it so, and all before it that
    is not right.
    """
    moved = moved_back(program, [value])
    makers = [
        program.maker[own]
        for own in moved
        if program.side.relation[own] == program.side.relation[value] and program.maker[own] >= 0
    ]
    if not makers:
        return None
    before = made_from(program, [value], lambda own: is_open(program, own))
    region = {program.maker[own] for own in before if is_open(program, own)} - {NOTHING}
    return FaultPlace((min(makers),), NOTHING, tuple(sorted(region)))
