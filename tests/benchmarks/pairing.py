"""Measures the sides of a comparison in turns, in one process, in a new random order each round.

On a shared machine speed drifts by more than the differences of interest, but neighboring
measurements drift together.

A figure is therefore a ratio of two sides of the same round, as a median over rounds. The ratio of
a side to itself shows how far such a figure can be trusted.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

from otel_torch.process.gc_pause import gc_paused

# entered before a side is measured and left afterwards; gives what is then called and timed
Side = Callable[[], AbstractContextManager[Callable[[], object]]]

BARE, CONTROL = "bare", "bare, again"
_RESAMPLED = 1000


def plainly(body: Callable[[], object]) -> Side:
    """A side that needs no preparation."""
    return lambda: nullcontext(body)


@dataclass(frozen=True)
class Estimate:
    """A median of rounds, and the range of nine in ten medians of resampled rounds."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def estimate(of: Callable[[Sequence[int]], float], rounds: int) -> Estimate:
    """Evaluate `of` for all rounds, and for rounds drawn from them with replacement.

    `of` takes the numbers of the rounds.
    """
    draw = random.Random(0)
    resampled = sorted(of(draw.choices(range(rounds), k=rounds)) for _ in range(_RESAMPLED))
    return Estimate(of(range(rounds)), resampled[_RESAMPLED // 20], resampled[-_RESAMPLED // 20])


@dataclass(frozen=True)
class Rounds:
    """The seconds of each side in each round."""

    seconds: Mapping[str, Sequence[float]]

    @property
    def count(self) -> int:
        """Return the number of rounds."""
        return len(next(iter(self.seconds.values())))

    def ratio(self, side: str, to: str = BARE) -> Estimate:
        """Return the side's time over that of `to`."""
        return estimate(lambda rounds: self._ratio(side, to, rounds), self.count)

    def mixed_ratio(self, weights: Mapping[str, float], to: str = BARE) -> Estimate:
        """Return the time of a mixture of sides, whose weights add up to 1, over that of `to`."""

        def of(rounds: Sequence[int]) -> float:
            return sum(weight * self._ratio(side, to, rounds) for side, weight in weights.items())

        return estimate(of, self.count)

    def overhead(self, side: str, bare: str = BARE) -> str:
        """Format the side's overhead over `bare`.

        >>> Rounds({"bare": [2.0, 4.0, 2.0], "recorded": [2.2, 4.4, 2.4]}).overhead("recorded")
        '+10.0 %'
        """
        return f"{100 * (self._ratio(side, bare, range(self.count)) - 1):+.1f} %"

    def share(self, ours: str, theirs: str, bare: str = BARE) -> Estimate:
        """Return our overhead over `bare` as a share of theirs."""

        def of(rounds: Sequence[int]) -> float:
            return (self._ratio(ours, bare, rounds) - 1) / (
                self._ratio(theirs, bare, rounds) - 1 or 1e-9
            )

        return estimate(of, self.count)

    def surplus(self, side: str, bare: str = BARE, rounds: Sequence[int] | None = None) -> float:
        """Return the median difference of the side to `bare` in seconds."""
        chosen = range(self.count) if rounds is None else rounds
        return median(self.seconds[side][index] - self.seconds[bare][index] for index in chosen)

    def estimated_surplus(self, side: str, bare: str = BARE) -> Estimate:
        """Return the difference of the side to `bare` in seconds, with its range."""
        return estimate(lambda rounds: self.surplus(side, bare, rounds), self.count)

    def cost_share(
        self, ours: str, theirs: str, records: Mapping[str, float], bare: str = BARE
    ) -> Estimate:
        """Return our cost per record as a share of theirs, for different numbers of records."""

        def of(rounds: Sequence[int]) -> float:
            mine, other = (
                self.surplus(side, bare, rounds) / records[side] for side in (ours, theirs)
            )
            return mine / (other or 1e-9)

        return estimate(of, self.count)

    def _ratio(self, side: str, to: str, rounds: Sequence[int]) -> float:
        return median(self.seconds[side][index] / self.seconds[to][index] for index in rounds)


@dataclass(frozen=True)
class Measured:
    """The same rounds in CPU time and in wall time, which other load disturbs far more."""

    cpu: Rounds
    wall: Rounds


def interleave(
    sides: Mapping[str, Side], rounds: int, times: int = 1, warm_up: int = 1, seed: int = 0
) -> Measured:
    """Measure each side once per round: enter it, call it `warm_up` times, time `times` calls, exit.

    CPU time is that of all threads of this process. The garbage collector runs only between sides.
    """
    order = random.Random(seed)
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    with gc_paused():
        for _ in range(rounds):
            for name in order.sample(list(sides), len(sides)):
                with sides[name]() as body:
                    for _ in range(warm_up):
                        body()
                    gc.collect()
                    start = time.process_time(), time.perf_counter()
                    for _ in range(times):
                        body()
                    end = time.process_time(), time.perf_counter()
                cpu[name].append((end[0] - start[0]) / times)
                wall[name].append((end[1] - start[1]) / times)
    return Measured(Rounds(cpu), Rounds(wall))
