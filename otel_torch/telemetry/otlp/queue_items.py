"""The items of an export queue: a span, some log records, some metric points.

An item knows its size, what is counted if it is lost, and its two forms: OTLP bytes, and the SDK's
objects for exporters that are not OTLP. Both forms, and everything else that can wait, are made in
the thread that sends; the program only hands over its records.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk._logs import LogRecordLimits, ReadableLogRecord
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
from otel_torch.telemetry.attributes import (
    ACTIVATION,
    estimate_event_bytes,
    event_attributes,
    gauge_values,
    metric_text,
    series_attributes,
    series_key,
)
from otel_torch.telemetry.otlp import otlp_protobuf

# estimated bytes of a span's records: no item comes near the limit of a message
CHUNK_BYTES = 1_000_000
# records of any other item. With long names that may still be too large; then it is split again
CHUNK_RECORDS = 1000
_EMPTY_RESOURCE, _EMPTY_SCOPE = Resource.get_empty(), InstrumentationScope("otel_torch")


def _encode_item(message: Any) -> bytes:
    """Return a log record or metric of protobuf as a piece of a request."""
    return otlp_protobuf.encode_field(otlp_protobuf.ITEM_FIELD, message.SerializeToString())


class QueueItem(Protocol):
    """One entry of an export queue.

    Attributes:
        size: estimated bytes.
        counts: how many spans, span events, log events or metric points it holds.
    """

    @property
    def size(self) -> int: ...

    @property
    def counts(self) -> dict[str, int]: ...

    def expand(self) -> Sequence[QueueItem]:
        """Return the items to send in its place; the item itself if it can be sent as it is."""

    def split(self) -> Sequence[QueueItem]:
        """Return two smaller items for one that is too large; nothing if it cannot be split."""

    def encode(self) -> list[bytes]:
        """Return spans, log records or metrics as pieces of an OTLP request."""

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        """Return ReadableSpan, ReadableLogRecord or Metric objects."""


class _IndivisibleItem:
    __slots__ = ()

    def expand(self) -> Sequence[Any]:
        return (self,)

    def split(self) -> Sequence[Any]:
        return ()


class _RecordsItem:
    """An item that can be split between any two of its records."""

    __slots__ = ()
    records: Sequence[Record]
    size: int

    def expand(self) -> Sequence[Any]:
        if len(self.records) <= CHUNK_RECORDS:
            return (self,)
        return self._split_by(CHUNK_RECORDS)

    def split(self) -> Sequence[Any]:
        if len(self.records) < 2:
            return ()
        return self._split_by((len(self.records) + 1) // 2)

    def _split_by(self, length: int) -> list[Any]:
        record_size = self.size // len(self.records) + 1
        items: list[Any] = []
        for start in range(0, len(self.records), length):
            records = self.records[start : start + length]
            items.append(replace(self, records=records, size=record_size * len(records)))  # type: ignore[type-var]
        return items


class DeferredItems:
    """Items that are made once, when they are first needed: to send them or to count them as lost.

    May be in several queues.
    """

    def __init__(self, size: int, make: Callable[[], Sequence[QueueItem]]) -> None:
        self.size = size
        self._make = make
        self._items: Sequence[QueueItem] | None = None
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for item in self.expand():
            total.update(item.counts)
        return total

    def expand(self) -> Sequence[QueueItem]:
        with self._lock:
            if self._items is None:
                self._items = self._make()
            return self._items

    def split(self) -> Sequence[QueueItem]:
        return ()

    def encode(self) -> list[bytes]:
        return [piece for item in self.expand() for piece in item.encode()]

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        objects: list[Any] = []
        for item in self.expand():
            objects += item.to_sdk_objects(resource, scope)
        return objects


def chunk_records(
    records: Sequence[Record], limit: int = CHUNK_BYTES
) -> Iterator[tuple[list[Record], int]]:
    """Yield the records in order, in chunks of at most `limit` estimated bytes, and their sizes."""
    chunk: list[Record] = []
    chunk_size = 0
    for record in records:
        size = estimate_event_bytes(record)
        if chunk and chunk_size + size > limit:
            yield chunk, chunk_size
            chunk, chunk_size = [], 0
        chunk.append(record)
        chunk_size += size
    if chunk:
        yield chunk, chunk_size


@dataclass(frozen=True, slots=True)
class SpanItem(_IndivisibleItem):
    """A span that has ended. Its activation records become its events."""

    span: ReadableSpan
    records: list[Record]
    size: int

    @property
    def counts(self) -> dict[str, int]:
        return {"span": 1, "span_event": len(self.records) + len(self.span.events)}

    def encode(self) -> list[bytes]:
        return otlp_protobuf.encode_span(self.span, self.records)

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        events = [
            Event(ACTIVATION, event_attributes(record), record.time_ns) for record in self.records
        ]
        span = self.span
        return [
            ReadableSpan(
                span.name,
                span.context,
                span.parent,
                span.resource,
                span.attributes,
                [*span.events, *events],
                span.links,
                span.kind,
                status=span.status,
                start_time=span.start_time,
                end_time=span.end_time,
                instrumentation_scope=span.instrumentation_scope,
            )
        ]


@dataclass(frozen=True, slots=True)
class LogItem(_RecordsItem):
    """Records as log records, all with the trace context of one span or of none.

    Args:
        limits: those of the SDK if they may drop any attribute.
    """

    records: Sequence[Record]
    size: int
    observed_ns: int
    span: SpanContext | None
    limits: LogRecordLimits | None = None

    @property
    def counts(self) -> dict[str, int]:
        return {"log_event": len(self.records)}

    def encode(self) -> list[bytes]:
        if self.limits is not None:
            request = encode_logs(self.to_sdk_objects(_EMPTY_RESOURCE, _EMPTY_SCOPE))
            logs = request.resource_logs[0].scope_logs[0].log_records
            return [_encode_item(log) for log in logs]
        trace_id = span_id = flags = 0
        if self.span:
            trace_id, span_id = self.span.trace_id, self.span.span_id
            flags = int(self.span.trace_flags)
        return otlp_protobuf.encode_log_records(
            self.records, self.observed_ns, trace_id, span_id, flags
        )

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        logs = []
        for record in self.records:
            log = make_log_record(record, self.span, self.observed_ns)
            if self.limits is not None:
                log.attributes = _bounded(log.attributes, self.limits)
            logs.append(ReadableLogRecord(log, resource, scope, self.limits))
        return logs


def _bounded(attributes: Any, limits: LogRecordLimits) -> BoundedAttributes:
    return BoundedAttributes(
        limits.max_log_record_attributes,
        attributes,
        immutable=False,
        max_value_len=limits.max_log_record_attribute_length,
        extended_attributes=True,
    )


def make_log_record(record: Record, span: SpanContext | None, observed_ns: int) -> LogRecord:
    """Return a record as a log record of the API. The event name is also the body, as Loki does
    not show event names.
    """
    return LogRecord(
        timestamp=record.time_ns,
        observed_timestamp=observed_ns,
        context=set_span_in_context(NonRecordingSpan(span)) if span else None,
        severity_text="INFO",
        severity_number=SeverityNumber.INFO,
        body=ACTIVATION,
        attributes=event_attributes(record),
        event_name=ACTIVATION,
    )


@dataclass(slots=True)
class GaugeItem(_RecordsItem):
    """Records whose numeric statistics are gauge points, each at its record's time."""

    records: Sequence[Record]
    size: int
    with_step: bool
    _point_count: int | None = field(default=None, init=False, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        count = self._point_count
        if count is None:
            count = sum(len(gauge_values(record)) for record in self.records)
        return {"metric_point": count}

    def encode(self) -> list[bytes]:
        pieces, self._point_count = otlp_protobuf.encode_gauges(
            self.records, with_step=self.with_step
        )
        return pieces

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        points_by_metric: dict[str, list[NumberDataPoint]] = {}
        for record in self.records:
            attributes: dict[str, Any] = series_attributes(*series_key(record))
            if self.with_step:
                attributes["torch.step"] = record.step
            for name, value in gauge_values(record):
                point = NumberDataPoint(attributes, 0, record.time_ns, value)
                points_by_metric.setdefault(name, []).append(point)
        return [
            Metric(name, *metric_text(name), Gauge(points))
            for name, points in points_by_metric.items()
        ]


@dataclass(frozen=True, slots=True)
class IntegerGaugeItem(_IndivisibleItem):
    """A gauge with one integer point."""

    name: str
    attributes: dict[str, str]
    time_ns: int
    value: int
    size: int = 120

    @property
    def counts(self) -> dict[str, int]:
        return {"metric_point": 1}

    def encode(self) -> list[bytes]:
        return otlp_protobuf.encode_integer_gauge(
            self.name, self.attributes, self.time_ns, self.value
        )

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        point = NumberDataPoint(self.attributes, 0, self.time_ns, self.value)
        return [Metric(self.name, "", "", Gauge([point]))]


@dataclass(frozen=True, slots=True)
class MetricItem(_IndivisibleItem):
    """A metric of the SDK, as a reader collected it."""

    metric: Metric
    size: int

    @property
    def counts(self) -> dict[str, int]:
        return {"metric_point": len(self.metric.data.data_points)}

    def encode(self) -> list[bytes]:
        scope_metrics = ScopeMetrics(_EMPTY_SCOPE, [self.metric], "")
        data = MetricsData([ResourceMetrics(_EMPTY_RESOURCE, [scope_metrics], "")])
        metrics = encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics
        return [_encode_item(metric) for metric in metrics]

    def to_sdk_objects(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return [self.metric]


# an exponential histogram with all its buckets takes about 1.5 kB
_POINT_BYTES = 1_600
_POINTS_PER_ITEM = CHUNK_BYTES // _POINT_BYTES


def iterate_metrics(data: MetricsData | None) -> Iterator[Metric]:
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            yield from scope.metrics


def make_metric_items(metrics: Iterable[Metric]) -> Iterator[MetricItem]:
    """Yield metrics in items that fit into a message."""
    for metric in metrics:
        points = metric.data.data_points
        for start in range(0, len(points), _POINTS_PER_ITEM):
            item_points: Any = list(points[start : start + _POINTS_PER_ITEM])
            yield MetricItem(
                replace(metric, data=replace(metric.data, data_points=item_points)),
                len(item_points) * _POINT_BYTES,
            )
