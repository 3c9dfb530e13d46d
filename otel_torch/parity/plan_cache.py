"""The plans of a comparison: which one fits a pair of episodes, and what is remembered from episode
to episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.cached_comparison import CheckedPairs, Measurements, PairPlan, floors_of_rows
from otel_torch.parity.call_graph import Parameter, sketch_bytes
from otel_torch.parity.columns import Columns, IrregularRows, Sketches, Structure, Structures
from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.row_batches import Floats, Indices
from otel_torch.recording.rows import Row

# plans that are kept: of models whose forwards are all of other structures, none is used twice
_MOST = 64


@dataclass(slots=True)
class CacheLookup:
    """A pair of episodes at first sight. numbers: None where rows are unusual. plan, checked: None
    where no plan fits.
    """

    numbers: tuple[Measurements, Measurements] | None = None
    floors: Floats | None = None
    plan: PairPlan | None = None
    checked: CheckedPairs | None = None


class PlanCache:
    """Makes plans of what was analysed in full, and finds the one for a pair of episodes.

    parameters: the reference's and the port's: of tensors that were sketched at attach. off: make
    none, analyse all in full.
    """

    def __init__(self, parameters: Sequence[Sequence[Parameter]], off: bool = False) -> None:
        lasting = [_numbered(side) for side in parameters]
        self.sketches = Sketches(lasting[0]), Sketches(lasting[1])
        self.noise_sketches = Sketches(lasting[0])
        self._structures = Structures()
        self._plans: dict[tuple[Structure, Structure], PairPlan | None] = {}
        self._partners: dict[tuple[Structure, Structure], Indices] = {}
        self._off = off

    def look(self, one: ForwardRows, other: ForwardRows, noise: ForwardRows | None) -> CacheLookup:
        """What can be said of two episodes without analysing them."""
        if self._off:
            return CacheLookup()
        try:
            numbers = self._numbers(one, self.sketches[0]), self._numbers(other, self.sketches[1])
            again = None if noise is None else self._numbers(noise, self.noise_sketches)
        except IrregularRows:
            return CacheLookup()
        floors = (
            None
            if again is None
            else floors_of_rows(numbers[0], again, self._partners_of(numbers[0], again))
        )
        plan = self._plans.get((numbers[0].structure, numbers[1].structure))
        checked = None if plan is None else plan.check(*numbers, floors)
        return CacheLookup(numbers, floors, plan, checked)

    def _numbers(self, episode: ForwardRows, earlier: Sketches) -> Measurements:
        columns = Columns(episode)
        return Measurements.of(columns, self._structures.of(columns), earlier)

    def _partners_of(self, reference: Measurements, noise: Measurements) -> Indices:
        """For each row of the reference the same one under noise, -1 where there is none."""
        key = reference.structure, noise.structure
        found = self._partners.get(key)
        if found is None:
            places = {_place(noise.columns, at): at for at in range(len(noise.columns.kinds))}
            rows = range(len(reference.columns.kinds))
            found = np.array(
                [places.get(_place(reference.columns, at), -1) for at in rows], dtype=np.int64
            )
            if len(self._partners) >= _MOST:
                self._partners.clear()
            self._partners[key] = found
        return found

    def learn(
        self,
        look: CacheLookup,
        alignment: Alignment,
        rows: tuple[list[Row], list[Row]],
        missing: bool,
    ) -> None:
        """Make a plan of an analysis that was not judged yet, if there is none and it finds the
        same. missing: whether one side never calls what the other does.
        """
        if look.numbers is None or look.plan is not None:
            return
        key = look.numbers[0].structure, look.numbers[1].structure
        if key in self._plans or any(
            len(side) != len(part.columns.kinds)
            for side, part in zip(rows, look.numbers, strict=True)
        ):
            return
        plan = PairPlan(alignment, rows, missing)
        if len(self._plans) >= _MOST:
            self._plans.clear()
        self._plans[key] = None
        if plan.agrees(alignment.pairs, *look.numbers, look.floors):
            self._plans[key] = look.plan = plan
            look.checked = plan.check(*look.numbers, look.floors)

    def forget(self, look: CacheLookup) -> None:
        """Make no use of a plan that found other than the full analysis: episodes of its structures
        are analysed in full.
        """
        if look.numbers is not None:
            self._plans[look.numbers[0].structure, look.numbers[1].structure] = None

    def remember(
        self, look: CacheLookup, one: ForwardRows, other: ForwardRows, noise: ForwardRows | None
    ) -> None:
        """Take in what was seen of values in two episodes: later ones name them by number alone."""
        for sketches, episode in zip(
            (*self.sketches, self.noise_sketches), (one, other, noise), strict=True
        ):
            if episode is not None:
                sketches.remember(episode)


def _numbered(parameters: Sequence[Parameter]) -> dict[int, bytes]:
    found = {}
    for parameter in parameters:
        number, sketch = parameter.row.get("value"), sketch_bytes(parameter.row.get("sketch"))
        if isinstance(number, int) and sketch is not None:
            found[number] = sketch
    return found


def _place(columns: Columns, at: int) -> tuple[object, ...]:
    kind = columns.episode.kinds.known[int(columns.kinds[at])]
    return kind.model, kind.module, kind.phase, kind.tensor, columns.episode.line(at).call
