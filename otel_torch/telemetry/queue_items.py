"""What waits to be sent: each item knows its size, what it counts as when it is lost, and its two
forms: OTLP bytes, and the SDK's objects for exporters that are not OTLP. Both are made in the
background thread that sends, and so is everything else that can wait until then: the program only
hands over its records.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from otel_torch.records import Record
from otel_torch.telemetry import otlp_protobuf
from otel_torch.telemetry.attributes import (
    ACTIVATION,
    describe_activation,
    estimate,
    gauges,
    identify,
)

# records of one span: few enough that no item comes near a message's limit
CHUNK_BYTES = 1_000_000
# records of one other item. What is too large all the same, for the names are long, is halved
CHUNK_RECORDS = 1000
_NOWHERE = Resource.get_empty()


class Item(Protocol):
    """One thing to send. size: estimated bytes. counts: how much of what is lost with it."""

    @property
    def size(self) -> int: ...

    @property
    def counts(self) -> dict[str, int]: ...

    def parts(self) -> Sequence[Item]:
        """What is sent in its place; itself, if it can be sent as it is."""

    def halves(self) -> Sequence[Item]:
        """Two smaller ones, for what is too large; none, if it cannot be divided."""

    def encode(self) -> list[bytes]:
        """Spans, log records or metrics, as pieces of a request."""

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        """ReadableSpan, ReadableLogRecord or Metric objects."""


class _Whole:
    """An item that is sent as it is."""

    __slots__ = ()

    def parts(self) -> Sequence[Any]:
        return (self,)

    def halves(self) -> Sequence[Any]:
        return ()


class _OfRecords:
    """An item that can be divided between any two of its records."""

    __slots__ = ()
    records: Sequence[Record]
    size: int

    def parts(self) -> Sequence[Any]:
        return (self,) if len(self.records) <= CHUNK_RECORDS else self._divided(CHUNK_RECORDS)

    def halves(self) -> Sequence[Any]:
        return self._divided((len(self.records) + 1) // 2) if len(self.records) > 1 else ()

    def _divided(self, most: int) -> list[Any]:
        slices = [self.records[start : start + most] for start in range(0, len(self.records), most)]
        each = self.size // len(self.records) + 1
        return [replace(self, records=some, size=each * len(some)) for some in slices]  # type: ignore[type-var]


class Deferred:
    """Items that are only made when they are to be sent, or to be counted as lost; once, whoever
    asks.
    """

    def __init__(self, size: int, make: Callable[[], Sequence[Item]]) -> None:
        self.size = size
        self._make = make
        self._made: Sequence[Item] | None = None
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for item in self.parts():
            total.update(item.counts)
        return total

    def parts(self) -> Sequence[Item]:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def halves(self) -> Sequence[Item]:
        return ()

    def encode(self) -> list[bytes]:
        return [piece for item in self.parts() for piece in item.encode()]

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return [one for item in self.parts() for one in item.readable(resource, scope)]


def chunk(
    records: Sequence[Record], limit: int = CHUNK_BYTES
) -> Iterator[tuple[list[Record], int]]:
    """Records in order, in runs of no more than `limit` estimated bytes; each with its size."""
    taken: list[Record] = []
    size = 0
    for record in records:
        needed = estimate(record)
        if taken and size + needed > limit:
            yield taken, size
            taken, size = [], 0
        taken.append(record)
        size += needed
    if taken:
        yield taken, size


@dataclass(frozen=True, slots=True)
class SpanItem(_Whole):
    """A span that has ended, with the activation records that are its events."""

    span: ReadableSpan
    records: list[Record]
    size: int

    @property
    def counts(self) -> dict[str, int]:
        return {"span": 1, "span_event": len(self.records) + len(self.span.events)}

    def encode(self) -> list[bytes]:
        return otlp_protobuf.span(self.span, self.records)

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        events = [
            Event(ACTIVATION, describe_activation(record), record.time_ns)
            for record in self.records
        ]
        span = self.span
        return [
            ReadableSpan(
                span.name, span.context, span.parent, span.resource, span.attributes, [*span.events, *events], span.links,
                span.kind, status=span.status, start_time=span.start_time, end_time=span.end_time,
                instrumentation_scope=span.instrumentation_scope,
            )
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogItem(_OfRecords):
    """Records of one span, each a log record."""

    records: Sequence[Record]
    size: int
    observed_ns: int
    span: SpanContext | None

    @property
    def counts(self) -> dict[str, int]:
        return {"log_event": len(self.records)}

    def encode(self) -> list[bytes]:
        trace_id, span_id, flags = (
            (self.span.trace_id, self.span.span_id, int(self.span.trace_flags))
            if self.span
            else (0, 0, 0)
        )
        return otlp_protobuf.log_records(self.records, self.observed_ns, trace_id, span_id, flags)

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return [
            ReadableLogRecord(log_record(record, self.span, self.observed_ns), resource, scope)
            for record in self.records
        ]


def log_record(record: Record, span: SpanContext | None, observed_ns: int) -> LogRecord:
    """A record as the API's log record. The name is the body as well, as Loki shows no event
    names.
    """
    return LogRecord(
        timestamp=record.time_ns,
        observed_timestamp=observed_ns,
        context=set_span_in_context(NonRecordingSpan(span)) if span else None,
        severity_text="INFO",
        severity_number=SeverityNumber.INFO,
        body=ACTIVATION,
        attributes=describe_activation(record),
        event_name=ACTIVATION,
    )


@dataclass(slots=True)
class GaugeItem(_OfRecords):
    """Records whose numeric statistics are gauge points, each at its record's own time."""

    records: Sequence[Record]
    size: int
    with_step: bool
    _points: int | None = field(default=None, init=False, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        points = self._points
        return {
            "metric_point": sum(len(gauges(record)) for record in self.records)
            if points is None
            else points
        }

    def encode(self) -> list[bytes]:
        pieces, self._points = otlp_protobuf.gauge_metrics(self.records, with_step=self.with_step)
        return pieces

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        points: dict[str, list[NumberDataPoint]] = {}
        for record in self.records:
            attributes: dict[str, Any] = identify(record)
            if self.with_step:
                attributes["torch.step"] = record.step
            for name, value in gauges(record):
                points.setdefault(name, []).append(
                    NumberDataPoint(attributes, 0, record.time_ns, value)
                )
        return [
            Metric(f"{ACTIVATION}.{name}", "", "", Gauge(found)) for name, found in points.items()
        ]


@dataclass(frozen=True, slots=True)
class NumberItem(_Whole):
    """A gauge with one point, a whole number."""

    name: str
    attributes: dict[str, str]
    time_ns: int
    value: int
    size: int = 120

    @property
    def counts(self) -> dict[str, int]:
        return {"metric_point": 1}

    def encode(self) -> list[bytes]:
        return otlp_protobuf.gauge_point(self.name, self.attributes, self.time_ns, self.value)

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return [
            Metric(
                self.name,
                "",
                "",
                Gauge([NumberDataPoint(self.attributes, 0, self.time_ns, self.value)]),
            )
        ]


@dataclass(frozen=True, slots=True)
class MetricItem(_Whole):
    """A metric that is already made: what a reader collected."""

    metric: Metric
    size: int

    @property
    def counts(self) -> dict[str, int]:
        return {"metric_point": len(self.metric.data.data_points)}

    def encode(self) -> list[bytes]:
        data = MetricsData(
            [
                ResourceMetrics(
                    _NOWHERE,
                    [ScopeMetrics(InstrumentationScope("otel_torch"), [self.metric], "")],
                    "",
                )
            ]
        )
        metrics = encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics
        return [
            otlp_protobuf.part(otlp_protobuf.ITEM, metric.SerializeToString()) for metric in metrics
        ]

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return [self.metric]


# an exponential histogram with all its buckets takes about 1.5 kB
_POINT_BYTES = 1_600
_POINTS = CHUNK_BYTES // _POINT_BYTES


def read_metrics(data: MetricsData | None) -> Iterator[Metric]:
    """The metrics that a reader collected."""
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            yield from scope.metrics


def metric_items(metrics: Iterable[Metric]) -> Iterator[MetricItem]:
    """Metrics in pieces that fit into a message."""
    for metric in metrics:
        points = metric.data.data_points
        for start in range(0, len(points), _POINTS):
            some: Any = list(points[start : start + _POINTS])
            yield MetricItem(
                replace(metric, data=replace(metric.data, data_points=some)),
                len(some) * _POINT_BYTES,
            )
