"""The rows of phase `train` as series: one number after another of a quantity.

A series takes 16 bytes a number, so that a training of many steps and modules fits into memory.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import count, repeat
from typing import Any, NamedTuple

from otel_torch.records import LoopStep
from otel_torch.training_quantities import split_label

# of the values of a step, these are their mean
_MEANS = frozenset({"loss", "dead"})


class SeriesName(NamedTuple):
    """What a series holds. module: "" for the whole model; label: `loss`, `lr[0]`."""

    model: str
    module: str
    label: str


@dataclass(slots=True)
class Series:
    """The values of a quantity in the order of the recording.

    Attributes:
        steps: For each value, the index of its step in `TrainingSeries.steps`.
        values: float64; NaN and Inf as recorded.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    _calls: int = 0  # that the last value is the mean of

    def add(self, step: int, value: float, *, is_mean: bool) -> None:
        """Append a value. is_mean: The values of a step become one, their mean."""
        if is_mean and self.steps and self.steps[-1] == step:
            self._calls += 1
            self.values[-1] += (value - self.values[-1]) / self._calls
            return
        self._calls = 1
        self.steps.append(step)
        self.values.append(value)

    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(slots=True)
class TrainingSeries:
    """The health of a training, by the rows of a recording.

    Attributes:
        rows: How many rows were added.
        steps: The steps in order of appearance.
        series: In order of appearance. Of what a step has several values of,
            such as losses, it has their mean.
    """

    rows: int = 0
    steps: list[LoopStep] = field(default_factory=list)
    series: dict[SeriesName, Series] = field(default_factory=dict)
    _index_of_step: dict[LoopStep, int] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of phase `train`; one without a number is left out."""
        name = SeriesName(str(row.get("model") or ""), row["module"], row["tensor"])
        self.add_value(name, LoopStep(row.get("loop"), row["step"]), row.get("mean"))

    def add_value(self, name: SeriesName, step: LoopStep, value: Any) -> None:
        """Add a value of a series; what is no number is left out."""
        if not isinstance(value, int | float):
            return
        self.rows += 1
        index = self._index_of_step.setdefault(step, len(self.steps))
        if index == len(self.steps):
            self.steps.append(step)
        series = self.series.get(name)
        if series is None:
            series = self.series[name] = Series()
        series.add(index, float(value), is_mean=name.label in _MEANS)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(name.model for name in self.series))

    def totals(self, model: str) -> dict[str, Series]:
        return {
            name.label: series
            for name, series in self.series.items()
            if name.model == model and not name.module
        }

    def modules(self, model: str, label: str) -> dict[str, Series]:
        """Return the series of one quantity by module, without that of the whole model."""
        return {
            name.module: series
            for name, series in self.series.items()
            if name.model == model and name.module and name.label == label
        }

    def module_rows(self, labels: frozenset[str]) -> Iterator[dict[str, Any]]:
        """Yield rows of the modules again, step by step, with the value as their only statistic."""
        chosen = [
            (name, series)
            for name, series in self.series.items()
            if name.module and name.label in labels
        ]
        values = merge(
            *(
                zip(series.steps, repeat(index), count(), strict=False)
                for index, (_, series) in enumerate(chosen)
            )
        )
        for step_index, index, position in values:
            name, series = chosen[index]
            step = self.steps[step_index]
            yield {
                **name._asdict(),
                "tensor": name.label,
                "loop": step.loop,
                "step": step.number,
                "mean": series.values[position],
            }

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return all(all(map(math.isfinite, series.values)) for series in self.series.values())


def quantity_of(label: str) -> str:
    """Return the quantity of a label: `lr` of `lr[0]`."""
    return split_label(label).quantity
