"""The statistics of several records of a tensor, as if their tensors were one.

A table with a row for each tensor has many records to show in each cell. A row that showed the last
mean beside the lowest minimum would describe no tensor at all; these describe one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from otel_torch.recording.rows import Row

# Numbers of a record that describe where its tensor was, not what is in it.
LOCATION = ("module", "tensor", "step", "call", "loop", "model", "phase", "branch")
BOOKKEEPING = ("value", "storage", "order", "parent")
_NO_STATISTICS = frozenset({*LOCATION, *BOOKKEEPING})
# Elements of a tensor whose shape was not recorded: such records weigh the same.
_UNKNOWN_NUMEL = float(1 << 20)
_NUMBERS = (float, int)

_Combine = Callable[[float, float, float, float], float]


def _min(total: float, weight: float, value: float, numel: float) -> float:
    return math.nan if total != total or value != value else min(total, value)


def _max(total: float, weight: float, value: float, numel: float) -> float:
    return math.nan if total != total or value != value else max(total, value)


def _sum(total: float, weight: float, value: float, numel: float) -> float:
    return total + value


def _mean(total: float, weight: float, value: float, numel: float) -> float:
    return (total * weight + value * numel) / (weight + numel or 1)


def _root_mean_square(total: float, weight: float, value: float, numel: float) -> float:
    return math.sqrt(_mean(total * total, weight, value * value, numel))


def _norm(total: float, weight: float, value: float, numel: float) -> float:
    return math.hypot(total, value)


# How a value of one more record is added. Other numbers are averaged.
_COMBINE: dict[str, _Combine] = {
    "min": _min,
    "max": _max,
    "sum": _sum,
    "nonfinite": _sum,
    "zeros": _sum,
    "numel": _sum,
    "rms": _root_mean_square,
    "l2": _norm,
}


class CombinedStatistics:
    """Combines the statistics of a tensor's records, one after the other.

    >>> combined = CombinedStatistics()
    >>> combined.add({"mean": 1.0, "std": 0.0, "max": 1.0, "shape": [2]})
    >>> combined.add({"mean": 4.0, "std": 0.0, "max": 4.0, "shape": [4]})
    >>> combined.values  # of 1, 1, 4, 4, 4, 4
    {'mean': 3.0, 'std': 1.5491933384829668, 'max': 4.0}
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._weights: dict[str, float] = {}  # statistic -> elements in `values`

    def add(self, row: Row) -> None:
        values, weights, numel = self.values, self._weights, _numel(row)
        std = self._std(row, numel)  # before `mean` changes
        for name, value in row.items():
            if type(value) not in _NUMBERS or name in _NO_STATISTICS:
                continue
            if (weight := weights.get(name)) is None:
                values[name], weights[name] = value, numel
            else:
                values[name] = _COMBINE.get(name, _mean)(values[name], weight, value, numel)
                weights[name] = weight + numel
        if std is not None:
            values["std"] = std

    def _std(self, row: Row, numel: float) -> float | None:
        """Return the deviation of all elements so far and the record's, if it follows."""
        values, weight = self.values, self._weights.get("std")
        std: Any = row.get("std")
        mean: Any = row.get("mean")
        if not weight or "mean" not in values or not (is_number(std) and is_number(mean)):
            return None
        distance, count = values["mean"] - mean, weight + numel
        squares = (weight - 1) * values["std"] * values["std"] + (numel - 1) * std * std
        squares += distance * distance * weight * numel / count
        return math.nan if squares < 0 else math.sqrt(squares / max(count - 1, 1))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numel(row: Row) -> float:
    shape = row.get("shape")
    if isinstance(shape, list) and all(type(size) is int for size in shape):
        return float(math.prod(shape))
    numel = row.get("numel")
    return float(numel) if isinstance(numel, int | float) else _UNKNOWN_NUMEL
