"""Histograms that cost the program an append: samples are kept as they come and counted by many,
where the SDK takes five to ten microseconds for each. Exponential ones of magnitudes, one a series,
and of durations, one a region.
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
# as the SDK: buckets a histogram has at most, and the finest resolution that it begins with
_MAX_BUCKETS, _FINEST = 160, 20
# samples of a series that are kept before they are counted
_KEPT = 32


class Magnitude:
    """One exponential histogram of values that are finite and not negative.

    Bucket `i` holds the values in (base**i, base**(i + 1)], base = 2 ** 2**-scale; the scale
    shrinks when they spread.

    >>> histogram = Magnitude()
    >>> for value in (0.0, 1.5, 3.0): histogram.add(value)
    >>> histogram.settle()
    >>> histogram.count, histogram.zeros, histogram.total, histogram.scale
    (3, 1, 4.5, 7)
    """

    __slots__ = (
        "_factor",
        "_fresh",
        "buckets",
        "count",
        "greatest",
        "least",
        "scale",
        "total",
        "zeros",
    )

    def __init__(self) -> None:
        self._fresh: list[float] = []
        self.count = self.zeros = 0
        self.total = 0.0
        self.least, self.greatest = math.inf, -math.inf
        self.buckets: dict[int, int] = {}
        self.scale = _FINEST
        self._factor = 2**_FINEST / math.log(2)

    def add(self, value: float) -> None:
        """Take one sample."""
        self._fresh.append(value)
        if len(self._fresh) >= _KEPT:
            self.settle()

    def settle(self) -> None:
        """Count the samples that have come since the last time."""
        values, self._fresh = self._fresh, []
        if not values:
            return
        self.count += len(values)
        self.total += sum(values)
        self.least, self.greatest = min(self.least, min(values)), max(self.greatest, max(values))
        zeros = values.count(0.0)
        if zeros:
            self.zeros += zeros
            values = [value for value in values if value]
        known, factor, ceil = len(self.buckets), self._factor, math.ceil
        for logarithm in map(math.log, values):
            index = ceil(logarithm * factor) - 1
            self.buckets[index] = self.buckets.get(index, 0) + 1
        if len(self.buckets) > known:
            self._narrow()

    def _narrow(self) -> None:
        """Merge neighbouring buckets until they are no more than allowed."""
        low, high = min(self.buckets), max(self.buckets)
        shift = 0
        while (high >> shift) - (low >> shift) >= _MAX_BUCKETS:
            shift += 1
        if shift:
            merged: dict[int, int] = {}
            for index, number in self.buckets.items():
                merged[index >> shift] = merged.get(index >> shift, 0) + number
            self.buckets = merged
            self.scale -= shift
            self._factor = 2.0**self.scale / math.log(2)

    def point(
        self, attributes: Mapping[str, Any], start_ns: int, now_ns: int
    ) -> ExponentialHistogramDataPoint:
        """The data point of all samples since `start_ns`."""
        self.settle()
        low, high = (min(self.buckets), max(self.buckets)) if self.buckets else (0, -1)
        positive = Buckets(low, [self.buckets.get(index, 0) for index in range(low, high + 1)])
        return ExponentialHistogramDataPoint(
            attributes, start_ns, now_ns, self.count, self.total, self.scale, self.zeros, positive, Buckets(0, []), 0,
            self.least, self.greatest,
        )  # fmt: skip


class Magnitudes(Generic[_Series]):
    """The histograms of all series of one metric, cumulative or delta. Not safe for several threads
    by itself.
    """

    def __init__(self, name: str, description: str, start_ns: int, *, delta: bool) -> None:
        self._name, self._description, self._start_ns, self._delta = (
            name,
            description,
            start_ns,
            delta,
        )
        self._found: dict[_Series, Magnitude] = {}

    def add_all(self, series: Iterable[_Series], values: Iterable[float]) -> None:
        """Take one sample of each series."""
        found = self._found
        for one, value in zip(series, values, strict=True):
            histogram = found.get(one)
            if histogram is None:
                histogram = found[one] = Magnitude()
            histogram.add(value)

    def collect(
        self, attributes: Mapping[_Series, Mapping[str, Any]], now_ns: int
    ) -> Metric | None:
        """What has accumulated; None where there is nothing."""
        points = [
            histogram.point(attributes[series], self._start_ns, now_ns)
            for series, histogram in self._found.items()
        ]
        if self._delta:
            self._found, self._start_ns = {}, now_ns
        return (
            Metric(
                self._name,
                self._description,
                "",
                ExponentialHistogram(points, _temporality(self._delta)),
            )
            if points
            else None
        )


class _Duration:
    """One histogram with fixed buckets."""

    __slots__ = ("buckets", "count", "greatest", "least", "total")

    def __init__(self, buckets: int) -> None:
        self.buckets = [0] * buckets
        self.count, self.total, self.least, self.greatest = 0, 0.0, math.inf, -math.inf


class Durations:
    """Histograms of seconds, one a name, cumulative or delta. `add` may be called by any thread,
    `collect` by one.

    bounds: the upper end of each bucket, in seconds, rising. attribute: what the name is called in
    the metric.
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
        self._name, self._description, self._attribute, self._bounds = (
            name,
            description,
            attribute,
            bounds,
        )
        self._start_ns, self._delta = start_ns, delta
        self._fresh: list[tuple[str, float]] = []
        self._found: dict[str, _Duration] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Take one sample."""
        self._fresh.append((name, seconds))
        if len(self._fresh) >= 4096:
            with self._lock:
                self._settle()

    def _settle(self) -> None:
        count = len(self._fresh)  # more may come meanwhile
        for name, seconds in self._fresh[:count]:
            histogram = self._found.get(name)
            if histogram is None:
                histogram = self._found[name] = _Duration(len(self._bounds) + 1)
            histogram.buckets[bisect_left(self._bounds, seconds)] += 1
            histogram.count += 1
            histogram.total += seconds
            histogram.least, histogram.greatest = (
                min(histogram.least, seconds),
                max(histogram.greatest, seconds),
            )
        del self._fresh[:count]

    def collect(self, now_ns: int) -> Metric | None:
        """What has accumulated; None where there is nothing."""
        with self._lock:
            self._settle()
            points = [
                HistogramDataPoint(
                    {self._attribute: name}, self._start_ns, now_ns, one.count, one.total, list(one.buckets), self._bounds,
                    one.least, one.greatest,
                )
                for name, one in self._found.items()
            ]  # fmt: skip
            if self._delta:
                self._found, self._start_ns = {}, now_ns
        return (
            Metric(self._name, self._description, "s", Histogram(points, _temporality(self._delta)))
            if points
            else None
        )


def _temporality(delta: bool) -> AggregationTemporality:
    return AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
