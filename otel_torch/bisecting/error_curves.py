"""The errors of a port as it is and as it is healed, of the same pairs of values.

What is wrong in the port has no counterpart in the reference until it is healed: only then is known
what it should have been.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import numpy as np

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.compared import ComparedRuns, RankedKey, by_key
from otel_torch.graph.distances import relative_distances
from otel_torch.parity.finding import ComparedPair, State
from otel_torch.parity.report.pairs import CURVE_STATES
from otel_torch.recording.graph_values import PUT_LABEL, ValueKey


def add_errors(
    answer: Bisection, first: ComparedRuns, last: ComparedRuns, exchanged: Set[RankedKey]
) -> None:
    """Give an answer the pairs of values of the port as it is, and the report of the healed one.

    Args:
        first: Both programs as they are.
        last: The reference beside the port with all that was healed.
        exchanged: The values of the port that were exchanged for that.
    """
    rank = first.leading
    answer.after = last.report(rank.rank)
    known = rank.recorded.map(lambda recorded: by_key(recorded, rank.rank))
    pairs: list[ComparedPair] = []
    rows: list[tuple[int, int]] = []
    for pair in answer.after.compared:
        own = RankedKey(ValueKey(pair.loop or 0, pair.step or 0, pair.tensor), rank.rank)
        other = _port_key(pair, rank.rank)
        if pair.state in CURVE_STATES and own in known.reference and other in known.port:
            pairs.append(pair)
            rows.append((known.reference[own], known.port[other]))
    reference, port = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    programs = rank.comparison.graphs
    errors = relative_distances(
        programs[0].values.sketch[reference], programs[1].values.sketch[port]
    )

    def state_of(pair: ComparedPair, error: float) -> State:
        if error <= pair.floor:
            return "right"
        is_exchanged = _port_key(pair, rank.rank) in exchanged
        return "introduced" if is_exchanged else "inherited"

    answer.report.compared = [
        replace(pair, error=error, state=state_of(pair, error))
        for pair, error in zip(pairs, errors.tolist(), strict=True)
        if not np.isnan(error)
    ]


def _port_key(pair: ComparedPair, rank: int) -> RankedKey:
    label = pair.port_tensor.removeprefix(PUT_LABEL)
    key = ValueKey(pair.port_loop or 0, pair.port_step or 0, label)
    return RankedKey(key, rank if pair.port_rank is None else pair.port_rank)
