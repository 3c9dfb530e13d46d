"""Activation records as log events with the trace context of their step.

A backend for logs has them within a second, before the step's span ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.sdk._logs import LogRecordLimits

import otel_torch
from otel_torch.process.console import say_once
from otel_torch.recorder import Sink
from otel_torch.records import Batch, Record
from otel_torch.telemetry.attributes import estimate_total_bytes, event_attributes
from otel_torch.telemetry.limits import may_drop_from_logs, read_log_limits
from otel_torch.telemetry.otlp.queue_items import LogItem, make_log_record
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.program_route import restrict_logger
from otel_torch.telemetry.sinks.span_sink import SpanSink


class EventSink(Sink):
    """Emits one log record per activation record.

    They go to the program's logger provider, if it has one, or else to our exporters. What it
    would send by OTLP, our queue sends.

    Args:
        span_sink: looks up the span of a step; None if no spans are made.
        is_only_form: whether activations are sent in no other form.
    """

    accepts_deferred_regions = True

    def __init__(
        self, pipelines: Pipelines, span_sink: SpanSink | None, *, is_only_form: bool = True
    ) -> None:
        self._pipelines, self._span_sink = pipelines, span_sink
        self._is_only_form = is_only_form
        self._own_limits = read_log_limits()

    def write(self, batch: Batch) -> None:
        span = self._span_sink.context_of(batch.step) if self._span_sink is not None else None
        now = time.time_ns()
        provider = self._pipelines.provider_to_call("logs")
        if provider is not None:
            logger = provider.get_logger("otel_torch", otel_torch.__version__)
            restrict_logger(logger, provider, self._pipelines.route("logs", provider))
            for record in batch.records:
                logger.emit(make_log_record(record, span, now))
        if self._pipelines.exports("logs"):
            size, limits = estimate_total_bytes(batch.records), self._limits()
            if limits is not None:
                self._count_dropped(batch.records, limits)
            self._pipelines.put("logs", [LogItem(batch.records, size, now, span, limits)])
        elif provider is None and self._is_only_form and span is not None:
            say_once(
                "activations are not sent: they are log events, and no exporter or provider takes "
                "logs; to see them on spans, as in Jaeger, set OTEL_TORCH_SIGNALS=spans,span_events"
            )

    def _limits(self) -> LogRecordLimits | None:
        """Return the limits of the program's provider, or else of the environment, if they may
        drop anything.
        """
        limits = getattr(self._pipelines.provider("logs"), "_log_record_limits", self._own_limits)
        return limits if may_drop_from_logs(limits) else None

    def _count_dropped(self, records: Sequence[Record], limits: LogRecordLimits) -> None:
        most = limits.max_log_record_attributes
        if most is not None:
            dropped = sum(max(0, len(event_attributes(record)) - most) for record in records)
            self._pipelines.losses.count("attribute", "attribute_limit", dropped)
