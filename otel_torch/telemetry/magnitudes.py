"""Exponential histograms of magnitudes, one a series: the SDK's take ten microseconds a sample, in the program's time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Metric,
)

_Series = TypeVar("_Series")
# as the SDK: buckets a histogram has at most, and the finest resolution that it begins with
_MAX_BUCKETS, _FINEST = 160, 20


class Magnitude:
    """One exponential histogram of values that are finite and not negative.

    Bucket `i` holds the values in (base**i, base**(i + 1)], base = 2 ** 2**-scale; the scale shrinks when they spread.

    >>> histogram = Magnitude()
    >>> for value in (0.0, 1.5, 3.0): histogram.add(value)
    >>> histogram.count, histogram.zeros, histogram.total, histogram.scale
    (3, 1, 4.5, 7)
    """

    __slots__ = ("_factor", "buckets", "count", "greatest", "least", "scale", "total", "zeros")

    def __init__(self) -> None:
        self.count = self.zeros = 0
        self.total = 0.0
        self.least, self.greatest = math.inf, -math.inf
        self.buckets: dict[int, int] = {}
        self.scale = _FINEST
        self._factor = 2**_FINEST / math.log(2)

    def add(self, value: float) -> None:
        """Take one sample."""
        self.count += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.greatest:
            self.greatest = value
        if value == 0:
            self.zeros += 1
            return
        index = math.ceil(math.log(value) * self._factor) - 1
        if index in self.buckets:
            self.buckets[index] += 1
        else:
            self.buckets[index] = 1
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

    def point(self, attributes: Mapping[str, Any], start_ns: int, now_ns: int) -> ExponentialHistogramDataPoint:
        """The data point of all samples since `start_ns`."""
        low, high = (min(self.buckets), max(self.buckets)) if self.buckets else (0, -1)
        positive = Buckets(low, [self.buckets.get(index, 0) for index in range(low, high + 1)])
        return ExponentialHistogramDataPoint(
            attributes, start_ns, now_ns, self.count, self.total, self.scale, self.zeros, positive, Buckets(0, []), 0,
            self.least, self.greatest,
        )  # fmt: skip


class Magnitudes(Generic[_Series]):
    """The histograms of all series of one metric, cumulative or delta. Not safe for several threads by itself."""

    def __init__(self, name: str, description: str, start_ns: int, *, delta: bool) -> None:
        self._name, self._description, self._start_ns, self._delta = name, description, start_ns, delta
        self._found: dict[_Series, Magnitude] = {}

    def add(self, series: _Series, value: float) -> None:
        """Take one sample of a series."""
        histogram = self._found.get(series)
        if histogram is None:
            histogram = self._found[series] = Magnitude()
        histogram.add(value)

    def collect(self, attributes: Mapping[_Series, Mapping[str, Any]], now_ns: int) -> Metric | None:
        """What has accumulated; None where there is nothing."""
        points = [histogram.point(attributes[series], self._start_ns, now_ns) for series, histogram in self._found.items()]
        temporality = AggregationTemporality.DELTA if self._delta else AggregationTemporality.CUMULATIVE
        if self._delta:
            self._found, self._start_ns = {}, now_ns
        return Metric(self._name, self._description, "", ExponentialHistogram(points, temporality)) if points else None
