"""Where the spans of a process are made: by the program's tracer provider, or by one of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, Tracer

import otel_torch
from otel_torch.records import Losses, Record, Scope
from otel_torch.telemetry.ids import PrivateIds
from otel_torch.telemetry.light_span import LightTracer
from otel_torch.telemetry.limits import count_dropped, may_drop_from_events, read_span_limits
from otel_torch.telemetry.otlp.queue_items import QueueItem, SpanItem
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.program_route import ProgramProcessors, can_replace_processors
from otel_torch.telemetry.providers import read_event_limit
from otel_torch.telemetry.sinks.trace_size import SPAN_BYTES

LINK_BYTES = 60
_EVENT_BYTES = 120
# events of a program's span that are reserved for others than activations
_RESERVED_EVENTS = 8


class QueueProcessor(SpanProcessor):
    """Enqueues our own spans when they end, with the records that become their events.

    Args:
        put: enqueues items.
        losses: counts what limits have dropped.
    """

    def __init__(self, put: Callable[[Sequence[QueueItem]], None], losses: Losses) -> None:
        self.put, self.losses = put, losses
        self.events: dict[int, tuple[list[Record], int]] = {}

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None:
            return
        records, size = self.events.pop(context.span_id, ([], 0))
        count_dropped(span, self.losses)
        if context.trace_flags.sampled:
            self.put([SpanItem(span, records, size + estimate_span(span))])


class Tracing:
    """A tracer for our spans: of the program's provider, or of a private one.

    Args:
        processors: of the program, if our queue replaces some of them.
    """

    def __init__(
        self,
        tracer: Tracer,
        ids: PrivateIds | None,
        queue: QueueProcessor | None,
        provider: Any,
        processors: ProgramProcessors | None = None,
    ) -> None:
        self.tracer, self.ids, self.provider = tracer, ids, provider
        self._queue, self._processors = queue, processors
        self._light_tracer: LightTracer | None = None
        limits = getattr(tracer, "_span_limits", None)
        is_own = ids is not None  # of a program's span, records leave a part of the events to it
        self._may_drop = limits is not None and (
            may_drop_from_events(limits) or (is_own and limits.max_events is not None)
        )

    @property
    def processor(self) -> QueueProcessor | None:
        """The queue of spans if records need not be made events of the SDK: nothing else gets the
        spans, and no limit drops anything.
        """
        if self._may_drop or (self._processors is not None and self._processors.has_others):
            return None
        return self._queue

    @classmethod
    def of_program(cls, provider: Any, pipelines: Pipelines) -> Tracing:
        """Make spans with the program's provider; our queue sends what would be sent by OTLP."""
        tracer = provider.get_tracer("otel_torch", otel_torch.__version__)
        if type(getattr(tracer, "id_generator", None)) is RandomIdGenerator:
            tracer.id_generator = PrivateIds()  # the SDK's draws from the program's random numbers
        if not can_replace_processors(tracer):
            return cls(tracer, None, None, provider)
        put = functools.partial(pipelines.put_for, provider, "traces")
        queue = QueueProcessor(put, pipelines.losses)
        tracer.span_processor = processors = ProgramProcessors(provider, queue)
        return cls(tracer, None, queue, provider, processors)

    @classmethod
    def private(cls, pipelines: Pipelines) -> Tracing:
        """Make spans with a provider of our own, which enqueues them for our exporters."""
        ids = PrivateIds()
        put = functools.partial(pipelines.put_for, None, "traces")
        processor = QueueProcessor(put, pipelines.losses)
        provider = TracerProvider(
            resource=pipelines.resource,
            shutdown_on_exit=False,
            id_generator=ids,
            span_limits=read_span_limits(),
        )
        provider.add_span_processor(processor)
        tracer = provider.get_tracer("otel_torch", otel_torch.__version__)
        return cls(tracer, ids, processor, provider)

    def light_tracer(self) -> LightTracer | None:
        """Return a tracer for light spans, or None if spans need the SDK's tracer."""
        if self._light_tracer is None or not self._light_tracer.is_current():
            put = self.processor.put if self.processor is not None else None
            self._light_tracer = LightTracer.of(self.tracer, put)
        if self._light_tracer is not None and self._light_tracer.is_current():
            return self._light_tracer
        return None

    def event_limit(self, span: Span) -> int | None:
        """Return how many activation events a span takes; None if only the message limits them."""
        if self.ids is not None:
            return None
        limit = read_event_limit(span)
        return None if limit is None else max(limit - _RESERVED_EVENTS, limit // 2)


def estimate_span(span: ReadableSpan) -> int:
    """Return the approximate bytes of an SDK span in a message."""
    events = sum(_EVENT_BYTES + _estimate_attributes(each.attributes or {}) for each in span.events)
    links = LINK_BYTES * len(span.links)
    return SPAN_BYTES + _estimate_attributes(span.attributes or {}) + events + links


def estimate_scope(scope: Scope) -> int:
    """Return the approximate bytes of a scope's span, without activation events."""
    events = sum(
        _EVENT_BYTES + _estimate_attributes(attributes) for _, _, attributes in scope.events
    )
    return SPAN_BYTES + _estimate_attributes(scope.attributes) + events


def _estimate_attributes(attributes: Any) -> int:
    size = 0
    for key, value in attributes.items():
        value_size = 4 * len(value) if isinstance(value, (str, tuple, list)) else 8
        size += 24 + len(key) + value_size
    return size
