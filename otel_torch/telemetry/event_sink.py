"""Activation records as log events with the trace context of their step.

A backend for logs has them within a second, before the step's span ends.
"""

from __future__ import annotations

import time

import otel_torch
from otel_torch.process.console import say_once
from otel_torch.recorder import Sink
from otel_torch.records import Batch
from otel_torch.telemetry.attributes import estimate_total_bytes
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.queue_items import LogItem, make_log_record
from otel_torch.telemetry.span_sink import SpanSink


class EventSink(Sink):
    """Emits one log record per activation record.

    They go to the program's logger provider, if it has one, or else to our exporters.

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

    def write(self, batch: Batch) -> None:
        span = self._span_sink.context_of(batch.step) if self._span_sink is not None else None
        now = time.time_ns()
        provider = self._pipelines.provider("logs")
        if provider is not None:
            logger = provider.get_logger("otel_torch", otel_torch.__version__)
            for record in batch.records:
                logger.emit(make_log_record(record, span, now))
        elif self._pipelines.exports("logs"):
            size = estimate_total_bytes(batch.records)
            self._pipelines.put("logs", [LogItem(batch.records, size, now, span)])
        elif self._is_only_form and span is not None:
            say_once(
                "activations are not sent: they are log events, and no exporter or provider takes "
                "logs; to see them on spans, as in Jaeger, set OTEL_TORCH_SIGNALS=spans,span_events"
            )
