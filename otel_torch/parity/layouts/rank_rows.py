"""Read one process and all ranks side by side: which rows describe the same tensor.

The rows of a step are joined by their keys. The recordings are read together, so that only the
steps at which they are differ are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from otel_torch.parity.call_graph import Sketch, decode_sketch, keep_for_later
from otel_torch.parity.forwards import WARM_UP
from otel_torch.parity.layouts.dealt_calls import DealtCalls
from otel_torch.parity.layouts.numbering import Numbering
from otel_torch.parity.layouts.whole_statistics import SCALING, encode_sketch
from otel_torch.recording.reader import iterate_rows
from otel_torch.recording.rows import Row
from otel_torch.statistics.sketch_format import SIZE

PARAMETER_GRADIENT = "param_grad."
# what else a row says of a tensor without its numbers
_DESCRIPTION = ("class", "shape", "dtype", "numel", "order", "parent", "value", "storage")


class PlaceKey(NamedTuple):
    """What identifies a tensor of a call in every recording of the run."""

    model: str
    module: str
    tensor: str
    loop: int | None
    step: int | None
    call: int | None
    phase: str
    branch: str | None

    @property
    def module_path(self) -> tuple[str, str]:
        """The module: (model, name)."""
        return self.model, self.module

    @property
    def position(self) -> tuple[int | None, int | None]:
        """When the call runs: (loop, step)."""
        return self.loop, self.step

    @property
    def tensor_name(self) -> tuple[str, str, str]:
        """The tensor in all calls: (model, module, tensor)."""
        return self[:3]

    @property
    def module_call(self) -> tuple[Any, ...]:
        """The call, whichever its tensor."""
        return self.module_path + self[3:]

    @property
    def is_input(self) -> bool:
        """Whether the call is given the tensor."""
        return self.tensor.startswith("in")

    @property
    def is_input_of_model(self) -> bool:
        """Whether the model itself is given the tensor."""
        return self.is_input and not self.module

    @property
    def is_parameter_gradient(self) -> bool:
        """Whether it is the gradient of a parameter."""
        return self.tensor.startswith(PARAMETER_GRADIENT)

    @property
    def is_gradient_inside(self) -> bool:
        """Whether it is a gradient of the backward pass, and of no parameter."""
        return self.phase == "backward" and not self.is_parameter_gradient


@dataclass(slots=True, eq=False)
class RankRow:
    """A row of one process.

    Attributes:
        sketch: Of the row's value, also where an earlier row has it.
        as_part: The sketches of the value as this rank's part, by dimension; empty where the
            process was alone.
        chunk: Which part of the model on its rank it belongs to, where a rank has several stages.
    """

    rank: int
    row: Row
    sketch: Sketch | None = None
    as_part: tuple[Sketch, ...] = ()
    chunk: int = 0

    @property
    def stage(self) -> tuple[int, int]:
        """The part of the model that the row belongs to, in the order of the whole."""
        return self.chunk, self.rank

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape, None where it is not recorded."""
        shape = self.row.get("shape")
        return tuple(shape) if isinstance(shape, list) else None

    @property
    def numel(self) -> int:
        """The number of elements, 0 where it is not recorded."""
        numel = self.row.get("numel")
        return numel if isinstance(numel, int) else int(np.prod(self.shape or (0,)))

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers."""
        return "int" in str(self.row.get("dtype"))

    @property
    def is_parameter_gradient(self) -> bool:
        """Whether an optimizer uses these numbers as they are."""
        return str(self.row.get("tensor")).startswith(PARAMETER_GRADIENT)

    def number(self, name: str) -> float:
        """Return a statistic, NaN where it is not recorded."""
        value = self.row.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def l2(self) -> float:
        """The norm, by the sketch where it is not recorded."""
        l2 = self.row.get("l2")
        if isinstance(l2, int | float):
            return float(l2)
        return 0.0 if self.sketch is None else float(np.linalg.norm(self.sketch))

    def times(self, factor: float) -> RankRow:
        """Return the row of the tensor times a positive number."""
        row = dict(self.row)
        row |= {name: row[name] * factor for name in SCALING if isinstance(row.get(name), float)}
        sketch = None if self.sketch is None else factor * self.sketch
        if "sketch" in row and sketch is not None:
            row["sketch"] = encode_sketch(sketch)
        return RankRow(
            self.rank, row, sketch, tuple(factor * part for part in self.as_part), self.chunk
        )


@dataclass(slots=True, eq=False)
class TensorPlace:
    """A tensor of a module call.

    Attributes:
        reference: The row of the process that ran alone, if it has the place.
        ranks: The rows of the ranks that have it.
    """

    key: PlaceKey
    reference: RankRow | None
    ranks: list[RankRow]


def place_key(row: Row) -> PlaceKey:
    """Return the key of a row."""
    fields: dict[str, Any] = {name: row.get(name) for name in PlaceKey._fields}
    return PlaceKey(**fields)


def iterate_places(
    reference: Path | None,
    ranks: dict[int, Path],
    numberings: dict[int, Numbering],
    dealt: dict[int, DealtCalls],
    warn: Callable[[str], None] = lambda message: None,
) -> Iterator[list[TensorPlace]]:
    """Yield the places of one step after another, in the order of the ranks.

    Args:
        reference: None if its steps are not those of the ranks.
        ranks: Rank -> recording.
        numberings: The names of the whole model, of each rank.
        dealt: Rank -> the numbers of its calls in one process, if the ranks divide those.
        warn: Called with a line for each rank whose file was cut.
    """
    alone = None if reference is None else _RankSteps(-1, reference, Numbering())
    steps = [
        _RankSteps(rank, path, numberings[rank], dealt.get(rank), warn)
        for rank, path in ranks.items()
    ]
    while True:
        keys = [key for step in steps if (key := step.next_key()) is not None]
        if not keys:
            return
        key = min(keys, key=_in_order) if dealt else keys[0]
        rows = [step.take(key) for step in steps]
        rows_alone = [] if alone is None else alone.take(key)
        references = {place_key(row.row): row for row in rows_alone}
        yield _with_spread_gradients(_join(references, rows), references, len(ranks))


def _with_spread_gradients(
    places: list[TensorPlace], references: dict[PlaceKey, RankRow], count: int
) -> list[TensorPlace]:
    """Add the gradients that no rank has as a whole, without their numbers.

    An optimizer that is split over the ranks (ZeRO) leaves each gradient on one rank, and that of
    one parameter in pieces on two.
    """
    gradients = [place for place in places if place.key.is_parameter_gradient]
    if all(len(place.ranks) == count for place in gradients):
        return places
    known = {place.key for place in gradients}
    in_pieces = []
    for key, reference in references.items():
        if key.is_parameter_gradient and key not in known:
            row = without_numbers(reference.row)
            row.pop("value", None)  # the number of another tensor on the ranks
            row.pop("storage", None)
            in_pieces.append(TensorPlace(key, None, [RankRow(gradients[0].ranks[0].rank, row)]))
    end = places.index(gradients[-1]) + 1
    return [*places[:end], *in_pieces, *places[end:]]


def without_numbers(row: Row) -> Row:
    """Return a row that says what a tensor is, and not which numbers it has."""
    names = PlaceKey._fields + _DESCRIPTION
    return {name: row[name] for name in names if name in row}


def _join(references: dict[PlaceKey, RankRow], ranks: list[list[RankRow]]) -> list[TensorPlace]:
    """Return the places of a step, in the order of one process.

    What only a later rank has, as a stage of a pipeline, follows what earlier ones have of its
    kind: a forward comes before the backward passes.
    """
    places: dict[PlaceKey, TensorPlace] = {}
    rows = [row for of_rank in ranks for row in of_rank]
    rows.sort(key=lambda row: row.chunk)  # the later stages of all ranks come last
    for row in rows:
        key = place_key(row.row)
        place = places.get(key)
        if place is None:
            place = places[key] = TensorPlace(key, references.get(key), [])
        place.ranks.append(row)
    first = rows[0].stage if rows else None
    by_kind: dict[tuple[Any, bool], list[TensorPlace]] = {}
    for place in places.values():
        by_kind.setdefault(_kind(place), []).append(place)
    ordered: list[TensorPlace] = []
    remaining = {
        kind: sum(place.ranks[0].stage == first for place in of_kind)
        for kind, of_kind in by_kind.items()
    }
    for place in places.values():
        if place.ranks[0].stage != first:
            continue
        ordered.append(place)
        kind = _kind(place)
        remaining[kind] -= 1
        if not remaining[kind]:
            ordered += [other for other in by_kind.pop(kind) if other.ranks[0].stage != first]
    return [*ordered, *(place for of_kind in by_kind.values() for place in of_kind)]


def _in_order(key: tuple[int | None, int | None]) -> tuple[int, int]:
    loop, step = key
    return loop or 0, step or 0


def _kind(place: TensorPlace) -> tuple[Any, bool]:
    return place.key.phase, place.key.is_parameter_gradient


class _RankSteps:
    """The rows of a recording, a step at a time."""

    def __init__(
        self,
        rank: int,
        path: Path,
        numbering: Numbering,
        dealt: DealtCalls | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._rank, self._numbering, self._dealt = rank, numbering, dealt
        self._sketches: dict[Any, tuple[Sketch | None, tuple[Sketch, ...]]] = {}
        # a framework's own forwards, which each rank runs on dummy inputs of its own
        rows: Iterator[Row] = (
            row for row in iterate_rows(path, warn) if row.get("phase") != WARM_UP
        )
        if dealt is not None:
            rows = map(dealt.renumber, rows)
        self._groups = groupby(rows, key=lambda row: (row.get("loop"), row.get("step")))
        self._waiting: dict[Any, list[RankRow]] = {}

    def next_key(self) -> Any:
        """Return the (loop, step) of the next rows, None at the end."""
        if not self._waiting:
            self._read()
        return next(iter(self._waiting), None)

    def take(self, key: Any) -> list[RankRow]:
        """Return the next rows of a (loop, step), which may lie ahead."""
        while key not in self._waiting and not self._is_past(key) and self._read():
            pass
        return self._waiting.pop(key, [])

    def _is_past(self, key: Any) -> bool:
        """Return whether the rank has later rows waiting, and so none of this step."""
        waiting = self._waiting if self._dealt is not None else ()
        return any(_in_order(key) < _in_order(later) for later in waiting)

    def _read(self) -> bool:
        group = next(self._groups, None)
        if group is None:
            return False
        key, rows = group
        self._waiting.setdefault(key, []).extend(map(self._with_sketches, rows))
        return True

    def _with_sketches(self, row: Row) -> RankRow:
        row["module"] = self._numbering.rename(row.get("model", ""), row["module"])
        row["model"], chunk = self._numbering.chunk(row.get("model", ""))
        value, text = row.get("value"), row.pop("part_sketches", None)
        if "sketch" in row:
            parts = decode_sketch(text)
            sketches = (
                decode_sketch(row["sketch"]),
                () if parts is None else tuple(parts.reshape(-1, SIZE)),
            )
            if value is not None:
                keep_for_later(self._sketches, value, sketches)
        elif row.get("phase") == "train" and isinstance(mean := row.get("mean"), float):
            sketches = np.array([mean]), ()  # a number is its own sketch
        else:
            sketches = self._sketches.get(value, (None, ()))
        return RankRow(self._rank, row, *sketches, chunk)
