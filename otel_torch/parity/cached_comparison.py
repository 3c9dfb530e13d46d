"""What was found out about one episode, used on all further ones of its structure: the same pairs,
checked by the array.

To lay two forwards side by side takes long, and comes to the same for each forward of a model. A
plan keeps the pairs, as indices of rows, and says which of them are right in an episode with other
numbers, by the rules of `values`. It judges nothing: where something is wrong in a way that was not
judged before, the episode is analysed in full.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_torch.parity.align import FUSED_FACTOR, Alignment, TensorPair
from otel_torch.parity.call_graph import TensorValue
from otel_torch.parity.columns import Columns, Flags, Sketches, Structure
from otel_torch.parity.finding import SHOWN_STATISTICS, ComparedPair, State
from otel_torch.parity.judge import GROWTH, Judgment
from otel_torch.parity.row_batches import STATISTICS, Floats, Indices
from otel_torch.parity.tolerance import END_FACTOR, LOWERED, NOISE_FACTOR, SHOWN, SINGLE
from otel_torch.parity.values import FAR, STATISTICS_FACTOR, Comparer, Relation, shapes_match

_ABS_MEAN, _RMS, _SUM, _L2 = (STATISTICS.index(name) for name in ("abs_mean", "rms", "sum", "l2"))
_ORDERLESS = [STATISTICS.index(name) for name in ("abs_mean", "mean", "std", "rms", "sum", "l2")]
# errors that a plan and the full analysis find of one episode may differ by the rounding of another
# order of sums
_ROUNDING = 1e-9
_Found = dict[tuple[bool, int], list[tuple[int, ...]]]


@dataclass(slots=True)
class Measurements:
    """One side of an episode as a plan needs it. sketches: float64, those of `columns` and then
    those of earlier episodes; slots: for each row which of them is its value's, -1 for none.
    finite: by row.
    """

    columns: Columns
    structure: Structure
    sketches: Floats
    slots: Indices
    finite: Flags

    @staticmethod
    def of(columns: Columns, structure: Structure, earlier: Sketches) -> Measurements:
        """The numbers of an episode, whose structure this is; of what was seen before it, `earlier`
        knows the sketches.
        """
        sketches, slots = columns.sketches.astype(np.float64), structure.slots
        if len(structure.foreign):
            width = sketches.shape[1]
            found = [earlier.get(number) for number in columns.value[structure.foreign].tolist()]
            usable = [
                sketch if sketch is not None and (not width or len(sketch) == 4 * width) else None
                for sketch in found
            ]
            width = width or max(
                (len(sketch) // 4 for sketch in usable if sketch is not None), default=0
            )
            nothing = bytes(4 * width)
            more = np.frombuffer(
                b"".join(nothing if one is None else one for one in usable), "<f4"
            ).reshape(-1, width)
            sketches = np.concatenate((sketches.reshape(-1, width), more.astype(np.float64)))
            if None in usable:
                missing = len(columns.sketched) + np.array(
                    [at for at, one in enumerate(usable) if one is None]
                )
                slots = np.where(np.isin(slots, missing), -1, slots)
        return Measurements(columns, structure, sketches, slots, columns.finite)


@dataclass(slots=True)
class CheckedPairs:
    """How the pairs of a plan compare in one episode, a number each, in the plan's order. error:
    NaN where there is none.

    layout: pairs that are right, in another order. floors: by row of the reference. pattern: what
    is wrong, to be known again.
    """

    error: Floats
    limit: Floats
    right: Flags
    layout: Flags
    floors: Floats | None

    @property
    def pattern(self) -> bytes:
        """Which pairs are wrong."""
        return np.packbits(self.right).tobytes()


@dataclass(slots=True)
class CachedJudgment:
    """What the full analysis made of an episode, by the places of its pairs in the plan."""

    diverged: bool
    states: dict[int, State]


@dataclass(slots=True)
class _Several:
    """Pairs in which one side is a whole and the other several parts. at: their places in the plan.
    whole, parts: rows, the parts of shape (parts, pairs). turned: the whole is the reference's.
    """

    at: Indices
    whole: Indices
    parts: NDArray[np.int64]
    turned: bool

    def sides(self, one: Measurements, other: Measurements) -> tuple[Measurements, Measurements]:
        """The side of the wholes, and that of the parts."""
        return (one, other) if self.turned else (other, one)


@dataclass(slots=True)
class _Like:
    """What a value was where the plan was made: its size, the shapes it was seen in, and how coarse
    it was.
    """

    numel: int
    shapes: set[tuple[int, ...]]
    coarse: float
    reordered: bool  # by a map

    @staticmethod
    def of(value: TensorValue, comparer: Comparer) -> _Like:
        """What there is to know of a value."""
        return _Like(
            value.numel, value.shapes, comparer.coarse.get(value, 0.0), value in comparer.reordered
        )


class PairPlan:
    """The pairs of two structures.

    rows: those that the alignment was made of. modules: the reference's module of each pair.
    uncalled: the calls of either side that have no partner, though their modules have. missing:
    whether one side never calls what the other does. judged: what the full analysis made of
    episodes, by their patterns. said: harmless pairs that are listed already.
    """

    def __init__(
        self, alignment: Alignment, rows: tuple[list[Any], list[Any]], missing: bool
    ) -> None:
        self.missing = missing
        rows_at = _rows_at(rows)
        expectations = alignment.pairs
        self.size = len(expectations)
        self._tolerance = alignment.comparer.tolerance
        bare = Comparer(self._tolerance, coarse=alignment.comparer.coarse)
        self._base = np.zeros(self.size)
        self._factor = np.ones(self.size)
        floor_rows: list[list[int]] = []
        reference_rows: list[list[int]] = []
        part_rows: list[list[int]] = [[] for _ in expectations]
        pairs: list[tuple[int, int, int]] = []
        sums: _Found = defaultdict(list)
        fused: _Found = defaultdict(list)
        self._one_order = np.zeros(self.size, dtype=bool)
        self._like: dict[int, tuple[_Like, _Like]] = {}
        for at, expectation in enumerate(expectations):
            mine = [rows_at[0][id(role.row)] for role in expectation.reference]
            theirs = [rows_at[1][id(role.row)] for role in expectation.port]
            first, second = expectation.reference[0].value, expectation.port[0].value
            floor_of = [] if first.is_integer and second.is_integer else mine[:1]
            reference_rows.append(mine)
            if len(mine) == len(theirs) == 1:
                pairs.append((at, mine[0], theirs[0]))
                self._base[at] = bare.limit(first, second)
                self._one_order[at] = (
                    shapes_match(first, second) and first not in alignment.comparer.reordered
                )
                self._like[at] = (
                    _Like.of(first, alignment.comparer),
                    _Like.of(second, alignment.comparer),
                )
            else:
                turned = len(mine) == 1
                whole, parts = (mine, theirs) if turned else (theirs, mine)
                kind = fused if expectation.basis == "fused" else sums
                kind[turned, len(parts)].append((at, whole[0], *parts))
                if kind is fused:
                    self._base[at] = bare.limit(first, second)
                    part_rows[at] = [] if turned else mine
                else:
                    self._factor[at] = 2
                    self._base[at] = (
                        bare.limit(first, second) if turned else bare.limit(second, first)
                    )
                    floor_of = floor_of if turned else []
            floor_rows.append(floor_of)
        self._floor_rows, self._reference_rows, self._part_rows = map(
            _padded, (floor_rows, reference_rows, part_rows)
        )
        self._equal = _equal_rows(alignment, rows_at[0])
        self._pair_at, *self._pair_rows = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
        self._single = np.zeros(self.size, dtype=bool)
        self._single[self._pair_at] = True
        self._sums, self._fused = _several(sums), _several(fused)
        self._finals = _finals(alignment)
        self._root_inputs = np.array(
            [
                at
                for at, expectation in enumerate(expectations)
                if expectation.basis == "outermost" and expectation.reference[0].side == "input"
            ],
            dtype=np.int64,
        )
        self._words = [_words(expectation, rows_at) for expectation in expectations]
        self._at = {words: at for at, words in enumerate(self._words)}
        self.modules = [words[0] for words in self._words]
        self.uncalled = [[call.module_path for call in calls] for calls in alignment.uncalled]
        self.judged: dict[bytes, CachedJudgment] = {}
        self.said: set[int] = set()

    # -- checking
    # ----------------------------------------------------------------------------------------------

    def check(self, one: Measurements, other: Measurements, floors: Floats | None) -> CheckedPairs:
        """Compare the pairs. floors: of the reference's rows, from `floors_of_rows`, None without
        noise.
        """
        with np.errstate(all="ignore"):
            floors = self._merged(one, floors)
            return self._grown(self._check(one, other, floors), one, other, floors)

    def agrees(
        self,
        expectations: Sequence[TensorPair],
        one: Measurements,
        other: Measurements,
        floors: Floats | None,
    ) -> bool:
        """Whether it finds what the full analysis, not yet judged, found of the same episode."""
        with np.errstate(all="ignore"):
            found, _ = self._check(one, other, self._merged(one, floors))
        for at, expectation in enumerate(expectations):
            relation = expectation.relation
            error = math.nan if relation.error is None else relation.error
            same = found.right[at] == relation.is_right and _near(found.limit[at], relation.limit)
            if not same or not _near(found.error[at], error):
                return False
        return True

    def _check(
        self, one: Measurements, other: Measurements, floors: Floats | None
    ) -> tuple[CheckedPairs, Flags]:
        limit = self._limits(floors, NOISE_FACTOR)
        right, layout = np.ones(self.size, dtype=bool), np.zeros(self.size, dtype=bool)
        found = CheckedPairs(np.full(self.size, np.nan), limit, right, layout, floors)
        different = np.zeros(self.size, dtype=bool)
        self._check_pairs(found, different, one, other, floors)
        for several in self._sums:
            found.error[several.at] = _sum_errors(several, one, other)
        for several in self._fused:
            found.error[several.at] = _fused_errors(several, one, other)
        for several in (*self._sums, *self._fused):
            error = found.error[several.at]
            found.right[several.at] = error <= limit[several.at]
            different[several.at] = ~np.isnan(error)
        return found, different

    def _merged(self, one: Measurements, floors: Floats | None) -> Floats | None:
        """The floors, for values that hold the same numbers the largest of theirs."""
        if floors is None or not self._equal.size:
            return floors
        rows, others = self._equal[
            :, [bool(one.slots[a] >= 0 and one.slots[b] >= 0) for a, b in self._equal.T]
        ]
        still = (one.sketches[one.slots[rows]] == one.sketches[one.slots[others]]).all(axis=1)
        rows, others = rows[still], others[still]
        merged = floors.copy()
        np.fmax.at(merged, others, floors[rows])
        merged[rows] = merged[others]
        return merged[one.structure.first]

    def _limits(self, floors: Floats | None, factor: float) -> Floats:
        """`Comparer.limit` of all pairs, and what `align` makes of it for fused ones."""
        limit = self._base
        if floors is not None:
            floor = _largest(floors, self._floor_rows)
            noisy = np.maximum(
                np.where(floor >= SHOWN * limit, limit * LOWERED, limit), factor * floor
            )
            single = np.maximum(limit, factor * floor)
            limit = np.where(floor < 0, limit, np.where(limit <= SINGLE, single, noisy))
            limit = np.maximum(limit, FUSED_FACTOR * _largest(floors, self._part_rows))
        return limit * self._factor

    def _check_pairs(
        self,
        found: CheckedPairs,
        different: Flags,
        one: Measurements,
        other: Measurements,
        floors: Floats | None,
    ) -> None:
        at, (mine, theirs) = self._pair_at, self._pair_rows
        mine, theirs = one.structure.first[mine], other.structure.first[theirs]
        limit = found.limit[at]
        slots = one.slots[mine], other.slots[theirs]
        sketched = (slots[0] >= 0) & (slots[1] >= 0)
        error = np.full(len(at), np.nan)
        left, right = one.sketches[slots[0][sketched]], other.sketches[slots[1][sketched]]
        if left.shape[1:] == right.shape[1:]:
            error[sketched] = _sketch_errors(left, right, one.columns.l2[mine[sketched]])
        numel = one.columns.numel[mine]
        good = error <= limit
        plain = np.flatnonzero(~sketched)
        if len(plain):
            statistics = (
                one.columns.statistics(mine[plain]),
                other.columns.statistics(theirs[plain]),
            )
            error[plain] = statistics_errors(*statistics, numel[plain])
            good[plain] = np.isnan(error[plain]) | (
                error[plain] <= STATISTICS_FACTOR * limit[plain]
            )
        usual = one.finite[mine] & other.finite[theirs] & (numel == other.columns.numel[theirs])
        found.error[at], found.right[at] = error, good & usual
        different[at] = ~good & usual
        # elements whose order is another one may be right all the same: by the rules for a single
        # pair
        alone = ~(good & usual) & ~(usual & (self._one_order[at] | ~sketched))
        for place in np.flatnonzero(alone).tolist():
            relation = self._relation(int(at[place]), one, other, floors)
            found.error[at[place]] = np.nan if relation.error is None else relation.error
            found.right[at[place]], found.layout[at[place]] = (
                relation.is_right,
                relation.state == "layout",
            )
            different[at[place]] = relation.state == "different"

    def _relation(
        self, at: int, one: Measurements, other: Measurements, floors: Floats | None
    ) -> Relation:
        """How a single pair compares by `values`."""
        made = []
        coarse: dict[TensorValue, float] = {}
        rows = [
            int(side.structure.first[self._words[at][place]])
            for side, place in ((one, 1), (other, 5))
        ]
        for side, row, like in zip((one, other), rows, self._like[at], strict=True):
            line = side.columns.episode.row(row)
            slot, numel = int(side.slots[row]), int(side.columns.numel[row])
            shapes = (
                like.shapes
                if like.numel == numel
                else {tuple(line["shape"])}
                if "shape" in line
                else set()
            )
            value = TensorValue(
                numel, side.sketches[slot] if slot >= 0 else None, line, shapes=set(shapes)
            )
            coarse[value] = like.coarse
            made.append(value)
        known = (
            {} if floors is None or np.isnan(floors[rows[0]]) else {made[0]: float(floors[rows[0]])}
        )
        reordered = {made[0]} if self._like[at][0].reordered else set()
        return Comparer(self._tolerance, known, coarse, reordered).relation(made[0], made[1])

    def _grown(
        self,
        checked: tuple[CheckedPairs, Flags],
        one: Measurements,
        other: Measurements,
        floors: Floats | None,
    ) -> CheckedPairs:
        """As `judge` lets error grow where no noise was recorded."""
        found, different = checked
        candidates = ~found.right & different & np.isfinite(found.error) & (found.limit != 0)
        if floors is not None:
            known = np.append(~np.isnan(floors), False)
            candidates &= ~known[self._reference_rows].any(axis=1)
        if not candidates.any():
            return found
        counts = found.right & np.isfinite(found.error) & (found.limit != 0)
        largest = np.maximum.accumulate(np.where(counts, found.error, 0.0))
        grown = 0.0
        for at in np.flatnonzero(candidates).tolist():
            limit = found.limit[at] + GROWTH * max(largest[at], grown)
            if found.error[at] > limit:
                continue
            near = found.error[at] <= FAR * found.limit[at] or at not in self._like
            if near or self._relation(at, one, other, floors).state == "different":
                found.right[at], found.limit[at] = True, limit
                grown = max(grown, float(found.error[at]))
        return found

    def ends_right(self, checked: CheckedPairs) -> bool:
        """Whether all final outputs of one side are right, as `judge` asks it."""
        right, floors = checked.right, checked.floors
        if floors is not None:
            known = self._single & ~np.isnan(np.append(floors, np.nan)[self._reference_rows[:, 0]])
            right = right & ~(
                known & ~checked.layout & (checked.error > self._limits(floors, END_FACTOR))
            )
        return any(side is not None and bool(right[side].all()) for side in self._finals)

    def begins_right(self, checked: CheckedPairs) -> bool:
        """Whether what enters the outermost calls is right."""
        right = checked.right[self._root_inputs]
        return bool(right.size and right.all())

    # -- what is kept of it
    # ----------------------------------------------------------------------------------------------

    def remember(
        self,
        checked: CheckedPairs,
        judgement: Judgment,
        expectations: Sequence[TensorPair],
        rows: tuple[list[Any], list[Any]],
    ) -> bool:
        """Keep what the full analysis made of an episode: others with the same pairs wrong are
        judged alike.

        expectations: its own, judged. Returns False if it found other pairs right: then the plan is
        not to be used.
        """
        rows_at = _rows_at(rows)
        places = {id(one): self._at.get(_words(one, rows_at)) for one in expectations}
        states: dict[int, State] = {}
        marks: list[tuple[State, list[TensorPair]]] = [
            ("healed", judgement.healed),
            ("inherited", judgement.wrong),
            (
                "introduced",
                [fault.pair for fault in judgement.faults if fault.pair is not None],
            ),
        ]
        for state, marked in marks:
            states.update({at: state for one in marked if (at := places.get(id(one))) is not None})
        self.judged[checked.pattern] = CachedJudgment(judgement.diverged, states)
        return all(
            checked.right[at] == one.is_right
            for one in expectations
            if (at := places[id(one)]) is not None
        )

    def comparison(
        self,
        at: int,
        checked: CheckedPairs,
        one: Columns,
        other: Columns,
        states: dict[int, State],
        statistics: bool,
    ) -> ComparedPair:
        """A pair in an episode, as it is shown."""
        place, row, tensors, side, port_place, port_row, port_tensors, port_side = self._words[at]
        state = states.get(at, "right" if checked.right[at] else "inherited")
        if state == "right" and checked.layout[at]:
            state = "layout"
        error = float(checked.error[at])
        return ComparedPair(
            place[0], place[1], tensors, side, *_time(one, row),
            port_place[0], port_place[1], port_tensors, port_side, *_time(other, port_row),
            at, None if math.isnan(error) else error, float(checked.limit[at]), state,
            _statistics(one, row) if statistics else {}, _statistics(other, port_row) if statistics else {},
        )  # fmt: skip


def _time(columns: Columns, row: int) -> tuple[int | None, int | None, int | None]:
    """loop, step, call of a row."""
    line = columns.episode.line(row)
    return line.loop, line.step, line.call


def _statistics(columns: Columns, row: int) -> dict[str, Any]:
    line = columns.episode.line(row)
    found = {
        name: value for name in SHOWN_STATISTICS if (value := getattr(line, name)) not in (None, "")
    }
    if line.shape is not None:
        found["shape"] = list(line.shape)
    return found


def _rows_at(rows: tuple[list[Any], list[Any]]) -> list[dict[int, int]]:
    """For each side the places of its rows, by their identity."""
    return [{id(row): at for at, row in enumerate(side)} for side in rows]


def _words(expectation: TensorPair, rows_at: list[dict[int, int]]) -> tuple[Any, ...]:
    """(reference's place, first row, tensors, side, port's place, first row, tensors, side)."""
    words: tuple[Any, ...] = ()
    for roles, at in zip((expectation.reference, expectation.port), rows_at, strict=True):
        words += (
            roles[0].call.module_path,
            at[id(roles[0].row)],
            "+".join(role.tensor for role in roles),
            roles[0].side,
        )
    return words


def _equal_rows(alignment: Alignment, rows_at: dict[int, int]) -> NDArray[np.int64]:
    """Rows of the reference's values that had other numbers and the same content, each with the
    first such: shape (2, rows).
    """
    found = []
    for value in alignment.reference.values:
        first = {role.row.get("value"): rows_at[id(role.row)] for role in reversed(value.roles)}
        whole = min(first.values())
        found += [(row, whole) for row in first.values() if row != whole]
    return np.array(found, dtype=np.int64).reshape(-1, 2).T


def _largest(floors: Floats, rows: NDArray[np.int64]) -> Floats:
    """The largest floor of several rows each, -1 where none is known."""
    found = np.append(floors, np.nan)[rows]
    largest: Floats = np.where(np.isnan(found), -1.0, found).max(axis=1, initial=-1.0)
    return largest


def _padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Lists of several lengths as one array, -1 where one is shorter."""
    if not any(rows):
        return np.empty((len(rows), 0), dtype=np.int64)
    return np.array(list(zip_longest(*rows, fillvalue=-1)), dtype=np.int64).T


def _finals(alignment: Alignment) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """For each side the pairs that are its final outputs, None where one of them is in no pair."""
    finals = {
        id(role): at
        for at, one in enumerate(alignment.pairs)
        if one.basis == "outermost" and one.reference[0].side == "output"
        for role in (*one.reference, *one.port)
    }
    sides = []
    for program in (alignment.reference, alignment.port):
        outputs = [finals.get(id(role)) for call in program.outermost for role in call.outputs]
        known = [at for at in outputs if at is not None]
        sides.append(
            np.array(known, dtype=np.int64) if known and len(known) == len(outputs) else None
        )
    return sides[0], sides[1]


def _several(found: _Found) -> list[_Several]:
    several = []
    for (turned, _), rows in found.items():
        at, whole, *parts = np.array(rows, dtype=np.int64).T
        several.append(_Several(at, whole, np.array(parts), turned))
    return several


def _near(one: float, other: float) -> bool:
    return bool(
        one == other
        or (one != one and other != other)
        or abs(one - other) <= _ROUNDING * max(1.0, abs(other))
    )


# -- the rules of `values` and `align`, by the array
# -----------------------------------------------------------------------


def _sketch_errors(one: Floats, other: Floats, size: Floats) -> Floats:
    """`values.sketch_error` of many pairs. size: the norms of the reference's values, NaN where not
    recorded.
    """
    apart = one - other
    distance = np.sqrt(np.einsum("ij,ij->i", apart, apart))
    size = np.where(np.isnan(size), np.sqrt(np.einsum("ij,ij->i", one, one)), size)
    return np.where(distance == 0, 0.0, np.where(size > 0, distance / size, np.inf))


def statistics_errors(one: Floats, other: Floats, numel: Floats) -> Floats:
    """`values.statistics_error` of many rows: statistics of shape (8, rows), sizes of shape
    (rows,); NaN for None.
    """
    units = np.ones((len(_ORDERLESS), one.shape[1]))
    units[_ORDERLESS.index(_SUM)] = np.maximum(numel, 1)
    units[_ORDERLESS.index(_L2)] = np.sqrt(np.maximum(numel, 1))
    sizes = np.abs(np.stack([side[which] for side in (one, other) for which in (_ABS_MEAN, _RMS)]))
    scale = np.where(np.isfinite(sizes), sizes, 0.0).max(axis=0)
    left, right = one[_ORDERLESS], other[_ORDERLESS]
    apart = np.abs(left - right) / units
    size = np.where(scale > 0, scale, np.maximum(np.abs(left), np.abs(right)) / units)
    errors = np.where(apart == 0, 0.0, np.where(size > 0, apart / size, np.inf))
    known = np.isfinite(left) & np.isfinite(right)
    errors = np.where(known, errors, -1.0).max(axis=0)
    return np.where(errors < 0, np.nan, errors)


def _sum_errors(several: _Several, one: Measurements, other: Measurements) -> Floats:
    """`align._sum` of many pairs; NaN where a sketch is not known."""
    side, part_side = several.sides(one, other)
    slots = side.slots[several.whole], part_side.slots[several.parts]
    whole, parts = side.sketches[slots[0]], part_side.sketches[slots[1]].sum(axis=0)
    error = np.linalg.norm(whole - parts, axis=1) / np.maximum(
        np.linalg.norm(whole, axis=1), 1e-300
    )
    return np.where((slots[0] < 0) | (slots[1] < 0).any(axis=0), np.nan, error)


def _fused_errors(several: _Several, one: Measurements, other: Measurements) -> Floats:
    """`align._put_together` of many pairs; NaN where parts and whole are not of one size."""
    side, part_side = several.sides(one, other)
    numel, sizes = side.columns.numel[several.whole], part_side.columns.numel[several.parts]
    whole = np.nan_to_num(side.columns.statistics(several.whole))
    parts = np.nan_to_num(
        part_side.columns.statistics(several.parts.ravel()).reshape(-1, *several.parts.shape)
    )
    total, scale = whole[_L2] ** 2, whole[_ABS_MEAN] * numel
    error = np.where(total > 0, np.abs((parts[_L2] ** 2).sum(axis=0) - total) / total, 0.0)
    for apart in (
        (parts[_ABS_MEAN] * sizes).sum(axis=0) - scale,
        parts[_SUM].sum(axis=0) - whole[_SUM],
    ):
        error = np.where(scale > 0, np.maximum(error, np.abs(apart) / scale), error)
    return np.where(sizes.sum(axis=0) == numel, error, np.nan)


def floors_of_rows(reference: Measurements, noise: Measurements, partners: Indices) -> Floats:
    """`noise.floors_of` for the rows of an episode, NaN where there is none. partners: the row of
    `noise` for each row, -1.
    """
    with np.errstate(all="ignore"):
        rows = np.flatnonzero(partners >= 0)
        mine, theirs = reference.structure.first[rows], noise.structure.first[partners[rows]]
        same = reference.columns.numel[mine] == noise.columns.numel[theirs]
        rows, mine, theirs = rows[same], mine[same], theirs[same]
        slots = reference.slots[mine], noise.slots[theirs]
        sketched = (slots[0] >= 0) & (slots[1] >= 0)
        error = np.full(len(rows), np.nan)
        plain = np.flatnonzero(~sketched)
        if len(plain):
            statistics = (
                reference.columns.statistics(rows[plain]),
                noise.columns.statistics(partners[rows[plain]]),
            )
            error[plain] = statistics_errors(*statistics, reference.columns.numel[mine[plain]])
        left, right = reference.sketches[slots[0][sketched]], noise.sketches[slots[1][sketched]]
        if left.shape[1:] == right.shape[1:]:
            error[sketched] = _sketch_errors(left, right, reference.columns.l2[mine[sketched]])
    worst = np.full(len(partners), -1.0)
    np.maximum.at(worst, mine, np.where(np.isnan(error), -1.0, error))
    found = np.where(worst < 0, np.nan, worst)
    return found[reference.structure.first]
