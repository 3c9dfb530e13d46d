"""Find where the port takes other rows of a table than the reference computes.

A table of angles that one program keeps, and the other one computes row by row, has no counterpart
as a whole: the fault seems to begin where it is made. Its rows, read whole, tell that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from otel_torch.bisecting.compared import ComparedRank, RankedKey
from otel_torch.bisecting.trials import Array, Trial
from otel_torch.graph.compare import FaultPlace
from otel_torch.graph.explanation import Explanation
from otel_torch.graph.graph import NOTHING
from otel_torch.graph.states import RIGHT, ComparedProgram, made_from, made_with

Places = tuple[int, ...]
# leaves that say nothing of what a program is given
_OWN_KINDS = ("buffer", "constant", "attribute")


class Take(NamedTuple):
    """An operation of the port that takes rows of a table."""

    node: int
    table: int
    taken: int


def takes_of(rank: ComparedRank, trial: Trial) -> list[Take]:
    """Return what takes rows of a table that is not right, before what a trial has exchanged."""
    fault, *others = trial.attempt.faults
    if others or fault.begins_at_leaf or fault.reference is None or rank.is_divided:
        return []
    program, takes = rank.comparison.programs[1], list[Take]()
    for node in _region(rank, trial):
        reads, makes = program.reads[node], program.makes[node]
        if program.graph.nodes.moves[node] and len(makes) == 1 and reads and reads[0] >= 0:
            take = Take(node, reads[0], makes[0])
            if _has_rows_of(program, take) and _is_own_table(program, take.table):
                takes.append(take)
    return takes


def computed_of(rank: ComparedRank, trial: Trial) -> list[int]:
    """Return the values that the reference computes at a trial's fault."""
    program, place = rank.comparison.programs[0], trial.attempt.faults[0].reference
    nodes = () if place is None else place.region
    return [value for node in nodes for value in program.makes[node] if program.is_informed[value]]


def begin_at_take(
    rank: ComparedRank,
    trial: Trial,
    takes: list[Take],
    reference: Mapping[RankedKey, Array],
    port: Mapping[RankedKey, Array],
) -> Trial:
    """Return a trial whose fault begins where the port takes other rows of a table than those that
    the reference computes; the same trial if it takes none.

    Args:
        reference, port: What the reference computes, and tables with what is taken of them, as far
            as they are known whole.
    """
    limits = rank.comparison.limits

    def computed_rows(table: Array, limit: float) -> Iterator[tuple[int, Places]]:
        for value in computed_of(rank, trial):
            own_limit = float(np.hypot(limits[0][value], limit))
            yield value, _places(reference.get(rank.reference_key(value)), table, own_limit)

    for number in dict.fromkeys(take.table for take in takes):
        table, limit = port.get(rank.port_key(number)), limits[1][number]
        if table is None:
            continue
        taken = [
            (take, places)
            for take in takes
            if take.table == number
            if (places := _places(port.get(rank.port_key(take.taken)), table, limit))
        ]
        counts = {len(places) for _, places in taken}
        # a step of the reference computes as many rows as one of the port takes
        computed = [own for own in computed_rows(table, limit) if len(own[1]) in counts]
        got, wanted = ({row for _, places in own for row in places} for own in (taken, computed))
        if wanted and not got <= wanted:
            value, rows = next((own for own in computed if not got.issuperset(own[1])), computed[0])
            return _from_take(rank, trial, taken[0][0], value, (rows, taken[0][1]))
    return trial


def _region(rank: ComparedRank, trial: Trial) -> Iterator[int]:
    """Yield the port's nodes between right values and what a trial has exchanged."""
    attempt = trial.attempt
    cut = rank.cut(attempt.faults[0], attempt.without, attempt.suspects)
    yield from () if cut is None else cut.region


def _has_rows_of(program: ComparedProgram, take: Take) -> bool:
    """Return whether what is taken has other rows than the table, of the same width."""
    values = program.graph.values
    shapes = values.shape[take.table], values.shape[take.taken]
    is_other = values.numel[take.table] != values.numel[take.taken]
    return bool(is_other and all(shapes) and shapes[0][-1] == shapes[1][-1] > 1)


def _is_own_table(program: ComparedProgram, value: int) -> bool:
    """Return whether a value is not right, and made of nothing that a program is given or draws."""
    if program.state[value] == RIGHT:
        return False
    graph = program.graph
    for before in made_from(program, [value], lambda own: True):
        leaf, node = graph.values.leaf[before], program.maker[before]
        is_given = leaf != NOTHING and graph.leaf_kinds[leaf] not in _OWN_KINDS
        if is_given or (node != NOTHING and graph.nodes.random[node]):
            return False
    return True


def _places(content: Array | None, table: Array, limit: float) -> Places:
    """Return which rows of a table some rows are, ascending; nothing unless each of them is one row
    of it alone.
    """
    width = table.shape[-1]
    if content is None or content.size % width or "c" in (content.dtype.kind, table.dtype.kind):
        return ()
    own, rows = (array.astype(np.float64).reshape(-1, width) for array in (table, content))
    places = set[int]()
    for row in np.unique(rows, axis=0):
        most = limit * np.linalg.norm(row)
        near = np.flatnonzero(np.abs(own[:, 0] - row[0]) <= most)  # a table may be long
        same = near[np.linalg.norm(own[near] - row, axis=1) <= most]
        if len(same) != 1:
            return ()
        places.add(int(same[0]))
    return tuple(sorted(places))


def _from_take(
    rank: ComparedRank,
    trial: Trial,
    take: Take,
    value: int,
    rows: tuple[Places, Places],
) -> Trial:
    """Return a trial whose fault begins where the port takes rows."""
    reference, port = rank.comparison.programs
    behind, maker = made_with(port, [take.taken]), reference.maker[value]
    region = [node for node in _region(rank, trial) if not behind.isdisjoint(port.makes[node])]
    operation = port.graph.operations[port.graph.nodes.operation[take.node]]
    fault = replace(
        trial.attempt.faults[0],
        reference=FaultPlace((maker,), NOTHING, (maker,)),
        port=FaultPlace((take.node,), NOTHING, tuple(region)),
        explanation=Explanation("rows", *rows, operation),
    )
    return replace(trial, attempt=replace(trial.attempt, faults=(fault,), ends_region=True))
