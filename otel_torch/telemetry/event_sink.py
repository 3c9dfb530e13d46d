"""Activation records as log events with the trace context of their step: for backends that store
logs, where they arrive within a second instead of with the end of the span.
"""

from __future__ import annotations

import time

import otel_torch
from otel_torch.recorder import Sink
from otel_torch.records import Batch
from otel_torch.telemetry.attributes import estimate_total_bytes
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.queue_items import LogItem, make_log_record
from otel_torch.telemetry.span_sink import SpanSink


class EventSink(Sink):
    """One log record an activation record, by the program's logger provider or our own exporters.

    spans: the sink that knows the span of a step, None where no spans are made.
    """

    def __init__(self, pipelines: Pipelines, spans: SpanSink | None) -> None:
        self._pipelines, self._spans = pipelines, spans

    def write(self, batch: Batch) -> None:
        span = self._spans.context_of(batch.step) if self._spans is not None else None
        now = time.time_ns()
        provider = self._pipelines.provider("logs")
        if provider is not None:
            logger = provider.get_logger("otel_torch", otel_torch.__version__)
            for record in batch.records:
                logger.emit(make_log_record(record, span, now))
        elif self._pipelines.exports("logs"):
            self._pipelines.put(
                "logs", [LogItem(batch.records, estimate_total_bytes(batch.records), now, span)]
            )
