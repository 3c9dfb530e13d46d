"""The table of statistics: what each name means, in terms of a tensor's row and of what is known
without its numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from otel_torch.records import Statistic
from otel_torch.statistics.measure import Measured
from otel_torch.statistics.row_layout import (
    MAGNITUDES,
    MAX,
    MIN,
    NONFINITE,
    PRIMITIVES,
    SQUARES,
    SUM,
    SUMS,
    WIDE,
    ZEROS,
)
from otel_torch.statistics.sketch import encode

_Row = Sequence[float]
_Compute = Callable[[_Row, Measured], Statistic | None]


@dataclass(frozen=True, slots=True)
class Definition:
    """One statistic: of which primitives it is computed, and how.

    compute: of the row, on the host, and the tensor's facts; None where it is not defined. least:
    elements below which it is not defined. of_complex: whether complex numbers have it (by their
    magnitudes).
    """

    primitives: tuple[str, ...]
    compute: _Compute
    least: int = 1
    of_complex: bool = False


def _std(row: _Row, of: Measured) -> float:
    """Unbiased, as `torch.std`; the difference holds because both sums are of fp64, and equal
    numbers differ by nothing.
    """
    if row[MIN] == row[MAX] and math.isfinite(row[MIN]):
        return 0.0
    deviations = row[SQUARES] - row[SUM] * row[SUM] / of.numel
    return 0.0 if deviations < 0 else math.sqrt(deviations / (of.numel - 1))


def _wide(name: str, row: _Row, of: Measured) -> Sequence[float]:
    """The part of a row that holds the several numbers of `name`."""
    start = len(SUMS)
    for column in of.primitives:
        if column == name:
            break
        start += WIDE.get(column, 0)
    return row[start : start + WIDE[name]]


DEFINITIONS: dict[str, Definition] = {
    "abs_mean": Definition(
        ("magnitudes",), lambda row, of: row[MAGNITUDES] / of.numel, of_complex=True
    ),
    "sum": Definition(("sum",), lambda row, of: row[SUM], least=0),
    "min": Definition(("min",), lambda row, of: row[MIN]),
    "max": Definition(("max",), lambda row, of: row[MAX]),
    "mean": Definition(("sum",), lambda row, of: row[SUM] / of.numel),
    "std": Definition(("min", "max", "sum", "squares"), _std, least=2),
    "nonfinite": Definition(
        ("nonfinite",), lambda row, of: int(row[NONFINITE]), least=0, of_complex=True
    ),
    "rms": Definition(
        ("squares",), lambda row, of: math.sqrt(row[SQUARES] / of.numel), of_complex=True
    ),
    "l2": Definition(
        ("squares",), lambda row, of: math.sqrt(row[SQUARES]), least=0, of_complex=True
    ),
    "zeros": Definition(("zeros",), lambda row, of: int(row[ZEROS]), least=0, of_complex=True),
    "numel": Definition((), lambda row, of: of.numel, least=0, of_complex=True),
    "histogram": Definition(
        ("histogram",),
        lambda row, of: [int(n) for n in _wide("histogram", row, of)],
        least=0,
        of_complex=True,
    ),
    "sketch": Definition(
        ("sketch",), lambda row, of: encode(_wide("sketch", row, of)), of_complex=True
    ),
    "row_sketch": Definition(
        ("row_sketch",), lambda row, of: encode(_wide("row_sketch", row, of)), of_complex=True
    ),
    "shape": Definition((), lambda row, of: of.shape, least=-1, of_complex=True),
    "dtype": Definition((), lambda row, of: of.dtype, least=-1, of_complex=True),
}


def primitives_of(names: Iterable[str]) -> tuple[str, ...]:
    """The columns that the named statistics need, in the row's order: what `measure` should be
    asked for.

    >>> primitives_of(["abs_mean", "shape"])
    ('magnitudes',)
    """
    needed = {primitive for name in names for primitive in DEFINITIONS[name].primitives}
    return tuple(primitive for primitive in PRIMITIVES if primitive in needed)


def derive(
    names: Sequence[str], row: Sequence[float] | None, measured: Measured
) -> dict[str, Statistic]:
    """The named statistics of a measured tensor, in the order of `names`; what is not defined for
    it is absent.

    row: its numbers on the host, as `read_rows` returns them. Non-finite results stay floats.
    Raises KeyError for a name that is not in the table.
    """
    columns, numel = measured.primitives, measured.numel
    if row is None or measured.stored != numel:
        row = _complete(row, measured)
        if row is None:
            columns, row = (), ()
    plan = _plan(tuple(names), columns, "complex" in measured.dtype, 2 if numel > 2 else numel)
    stats = {name: compute(row, measured) for name, compute in plan}
    if measured.shape is None:
        stats.pop("shape", None)
    return stats  # type: ignore[return-value]


@functools.lru_cache(256)
def _plan(
    names: tuple[str, ...], columns: tuple[str, ...], is_complex: bool, numel: int
) -> list[tuple[str, _Compute]]:
    """Which of the names are defined for such a tensor, worked out once for all tensors like it."""
    defined = ((name, DEFINITIONS[name]) for name in names)
    return [
        (name, one.compute)
        for name, one in defined
        if numel >= one.least
        and (one.of_complex or not is_complex)
        and set(one.primitives) <= set(columns)
    ]


def _complete(numbers: Sequence[float] | None, measured: Measured) -> list[float] | None:
    """The row with the zeros that a sparse tensor has but does not store; None where there are no
    numbers.
    """
    if numbers is not None:
        row = list(numbers)
    elif measured.stored == 0:
        row = [0.0] * (len(SUMS) + sum(WIDE.get(name, 0) for name in measured.primitives))
    else:
        return None
    implied = measured.numel - measured.stored
    if implied:
        row[MIN], row[MAX] = _with_zero(min, row[MIN]), _with_zero(max, row[MAX])
        row[ZEROS] += implied
        if "histogram" in measured.primitives:
            row[len(SUMS)] += implied
    return row


def _with_zero(extreme: Callable[[float, float], float], number: float) -> float:
    return number if math.isnan(number) else extreme(number, 0.0)
