"""Chooses which compared pairs a report shows: the worst ones, and those around the finding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from otel_torch.parity.finding import ComparedPair, Finding, Report, State

_PLACE = (
    *("model", "module", "tensor", "side"),
    *("port_model", "port_module", "port_tensor", "port_side"),
)
StepKey = tuple[int | None, int | None]  # loop and step
Item = TypeVar("Item")

# The states that a curve shows. Pairs in the other states differ by more than their floor, yet do
# no harm.
CURVE_STATES: tuple[State, ...] = ("right", "inherited", "introduced")


def error_over_floor(error: float | None, floor: float | None) -> float:
    """Return error / floor: 1 at the floor, 0 without an error, infinite for NaN or Inf.

    >>> error_over_floor(3e-6, 1e-6), error_over_floor(None, 1e-6), error_over_floor(1.0, 0.0)
    (3.0, 0.0, inf)
    """
    if error is None or error == 0:
        return 0.0
    if not math.isfinite(error) or not floor:
        return math.inf
    return error / floor


def excess(pair: ComparedPair) -> float:
    """Return how many times its floor the error of a pair is."""
    return error_over_floor(pair.error, pair.floor)


def worst_pair(pairs: Iterable[ComparedPair]) -> ComparedPair | None:
    """Return the pair furthest above its floor; pairs with an introduced error come first."""
    return max(pairs, key=lambda pair: (pair.state == "introduced", excess(pair)), default=None)


def pairs_around_finding(report: Report) -> list[ComparedPair]:
    """Return the pairs of the first finding's step in execution order, or of all steps if the
    finding has none.
    """
    first = report.first
    pairs = list(_pairs_on_curve(report))
    if first is not None and first.step is not None:
        pairs = [pair for pair in pairs if (pair.loop, pair.step) == (first.loop, first.step)]
    return sorted(pairs, key=lambda pair: pair.depth)


def worst_by_step(report: Report) -> dict[StepKey, ComparedPair]:
    """Return the pair with the largest error of each step, ordered by loop and step."""
    worst: dict[StepKey, ComparedPair] = {}
    for pair in _pairs_on_curve(report):
        key = (pair.loop, pair.step)
        if key not in worst or (pair.error or 0) > (worst[key].error or 0):
            worst[key] = pair
    return {key: worst[key] for key in sorted_steps(worst)}


def sorted_steps(steps: Iterable[StepKey]) -> list[StepKey]:
    """Return the steps in order; None comes first.

    >>> sorted_steps([(0, 2), (0, None), (None, 1)])
    [(None, 1), (0, None), (0, 2)]
    """
    return sorted(steps, key=lambda step: tuple(-1 if part is None else part for part in step))


def pair_of_finding(report: Report, finding: Finding | None) -> ComparedPair | None:
    """Return the compared pair at the place of a finding, if any."""
    if finding is None:
        return None
    location = _location(finding)
    return next((pair for pair in report.compared if _location(pair) == location), None)


def path_to_finding(report: Report) -> list[ComparedPair]:
    """Return the pairs on the path from the inputs to the first finding, which ends at its place.

    The value that differs may be seen in several places: as an output, and as the next input.
    """
    first, path = report.first, list(report.chain)
    if path and path[-1].state != "introduced":
        end = pair_of_finding(report, first)
        if end is not None:
            path.append(end)
    if first is None or not path or path[-1].state != "introduced":
        return path
    places = {name: getattr(first, name) for name in _PLACE}
    if None not in places.values():
        path[-1] = replace(path[-1], **places)
    return path


def group_neighbors(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Split a sequence into at most `limit` groups of neighbors, of about equal size.

    >>> group_neighbors("abcde", 2)
    [['a', 'b'], ['c', 'd', 'e']]
    """
    if not items:
        return []
    groups = min(limit, len(items))
    edges = [len(items) * index // groups for index in range(groups + 1)]
    return [list(items[start:stop]) for start, stop in pairwise(edges)]


def _pairs_on_curve(report: Report) -> Iterable[ComparedPair]:
    return (
        pair for pair in report.compared if pair.state in CURVE_STATES and pair.side != "parameter"
    )


def _location(item: Finding | ComparedPair) -> tuple[object, ...]:
    return item.model, item.module, item.tensor, item.loop, item.step, item.call
