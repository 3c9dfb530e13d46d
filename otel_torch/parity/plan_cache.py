"""Keep the plans of a comparison, and the sketches of earlier forwards, from forward to forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_torch.parity.align import Alignment
from otel_torch.parity.cached_comparison import CheckedPairs, PairPlan
from otel_torch.parity.call_graph import Parameter, sketch_bytes
from otel_torch.parity.columns import Columns, IrregularRows, Sketches, Structure, Structures
from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.measurements import Measurements, measure_floors
from otel_torch.parity.sides import Sides
from otel_torch.recording.row_batches import Floats, Indices
from otel_torch.recording.rows import Row

# a model whose forwards all have other structures never uses a plan again
_MOST_PLANS = 64


# of the reference, the port and the noise, if any
_Structures = tuple[Structure, Structure, Structure | None]


@dataclass(slots=True)
class CacheLookup:
    """The cached plan and the measurements for a pair of forwards.

    measurements, structures: None if the rows are irregular. plan, checked: None if no plan fits.
    """

    structures: _Structures | None = None
    measurements: tuple[Measurements, Measurements] | None = None
    floors: Floats | None = None
    plan: PairPlan | None = None
    checked: CheckedPairs | None = None


class PlanCache:
    """Makes plans from full analyses, and looks up the plan of a pair of forwards.

    Args:
        parameters: The parameters of either side; their sketches are needed later.
        off: Make no plans, so that every forward is analysed in full. May be set later.
    """

    def __init__(self, parameters: Sides[Sequence[Parameter]], off: bool = False) -> None:
        of_parameters = parameters.map(_sketches_by_number)
        self.sketches = of_parameters.map(Sketches)
        self.noise_sketches = Sketches(of_parameters.reference)
        self._structures = Structures()
        self._plans: dict[_Structures, PairPlan | None] = {}
        self._noise_partners: dict[tuple[Structure, Structure], Indices] = {}
        self.off = off

    def look_up(
        self, reference: ForwardRows, port: ForwardRows, noise: ForwardRows | None
    ) -> CacheLookup:
        """Compare two forwards by the plan for their structures, if any."""
        if self.off:
            return CacheLookup()
        floors = noise_structure = None
        try:
            measured = self._measure(reference, self.sketches.reference)
            measured_port = self._measure(port, self.sketches.port)
            if noise is not None:
                measured_noise = self._measure(noise, self.noise_sketches)
                noise_structure = measured_noise.structure
                partners = self._partners_of(measured, measured_noise)
                floors = measure_floors(measured, measured_noise, partners)
        except IrregularRows:
            return CacheLookup()
        structures = measured.structure, measured_port.structure, noise_structure
        plan = self._plans.get(structures)
        checked = None if plan is None else plan.check(measured, measured_port, floors)
        return CacheLookup(structures, (measured, measured_port), floors, plan, checked)

    def _measure(self, forward: ForwardRows, earlier: Sketches) -> Measurements:
        columns = Columns(forward)
        return Measurements.of(columns, self._structures.of(columns), earlier)

    def _partners_of(self, reference: Measurements, noise: Measurements) -> Indices:
        """Return, for each row of the reference, the same row under noise, -1 without one."""
        key = reference.structure, noise.structure
        partners = self._noise_partners.get(key)
        if partners is None:
            noise_rows = {
                _row_key(noise.columns, row): row for row in range(len(noise.columns.kinds))
            }
            rows = range(len(reference.columns.kinds))
            partners = np.array(
                [noise_rows.get(_row_key(reference.columns, row), -1) for row in rows],
                dtype=np.int64,
            )
            if len(self._noise_partners) >= _MOST_PLANS:
                self._noise_partners.clear()
            self._noise_partners[key] = partners
        return partners

    def learn(
        self,
        lookup: CacheLookup,
        alignment: Alignment,
        rows: tuple[list[Row], list[Row]],
        has_missing: bool,
    ) -> None:
        """Make a plan from an analysis not yet judged, if the plan finds the same.

        Args:
            has_missing: Whether one side never calls a module that the other side calls.
        """
        key = lookup.structures
        if key is None or lookup.measurements is None or key in self._plans:
            return
        reference, port = lookup.measurements
        if len(rows[0]) != len(reference.columns.kinds) or len(rows[1]) != len(port.columns.kinds):
            return
        plan = PairPlan(alignment, rows, has_missing)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = None
        if plan.agrees(alignment.pairs, reference, port, lookup.floors):
            self._plans[key] = lookup.plan = plan
            lookup.checked = plan.check(reference, port, lookup.floors)

    def discard(self, lookup: CacheLookup) -> None:
        """Discard a plan that disagrees with a full analysis, and make none for its structures."""
        if lookup.structures is not None:
            self._plans[lookup.structures] = None

    def remember(
        self, reference: ForwardRows, port: ForwardRows, noise: ForwardRows | None
    ) -> None:
        """Keep the sketches of two forwards: later ones name the values by number alone."""
        self.sketches.reference.remember(reference)
        self.sketches.port.remember(port)
        if noise is not None:
            self.noise_sketches.remember(noise)


def _sketches_by_number(parameters: Sequence[Parameter]) -> dict[int, bytes]:
    sketches = {}
    for parameter in parameters:
        number, sketch = parameter.row.get("value"), sketch_bytes(parameter.row.get("sketch"))
        if isinstance(number, int) and sketch is not None:
            sketches[number] = sketch
    return sketches


def _row_key(columns: Columns, row: int) -> tuple[object, ...]:
    kind = columns.forward.kinds.kinds[int(columns.kinds[row])]
    call = columns.forward.place(row)[2]
    return kind.model, kind.module, kind.phase, kind.tensor, call
