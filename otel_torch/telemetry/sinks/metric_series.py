"""Bounds the metric series of a process, and decides for each step whether `torch.step` is one of
their attributes.

A metric backend stores one sample per series and export interval, so a loop that runs several steps
in an interval keeps all values only if each step is a series of its own. That is affordable while
the loop is bounded and short. `OTEL_TORCH_METRIC_STEP=auto` decides by OTEL_TORCH_METRIC_SERIES:

>>> from otel_torch.records import Batch, Losses, Record, Scope
>>> from otel_torch.telemetry.sinks.metric_series import SeriesTable
>>> def batch(step):
...     record = Record("mlp", "out", step, 0, 0, "Net", "forward", None, {"mean": 0.5}, 0)
...     return Batch([record], Scope("step", "torch.step", bounded=True))
>>> table = SeriesTable("auto", limit=4)

One series per step; as many must remain for the same metric without the step:

>>> for step in range(3):
...     labels_step = table.should_label_step(batch(step))
...     allowed = table.find(batch(step).records, labels_step=labels_step)
...     print(step, labels_step, table.used)
0 True 1
1 True 2
2 True 3

The fourth would be series 4 and leave no room, so from here on each value has only its own time:

>>> from unittest.mock import patch
>>> with patch("otel_torch.telemetry.sinks.metric_series.say_once"):
...     table.should_label_step(batch(3))
False
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otel_torch.process.console import say_once
from otel_torch.records import Batch, Record
from otel_torch.telemetry.attributes import gauge_values, series_attributes, series_key
from otel_torch.training_quantities import PHASE

# what `series_key` returns, and the step if it is an attribute
SeriesKey = tuple[Any, ...]
_LENGTH_WITH_STEP = 6


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The metric series of one tensor of one module. Those beyond the limit are not allowed."""

    attributes: dict[str, Any]
    is_allowed: bool


def make_keys(records: Sequence[Record], *, labels_step: bool) -> list[SeriesKey]:
    keys: list[SeriesKey] = list(map(series_key, records))
    if not labels_step:
        return keys
    return [(*key, record.step) for key, record in zip(keys, records, strict=True)]


class SeriesTable:
    """The series of one process, up to a limit. The metric sink owns it and guards it by a lock.

    Args:
        mode: OTEL_TORCH_METRIC_STEP: `label`, `time` or `auto`.
        limit: OTEL_TORCH_METRIC_SERIES.

    Attributes:
        used: how many series the allowed keys have.
    """

    def __init__(self, mode: str, limit: int) -> None:
        self.used = 0
        self._mode, self._limit = mode, limit
        self._is_full_for_steps = False
        self._series: dict[SeriesKey, MetricSeries] = {}

    def should_label_step(self, batch: Batch) -> bool:
        """Return whether the step is an attribute of this batch's metrics."""
        if self._mode != "auto":
            return self._mode == "label"
        if batch.step is None or not batch.step.bounded or self._is_full_for_steps:
            return False
        keys = make_keys(batch.records, labels_step=True)
        new_records = {
            key: record
            for key, record in zip(keys, batch.records, strict=True)
            if key not in self._series
        }
        needed = sum(map(_count_series, new_records.values()))
        # as many must remain for the same metrics without the step
        if self.used + 2 * needed > self._limit:
            self._is_full_for_steps = True
            say_once(
                "metrics continue without torch.step as an attribute, each value at its own time: "
                f"with it there would be more than {self._limit} series (OTEL_TORCH_METRIC_SERIES)"
            )
            return False
        return True

    def find(
        self, records: Sequence[Record], *, labels_step: bool
    ) -> tuple[list[SeriesKey], list[bool]]:
        """Return the series key of each record, and whether the series is allowed. New series are
        added up to the limit.
        """
        keys = make_keys(records, labels_step=labels_step)
        allowed = [
            (self._series.get(key) or self._add(key, record)).is_allowed
            for key, record in zip(keys, records, strict=True)
        ]
        return keys, allowed

    def attributes_of(self, key: SeriesKey) -> dict[str, Any]:
        return self._series[key].attributes

    def allowed_attributes(self) -> Mapping[SeriesKey, dict[str, Any]]:
        return {key: entry.attributes for key, entry in self._series.items() if entry.is_allowed}

    def _add(self, key: SeriesKey, record: Record) -> MetricSeries:
        has_step = len(key) == _LENGTH_WITH_STEP
        # loss and learning rate arrive when the activations may have used up the limit
        is_total = record.phase == PHASE and not record.module and not has_step
        needed = 0 if is_total else _count_series(record)
        is_allowed = self.used + needed <= self._limit
        attributes: dict[str, Any] = {}
        if is_allowed:
            self.used += needed
            attributes.update(series_attributes(*series_key(record)))
            if has_step:
                attributes["torch.step"] = record.step
        else:
            say_once(
                f"more than {self._limit} metric series: those of further modules"
                f"{' and steps' if has_step else ''} are dropped and counted; raise "
                "OTEL_TORCH_METRIC_SERIES, or select less with OTEL_TORCH_MODULES and "
                "OTEL_TORCH_STATS"
            )
        series = self._series[key] = MetricSeries(attributes, is_allowed)
        return series


def _count_series(record: Record) -> int:
    """Return the number of a record's series: its gauges and, with `abs_mean`, the histogram."""
    return len(gauge_values(record)) + ("abs_mean" in record.stats)
