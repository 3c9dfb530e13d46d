"""Compare forwards of a known structure as arrays, with the pairs of an earlier analysis.

Aligning two forwards is slow and gives the same pairs for each forward of a model. A `PairPlan`
keeps the pairs as row indices and applies the rules of `rules` to all of them at once. It does not
judge: if a forward is wrong in a way that was not judged before, it is analysed in full.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.align import FUSED_FACTOR, Alignment
from otel_torch.parity.call_graph import ModuleCall, TensorValue
from otel_torch.parity.columns import Columns
from otel_torch.parity.faults import Judgment
from otel_torch.parity.finding import SHOWN_STATISTICS, ComparedPair, State
from otel_torch.parity.judge import final_outputs
from otel_torch.parity.measurements import (
    Groups,
    Measurements,
    errors_by_sketch,
    part_groups,
)
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.rules import (
    Flags,
    Floats,
    grow_limits,
    limits_under_noise,
    right_at_the_end,
    statistics_errors,
)
from otel_torch.parity.sides import Sides
from otel_torch.parity.tensor_pair import TensorPair
from otel_torch.parity.tolerance import END_FACTOR, NOISE_FACTOR
from otel_torch.parity.values import FAR, STATISTICS_FACTOR, Comparer, Relation, shapes_match

# the plan and the full analysis may sum in another order, so their errors may differ by rounding
_ROUNDING = 1e-9


@dataclass(slots=True)
class CheckedPairs:
    """How the pairs of a plan compare in one forward, one entry per pair.

    Args:
        error: NaN where unknown.
        layout: Pairs that are right, in another order.
        floors: By row of the reference, None without noise.
    """

    error: Floats
    limit: Floats
    right: Flags
    layout: Flags
    floors: Floats | None

    @property
    def pattern(self) -> bytes:
        """A key that identifies the set of wrong pairs."""
        return np.packbits(self.right).tobytes()


@dataclass(slots=True)
class CachedJudgment:
    """The judgment of a full analysis.

    states: State of each wrong pair, by its index in the plan.
    """

    diverged: bool
    states: dict[int, State]


@dataclass(slots=True)
class _ValueFacts:
    """Facts about a value from the analysis that made the plan.

    coarse: The coarsest dtype that took part. reordered: By the user's map.
    """

    numel: int
    shapes: set[tuple[int, ...]]
    coarse: str
    reordered: bool

    @staticmethod
    def of(value: TensorValue, comparer: Comparer) -> _ValueFacts:
        coarse = comparer.coarse.get(value, "")
        return _ValueFacts(value.numel, value.shapes, coarse, value in comparer.reordered)


class _TensorKey(NamedTuple):
    """One side of a pair. row: Of its first tensor. tensors: All names, joined by "+"."""

    module_path: ModulePath
    row: int
    tensors: str
    side: Any


_PairKey = Sides[_TensorKey]


class PairPlan:
    """The pairs of two forward structures.

    Args:
        alignment: Of a full analysis, not yet judged.
        rows: The rows that the alignment was built from.
        has_missing: Whether one side never calls a module that the other side calls.

    Attributes:
        modules: The reference's module of each pair.
        uncalled: Modules of calls without a partner, for either side.
        judgments: Results of full analyses, by the pattern of wrong pairs.
        reported_healed: Harmless pairs that are already listed.
    """

    def __init__(
        self, alignment: Alignment, rows: tuple[list[Any], list[Any]], has_missing: bool
    ) -> None:
        self.has_missing = has_missing
        row_index = _row_index(rows)
        pairs = alignment.pairs
        self.size = len(pairs)
        self._tolerance = alignment.comparer.tolerance
        self._collect(alignment, row_index)
        self._equal = _equal_rows(alignment, row_index.reference)
        self._finals = final_outputs(alignment)
        self._root_inputs = np.array(
            [i for i, pair in enumerate(pairs) if pair.basis == "outermost" and not pair.is_output],
            dtype=np.int64,
        )
        self._keys = [_pair_key(pair, row_index) for pair in pairs]
        self._index_of_key = {key: index for index, key in enumerate(self._keys)}
        self.modules = [key.reference.module_path for key in self._keys]
        self.uncalled = alignment.uncalled.map(_module_paths)
        self.judgments: dict[bytes, CachedJudgment] = {}
        self.reported_healed: set[int] = set()

    def _collect(self, alignment: Alignment, row_index: Sides[dict[int, int]]) -> None:
        """Sort the pairs into single ones, sums and fused ones, with their limits and rows."""
        comparer = alignment.comparer
        without_noise = Comparer(self._tolerance, coarse=comparer.coarse)
        self._base = np.zeros(self.size)
        self._factor = np.ones(self.size)
        self._noise_scale = np.ones(self.size)
        self._same_order = np.zeros(self.size, dtype=bool)
        self._facts: dict[int, tuple[_ValueFacts, _ValueFacts]] = {}
        floor_rows: list[list[int]] = []
        reference_rows: list[list[int]] = []
        part_rows: list[list[int]] = [[] for _ in alignment.pairs]
        single: list[tuple[int, int, int]] = []
        sums: Groups = defaultdict(list)
        fused: Groups = defaultdict(list)
        for index, pair in enumerate(alignment.pairs):
            rows = [row_index.reference[id(role.row)] for role in pair.reference]
            port_rows = [row_index.port[id(role.row)] for role in pair.port]
            first, second = pair.reference[0].value, pair.port[0].value
            reference_rows.append(rows)
            self._noise_scale[index] = comparer.noise_scale(first, second)
            floor_rows.append([] if first.is_integer and second.is_integer else rows[:1])
            if pair.is_single:
                single.append((index, rows[0], port_rows[0]))
                self._base[index] = without_noise.limit(first, second)
                is_reordered = first in comparer.reordered
                self._same_order[index] = shapes_match(first, second) and not is_reordered
                facts = _ValueFacts.of(first, comparer), _ValueFacts.of(second, comparer)
                self._facts[index] = facts
                continue
            whole_is_reference = len(rows) == 1
            whole, parts = (rows, port_rows) if whole_is_reference else (port_rows, rows)
            group = fused if pair.basis == "fused" else sums
            group[whole_is_reference, len(parts)].append((index, whole[0], *parts))
            if group is fused:
                self._base[index] = without_noise.limit(first, second)
                part_rows[index] = [] if whole_is_reference else rows
                continue
            self._factor[index] = 2
            values = (first, second) if whole_is_reference else (second, first)
            self._base[index] = without_noise.limit(*values)
            if not whole_is_reference:
                floor_rows[index] = []
        self._floor_rows = _padded(floor_rows)
        self._reference_rows = _padded(reference_rows)
        self._part_rows = _padded(part_rows)
        table = np.array(single, dtype=np.int64).reshape(-1, 3)
        self._single, self._single_rows, self._single_port_rows = table.T
        self._is_single = np.zeros(self.size, dtype=bool)
        self._is_single[self._single] = True
        self._sums, self._fused = part_groups(sums), part_groups(fused)

    # -- checking
    # ----------------------------------------------------------------------------------------------

    def check(
        self, reference: Measurements, port: Measurements, floors: Floats | None
    ) -> CheckedPairs:
        """Compare the pairs in another forward.

        Args:
            floors: Of the reference's rows, from `measure_floors`, None without noise.
        """
        with np.errstate(all="ignore"):
            floors = self._merge_floors(reference, floors)
            checked, is_different = self._compare(reference, port, floors)
            self._grow(checked, is_different, reference, port)
        return checked

    def agrees(
        self,
        pairs: Sequence[TensorPair],
        reference: Measurements,
        port: Measurements,
        floors: Floats | None,
    ) -> bool:
        """Return whether the plan finds what the full analysis, not yet judged, found."""
        with np.errstate(all="ignore"):
            floors = self._merge_floors(reference, floors)
            checked, _ = self._compare(reference, port, floors)
        for index, pair in enumerate(pairs):
            relation = pair.relation
            error = math.nan if relation.error is None else relation.error
            if checked.right[index] != relation.is_right:
                return False
            if not _is_near(checked.limit[index], relation.limit):
                return False
            if not _is_near(checked.error[index], error):
                return False
        return True

    def _compare(
        self, reference: Measurements, port: Measurements, floors: Floats | None
    ) -> tuple[CheckedPairs, Flags]:
        """Compare the pairs; also return a flag for each pair that differs in its numbers."""
        limit = self._limits(floors, NOISE_FACTOR)
        right, layout = np.ones(self.size, dtype=bool), np.zeros(self.size, dtype=bool)
        checked = CheckedPairs(np.full(self.size, np.nan), limit, right, layout, floors)
        is_different = np.zeros(self.size, dtype=bool)
        self._compare_single(checked, is_different, reference, port)
        for group in self._sums:
            checked.error[group.pairs] = group.sum_errors(reference, port)
        for group in self._fused:
            checked.error[group.pairs] = group.fused_errors(reference, port)
        for group in (*self._sums, *self._fused):
            error = checked.error[group.pairs]
            checked.right[group.pairs] = error <= limit[group.pairs]
            is_different[group.pairs] = ~np.isnan(error)
        return checked, is_different

    def _merge_floors(self, reference: Measurements, floors: Floats | None) -> Floats | None:
        """Give rows that still hold the same numbers the largest of their floors."""
        if floors is None or not self._equal.size:
            return floors
        slots = reference.slots
        is_sketched = [bool(slots[a] >= 0 and slots[b] >= 0) for a, b in self._equal.T]
        rows, wholes = self._equal[:, is_sketched]
        sketches = reference.sketches
        still_equal = (sketches[slots[rows]] == sketches[slots[wholes]]).all(axis=1)
        rows, wholes = rows[still_equal], wholes[still_equal]
        merged = floors.copy()
        np.fmax.at(merged, wholes, floors[rows])
        merged[rows] = merged[wholes]
        return merged[reference.structure.first]

    def _limits(self, floors: Floats | None, factor: float) -> Floats:
        """Return the limit of each pair."""
        if floors is None:
            return self._base * self._factor
        scale = self._noise_scale
        floor = scale * _largest_floors(floors, self._floor_rows)
        limit = limits_under_noise(self._base, floor, factor)
        limit = np.fmax(limit, FUSED_FACTOR * scale * _largest_floors(floors, self._part_rows))
        return limit * self._factor

    def _compare_single(
        self,
        checked: CheckedPairs,
        is_different: Flags,
        reference: Measurements,
        port: Measurements,
    ) -> None:
        pairs = self._single
        rows = reference.structure.first[self._single_rows]
        port_rows = port.structure.first[self._single_port_rows]
        limit = checked.limit[pairs]
        numel = reference.columns.numel[rows]
        error, by_statistics = errors_by_sketch(reference, rows, port, port_rows)
        is_sketched = np.ones(len(pairs), dtype=bool)
        right = error <= limit
        if len(by_statistics):
            is_sketched[by_statistics] = False
            error[by_statistics] = statistics_errors(
                reference.columns.statistics(rows[by_statistics]),
                port.columns.statistics(port_rows[by_statistics]),
                numel[by_statistics],
            )
            allowed = STATISTICS_FACTOR * limit[by_statistics]
            is_unknown = np.isnan(error[by_statistics])
            right[by_statistics] = is_unknown | (error[by_statistics] <= allowed)
        is_finite = reference.finite[rows] & port.finite[port_rows]
        is_comparable = is_finite & (numel == port.columns.numel[port_rows])
        right &= is_comparable
        checked.error[pairs], checked.right[pairs] = error, right
        is_different[pairs] = ~right & is_comparable
        # elements in another order may be right: the full rules decide for each of these pairs
        is_decided = is_comparable & (self._same_order[pairs] | ~is_sketched)
        for index in pairs[~right & ~is_decided].tolist():
            relation = self._relation(index, reference, port, checked.floors)
            checked.error[index] = np.nan if relation.error is None else relation.error
            checked.right[index] = relation.is_right
            checked.layout[index] = relation.state == "layout"
            is_different[index] = relation.state == "different"

    def _relation(
        self, index: int, reference: Measurements, port: Measurements, floors: Floats | None
    ) -> Relation:
        """Compare a single pair by the rules of the full analysis."""
        key, facts = self._keys[index], self._facts[index]
        row = int(reference.structure.first[key.reference.row])
        value = _value_at(reference, row, facts[0])
        port_row = int(port.structure.first[key.port.row])
        port_value = _value_at(port, port_row, facts[1])
        comparer = Comparer(
            self._tolerance, coarse={value: facts[0].coarse, port_value: facts[1].coarse}
        )
        if floors is not None and not np.isnan(floors[row]):
            comparer.floors[value] = float(floors[row] * self._noise_scale[index])
        if facts[0].reordered:
            comparer.reordered.add(value)
        return comparer.relation(value, port_value)

    def _grow(
        self,
        checked: CheckedPairs,
        is_different: Flags,
        reference: Measurements,
        port: Measurements,
    ) -> None:
        """Raise the limits of pairs without recorded noise (see `grow_limits`)."""
        if checked.right.all():
            return
        can_grow = is_different
        if checked.floors is not None:
            has_floor = np.append(~np.isnan(checked.floors), False)
            can_grow = can_grow & ~has_floor[self._reference_rows].any(axis=1)
        limit = checked.limit

        def is_other_numbers(index: int) -> bool:
            if checked.error[index] <= FAR * limit[index] or index not in self._facts:
                return True
            relation = self._relation(index, reference, port, checked.floors)
            return relation.state == "different"

        grown = grow_limits(checked.error, limit, checked.right, can_grow, is_other_numbers)
        for index, grown_limit in list(grown):
            checked.right[index], limit[index] = True, grown_limit

    def ends_right(self, checked: CheckedPairs) -> bool:
        """Return whether all final outputs of one side are right."""
        right, floors = checked.right, checked.floors
        if floors is not None:
            has_floor = ~np.isnan(np.append(floors, np.nan)[self._reference_rows[:, 0]])
            is_strict = self._is_single & has_floor & ~checked.layout
            end_limit = self._limits(floors, END_FACTOR)
            right = right_at_the_end(right, checked.error, end_limit, is_strict)
        return any(side is not None and bool(right[side].all()) for side in self._finals)

    def begins_right(self, checked: CheckedPairs) -> bool:
        """Return whether all inputs of the outermost calls are right."""
        right = checked.right[self._root_inputs]
        return bool(right.size and right.all())

    # -- results of full analyses
    # ----------------------------------------------------------------------------------------------

    def remember(
        self,
        checked: CheckedPairs,
        judgment: Judgment,
        pairs: Sequence[TensorPair],
        rows: tuple[list[Any], list[Any]],
    ) -> bool:
        """Keep a judgment for later forwards in which the same pairs are wrong.

        Args:
            pairs: Of the full analysis, judged.

        Returns:
            False if the full analysis found other pairs right; the plan must not be used then.
        """
        row_index = _row_index(rows)
        indices = {id(pair): self._index_of_key.get(_pair_key(pair, row_index)) for pair in pairs}
        introduced = [fault.pair for fault in judgment.faults if fault.pair is not None]
        groups: list[tuple[State, list[TensorPair]]] = [
            ("healed", judgment.healed),
            ("inherited", judgment.wrong),
            ("introduced", introduced),
        ]
        states: dict[int, State] = {}
        for state, group in groups:
            for pair in group:
                index = indices.get(id(pair))
                if index is not None:
                    states[index] = state
        self.judgments[checked.pattern] = CachedJudgment(judgment.diverged, states)
        for pair in pairs:
            index = indices[id(pair)]
            if index is not None and checked.right[index] != pair.is_right:
                return False
        return True

    def compared_pair(
        self,
        index: int,
        checked: CheckedPairs,
        columns: tuple[Columns, Columns],
        states: dict[int, State],
        with_statistics: bool,
    ) -> ComparedPair:
        """Return a pair of a forward in the form of the report."""
        key, port_key = self._keys[index]
        state = states.get(index, "right" if checked.right[index] else "inherited")
        if state == "right" and checked.layout[index]:
            state = "layout"
        error = float(checked.error[index])
        forward, port_forward = columns[0].forward, columns[1].forward
        # by position: keywords are slower, and this runs for every retained pair
        return ComparedPair(
            *key.module_path,
            key.tensors,
            key.side,
            *forward.place(key.row),
            *port_key.module_path,
            port_key.tensors,
            port_key.side,
            *port_forward.place(port_key.row),
            index,
            None if math.isnan(error) else error,
            float(checked.limit[index]),
            state,
            _shown_statistics(forward.record(key.row)) if with_statistics else {},
            _shown_statistics(port_forward.record(port_key.row)) if with_statistics else {},
        )


def _value_at(side: Measurements, row: int, facts: _ValueFacts) -> TensorValue:
    """Return the value of a row, for the rules of the full analysis."""
    fields = side.columns.forward.row(row)
    slot, numel = int(side.slots[row]), int(side.columns.numel[row])
    if facts.numel == numel:
        shapes = set(facts.shapes)
    else:
        shapes = {tuple(fields["shape"])} if "shape" in fields else set()
    sketch = side.sketches[slot] if slot >= 0 else None
    return TensorValue(numel, sketch, fields, shapes=shapes)


def _shown_statistics(record: Any) -> dict[str, Any]:
    statistics = {}
    for name in SHOWN_STATISTICS:
        value = getattr(record, name)
        if value not in (None, ""):
            statistics[name] = value
    if isinstance(record.shape, tuple):
        statistics["shape"] = list(record.shape)
    return statistics


def _row_index(rows: tuple[list[Any], list[Any]]) -> Sides[dict[int, int]]:
    """Return the position of each row, by its identity."""
    return Sides(*rows).map(lambda side: {id(row): index for index, row in enumerate(side)})


def _pair_key(pair: TensorPair, row_index: Sides[dict[int, int]]) -> _PairKey:
    keys = [
        _TensorKey(
            roles[0].call.module_path,
            index[id(roles[0].row)],
            "+".join(role.tensor for role in roles),
            roles[0].side,
        )
        for roles, index in zip((pair.reference, pair.port), row_index, strict=True)
    ]
    return Sides(*keys)


def _equal_rows(alignment: Alignment, row_index: dict[int, int]) -> NDArray[np.int64]:
    """Return rows of the reference whose values have other numbers but equal content.

    Returns:
        Shape (2, rows): each row, and the first row with its content.
    """
    equal = []
    for value in alignment.reference.values:
        rows = {role.row.get("value"): row_index[id(role.row)] for role in reversed(value.roles)}
        first = min(rows.values())
        equal += [(row, first) for row in rows.values() if row != first]
    return np.array(equal, dtype=np.int64).reshape(-1, 2).T


def _module_paths(calls: Iterable[ModuleCall]) -> list[ModulePath]:
    return [call.module_path for call in calls]


def _largest_floors(floors: Floats, rows: NDArray[np.int64]) -> Floats:
    """Return the largest floor of each group of rows, NaN where none is known."""
    largest: Floats = np.fmax.reduce(np.append(floors, np.nan)[rows], axis=1, initial=np.nan)
    return largest


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return lists of different lengths as one array, -1 where one is shorter."""
    if not any(rows):
        return np.empty((len(rows), 0), dtype=np.int64)
    return np.array(list(zip_longest(*rows, fillvalue=-1)), dtype=np.int64).T


def _is_near(number: float, expected: float) -> bool:
    """Return whether two numbers are equal but for rounding, or both NaN."""
    if number == expected or (math.isnan(number) and math.isnan(expected)):
        return True
    return bool(abs(number - expected) <= _ROUNDING * max(1.0, abs(expected)))
