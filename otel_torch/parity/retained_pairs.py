"""What is kept of a long comparison: every pair where something happens, and elsewhere enough to
draw curves and maps.

A million compared pairs would fill the memory, and nobody looks at them. All pairs are kept of the
first episodes, of the first wrong one and of the one before it. All others are put together in a
limited number of stretches, and of the worst episode of each the worst pair of each module is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.parity.finding import ComparedPair
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.row_batches import Floats

# how many episodes are kept in full from the start on
_FIRST = 2
# how many pairs are kept besides, and in how many stretches of the run at the most and at the least
_CELLS, _MOST_STRETCHES, _FEWEST_STRETCHES = 40_000, 64, 8


@dataclass(slots=True)
class ComparedForward:
    """The pairs of one episode: how large each error is, and how to get a pair as it is shown.

    modules: the reference's module of each pair. make: its place among the pairs, and whether with
    statistics -> the pair.
    """

    modules: Sequence[ModulePath]
    error: Floats
    limit: Floats
    wrong: bool
    make: Callable[[int, bool], ComparedPair]


@dataclass(slots=True)
class _Stretch:
    """The worst episode of a stretch of the run: its number, how far it goes beyond what is legal,
    and its pairs.
    """

    excess: float
    episode: int
    pairs: list[ComparedPair]


class RetainedPairs:
    """Takes the episodes one after the other."""

    def __init__(self) -> None:
        self.pairs = 0
        self._whole: dict[int, list[ComparedPair]] = {}
        self._stretches: list[_Stretch] = []
        self._length, self._in_last = 1, 0
        self._worst: tuple[float, int, ComparedForward] | None = (
            None  # of the stretch that is going on
        )
        self._modules = 1
        self._count = 0
        self._last: tuple[int, ComparedForward] | None = None
        self._went_wrong = False

    def take(self, compared: ComparedForward) -> None:
        """Take in the pairs of the next episode."""
        number = self._count
        self._count += 1
        self.pairs += len(compared.modules)
        turning = compared.wrong and not self._went_wrong
        self._went_wrong = self._went_wrong or compared.wrong
        if self._last is not None:
            (self._keep if turning else self._summarise)(*self._last)
            self._last = None
        if number < _FIRST or turning:
            self._keep(number, compared)
        else:
            self._last = number, compared

    def finish(self) -> list[ComparedPair]:
        """All that is kept, in the order of the episodes."""
        if self._last is not None:
            self._summarise(*self._last)
            self._last = None
        self._close()
        found = dict(self._whole)
        found.update((stretch.episode, stretch.pairs) for stretch in self._stretches)
        return [pair for number in sorted(found) for pair in found[number]]

    def _keep(self, number: int, compared: ComparedForward) -> None:
        self._whole[number] = [compared.make(at, True) for at in range(len(compared.modules))]

    def _summarise(self, number: int, compared: ComparedForward) -> None:
        excess = float(_excess(compared.error, compared.limit).max(initial=0.0))
        if self._worst is None or excess > self._worst[0]:
            self._worst = excess, number, compared
        self._in_last += 1
        if self._in_last == self._length:
            self._close()

    def _close(self) -> None:
        """End the stretch that is going on: of its worst episode the worst pair of each module is
        kept.
        """
        if self._worst is None:
            return
        excess, number, compared = self._worst
        self._worst, self._in_last = None, 0
        worst: dict[ModulePath, int] = {}
        for at in np.argsort(_excess(compared.error, compared.limit), kind="stable").tolist():
            worst[compared.modules[at]] = at
        self._stretches.append(
            _Stretch(excess, number, [compared.make(at, False) for at in sorted(worst.values())])
        )
        self._modules = max(self._modules, len(worst))
        if len(self._stretches) >= max(
            _FEWEST_STRETCHES, min(_MOST_STRETCHES, _CELLS // self._modules)
        ):
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=False)
            odd = self._stretches[-1:] if len(self._stretches) % 2 else []
            self._stretches = [
                max(pair, key=lambda stretch: stretch.excess) for pair in pairs
            ] + odd
            self._length *= 2


def _excess(error: Floats, limit: Floats) -> Floats:
    """Error over limit; infinite where nothing is allowed, or where an error is not finite."""
    with np.errstate(all="ignore"):
        found = np.where(np.isfinite(error) & (limit > 0), error / limit, np.inf)
    found[(error == 0) | np.isnan(error)] = 0.0
    return found
