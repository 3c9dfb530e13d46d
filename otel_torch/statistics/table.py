"""The table of statistics: what each name means, in terms of a tensor's row and of what is known without its numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otel_torch.records import Statistic
from otel_torch.statistics.measure import PRIMITIVES, WIDE, Measured
from otel_torch.statistics.sketch import encode

_Row = Mapping[str, Any]
_Compute = Callable[[_Row, Measured], Statistic | None]


@dataclass(frozen=True, slots=True)
class Definition:
    """One statistic: of which primitives it is computed, and how.

    compute: of the primitives and the tensor's facts; None where it is not defined. least: elements below which it is
    not defined. of_complex: whether complex numbers have it (by their magnitudes).
    """

    primitives: tuple[str, ...]
    compute: _Compute
    least: int = 1
    of_complex: bool = False


def _std(row: _Row, of: Measured) -> float:
    """Unbiased, as `torch.std`; the difference holds because both sums are of fp64, and equal numbers differ by nothing."""
    if row["min"] == row["max"] and math.isfinite(row["min"]):
        return 0.0
    deviations = row["squares"] - row["sum"] * row["sum"] / of.numel
    return 0.0 if deviations < 0 else math.sqrt(deviations / (of.numel - 1))


DEFINITIONS: dict[str, Definition] = {
    "abs_mean": Definition(("magnitudes",), lambda row, of: row["magnitudes"] / of.numel, of_complex=True),
    "sum": Definition(("sum",), lambda row, of: row["sum"], least=0),
    "min": Definition(("min",), lambda row, of: row["min"]),
    "max": Definition(("max",), lambda row, of: row["max"]),
    "mean": Definition(("sum",), lambda row, of: row["sum"] / of.numel),
    "std": Definition(("min", "max", "sum", "squares"), _std, least=2),
    "nonfinite": Definition(("nonfinite",), lambda row, of: int(row["nonfinite"]), least=0, of_complex=True),
    "rms": Definition(("squares",), lambda row, of: math.sqrt(row["squares"] / of.numel), of_complex=True),
    "l2": Definition(("squares",), lambda row, of: math.sqrt(row["squares"]), least=0, of_complex=True),
    "zeros": Definition(("zeros",), lambda row, of: int(row["zeros"]), least=0, of_complex=True),
    "numel": Definition((), lambda row, of: of.numel, least=0, of_complex=True),
    "histogram": Definition(("histogram",), lambda row, of: [int(n) for n in row["histogram"]], least=0, of_complex=True),
    "sketch": Definition(("sketch",), lambda row, of: encode(row["sketch"]), of_complex=True),
    "row_sketch": Definition(("row_sketch",), lambda row, of: encode(row["row_sketch"]), of_complex=True),
    "shape": Definition((), lambda row, of: of.shape, least=-1, of_complex=True),
    "dtype": Definition((), lambda row, of: of.dtype, least=-1, of_complex=True),
}


def primitives_of(names: Iterable[str]) -> tuple[str, ...]:
    """The columns that the named statistics need, in the row's order: what `measure` should be asked for.

    >>> primitives_of(["abs_mean", "shape"])
    ('magnitudes',)
    """
    needed = {primitive for name in names for primitive in DEFINITIONS[name].primitives}
    return tuple(primitive for primitive in PRIMITIVES if primitive in needed)


def derive(names: Sequence[str], primitives: Sequence[float] | None, measured: Measured) -> dict[str, Statistic]:
    """The named statistics of a measured tensor, in the order of `names`; what is not defined for it is absent.

    primitives: its row on the host, as `read_rows` returns it. Non-finite results stay floats. Raises KeyError for a
    name that is not in the table.
    """
    row = _complete(primitives, measured)
    stats: dict[str, Statistic] = {}
    for name, compute in _plan(tuple(names), tuple(row), "complex" in measured.dtype, min(measured.numel, 2)):
        value = compute(row, measured)
        if value is not None:
            stats[name] = value
    return stats


@functools.lru_cache(256)
def _plan(names: tuple[str, ...], columns: tuple[str, ...], is_complex: bool, numel: int) -> list[tuple[str, _Compute]]:
    """Which of the names are defined for such a tensor, worked out once for all tensors like it."""
    defined = ((name, DEFINITIONS[name]) for name in names)
    return [
        (name, one.compute)
        for name, one in defined
        if numel >= one.least and (one.of_complex or not is_complex) and set(one.primitives) <= set(columns)
    ]


def _complete(primitives: Sequence[float] | None, measured: Measured) -> dict[str, Any]:
    """The primitives by name, with the zeros that a sparse tensor has but does not store; {} where there are none."""
    row: dict[str, Any]
    if primitives is not None:
        row = dict(zip(measured.primitives, primitives, strict=False))
        start = len(measured.primitives) - sum(name in WIDE for name in measured.primitives)
        for name in measured.primitives[start:]:
            row[name] = primitives[start : start + WIDE[name]]
            start += WIDE[name]
    elif measured.stored == 0:
        row = {name: 0.0 for name in measured.primitives if name not in WIDE}
        if "histogram" in measured.primitives:
            row["histogram"] = [0.0] * WIDE["histogram"]
    else:
        return {}
    implied = measured.numel - measured.stored
    if implied:
        for name, extreme in (("min", min), ("max", max)):
            if name in row and not math.isnan(row[name]):
                row[name] = extreme(row[name], 0.0)
        if "zeros" in row:
            row["zeros"] += implied
        if "histogram" in row:
            row["histogram"] = [row["histogram"][0] + implied, *row["histogram"][1:]]
    return row
