"""Calls of all ranks are numbered as those of one process, in the order of time."""

from __future__ import annotations

from otel_torch.parity.layouts.call_numbers import CallNumbers
from otel_torch.parity.layouts.rank_rows import RankRow


def called(rank, model, step, first, last):
    row = {"model": model, "module": "", "loop": 0, "step": step, "call": 0, "phase": "forward"}
    return RankRow(rank, row | {"order": [first, last], "parent": None})


def test_models_on_ranks_of_their_own_run_in_the_steps_of_one_process():
    # an encoder on rank 0 and a decoder on rank 1, for two steps
    steps = [
        [called(0, "Encoder", 0, 0, 49), called(1, "Decoder", 0, 0, 71)],
        [called(0, "Encoder", 1, 50, 99), called(1, "Decoder", 1, 72, 143)],
    ]
    orders = []
    for rows in steps:
        numbers = CallNumbers(rows)
        orders += [numbers.renumber(row)["order"] for row in rows]
    bounds = [number for order in orders for number in order]
    assert bounds == sorted(set(bounds))
