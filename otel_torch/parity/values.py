"""Compare a value of the reference with a value of the port.

The sketch decides where both have one. Statistics do not depend on the order of elements: they
decide where a sketch is missing, and distinguish a permutation from another value where both sides
have one. Extremes never decide, because one unit in the last place of a maximum is 0.4 % in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from otel_torch.parity.call_graph import Role, TensorValue
from otel_torch.parity.rules import (
    ORDER_BLIND,
    Floats,
    limits_under_noise,
    sketch_errors,
    statistics_errors,
)
from otel_torch.parity.tolerance import NOISE_FACTOR, SINGLE, Tolerance, coarser, noise_scale
from otel_torch.recording.rows import Row

# equal: within the limit. order: the same numbers in another order, although the shapes agree.
# layout: likewise, but the shapes already imply another order. repeated: one is the other several
# times. different: none of these
RelationState = Literal["equal", "order", "layout", "repeated", "shape", "nonfinite", "different"]

RIGHT: frozenset[RelationState] = frozenset({"equal", "layout", "repeated"})
# statistics may be off by this multiple of the limit: sums see less than sketches, and several are
# compared
STATISTICS_FACTOR = 4.0
# the error of a permuted tensor is at least this multiple of its limit
FAR = 20.0


@dataclass(frozen=True, slots=True)
class Relation:
    """How two values compare.

    error, limit: relative L2, or of the worst statistic without sketches. The error is None where
    the two cannot be compared.
    """

    state: RelationState
    error: float | None
    limit: float

    @property
    def is_right(self) -> bool:
        """Whether the port's value may replace the reference's."""
        return self.state in RIGHT


@dataclass(slots=True)
class Comparer:
    """Compares values of one forward, each pair once.

    Args:
        tolerance: The limits by dtype.
        floors: Error of the reference's values under noise, relative.
        coarse: The coarsest dtype that took part in making a value.
        noise_dtypes: Likewise, of the reference's values under noise.
        reordered: Values of the reference that the port, by the user's map, lays out differently.
        apart: Legal errors of values, relative, by the parameters of the modules that made them.
    """

    tolerance: Tolerance
    floors: dict[TensorValue, float] = field(default_factory=dict)
    coarse: dict[TensorValue, str] = field(default_factory=dict)
    noise_dtypes: dict[TensorValue, str] = field(default_factory=dict)
    reordered: set[TensorValue] = field(default_factory=set)
    apart: dict[TensorValue, float] = field(default_factory=dict)
    _relations: dict[tuple[TensorValue, TensorValue], Relation] = field(default_factory=dict)

    def relation(self, reference: TensorValue, port: TensorValue) -> Relation:
        """Return how the two compare."""
        relation = self._relations.get((reference, port))
        if relation is None:
            relation = self._relations[reference, port] = self._compare(reference, port)
        return relation

    def is_equal(self, reference: TensorValue, port: TensorValue) -> bool:
        """Return whether the two hold the same numbers in the same order."""
        return reference.numel == port.numel and self.relation(reference, port).state == "equal"

    def limit(
        self, reference: TensorValue, port: TensorValue, factor: float = NOISE_FACTOR
    ) -> float:
        """Return the largest error at which the two are equal."""
        if reference.is_integer and port.is_integer:
            return 0.0
        base = self.tolerance.base(self._dtypes(reference, port)) + self.apart.get(reference, 0.0)
        floor = self.floors.get(reference)
        if floor is None:
            return base
        floor *= self.noise_scale(reference, port)
        return float(limits_under_noise(np.float64(base), np.float64(floor), factor))  # type: ignore[arg-type]

    def base(self, value: TensorValue) -> float:
        """Return how far a value may be off by the dtypes that took part in making it."""
        return self.tolerance.base(self._dtypes(value))

    def noise_scale(self, reference: TensorValue, port: TensorValue) -> float:
        """Return the factor of the reference's floor, for noise of another dtype."""
        if reference not in self.noise_dtypes:
            return 1.0
        dtypes = (coarser(self._dtypes(value)) for value in (reference, port))
        return noise_scale(self.noise_dtypes[reference], *dtypes)

    def _dtypes(self, *values: TensorValue) -> list[str]:
        dtypes = [str(value.row.get("dtype", "")) for value in values]
        return dtypes + [self.coarse.get(value, "") for value in values]

    def _compare(self, reference: TensorValue, port: TensorValue) -> Relation:
        limit = self.limit(reference, port)
        if reference.numel != port.numel:
            is_repeated = _is_repeated(reference, port, limit)
            return Relation("repeated" if is_repeated else "shape", None, limit)
        if not reference.is_finite or not port.is_finite:
            are_both = reference.is_finite == port.is_finite
            return Relation("equal" if are_both else "nonfinite", math.inf, limit)
        error = sketch_error(reference, port)
        if error is None:
            error = statistics_error(reference.row, port.row, reference.numel)
            is_equal = error is None or error <= STATISTICS_FACTOR * limit
            return Relation("equal" if is_equal else "different", error, limit)
        if error <= limit:
            return Relation("equal", error, limit)
        return self._compare_order(reference, port, error, limit)

    def _compare_order(
        self, reference: TensorValue, port: TensorValue, error: float, limit: float
    ) -> Relation:
        """Distinguish other numbers from the same numbers in another order."""
        statistics = statistics_error(reference.row, port.row, reference.numel)
        if statistics is None:
            return Relation("different", error, limit)
        # a permutation is far off and keeps every sum; rounding averages out in sums
        is_permuted = (
            error > FAR * limit
            and statistics <= _averaged(limit, reference)
            and _have_same_extremes(reference.row, port.row, limit)
        )
        if shapes_match(reference, port) and reference not in self.reordered:
            return Relation("order" if is_permuted else "different", error, limit)
        # the shapes imply another order, so only the sums show how far off the elements are
        error = min(error, statistics * math.sqrt(reference.numel))
        is_layout = is_permuted or error <= 4 * limit
        return Relation("layout" if is_layout else "different", error, limit)


def sketch_error(reference: TensorValue, port: TensorValue) -> float | None:
    """Return the estimated relative L2 distance, or None without sketches."""
    if reference.sketch is None or port.sketch is None:
        return None
    if len(reference.sketch) != len(port.sketch):
        return None  # rows of other tokens, or of another width
    error = float(sketch_errors(reference.sketch[None], port.sketch[None], _norms([reference]))[0])
    return None if math.isnan(error) else error


def statistics_error(reference: Row, port: Row, numel: int) -> float | None:
    """Return the largest difference of the order-blind statistics of two rows, or None."""
    columns = _statistics([reference]), _statistics([port])
    error = float(statistics_errors(*columns, np.array([float(numel)]))[0])
    return None if math.isnan(error) else error


def _have_same_extremes(reference: Row, port: Row, limit: float) -> bool:
    """Return whether the smallest and the largest element are equal, as those of a permutation."""
    names = [name for name in ("min", "max") if _is_number(reference.get(name))]
    numbers = [(reference[name], port[name]) for name in names if _is_number(port.get(name))]
    scale = max((abs(number) for pair in numbers for number in pair), default=0.0)
    return bool(numbers) and all(abs(x - y) <= 4 * max(limit, SINGLE) * scale for x, y in numbers)


def errors_of_roles(references: Sequence[Role], ports: Sequence[Role]) -> Floats:
    """Return the errors of pairs of tensors: by sketches, by statistics, else NaN."""
    errors = np.full(len(references), np.nan)
    sketches = [
        (index, reference.value.sketch, port.value.sketch)
        for index, (reference, port) in enumerate(zip(references, ports, strict=True))
        if reference.value.sketch is not None and port.value.sketch is not None
    ]
    if sketches:
        indices, *sides = zip(*sketches, strict=True)
        norms = _norms([references[index].value for index in indices])
        errors[list(indices)] = sketch_errors(np.stack(sides[0]), np.stack(sides[1]), norms)
    remaining = np.flatnonzero(np.isnan(errors)).tolist()
    if remaining:
        statistics = [
            _statistics([side[index].row for index in remaining]) for side in (references, ports)
        ]
        numel = np.array([float(references[index].value.numel) for index in remaining])
        errors[remaining] = statistics_errors(statistics[0], statistics[1], numel)
    return errors


def _norms(values: Sequence[TensorValue]) -> Floats:
    """Return the recorded L2 norms, NaN where absent."""
    norms = [value.row.get("l2") for value in values]
    return np.array([norm if isinstance(norm, int | float) else math.nan for norm in norms])


def _statistics(rows: Sequence[Row]) -> Floats:
    """Return the order-blind statistics, shape (6, rows), NaN where absent."""
    table = [[row.get(name) for row in rows] for name in ORDER_BLIND]
    return np.array([[x if _is_number(x) else math.nan for x in line] for line in table])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shapes_match(reference: TensorValue, port: TensorValue) -> bool:
    """Return whether the elements of the two should be in the same order.

    They should if they have a shape in common, or if one shape only splits dimensions of the other.
    """
    reference_ends, port_ends = (
        {_dimension_ends(shape) for shape in value.shapes} for value in (reference, port)
    )
    return any(
        ends <= other_ends or other_ends <= ends
        for ends in reference_ends
        for other_ends in port_ends
    )


def _dimension_ends(shape: tuple[int, ...]) -> frozenset[int]:
    """Return the products of the leading dimensions; splitting a dimension only adds to them.

    >>> sorted(_dimension_ends((2, 12))), sorted(_dimension_ends((2, 3, 4)))
    ([2, 24], [2, 6, 24])
    """
    return frozenset(math.prod(shape[: index + 1]) for index in range(len(shape))) - {1}


def _is_repeated(reference: TensorValue, port: TensorValue, limit: float) -> bool:
    """Return whether the larger value repeats the smaller one.

    One program may expand a table, such as rotary positions, that the other keeps small.
    """
    small, large = sorted((reference, port), key=lambda value: value.numel)
    if small.numel <= 0 or large.numel % small.numel:
        return False
    statistics = [
        (name, float(small.row[name]), float(large.row[name]))
        for name in ("abs_mean", "mean", "min", "max")
        if _is_number(small.row.get(name)) and _is_number(large.row.get(name))
    ]
    scale = max((max(abs(x), abs(y)) for _, x, y in statistics), default=0.0)
    # rounding averages out in means, not in extremes
    averaged = _averaged(limit, small)
    slack = {"abs_mean": averaged, "mean": averaged}
    return len(statistics) >= 3 and all(
        abs(x - y) <= slack.get(name, max(limit, SINGLE)) * scale for name, x, y in statistics
    )


def _averaged(limit: float, value: TensorValue) -> float:
    """Return how far a mean may be off if every element may be off by `limit`."""
    return SINGLE + 2 * limit / math.sqrt(max(value.numel, 1))
