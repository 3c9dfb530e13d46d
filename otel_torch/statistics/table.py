"""The table of statistics: how each one follows from a tensor's row and metadata.

To add a statistic that follows from existing columns, add its line to `DEFINITIONS`; settings,
`--help` and the data frame take the names from there. Describe it in `docs/record-format.md`.

A new column goes into `row_layout.py` and into what fills a row, between which `measure.py`
chooses: torch's operators (`reduce.py`, or a module like `histogram.py`), `kernel.c` and
`triton_kernel.py`. A vector column may be left to torch's operators alone, as `row_sketch` is.

Imports no torch, because settings are read before torch is imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_torch.records import Statistic
from otel_torch.statistics.row_layout import (
    COLUMNS,
    MAGNITUDES,
    MAX,
    MIN,
    NONFINITE,
    SCALARS,
    SQUARES,
    SUM,
    VECTORS,
    ZEROS,
    join_parts,
)
from otel_torch.statistics.sketch_format import SIZE, encode

if TYPE_CHECKING:
    from otel_torch.statistics.measure import Measurement

_Row = Sequence[float]
_Compute = Callable[[_Row, "Measurement"], Statistic | None]


@dataclass(frozen=True, slots=True)
class StatisticDefinition:
    """How one statistic is computed.

    columns: the columns of the row that it needs. compute: takes the row, on the host, and the
    measurement. min_numel: the smallest number of elements for which it is defined; -1 if it is
    defined even where that number is unknown. supports_complex: whether it is defined for complex
    tensors, by their magnitudes.
    """

    columns: tuple[str, ...]
    compute: _Compute
    min_numel: int = 1
    supports_complex: bool = False


def _std(row: _Row, measurement: Measurement) -> float:
    """Compute the unbiased standard deviation, as `torch.std` does.

    The sums are in fp64, so that their difference keeps enough digits. Equal elements give exactly
    zero.
    """
    if row[MIN] == row[MAX] and math.isfinite(row[MIN]):
        return 0.0
    deviations = row[SQUARES] - row[SUM] * row[SUM] / measurement.numel
    return 0.0 if deviations < 0 else math.sqrt(deviations / (measurement.numel - 1))


def _vector(name: str, row: _Row, measurement: Measurement) -> Sequence[float]:
    """Return the numbers of a vector column."""
    return _columns_from(name, row, measurement)[: VECTORS[name]]


def _columns_from(name: str, row: _Row, measurement: Measurement) -> Sequence[float]:
    """Return the numbers of a vector column and of those behind it."""
    before = measurement.columns[: measurement.columns.index(name)]
    return row[len(SCALARS) + sum(VECTORS.get(column, 0) for column in before) :]


def _histogram(row: _Row, measurement: Measurement) -> list[int]:
    return [int(count) for count in _vector("histogram", row, measurement)]


def _sketch(row: _Row, measurement: Measurement) -> str:
    return encode(_vector("sketch", row, measurement))


def _row_sketch(row: _Row, measurement: Measurement) -> str:
    return encode(_vector("row_sketch", row, measurement))


def _part_sketches(row: _Row, measurement: Measurement) -> str:
    """Return one sketch for each dimension that the tensor has."""
    sketches = _vector("part_sketches", row, measurement)
    return encode(sketches[: SIZE * len(measurement.shape or ())])


def _rows(row: _Row, measurement: Measurement) -> str:
    return encode(_columns_from("rows", row, measurement))


def _hash(row: _Row, measurement: Measurement) -> str:
    """Return the hash as 16 hexadecimal digits."""
    return f"{join_parts(_vector('hash', row, measurement)):016x}"


DEFINITIONS: dict[str, StatisticDefinition] = {
    "abs_mean": StatisticDefinition(
        columns=("magnitudes",),
        compute=lambda row, tensor: row[MAGNITUDES] / tensor.numel,
        supports_complex=True,
    ),
    "sum": StatisticDefinition(("sum",), lambda row, tensor: row[SUM], min_numel=0),
    "min": StatisticDefinition(("min",), lambda row, tensor: row[MIN]),
    "max": StatisticDefinition(("max",), lambda row, tensor: row[MAX]),
    "mean": StatisticDefinition(("sum",), lambda row, tensor: row[SUM] / tensor.numel),
    "std": StatisticDefinition(("min", "max", "sum", "squares"), _std, min_numel=2),
    "nonfinite": StatisticDefinition(
        columns=("nonfinite",),
        compute=lambda row, tensor: int(row[NONFINITE]),
        min_numel=0,
        supports_complex=True,
    ),
    "rms": StatisticDefinition(
        columns=("squares",),
        compute=lambda row, tensor: math.sqrt(row[SQUARES] / tensor.numel),
        supports_complex=True,
    ),
    "l2": StatisticDefinition(
        columns=("squares",),
        compute=lambda row, tensor: math.sqrt(row[SQUARES]),
        min_numel=0,
        supports_complex=True,
    ),
    "zeros": StatisticDefinition(
        columns=("zeros",),
        compute=lambda row, tensor: int(row[ZEROS]),
        min_numel=0,
        supports_complex=True,
    ),
    "numel": StatisticDefinition(
        columns=(), compute=lambda row, tensor: tensor.numel, min_numel=0, supports_complex=True
    ),
    "histogram": StatisticDefinition(
        columns=("histogram",), compute=_histogram, min_numel=0, supports_complex=True
    ),
    "sketch": StatisticDefinition(("sketch",), _sketch, supports_complex=True),
    "part_sketches": StatisticDefinition(("part_sketches",), _part_sketches, supports_complex=True),
    "row_sketch": StatisticDefinition(("row_sketch",), _row_sketch, supports_complex=True),
    "rows": StatisticDefinition(("rows",), _rows, supports_complex=True),
    "hash": StatisticDefinition(("hash",), _hash, min_numel=0, supports_complex=True),
    "shape": StatisticDefinition(
        columns=(), compute=lambda row, tensor: tensor.shape, min_numel=-1, supports_complex=True
    ),
    "dtype": StatisticDefinition(
        columns=(), compute=lambda row, tensor: tensor.dtype, min_numel=-1, supports_complex=True
    ),
}


def columns_for(names: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that the named statistics need, in the order of a row, for `measure`.

    >>> columns_for(["std", "abs_mean", "shape"])
    ('min', 'max', 'sum', 'squares', 'magnitudes')
    """
    needed = {column for name in names for column in DEFINITIONS[name].columns}
    return tuple(column for column in COLUMNS if column in needed)


def derive(
    names: Sequence[str], row: Sequence[float] | None, measurement: Measurement
) -> dict[str, Statistic]:
    """Return the named statistics of a tensor, in the order of `names`.

    A statistic that is not defined for the tensor is absent. Results may be NaN or Inf.

    Args:
        row: the tensor's numbers on the host, as `read_rows` returns them.

    Raises:
        KeyError: a name is not in `DEFINITIONS`.
    """
    columns, numel = measurement.columns, measurement.numel
    if row is None or measurement.stored_numel != numel:
        row = _add_implicit_zeros(row, measurement)
        if row is None:
            columns, row = (), ()
    is_complex = "complex" in measurement.dtype
    # 2 stands for every larger size, so that few plans are cached
    plan = _plan(tuple(names), columns, is_complex, 2 if numel > 2 else numel)
    stats = {name: compute(row, measurement) for name, compute in plan}
    if measurement.shape is None:
        stats.pop("shape", None)
    return stats  # type: ignore[return-value]


@functools.lru_cache(256)
def _plan(
    names: tuple[str, ...], columns: tuple[str, ...], is_complex: bool, numel: int
) -> list[tuple[str, _Compute]]:
    """Return (name, function) of the statistics that are defined for such tensors."""
    plan = []
    for name in names:
        definition = DEFINITIONS[name]
        is_defined = numel >= definition.min_numel and set(definition.columns) <= set(columns)
        if is_defined and (definition.supports_complex or not is_complex):
            plan.append((name, definition.compute))
    return plan


def _add_implicit_zeros(
    numbers: Sequence[float] | None, measurement: Measurement
) -> list[float] | None:
    """Add the zeros that a sparse tensor has but does not store; None if it has no row."""
    if numbers is not None:
        row = list(numbers)
    elif measurement.stored_numel == 0:
        row = [0.0] * (len(SCALARS) + sum(VECTORS.get(name, 0) for name in measurement.columns))
    else:
        return None
    implicit = measurement.numel - measurement.stored_numel
    if implicit:
        row[MIN] = row[MIN] if math.isnan(row[MIN]) else min(row[MIN], 0.0)
        row[MAX] = row[MAX] if math.isnan(row[MAX]) else max(row[MAX], 0.0)
        row[ZEROS] += implicit
        if "histogram" in measurement.columns:
            row[len(SCALARS)] += implicit
    return row
