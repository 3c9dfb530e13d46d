"""Limit how many compared pairs of a long run are kept in memory.

All pairs of the first forwards are kept, and all of the first wrong forward and the one before it.
The other forwards are grouped into a limited number of stretches; of the worst forward of each, the
worst pair of each module is kept, which is enough for curves and heat maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.parity.finding import ComparedPair
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.rules import Floats

# forwards at the start that are kept in full
_FIRST = 2
# how many further pairs are kept, and in how many stretches of the run
_CELLS, _MOST_STRETCHES, _FEWEST_STRETCHES = 40_000, 64, 8


@dataclass(slots=True)
class ComparedForward:
    """The pairs of one forward.

    Attributes:
        modules: The reference's module of each pair.
        make: (index of a pair, with statistics) -> the pair in the form of the report.
    """

    modules: Sequence[ModulePath]
    error: Floats
    limit: Floats
    diverged: bool
    make: Callable[[int, bool], ComparedPair]


@dataclass(slots=True)
class _Stretch:
    """The worst forward of a stretch of the run.

    excess: Its largest error over limit. forward: Its number.
    """

    excess: float
    forward: int
    pairs: list[ComparedPair]


class RetainedPairs:
    """Collects the pairs of one forward after another."""

    def __init__(self) -> None:
        self.count = 0
        self._in_full: dict[int, list[ComparedPair]] = {}
        self._stretches: list[_Stretch] = []
        self._stretch_length, self._forwards_in_stretch = 1, 0
        # the worst forward of the current stretch
        self._worst: tuple[float, int, ComparedForward] | None = None
        self._modules = 1
        self._forwards = 0
        # the last forward, retained if the next one is the first wrong one
        self._pending: tuple[int, ComparedForward] | None = None
        self._has_diverged = False

    def add(self, forward: ComparedForward) -> None:
        """Add the pairs of the next forward."""
        number = self._forwards
        self._forwards += 1
        self.count += len(forward.modules)
        is_first_wrong = forward.diverged and not self._has_diverged
        self._has_diverged = self._has_diverged or forward.diverged
        if self._pending is not None:
            (self._retain if is_first_wrong else self._summarize)(*self._pending)
            self._pending = None
        if number < _FIRST or is_first_wrong:
            self._retain(number, forward)
        else:
            self._pending = number, forward

    def finish(self) -> list[ComparedPair]:
        """Return the retained pairs, in the order of the forwards."""
        if self._pending is not None:
            self._summarize(*self._pending)
            self._pending = None
        self._end_stretch()
        retained = dict(self._in_full)
        retained.update((stretch.forward, stretch.pairs) for stretch in self._stretches)
        return [pair for number in sorted(retained) for pair in retained[number]]

    def _retain(self, number: int, forward: ComparedForward) -> None:
        self._in_full[number] = [forward.make(i, True) for i in range(len(forward.modules))]

    def _summarize(self, number: int, forward: ComparedForward) -> None:
        excess = float(_excess(forward.error, forward.limit).max(initial=0.0))
        if self._worst is None or excess > self._worst[0]:
            self._worst = excess, number, forward
        self._forwards_in_stretch += 1
        if self._forwards_in_stretch == self._stretch_length:
            self._end_stretch()

    def _end_stretch(self) -> None:
        """Retain the worst pair of each module of the current stretch's worst forward."""
        if self._worst is None:
            return
        excess, number, forward = self._worst
        self._worst, self._forwards_in_stretch = None, 0
        worst: dict[ModulePath, int] = {}
        for index in np.argsort(_excess(forward.error, forward.limit), kind="stable").tolist():
            worst[forward.modules[index]] = index
        pairs = [forward.make(index, False) for index in sorted(worst.values())]
        self._stretches.append(_Stretch(excess, number, pairs))
        self._modules = max(self._modules, len(worst))
        most = max(_FEWEST_STRETCHES, min(_MOST_STRETCHES, _CELLS // self._modules))
        if len(self._stretches) >= most:
            self._merge_stretches()

    def _merge_stretches(self) -> None:
        """Keep the worse of each two neighboring stretches, and double their length."""
        neighbors = zip(self._stretches[::2], self._stretches[1::2], strict=False)
        merged = [max(pair, key=lambda stretch: stretch.excess) for pair in neighbors]
        if len(self._stretches) % 2:
            merged.append(self._stretches[-1])
        self._stretches = merged
        self._stretch_length *= 2


def _excess(error: Floats, limit: Floats) -> Floats:
    """Return error over limit; inf if the limit is 0 or the error not finite."""
    with np.errstate(all="ignore"):
        excess = np.where(np.isfinite(error) & (limit > 0), error / limit, np.inf)
    excess[(error == 0) | np.isnan(error)] = 0.0
    return excess
