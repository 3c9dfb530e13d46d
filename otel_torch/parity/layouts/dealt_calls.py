"""Number the calls of ranks that divide those of one process among them.

    one process   0: prompt   1: no prompt   2: prompt   3: no prompt
    rank 0        0: prompt                  1: prompt
    rank 1                    0: no prompt               1: no prompt

So does guidance over ranks, and so do data parallel ranks that together accumulate gradients of the
microbatches of one process. What enters the model shows which calls a rank has: blocks of them in
turn. Where a rank's inputs are wrong, those of the other ranks and calls still do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import Sketch, decode_sketch, keep_for_later
from otel_torch.parity.layouts.numbering import Numbering
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import iterate_rows
from otel_torch.recording.rows import Row
from otel_torch.records import FORWARD_PHASES

_INSIDE_PHASES = (*FORWARD_PHASES, "recompute", "backward")
_SAME = 1e-4  # relative distance of equal inputs
_LEAST_AGREEING = 0.5  # the part of the inputs that can be compared
_CallKey = tuple[str, Any, Any, int]  # module, loop, step, call


@dataclass(slots=True)
class _Forward:
    """An outermost forward of a model.

    Attributes:
        first, last: The numbers of its entry and of the last entry or exit in it.
        calls: The first call of each module in it.
    """

    loop: Any
    step: Any
    first: int
    last: int
    inputs: dict[str, tuple[Any, Sketch]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


class DealtCalls:
    """Gives the rows of a rank the numbers that their calls have in one process.

    Args:
        forwards: Model of the rank -> its forwards.
        targets: Likewise -> those of one process that they are.
        length: How many numbers the calls of a forward have at most.
    """

    def __init__(
        self,
        forwards: dict[str, list[_Forward]],
        targets: dict[str, list[_Forward]],
        length: int,
    ) -> None:
        self._forwards, self._targets, self._length = forwards, targets, length
        self._by_call = {
            (model, module, forward.loop, forward.step, call): index
            for model, of_model in forwards.items()
            for index, forward in enumerate(of_model)
            for module, call in forward.calls.items()
        }

    def renumber(self, row: Row) -> Row:
        """Return a row with the loop, step, call, and order of one process."""
        index = self._index(row)
        if index is None:
            return row
        model, module = str(row.get("model", "")), str(row["module"])
        forward, target = self._forwards[model][index], self._targets[model][index]
        row["loop"], row["step"] = target.loop, target.step
        own = forward.calls.get(module)
        if own is not None:
            row["call"] += target.calls.get(module, own) - own
        moved = target.first * self._length - forward.first
        order = row.get("order")
        if order:
            row["order"] = [None if number is None else number + moved for number in order]
        if isinstance(row.get("parent"), int):
            row["parent"] += moved
        return row

    def _index(self, row: Row) -> int | None:
        """Return which forward of its model a row belongs to, None if to no single one."""
        model, tensor = str(row.get("model", "")), str(row["tensor"])
        if model not in self._targets:
            return None
        is_loss = row.get("phase") == "train" and tensor == "loss"
        is_inside = row.get("phase") in _INSIDE_PHASES and not tensor.startswith("param_grad.")
        if not is_loss and not is_inside:
            return None
        module, call = str(row["module"]), row["call"]
        # a module may run several times in a forward, of which the first one is known
        while call >= 0:
            index = self._by_call.get((model, module, row.get("loop"), row.get("step"), call))
            if index is not None:
                return index
            call -= 1
        return None


def find_dealt_calls(
    reference: Path, ranks: dict[int, Path], numberings: dict[int, Numbering]
) -> tuple[dict[int, DealtCalls], int]:
    """Return rank -> numbers of its calls, and among how many groups of ranks they are divided.

    Nothing is returned, and 1, where the ranks do not divide the calls of one process.
    """
    count = _groups(reference, ranks, numberings)
    if count == 1:
        return {}, 1
    whole = _forwards_of(reference)
    own = {rank: _forwards_of(path) for rank, path in ranks.items()}
    length = 1 + max(
        forward.last - forward.first
        for by_model in own.values()
        for of_model in by_model.values()
        for forward in of_model
    )
    chosen: dict[int, dict[str, list[_Forward]]] = {}
    most_agreeing = compared = 0
    for arrangement in _arrangements(list(ranks), count, own):
        targets, agreeing, of_these = _deal(arrangement, count, whole, own, numberings)
        if agreeing > most_agreeing:
            most_agreeing, compared, chosen = agreeing, of_these, targets
    _, usual, _ = _deal((dict.fromkeys(ranks, 0), 0), 1, whole, own, numberings)
    if most_agreeing <= usual or most_agreeing < _LEAST_AGREEING * compared:
        return {}, 1
    return {rank: DealtCalls(own[rank], chosen[rank], length) for rank in ranks}, count


def _groups(reference: Path, ranks: dict[int, Path], numberings: dict[int, Numbering]) -> int:
    """Return how many times as many forwards one process has as each rank, of every model."""
    expected = _counts(reference)
    factors = set()
    for rank, path in ranks.items():
        for model, count in _counts(path).items():
            in_whole = expected.get(numberings[rank].chunk(model)[0], 0)
            if not count or not in_whole or in_whole % count:
                return 1
            factors.add(in_whole // count)
    factor = factors.pop() if len(factors) == 1 else 1
    return factor if factor and not len(ranks) % factor else 1


def _counts(path: Path) -> dict[str, int]:
    models = read_metadata(path).get("models", {})
    return {model: facts.get("forwards") or 0 for model, facts in models.items()}


def _forwards_of(path: Path) -> dict[str, list[_Forward]]:
    """Return the outermost forwards of each model."""
    forwards: dict[str, list[_Forward]] = {}
    sketches: dict[Any, Sketch] = {}
    for row in iterate_rows(path):
        model, module = str(row.get("model", "")), str(row["module"])
        sketch = decode_sketch(row["sketch"]) if "sketch" in row else sketches.get(row.get("value"))
        if row.get("value") is not None and sketch is not None:
            keep_for_later(sketches, row["value"], sketch)
        order = row.get("order")
        if row.get("phase") not in FORWARD_PHASES or not order or order[0] is None:
            continue
        of_model = forwards.setdefault(model, [])
        if not module and (not of_model or of_model[-1].first != order[0]):
            of_model.append(_Forward(row.get("loop"), row.get("step"), order[0], order[0]))
        if not of_model:
            continue
        forward = of_model[-1]
        # rows that were written before the exit do not have its number
        forward.last = max(forward.last, *(number for number in order if number is not None))
        forward.calls.setdefault(module, row["call"])
        if not module and str(row["tensor"]).startswith("in") and sketch is not None:
            forward.inputs[row["tensor"]] = row.get("shape"), sketch
    return forwards


_Arrangement = tuple[dict[int, int], int]  # rank -> group, length of a block


def _arrangements(
    ranks: list[int], count: int, own: dict[int, dict[str, list[_Forward]]]
) -> Iterator[_Arrangement]:
    """Yield the ways in which groups of ranks may divide calls: blocks of a length, in turn."""
    size = len(ranks) // count
    lengths = {len(of_model) for by_model in own.values() for of_model in by_model.values()}
    longest = min(lengths, default=0)
    for length in range(1, longest + 1):
        if any(number % length for number in lengths):
            continue
        yield {rank: index // size for index, rank in enumerate(ranks)}, length
        if size > 1:
            yield {rank: index % count for index, rank in enumerate(ranks)}, length


def _deal(
    arrangement: _Arrangement,
    count: int,
    whole: dict[str, list[_Forward]],
    own: dict[int, dict[str, list[_Forward]]],
    numberings: dict[int, Numbering],
) -> tuple[dict[int, dict[str, list[_Forward]]], int, int]:
    """Return each rank's forwards in one process, and how many inputs agree, of how many."""
    groups, length = arrangement
    targets: dict[int, dict[str, list[_Forward]]] = {}
    agreeing = compared = 0
    for rank, by_model in own.items():
        targets[rank] = {}
        for model, forwards in by_model.items():
            of_whole = whole.get(numberings[rank].chunk(model)[0], [])
            chosen = []
            for index, forward in enumerate(forwards):
                position = index
                if length:
                    block, place = divmod(index, length)
                    position = (block * count + groups[rank]) * length + place
                if position >= len(of_whole):
                    return {}, 0, 0
                chosen.append(of_whole[position])
                for agrees in _agreements(of_whole[position], forward):
                    agreeing += agrees
                    compared += 1
            targets[rank][model] = chosen
    return targets, agreeing, compared


def _agreements(target: _Forward, forward: _Forward) -> Iterator[bool]:
    """Yield whether inputs agree, of those that have one shape: a later stage has others."""
    for name, (shape, sketch) in forward.inputs.items():
        expected_shape, expected = target.inputs.get(name, (None, None))
        if expected is not None and shape == expected_shape:
            yield bool(np.linalg.norm(sketch - expected) <= _SAME * np.linalg.norm(expected))
