"""Histograms that cost the program an append per sample: samples are buffered and counted many at a
time, where the SDK takes five to ten microseconds for each.

One exponential histogram per metric series for magnitudes, and one with fixed buckets per region
for durations.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Histogram,
    HistogramDataPoint,
    Metric,
)

_Series = TypeVar("_Series")
# as in the SDK: the most buckets of a histogram, and its first scale
_MAX_BUCKETS, _MAX_SCALE = 160, 20
# samples that are buffered before they are counted
_BUFFERED_MAGNITUDES, _BUFFERED_DURATIONS = 32, 4096


class MagnitudeHistogram:
    """One exponential histogram of finite values that are not negative.

    Bucket `i` holds the values in (base**i, base**(i + 1)] with base = 2 ** 2**-scale. The scale
    shrinks when the values spread.

    >>> histogram = MagnitudeHistogram()
    >>> for value in (0.0, 1.5, 3.0):
    ...     histogram.add(value)
    >>> histogram.count_buffered()
    >>> histogram.count, histogram.zeros, histogram.total, histogram.scale
    (3, 1, 4.5, 7)
    """

    __slots__ = (
        "_buffer",
        "_factor",
        "buckets",
        "count",
        "greatest",
        "least",
        "scale",
        "total",
        "zeros",
    )

    def __init__(self) -> None:
        self._buffer: list[float] = []
        self.count = self.zeros = 0
        self.total = 0.0
        self.least, self.greatest = math.inf, -math.inf
        self.buckets: dict[int, int] = {}
        self.scale = _MAX_SCALE
        self._factor = 2**_MAX_SCALE / math.log(2)

    def add(self, value: float) -> None:
        self._buffer.append(value)
        if len(self._buffer) >= _BUFFERED_MAGNITUDES:
            self.count_buffered()

    def count_buffered(self) -> None:
        """Count the samples that are buffered."""
        values, self._buffer = self._buffer, []
        if not values:
            return
        self.count += len(values)
        self.total += sum(values)
        self.least, self.greatest = min(self.least, min(values)), max(self.greatest, max(values))
        zeros = values.count(0.0)
        if zeros:
            self.zeros += zeros
            values = [value for value in values if value]
        bucket_count, factor, ceil = len(self.buckets), self._factor, math.ceil
        for logarithm in map(math.log, values):
            index = ceil(logarithm * factor) - 1
            self.buckets[index] = self.buckets.get(index, 0) + 1
        if len(self.buckets) > bucket_count:
            self._reduce_scale()

    def _reduce_scale(self) -> None:
        """Merge adjacent buckets until there are no more than _MAX_BUCKETS."""
        low, high = min(self.buckets), max(self.buckets)
        shift = 0
        while (high >> shift) - (low >> shift) >= _MAX_BUCKETS:
            shift += 1
        if shift:
            merged: dict[int, int] = {}
            for index, count in self.buckets.items():
                merged[index >> shift] = merged.get(index >> shift, 0) + count
            self.buckets = merged
            self.scale -= shift
            self._factor = 2.0**self.scale / math.log(2)

    def make_point(
        self, attributes: Mapping[str, Any], start_ns: int, now_ns: int
    ) -> ExponentialHistogramDataPoint:
        """Return the data point of all samples since `start_ns`."""
        self.count_buffered()
        low, high = (min(self.buckets), max(self.buckets)) if self.buckets else (0, -1)
        counts = [self.buckets.get(index, 0) for index in range(low, high + 1)]
        return ExponentialHistogramDataPoint(
            attributes,
            start_ns,
            now_ns,
            self.count,
            self.total,
            self.scale,
            self.zeros,
            positive=Buckets(low, counts),
            negative=Buckets(0, []),
            flags=0,
            min=self.least,
            max=self.greatest,
        )


class MagnitudeMetric(Generic[_Series]):
    """One metric: an exponential histogram per series, cumulative or delta. Not thread-safe."""

    def __init__(self, name: str, description: str, start_ns: int, *, delta: bool) -> None:
        self._name, self._description = name, description
        self._start_ns, self._delta = start_ns, delta
        self._histograms: dict[_Series, MagnitudeHistogram] = {}

    def add_all(self, series: Iterable[_Series], values: Iterable[float]) -> None:
        histograms = self._histograms
        for key, value in zip(series, values, strict=True):
            histogram = histograms.get(key)
            if histogram is None:
                histogram = histograms[key] = MagnitudeHistogram()
            histogram.add(value)

    def collect(
        self, attributes: Mapping[_Series, Mapping[str, Any]], now_ns: int
    ) -> Metric | None:
        points = [
            histogram.make_point(attributes[series], self._start_ns, now_ns)
            for series, histogram in self._histograms.items()
        ]
        if self._delta:
            self._histograms, self._start_ns = {}, now_ns
        if not points:
            return None
        data = ExponentialHistogram(points, _temporality(self._delta))
        return Metric(self._name, self._description, "", data)


class _DurationHistogram:
    """One histogram with fixed buckets."""

    __slots__ = ("buckets", "count", "greatest", "least", "total")

    def __init__(self, bucket_count: int) -> None:
        self.buckets = [0] * bucket_count
        self.count, self.total, self.least, self.greatest = 0, 0.0, math.inf, -math.inf


class DurationMetric:
    """One metric: a histogram of seconds per name, cumulative or delta. Any thread may call `add`,
    one thread `collect`.

    Args:
        attribute: the attribute that holds the name.
        bounds: the upper bound of each bucket in seconds, ascending.
    """

    def __init__(
        self,
        name: str,
        description: str,
        attribute: str,
        bounds: Sequence[float],
        start_ns: int,
        *,
        delta: bool,
    ) -> None:
        self._name, self._description = name, description
        self._attribute, self._bounds = attribute, bounds
        self._start_ns, self._delta = start_ns, delta
        self._buffer: list[tuple[str, float]] = []
        self._histograms: dict[str, _DurationHistogram] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        self._buffer.append((name, seconds))
        if len(self._buffer) >= _BUFFERED_DURATIONS:
            with self._lock:
                self._count_buffered()

    def _count_buffered(self) -> None:
        length = len(self._buffer)  # other threads may append meanwhile
        for name, seconds in self._buffer[:length]:
            histogram = self._histograms.get(name)
            if histogram is None:
                histogram = self._histograms[name] = _DurationHistogram(len(self._bounds) + 1)
            histogram.buckets[bisect_left(self._bounds, seconds)] += 1
            histogram.count += 1
            histogram.total += seconds
            histogram.least = min(histogram.least, seconds)
            histogram.greatest = max(histogram.greatest, seconds)
        del self._buffer[:length]

    def collect(self, now_ns: int) -> Metric | None:
        with self._lock:
            self._count_buffered()
            points = [
                HistogramDataPoint(
                    {self._attribute: name},
                    self._start_ns,
                    now_ns,
                    histogram.count,
                    histogram.total,
                    list(histogram.buckets),
                    self._bounds,
                    histogram.least,
                    histogram.greatest,
                )
                for name, histogram in self._histograms.items()
            ]
            if self._delta:
                self._histograms, self._start_ns = {}, now_ns
        if not points:
            return None
        data = Histogram(points, _temporality(self._delta))
        return Metric(self._name, self._description, "s", data)


def _temporality(delta: bool) -> AggregationTemporality:
    return AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
