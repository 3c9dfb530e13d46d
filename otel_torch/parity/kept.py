"""What is kept of a long comparison: every pair where something happens, and elsewhere enough to draw curves and maps.

A million compared pairs would fill the memory, and nobody looks at them. All pairs are kept of the first episodes, of the
first wrong one and of the one before it; of all others the worst pair of each module, in a limited number of stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.parity.finding import Comparison
from otel_torch.parity.lines import Floats
from otel_torch.parity.modules import Place

# how many episodes are kept in full from the start on
_FIRST = 2
# how many worst pairs are kept besides, and in how many stretches of the run at the most and at the least
_CELLS, _MOST_STRETCHES, _FEWEST_STRETCHES = 40_000, 64, 8


@dataclass(slots=True)
class Compared:
    """The pairs of one episode: how large each error is, and how to get a pair as it is shown.

    modules: the reference's module of each pair. make: its place among the pairs, and whether with statistics -> the pair.
    """

    modules: Sequence[Place]
    error: Floats
    limit: Floats
    wrong: bool
    make: Callable[[int, bool], Comparison]


@dataclass(slots=True)
class _Cell:
    """The worst pair of a module in a stretch, and of which episode it is."""

    excess: float
    episode: int
    pair: Comparison


class Kept:
    """Takes the episodes one after the other."""

    def __init__(self) -> None:
        self.pairs = 0
        self._whole: dict[int, list[Comparison]] = {}
        self._stretches: list[dict[Place, _Cell]] = [{}]
        self._length, self._in_last = 1, 0
        self._modules = 0
        self._count = 0
        self._last: tuple[int, Compared] | None = None
        self._went_wrong = False

    def take(self, compared: Compared) -> None:
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

    def finish(self) -> list[Comparison]:
        """All that is kept, in the order of the episodes."""
        if self._last is not None:
            self._summarise(*self._last)
            self._last = None
        found = [(number, pair.depth, at, pair) for number, pairs in self._whole.items() for at, pair in enumerate(pairs)]
        found += [(cell.episode, cell.pair.depth, 0, cell.pair) for stretch in self._stretches for cell in stretch.values()]
        return [pair for *_, pair in sorted(found, key=lambda one: one[:3])]

    def _keep(self, number: int, compared: Compared) -> None:
        self._whole[number] = [compared.make(at, True) for at in range(len(compared.modules))]

    def _summarise(self, number: int, compared: Compared) -> None:
        if self._in_last == self._length:
            self._stretches.append({})
            self._in_last = 0
            most = max(_FEWEST_STRETCHES, min(_MOST_STRETCHES, _CELLS // max(self._modules, 1)))
            if len(self._stretches) > most:
                self._halve()
        self._in_last += 1
        stretch = self._stretches[-1]
        excess = _excess(compared.error, compared.limit)
        worst: dict[Place, int] = {}
        for at in np.argsort(excess, kind="stable").tolist():
            worst[compared.modules[at]] = at
        for module, at in worst.items():
            cell = stretch.get(module)
            if cell is None or excess[at] > cell.excess:
                stretch[module] = _Cell(float(excess[at]), number, compared.make(at, False))
        self._modules = max(self._modules, len(stretch))

    def _halve(self) -> None:
        """Put neighbouring stretches together."""
        self._in_last = self._length if len(self._stretches) % 2 == 0 else 0
        halved = []
        for first, second in zip(self._stretches[::2], [*self._stretches[1::2], {}], strict=False):
            for module, cell in second.items():
                if module not in first or cell.excess > first[module].excess:
                    first[module] = cell
            halved.append(first)
        self._stretches = halved
        self._length *= 2


def _excess(error: Floats, limit: Floats) -> Floats:
    """Error over limit; infinite where nothing is allowed, or where an error is not finite."""
    with np.errstate(all="ignore"):
        found = np.where(np.isfinite(error) & (limit > 0), error / limit, np.inf)
    found[(error == 0) | np.isnan(error)] = 0.0
    return found
