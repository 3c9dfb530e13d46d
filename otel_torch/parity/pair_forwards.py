"""Pair the forwards of two recordings: in order, unless their inputs say otherwise.

One program may warm up, run an extra step, or record its encoder after the first step. Paired by
order alone, every later forward would be compared with its neighbor and look wrong.

For example, with a port that warms up on other inputs (numbers are the inputs' contents):

    reference   step 0: 5    step 1: 6    step 2: 7
    port        step 0: 1    step 1: 5    step 2: 6    step 3: 7
    pairs       (0, 1) (1, 2) (2, 3); step 0 of the port is left out
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.sides import Sides
from otel_torch.recording.row_schema import RowRecord

# how many forwards, and how many of their rows, are searched for one with equal inputs
_LOOKAHEAD, _ROWS_AHEAD = 8, 20_000
# relative distance of inputs that are equal but for rounding, and of those that may belong
# together: the inputs of one denoise step drift apart
_SAME, _SIMILAR = 1e-3, 0.05

SketchLookup = Callable[[RowRecord], bytes | None]
ModelStep = tuple[str, int, int]  # model, loop and step
_Pair = Sides[ForwardRows]


class ForwardPairer:
    """Pairs the forwards of two recordings.

    Args:
        streams: The forwards of either side.
        models: The reference's model -> the port's.
        by_order: Models of the reference whose forwards are equally many on both sides and pair in
            order.
        by_step: Likewise, but recorded in some steps only; forwards of the same step pair.
        sketch_of: Returns the sketch of a row, for either side.

    Attributes:
        unpaired: How many forwards have no partner, by model, loop and step.
        notes: Assumptions, for the warnings of the report.
    """

    def __init__(
        self,
        streams: Sides[Iterator[ForwardRows]],
        models: Mapping[str, str],
        by_order: frozenset[str],
        sketch_of: Sides[SketchLookup],
        by_step: frozenset[str] = frozenset(),
    ) -> None:
        self.unpaired: Sides[Counter[ModelStep]] = Sides(Counter(), Counter())
        self.notes: list[str] = []
        self._streams = streams
        self._reference_model = {port: reference for reference, port in models.items()}
        self._port_model = models
        self._by_order, self._by_step = by_order, by_step
        self._sketch_of = sketch_of
        self._waiting: Sides[deque[ForwardRows]] = Sides(deque(), deque())
        # how many loops and steps the port is ahead, by model
        self._offsets: dict[str, tuple[int, int] | None] = {}

    def pairs(self) -> Iterator[_Pair]:
        """Yield the pairs, in order."""
        while self._read_ahead(1):
            if self._first_pair() is None:
                self._read_ahead(_LOOKAHEAD, is_required=False)
                if self._first_pair() is None:
                    self._drop_first_of_longer()
                    continue
            if not self._drop_unrecorded_step():
                pair = self._next_pair()
                if pair is not None:
                    yield pair
        for waiting, stream, unpaired in zip(
            self._waiting, self._streams, self.unpaired, strict=True
        ):
            unpaired.update(map(_model_step, waiting))
            unpaired.update(map(_model_step, stream))

    def _read_ahead(self, count: int, is_required: bool = True) -> bool:
        """Let up to `count` forwards of each side wait; return whether each side has one.

        Args:
            is_required: Whether to read on beyond `_ROWS_AHEAD` rows.
        """
        for waiting, stream, models, unpaired in zip(
            self._waiting,
            self._streams,
            (self._port_model, self._reference_model),
            self.unpaired,
            strict=True,
        ):
            while len(waiting) < count:
                rows = sum(forward.length for forward in waiting)
                forward = next(stream, None) if is_required or rows < _ROWS_AHEAD else None
                if forward is None:
                    break
                if forward.model in models:
                    waiting.append(forward)
                else:
                    unpaired[_model_step(forward)] += 1
        return bool(self._waiting.reference and self._waiting.port)

    def _drop_first_of_longer(self) -> None:
        is_port_longer = len(self._waiting.port) > len(self._waiting.reference)
        side = 1 if is_port_longer else 0
        self.unpaired[side][_model_step(self._waiting[side].popleft())] += 1

    def _drop_unrecorded_step(self) -> bool:
        """Drop a forward of a step that the other side did not record; return whether one was."""
        first = self._first_pair()
        if first is None or first.reference.model not in self._by_step:
            return False
        positions = first.map(_position)
        if positions.reference == positions.port:
            return False
        side = 1 if positions.reference > positions.port else 0
        self._waiting[side].remove(first[side])
        self.unpaired[side][_model_step(first[side])] += 1
        return True

    def _next_pair(self) -> _Pair | None:
        """Remove and return the first two forwards of a model, or near ones whose inputs agree."""
        pair = self._first_pair()
        if pair is None:
            return None
        model = pair.reference.model
        if model not in self._by_order | self._by_step and not self._is_sure(pair):
            self._read_ahead(_LOOKAHEAD, is_required=False)
            pair = self._best_pair(model) or pair
        self._note_first_offset(model, pair)
        self._offsets[model] = _offset(pair)
        for waiting, forward, unpaired in zip(self._waiting, pair, self.unpaired, strict=True):
            before = list(islice(waiting, waiting.index(forward)))
            for passed in before:
                if passed.model == forward.model:
                    waiting.remove(passed)
                    unpaired[_model_step(passed)] += 1
            waiting.remove(forward)
        return pair

    def _note_first_offset(self, model: str, pair: _Pair) -> None:
        reference, port = pair
        if model in self._offsets or (reference.loop, reference.step) == (port.loop, port.step):
            return
        self.notes.append(
            f"the first forward of {model or 'a model'} that can be compared is of step "
            f"{reference.step} in the reference and of step {port.step} in the port: forwards are "
            "paired by their inputs and in order"
        )

    def _first_pair(self) -> _Pair | None:
        """Return the first two waiting forwards of paired models, or None."""
        ports: dict[str, ForwardRows] = {}
        for forward in self._waiting.port:
            ports.setdefault(self._reference_model[forward.model], forward)
        for forward in self._waiting.reference:
            if forward.model in ports:
                return Sides(forward, ports[forward.model])
        return None

    def _is_sure(self, pair: _Pair) -> bool:
        """Return whether neither inputs nor steps contradict a pair."""
        return not self._changes_offset(pair) and self._agreement(pair, _SAME) in (None, 1.0)

    def _changes_offset(self, pair: _Pair) -> bool:
        """Return whether the port is not as many steps ahead as in the pair before."""
        expected = self._offsets.get(pair.reference.model)
        return expected is not None and _offset(pair) != expected

    def _best_pair(self, model: str) -> _Pair | None:
        """Return the waiting pair whose inputs agree most; of equal ones, the earliest."""
        candidates = [
            (index + port_index, Sides(forward, port))
            for index, forward in enumerate(self._waiting.reference)
            if forward.model == model
            for port_index, port in enumerate(self._waiting.port)
            if port.model == self._port_model[model]
        ]

        def rank(candidate: tuple[int, _Pair]) -> tuple[float, bool, float, int]:
            distance, pair = candidate
            same = self._agreement(pair, _SAME) or 0.0
            similar = self._agreement(pair, _SIMILAR) or 0.0
            return -same, self._changes_offset(pair), -similar, distance

        best = min(candidates, key=rank, default=None)
        return None if best is None else best[1]

    def _agreement(self, pair: _Pair, limit: float) -> float | None:
        """Return the share of inputs that agree within a limit, 0 to 1, or None without inputs."""
        inputs = pair.map(_informative_inputs)
        if not inputs.reference or not inputs.port:
            return None
        remaining, count = list(inputs.port), 0
        for record in inputs.reference:
            match = next((m for m in remaining if self._agree(record, m, limit)), None)
            if match is not None:
                count += 1
                remaining.remove(match)
        return count / min(map(len, inputs))

    def _agree(self, reference: RowRecord, port: RowRecord, limit: float) -> bool:
        if reference.numel != port.numel:
            return False
        if reference.numel is None and reference.shape != port.shape:
            return False
        sketch, port_sketch = self._sketch_of.reference(reference), self._sketch_of.port(port)
        if sketch is not None and port_sketch is not None and len(sketch) == len(port_sketch):
            numbers = np.frombuffer(sketch, "<f4").astype(np.float64)
            port_numbers = np.frombuffer(port_sketch, "<f4").astype(np.float64)
            distance = float(np.linalg.norm(numbers - port_numbers))
            return distance == 0 or distance <= limit * float(np.linalg.norm(numbers))
        return all(
            _is_near(getattr(reference, name), getattr(port, name), limit)
            for name in ("abs_mean", "l2", "mean")
        )


def _informative_inputs(forward: ForwardRows) -> list[RowRecord]:
    """Return the inputs of the outermost call, without those filled with one number."""
    first = forward.record(0)
    inputs = []
    for index in range(forward.length):
        record = forward.record(index)
        is_same_call = record.order == first.order and record.module == first.module
        if not is_same_call or not record.tensor.startswith("in"):
            break
        if record.numel == 1 or record.min is None or record.min != record.max:
            inputs.append(record)
    return inputs


def _model_step(forward: ForwardRows) -> ModelStep:
    return forward.model, forward.loop or 0, forward.step or 0


def _position(forward: ForwardRows) -> tuple[int, int, str, int]:
    """Return a forward's position in its run: loop, step, phase, call."""
    phase = forward.key[3]
    return forward.loop or 0, forward.step or 0, phase, forward.record(0).call or 0


def _offset(pair: _Pair) -> tuple[int, int] | None:
    """Return how many loops and steps the port is ahead."""
    reference, port = pair
    if reference.step is None or port.step is None:
        return None
    return (port.loop or 0) - (reference.loop or 0), port.step - reference.step


def _is_near(number: Any, expected: Any, limit: float) -> bool:
    if not isinstance(number, float) or not isinstance(expected, float):
        return bool(number == expected)
    return abs(number - expected) <= limit * max(abs(number), abs(expected))
