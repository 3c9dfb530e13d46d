"""What waits to be sent: each item knows its size, what it counts as when it is lost, and its two forms: OTLP bytes, and
the SDK's objects for exporters that are not OTLP. Both are made in the background thread that sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import Gauge, Metric, MetricsData, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from otel_torch.records import Record
from otel_torch.telemetry import wire
from otel_torch.telemetry.attributes import ACTIVATION, describe_activation, estimate, gauges, identify

# records that make one item: small enough that no item comes near a message's limit
CHUNK_BYTES = 1_000_000
_NOWHERE = Resource.get_empty()


class Item(Protocol):
    """One thing to send. size: estimated bytes. counts: how much of what is lost with it."""

    @property
    def size(self) -> int: ...

    @property
    def counts(self) -> dict[str, int]: ...

    def encode(self) -> list[bytes]:
        """Span, LogRecord or Metric messages."""

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        """ReadableSpan, ReadableLogRecord or Metric objects."""


def chunk(records: Sequence[Record], limit: int = CHUNK_BYTES) -> Iterator[tuple[list[Record], int]]:
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
class SpanItem:
    """A span that has ended, with the activation records that are its events."""

    span: ReadableSpan
    records: list[Record]
    size: int

    @property
    def counts(self) -> dict[str, int]:
        return {"span": 1, "span_event": len(self.records) + len(self.span.events)}

    def encode(self) -> list[bytes]:
        span = encode_spans([self.span]).resource_spans[0].scope_spans[0].spans[0].SerializeToString()
        return [span + b"".join(wire.part(wire.SPAN_EVENT, wire.span_event(record)) for record in self.records)]

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        events = [Event(ACTIVATION, describe_activation(record), record.time_ns) for record in self.records]
        span = self.span
        return [
            ReadableSpan(
                span.name, span.context, span.parent, span.resource, span.attributes, [*span.events, *events], span.links,
                span.kind, status=span.status, start_time=span.start_time, end_time=span.end_time,
                instrumentation_scope=span.instrumentation_scope,
            )
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogItem:
    """Records of one span, each a log record."""

    records: list[Record]
    size: int
    observed_ns: int
    span: SpanContext | None

    @property
    def counts(self) -> dict[str, int]:
        return {"log_event": len(self.records)}

    def encode(self) -> list[bytes]:
        trace_id, span_id, flags = (self.span.trace_id, self.span.span_id, int(self.span.trace_flags)) if self.span else (0, 0, 0)
        return [wire.log_record(record, self.observed_ns, trace_id, span_id, flags) for record in self.records]

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        return [ReadableLogRecord(log_record(record, self.span, self.observed_ns), resource, scope) for record in self.records]


def log_record(record: Record, span: SpanContext | None, observed_ns: int) -> LogRecord:
    """A record as the API's log record. The name is the body as well, as Loki shows no event names."""
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


@dataclass(frozen=True, slots=True)
class GaugeItem:
    """Records whose numeric statistics are gauge points, each at its record's own time."""

    records: list[Record]
    size: int
    with_step: bool

    @property
    def counts(self) -> dict[str, int]:
        return {"metric_point": sum(len(gauges(record)) for record in self.records)}

    def encode(self) -> list[bytes]:
        return wire.gauge_metrics(self.records, with_step=self.with_step)

    def readable(self, resource: Resource, scope: InstrumentationScope) -> list[Any]:
        points: dict[str, list[NumberDataPoint]] = {}
        for record in self.records:
            attributes: dict[str, Any] = identify(record)
            if self.with_step:
                attributes["torch.step"] = record.step
            for name, value in gauges(record):
                points.setdefault(name, []).append(NumberDataPoint(attributes, 0, record.time_ns, value))
        return [Metric(f"{ACTIVATION}.{name}", "", "", Gauge(found)) for name, found in points.items()]


@dataclass(frozen=True, slots=True)
class MetricItem:
    """A metric that is already made: what a reader collected, or a single gauge."""

    metric: Metric
    size: int

    @property
    def counts(self) -> dict[str, int]:
        return {"metric_point": len(self.metric.data.data_points)}

    def encode(self) -> list[bytes]:
        data = MetricsData([ResourceMetrics(_NOWHERE, [ScopeMetrics(InstrumentationScope("otel_torch"), [self.metric], "")], "")])
        return [message.SerializeToString() for message in encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics]

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
            yield MetricItem(replace(metric, data=replace(metric.data, data_points=some)), len(some) * _POINT_BYTES)
