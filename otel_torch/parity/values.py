"""How a value of one program and one of the other compare: the same, the same in another order, or
something else.

The sketch decides where there is one; statistics, which see no order, decide where there is none
and tell a permutation from another value where there is. Extremes never decide: one unit at the
maximum is 0.4 % in bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from otel_torch.parity.call_graph import TensorValue
from otel_torch.parity.tolerance import NOISE_FACTOR, SINGLE, Tolerance

# equal: within the limit. order: the same numbers in another order, though of one shape. layout:
# likewise, but in shapes that have another order anyway. repeated: one is the other several times.
# different: none of these
State = Literal["equal", "order", "layout", "repeated", "shape", "nonfinite", "different"]

RIGHT: frozenset[State] = frozenset({"equal", "layout", "repeated"})
# where statistics decide, how much they may be off: sums see less than sketches, and several are
# looked at
STATISTICS_FACTOR = 4.0
# how many times its limit the error of a permuted tensor has at the least
FAR = 20.0


@dataclass(frozen=True, slots=True)
class Relation:
    """error, limit: relative L2, or of the worst statistic where there is no sketch; None where
    none can be had.
    """

    state: State
    error: float | None
    limit: float

    @property
    def is_right(self) -> bool:
        """Whether the two values are what they should be."""
        return self.state in RIGHT


@dataclass(slots=True)
class Comparer:
    """Compares values, each pair once. floors: of the reference's values, relative, by value.
    reordered: those that the port, as a map says, keeps in another order.
    """

    tolerance: Tolerance
    floors: dict[TensorValue, float] = field(default_factory=dict)
    coarse: dict[TensorValue, float] = field(default_factory=dict)
    reordered: set[TensorValue] = field(default_factory=set)
    _known: dict[tuple[TensorValue, TensorValue], Relation] = field(default_factory=dict)

    def relation(self, reference: TensorValue, port: TensorValue) -> Relation:
        """How the two compare."""
        known = self._known.get((reference, port))
        if known is None:
            known = self._known[reference, port] = self._compare(reference, port)
        return known

    def equal(self, reference: TensorValue, port: TensorValue) -> bool:
        """Whether the two hold the same numbers in the same order."""
        return reference.numel == port.numel and self.relation(reference, port).state == "equal"

    def limit(
        self, reference: TensorValue, port: TensorValue, factor: float = NOISE_FACTOR
    ) -> float:
        """How far the two may be apart."""
        if reference.is_integer and port.is_integer:
            return 0.0
        base = max(self.coarse.get(reference, 0.0), self.coarse.get(port, 0.0))
        base = max(
            base, self.tolerance.base(str(one.row.get("dtype", "")) for one in (reference, port))
        )
        if base <= SINGLE:
            return max(base, factor * self.floors.get(reference, 0.0))
        return self.tolerance.with_noise(base, self.floors.get(reference), factor)

    def _compare(self, one: TensorValue, other: TensorValue) -> Relation:
        limit = self.limit(one, other)
        if one.numel != other.numel:
            return Relation("repeated" if _repeats(one, other, limit) else "shape", None, limit)
        if one.is_finite != other.is_finite or not one.is_finite:
            return Relation(
                "equal" if one.is_finite == other.is_finite else "nonfinite", math.inf, limit
            )
        error = sketch_error(one, other)
        if error is None:
            error = statistics_error(one.row, other.row)
            return Relation(
                "equal" if error is None or error <= STATISTICS_FACTOR * limit else "different",
                error,
                limit,
            )
        if error <= limit:
            return Relation("equal", error, limit)
        apart = statistics_error(one.row, other.row)
        if apart is None:
            return Relation("different", error, limit)
        # a permutation moves far and leaves every sum as it was; what was wrong by rounding before
        # averages out in sums
        permuted = error > FAR * limit and apart <= _averaged(limit, one)
        if shapes_meet(one, other) and one not in self.reordered:
            return Relation("order" if permuted else "different", error, limit)
        # in another order anyway: what the sums are off by tells what the elements are
        error = min(error, apart * math.sqrt(one.numel))
        return Relation("layout" if permuted or error <= 4 * limit else "different", error, limit)


def sketch_error(one: TensorValue, other: TensorValue) -> float | None:
    """The estimated relative L2 distance, None without sketches."""
    if one.sketch is None or other.sketch is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # masks of the largest number there is
        difference = float(np.linalg.norm(one.sketch - other.sketch))
    if not math.isfinite(difference):
        return None
    if difference == 0:
        return 0.0
    size = _norm(one)
    return difference / size if size else math.inf


def _norm(value: TensorValue) -> float:
    norm = value.row.get("l2")
    return float(norm) if isinstance(norm, int | float) else float(np.linalg.norm(value.sketch))  # type: ignore[arg-type]


def statistics_error(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """How far the order-blind statistics of two rows are apart, the worst of them, relative to the
    tensor's size; None where they have none in common.
    """
    errors = []
    scale = max(
        (
            abs(float(row[name]))
            for row in (one, other)
            for name in ("abs_mean", "rms")
            if _number(row.get(name))
        ),
        default=0,
    )
    root = math.sqrt(max(_numel(one), 1))
    for name, unit in (
        ("abs_mean", 1.0),
        ("mean", 1.0),
        ("std", 1.0),
        ("rms", 1.0),
        ("sum", float(max(_numel(one), 1))),
        ("l2", root),
    ):
        left, right = one.get(name), other.get(name)
        if not (_number(left) and _number(right)):
            continue
        apart = abs(float(left) - float(right)) / unit  # type: ignore[arg-type]
        size = scale or max(abs(float(left)), abs(float(right))) / unit  # type: ignore[arg-type]
        errors.append(0.0 if apart == 0 else apart / size if size else math.inf)
    return max(errors) if errors else None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numel(row: dict[str, Any]) -> int:
    shape = row.get("shape")
    return math.prod(shape) if isinstance(shape, list) else 1


def shapes_meet(one: TensorValue, other: TensorValue) -> bool:
    """Whether the two have a shape in common, or shapes of which one only splits the dimensions of
    the other: their elements should then be in one order.
    """
    mine, theirs = ({_ends(shape) for shape in value.shapes} for value in (one, other))
    return any(first <= second or second <= first for first in mine for second in theirs)


def _ends(shape: tuple[int, ...]) -> frozenset[int]:
    """After how many elements each dimension begins anew, from the outermost: what splitting one
    only adds to.
    """
    return frozenset(math.prod(shape[: index + 1]) for index in range(len(shape))) - {1}


def _repeats(one: TensorValue, other: TensorValue, limit: float) -> bool:
    """Whether the larger value is the smaller one several times: a table that one program expands
    and the other does not.
    """
    small, large = sorted((one, other), key=lambda value: value.numel)
    if small.numel <= 0 or large.numel % small.numel:
        return False
    a, b = small.row, large.row
    names = ("abs_mean", "mean", "min", "max")
    known = [
        (name, float(a[name]), float(b[name]))
        for name in names
        if _number(a.get(name)) and _number(b.get(name))
    ]
    scale = max((max(abs(x), abs(y)) for _, x, y in known), default=0.0)
    # what was wrong by rounding before averages out in means, not in extremes
    slack = {"abs_mean": _averaged(limit, small), "mean": _averaged(limit, small)}
    return len(known) >= 3 and all(
        abs(x - y) <= slack.get(name, max(limit, SINGLE)) * scale for name, x, y in known
    )


def _averaged(limit: float, value: TensorValue) -> float:
    return SINGLE + 2 * limit / math.sqrt(max(value.numel, 1))
