"""Which forward of the reference belongs to which of the port: the same turn, unless their inputs
say otherwise.

One program warms up, or runs a step more, or writes its encoder's forward after the first step:
taken by turns alone, all that follows would be compared with its neighbour, and called wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.row_batches import RowRecord

# how many forwards are looked at for one with equal inputs, and at how many rows in all
_LOOKAHEAD, _ROWS_AHEAD = 8, 20_000
# inputs that are the same, but for rounding; and inputs that may be: those of one forward go apart,
# step by step
_SAME, _ALIKE = 1e-3, 0.05

Sketched = Callable[[RowRecord], bytes | None]


class ForwardPairer:
    """Pairs the episodes of two recordings.

    models: reference's model -> port's. by_turn: reference's models of which both sides are known
    to have equally many forwards, so that nothing is to be looked for. by_moment: likewise, but
    recorded in some of their steps only: forwards that say the same step belong together.
    sketch_of: for each side, what is known of a line's sketch. left_out: how many forwards of a
    model have no partner, the reference's and the port's; `notes` names what was assumed.
    """

    def __init__(
        self,
        streams: Sequence[Iterator[ForwardRows]],
        models: Mapping[str, str],
        by_turn: frozenset[str],
        sketch_of: tuple[Sketched, Sketched],
        by_moment: frozenset[str] = frozenset(),
    ) -> None:
        self.left_out: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self.notes: list[str] = []
        self._streams = streams
        self._models = models, {other: one for one, other in models.items()}
        self._by_turn, self._by_moment = by_turn, by_moment
        self._sketch_of = sketch_of
        self._waiting: tuple[deque[ForwardRows], deque[ForwardRows]] = deque(), deque()
        self._apart: dict[
            str, tuple[int, int] | None
        ] = {}  # how far the port's loops and steps are ahead, by model

    def pairs(self) -> Iterator[tuple[ForwardRows, ForwardRows]]:
        """The pairs, in order."""
        while self._look_ahead(1):
            if self._heads() is None:
                self._look_ahead(_LOOKAHEAD, needed=False)
                if self._heads() is None:
                    side = int(len(self._waiting[1]) > len(self._waiting[0]))
                    self.left_out[side][self._waiting[side].popleft().model] += 1
                    continue
            if not self._skip() and (found := self._next()) is not None:
                yield found
        for side in (0, 1):
            self.left_out[side].update(episode.model for episode in self._waiting[side])
            self.left_out[side].update(episode.model for episode in self._streams[side])

    def _look_ahead(self, count: int, needed: bool = True) -> bool:
        """Have so many episodes of each side wait, or as many as there are; whether each side has
        one.
        """
        for side in (0, 1):
            waiting = self._waiting[side]
            while len(waiting) < count and (
                needed or sum(one.length for one in waiting) < _ROWS_AHEAD
            ):
                episode = next(self._streams[side], None)
                if episode is None:
                    break
                if episode.model in self._models[side]:
                    waiting.append(episode)
                else:
                    self.left_out[side][episode.model] += 1
        return bool(self._waiting[0] and self._waiting[1])

    def _skip(self) -> bool:
        """Leave out a forward of a step that the other program did not record; whether there was
        one.
        """
        first = self._heads()
        if first is None:
            return False
        one, other = (self._waiting[side][first[side]] for side in (0, 1))
        if one.model not in self._by_moment or _place(one) == _place(other):
            return False
        side = int(_place(one) > _place(other))
        del self._waiting[side][first[side]]
        self.left_out[side][(one, other)[side].model] += 1
        return True

    def _next(self) -> tuple[ForwardRows, ForwardRows] | None:
        """The next pair: the first two of a model, or those near them whose inputs meet better."""
        first = self._heads()
        if first is None:
            return None
        model = self._waiting[0][first[0]].model
        if model not in self._by_turn | self._by_moment and not self._surely(*first):
            self._look_ahead(_LOOKAHEAD, needed=False)
            first = self._best(model, first)
        one, other = (self._waiting[side][first[side]] for side in (0, 1))
        if model not in self._apart and (one.loop, one.step) != (other.loop, other.step):
            self.notes.append(
                f"the first forward of {model or 'a model'} that can be compared is of step {one.step} in the reference and of "
                f"step {other.step} in the port: forwards are paired by their inputs and in turn"
            )
        self._apart[model] = _ahead(one, other)
        for side, chosen in ((0, one), (1, other)):
            for passed in [
                episode
                for episode in islice(self._waiting[side], first[side])
                if episode.model == chosen.model
            ]:
                self._waiting[side].remove(passed)
                self.left_out[side][passed.model] += 1
            self._waiting[side].remove(chosen)
        return one, other

    def _heads(self) -> tuple[int, int] | None:
        """The places of the first two waiting episodes of paired models."""
        there: dict[str, int] = {}
        for at, episode in enumerate(self._waiting[1]):
            there.setdefault(self._models[1][episode.model], at)
        return next(
            (
                (at, there[one.model])
                for at, one in enumerate(self._waiting[0])
                if one.model in there
            ),
            None,
        )

    def _surely(self, at: int, there: int) -> bool:
        """Whether two episodes belong together for all that is known of them."""
        one, other = self._waiting[0][at], self._waiting[1][there]
        return not self._strays(one, other) and self._score(one, other, _SAME) in (None, 1.0)

    def _strays(self, one: ForwardRows, other: ForwardRows) -> bool:
        """Whether the steps of two episodes are further apart, or less far, than those of the pair
        before.
        """
        expected = self._apart.get(one.model)
        return expected is not None and _ahead(one, other) != expected

    def _best(self, model: str, first: tuple[int, int]) -> tuple[int, int]:
        candidates = [
            (at, there)
            for at, one in enumerate(self._waiting[0])
            if one.model == model
            for there, other in enumerate(self._waiting[1])
            if other.model == self._models[0][model]
        ]

        def rank(pair: tuple[int, int]) -> tuple[float, bool, float, int]:
            one, other = self._waiting[0][pair[0]], self._waiting[1][pair[1]]
            same, alike = (self._score(one, other, limit) or 0.0 for limit in (_SAME, _ALIKE))
            return -same, self._strays(one, other), -alike, sum(pair)

        return min(candidates, key=rank, default=first)

    def _score(self, one: ForwardRows, other: ForwardRows, limit: float) -> float | None:
        """How much of what enters two forwards is alike, from 0 to 1; None where nothing is known
        of it.
        """
        sides = [_inputs(one), _inputs(other)]
        if not all(sides):
            return None
        left, alike = list(sides[1]), 0
        for line in sides[0]:
            partner = next((other for other in left if self._meet(line, other, limit)), None)
            if partner is not None:
                alike += 1
                left.remove(partner)
        return alike / min(map(len, sides))

    def _meet(self, one: RowRecord, other: RowRecord, limit: float) -> bool:
        if one.numel != other.numel or (one.shape != other.shape and one.numel is None):
            return False
        sketches = [
            sketch_of(line) for sketch_of, line in zip(self._sketch_of, (one, other), strict=True)
        ]
        if (
            sketches[0] is not None
            and sketches[1] is not None
            and len(sketches[0]) == len(sketches[1])
        ):
            left, right = (
                np.frombuffer(sketch, "<f4").astype(np.float64)
                for sketch in sketches
                if sketch is not None
            )
            apart, size = float(np.linalg.norm(left - right)), float(np.linalg.norm(left))
            return apart == 0 or apart <= limit * size
        return all(
            _near(getattr(one, name), getattr(other, name), limit)
            for name in ("abs_mean", "l2", "mean")
        )


def _inputs(episode: ForwardRows) -> list[RowRecord]:
    """What enters the outermost call, fillings of one number left out."""
    first = episode.line(0)
    found = []
    for at in range(episode.length):
        line = episode.line(at)
        if (
            line.order != first.order
            or line.module != first.module
            or not line.tensor.startswith("in")
        ):
            break
        if line.numel == 1 or line.min is None or line.min != line.max:
            found.append(line)
    return found


def _place(episode: ForwardRows) -> tuple[int, int, str, int]:
    """Where it stands in its run, in order but for the phases of a step."""
    return episode.loop or 0, episode.step or 0, episode.moment[3], episode.line(0).call or 0


def _ahead(one: ForwardRows, other: ForwardRows) -> tuple[int, int] | None:
    """How far the other's loop and step are ahead."""
    if one.step is None or other.step is None:
        return None
    return (other.loop or 0) - (one.loop or 0), other.step - one.step


def _near(one: Any, other: Any, limit: float) -> bool:
    if not isinstance(one, float) or not isinstance(other, float):
        return bool(one == other)
    return abs(one - other) <= limit * max(abs(one), abs(other))
