"""SDK spans for regions at a third of their cost: parts of a span are made when first used.

A region's span has a name, two times and a parent. The SDK makes eight more objects for it and asks
a sampler whose answer is known, all while the program waits. A `LightSpan` is a subclass of the
SDK's span, so a program or processor can do with it whatever it does with any span, but its
containers, lock and context come into being at their first use, often in the export thread.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    propagation,
)
from opentelemetry.trace import Span as AnySpan

from otel_torch.regions.closer import DeviceTimer, RegionCloser, RegionEntry, RegionLabel
from otel_torch.telemetry.ids import PrivateIds, private
from otel_torch.telemetry.program_route import can_replace_processors
from otel_torch.telemetry.providers import is_always_sampling, is_sdk_counting_spans

# seconds for which an export thread waits for a span's device time; after the first that takes
# longer it waits for none
MAX_DEVICE_WAIT_S = 0.5

# more than a region's label has
_LABEL_ATTRIBUTES = 16

# -- the current span

# private names of the API: the context key of the current span, and the variable of the context
CURRENT: str = getattr(propagation, "_SPAN_KEY", "")
_variable = getattr(getattr(context_api, "_RUNTIME_CONTEXT", None), "_current_context", None)
_has_variable = isinstance(_variable, ContextVar)
# the API's `get_current`, `attach` and `detach` without its checks; `detach` raises ValueError in
# another context than that of `attach`
read_context: Callable[[], Context] = _variable.get if _has_variable else context_api.get_current  # type: ignore[union-attr]
attach: Callable[[Context], Any] = _variable.set if _has_variable else context_api.attach  # type: ignore[union-attr]
detach: Callable[[Any], None] = _variable.reset if _has_variable else context_api.detach  # type: ignore[union-attr]

# -- the parts of a span


def _make_lock(span: LightSpan) -> Any:
    return threading.Lock()


def _make_context(span: LightSpan) -> SpanContext:
    trace_id, flags, state = span.trace
    return SpanContext(trace_id, span.span_id, False, flags, state)


def _make_parent(span: LightSpan) -> SpanContext | None:
    return span.parent_span.get_span_context() if span.parent_span is not None else None


def _make_attributes(span: LightSpan) -> BoundedAttributes:
    limits = span._limits
    return BoundedAttributes(
        limits.max_span_attributes,
        span.label.attributes,
        immutable=False,
        max_value_len=limits.max_span_attribute_length,
    )


def _make_links(span: LightSpan) -> Any:
    if span.linked_span is None:
        return span._new_links(())
    return span._new_links((Link(span.linked_span.get_span_context()),))


# private attributes of the SDK's span that are made when they are first read
_LAZY_PARTS: dict[str, Callable[[LightSpan], Any]] = {
    "_name": lambda span: span.label.span_name,
    "_lock": _make_lock,
    "_context": _make_context,
    "_parent": _make_parent,
    "_attributes": _make_attributes,
    "_events": lambda span: span._new_events(),  # type: ignore[no-untyped-call]
    "_links": _make_links,
}
# reading any other part means that the span may have been modified
_READ_ONLY_PARTS = frozenset({"_name", "_context", "_parent"})
_UNSET = Status(StatusCode.UNSET)
_new: Any = object.__new__  # the SDK refuses to make a span outside of its tracer


# shared by all spans of a trace that start here: trace id, flags, and state if not empty
Trace = tuple[int, TraceFlags, TraceState | None]


class LightSpan(RegionEntry, Span):
    """The entry of a region as a started span; made by a `LightTracer`."""

    has_span = True

    # as the SDK's span has them
    _kind = SpanKind.INTERNAL
    _status = _UNSET
    _end_time: int | None = None
    _sampler = _trace_config = _instrumentation_info = _record_end_metrics = None
    _record_exception = _set_status_on_exception = True

    context_token: Any = None
    linked_span: AnySpan | None = None
    is_modified = False  # whether attributes, events, links or status may have been set
    awaits_release = False  # whether it has ended and its processors do not have it yet
    _has_read_device = False

    # set by `LightTracer.start`; a constructor call would be a fifth of the cost
    light_tracer: LightTracer
    closer: RegionCloser
    label: RegionLabel
    parent_span: AnySpan | None  # None for a root
    trace: Trace
    span_id: int

    def __getattr__(self, name: str) -> Any:
        make = _LAZY_PARTS.get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in _READ_ONLY_PARTS:
            self.is_modified = True
        # if two threads make a part at once, both get the first
        return self.__dict__.setdefault(name, make(self))

    # read from the tracer each time, because a fork changes its resource
    @property
    def _resource(self) -> Any:  # type: ignore[override]
        return self.light_tracer.tracer.resource

    @property
    def _instrumentation_scope(self) -> Any:  # type: ignore[override]
        return self.light_tracer.scope

    @property
    def _limits(self) -> Any:
        return self.light_tracer.limits

    @property
    def _span_processor(self) -> Any:  # type: ignore[override]
        return self.light_tracer.tracer.span_processor

    @property
    def start_ns(self) -> int:  # type: ignore[override]
        return self._start_time or 0

    def to_json(self, indent: int | None = 4) -> str:
        self._add_device_time()
        text: str = super().to_json(indent)
        return text

    # exporters read these of every span: answered without making the part if it is not modified

    @property
    def attributes(self) -> Any:
        """The attributes; after the end with `torch.device.duration`, which may wait briefly."""
        self._add_device_time()
        if self.is_modified:
            return super().attributes
        return self.light_tracer.attributes_of(self.label)

    @property
    def events(self) -> Any:
        return super().events if self.is_modified else ()

    @property
    def links(self) -> Any:
        return super().links if self.is_modified or self.linked_span is not None else ()

    @property
    def dropped_attributes(self) -> int:
        if self.is_modified:
            return super().dropped_attributes
        return len(self.label.attributes) - len(self.light_tracer.attributes_of(self.label))

    @property
    def dropped_events(self) -> int:
        return super().dropped_events if self.is_modified else 0

    @property
    def dropped_links(self) -> int:
        return super().dropped_links if self.is_modified else 0

    def _add_device_time(self) -> None:
        if self.device_timer is None or self._has_read_device or self._end_time is None:
            return
        self._has_read_device = True
        seconds = self.light_tracer.wait_for(self.device_timer)
        if seconds is not None:
            attributes: Any = self._attributes
            attributes._immutable = False
            attributes["torch.device.duration"] = seconds
            attributes._immutable = True


# -- the tracer


def has_expected_parts(tracer: Any) -> bool:
    """Return whether a span of this SDK version has only the attributes that a light span has."""
    span = _SdkSpan(
        "", SpanContext(1, 1, False), resource=tracer.resource, limits=tracer._span_limits
    )
    expected = {*dir(LightSpan), *_LAZY_PARTS, "_name", "_start_time"}
    return bool(CURRENT) and set(vars(span)) <= expected


class _SdkSpan(Span):
    """The SDK's span, which can only be constructed as a subclass."""


def are_light_spans_made() -> bool:
    """Return whether this version of the SDK has the private names that light spans use."""
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("otel_torch")
    return LightTracer.of(tracer) is not None


def _overrides(processor: Any, method: str) -> bool:
    """Return whether a processor overrides a method that the SDK's own processors leave empty."""
    sdk_classes = (SpanProcessor, BatchSpanProcessor, SimpleSpanProcessor)
    sdk_methods = [getattr(cls, method, None) for cls in sdk_classes]
    if method in getattr(processor, "__dict__", ()):
        return True
    return getattr(type(processor), method, None) not in sdk_methods


class LightTracer:
    """Makes light spans in place of an SDK tracer, with its ids, limits, resource and processors.

    Args:
        tracer: the tracer that it replaces.
        put: enqueues ended spans, which are held back for `SpanSink.release_spans`; None to give
            them to the processors.
    """

    def __init__(self, tracer: Tracer, put: Callable[[Sequence[Any]], None] | None) -> None:
        self.tracer, self.put = tracer, put
        self.limits, self.scope = tracer._span_limits, tracer._instrumentation_scope
        most = self.limits.max_span_attributes
        self.may_drop_attributes = most is not None and most < _LABEL_ATTRIBUTES
        self.config = tracer._tracer_config
        self.multi_processor: Any = tracer.span_processor
        self.processors: tuple[Any, ...] = self.multi_processor._span_processors
        self._set_up_ids(tracer.id_generator)
        self._samples_roots = is_always_sampling(tracer.sampler, "root")
        self._samples_children = is_always_sampling(tracer.sampler, "local_parent_sampled")
        # the last parent that was not a light span, and its trace
        self._last_parent: tuple[Any, Trace] = (None, (0, self._root_flags, None))
        self._last_attributes: tuple[RegionLabel | None, Any] = (None, None)
        self._set_up_processors()
        self._device_wait_s = MAX_DEVICE_WAIT_S

    def _set_up_ids(self, ids: Any) -> None:
        random = TraceFlags.RANDOM_TRACE_ID if ids.is_trace_id_random() else 0
        self._root_flags = TraceFlags(TraceFlags.SAMPLED | random)
        self._draw_bits: Callable[[int], int]
        self._draw_trace_id: Callable[[], int]
        if type(ids) is PrivateIds:
            self._draw_bits = private.getrandbits
            self._draw_trace_id = functools.partial(private.getrandbits, 128)
        else:
            self._draw_bits = lambda _: int(ids.generate_span_id())
            self._draw_trace_id = ids.generate_trace_id

    def _set_up_processors(self) -> None:
        processors = self.processors
        self._calls_on_start = any(_overrides(each, "on_start") for each in processors)
        self._calls_on_ending = any(_overrides(each, "_on_ending") for each in processors)
        # a batch processor only enqueues a span; its thread may wait for the device time later
        queues = [_enqueue_of(processor) for processor in processors]
        self.can_wait = not self._calls_on_ending and all(queue is not None for queue in queues)
        # all there is to do at the end of a span, nearly always
        self.enqueue = queues[0] if self.can_wait and len(queues) == 1 else None
        self._on_end = [
            queue or processor.on_end for queue, processor in zip(queues, processors, strict=True)
        ]

    @classmethod
    def of(
        cls, tracer: Any, put: Callable[[Sequence[Any]], None] | None = None
    ) -> LightTracer | None:
        """Return a light tracer, or None if `tracer` is not the SDK's, or not as expected."""
        try:
            if not can_replace_processors(tracer):
                return None
            if not tracer._tracer_config.is_enabled or is_sdk_counting_spans():
                return None
            if not has_expected_parts(tracer):
                return None
            return cls(tracer, put)
        except Exception:  # this version of the SDK lacks a private name
            return None

    def is_current(self) -> bool:
        """Return whether the provider's processors and configuration are still the same."""
        return (
            self.multi_processor._span_processors is self.processors
            and self.tracer._tracer_config is self.config
        )

    def start(
        self,
        closer: RegionCloser,
        label: RegionLabel,
        parent: Any,
        context: Context,
        start_ns: int,
    ) -> LightSpan | None:
        """Start a span under `parent`, or a root for None, without making it the current one.

        Returns None if a sampler has to decide.
        """
        if type(parent) is LightSpan:
            if not self._samples_children:
                return None
            trace = parent.trace
        elif parent is None:
            if not self._samples_roots:
                return None
            trace = (self._draw_trace_id() or 1, self._root_flags, None)
        else:
            if self._last_parent[0] is not parent:
                sampled_trace = self._sampled_trace_of(parent)
                if sampled_trace is None:
                    return None
                self._last_parent = parent, sampled_trace
            trace = self._last_parent[1]
        span: LightSpan = _new(LightSpan)
        span.light_tracer = self
        span.closer = closer
        span.label = label
        span.parent_span = parent
        span.trace = trace
        span.span_id = self._draw_bits(64) or 1
        span._start_time = start_ns
        if self._calls_on_start:
            self.multi_processor.on_start(span, parent_context=context)
        return span

    def _sampled_trace_of(self, parent: Any) -> Trace | None:
        """Return the trace that a child of `parent` joins; None if it might not be sampled."""
        context = parent.get_span_context()
        flags = context.trace_flags
        place = "remote" if context.is_remote else "local"
        decision = "sampled" if flags.sampled else "not_sampled"
        kind = f"{place}_parent_{decision}"
        if not context.is_valid or not is_always_sampling(self.tracer.sampler, kind):
            return None
        random = flags & TraceFlags.RANDOM_TRACE_ID
        state = context.trace_state or None
        return context.trace_id, TraceFlags(random | TraceFlags.SAMPLED), state

    def attributes_of(self, label: RegionLabel) -> Any:
        last = self._last_attributes
        if last[0] is not label:
            limits = self.limits
            bounded = BoundedAttributes(
                limits.max_span_attributes, label.attributes, True, limits.max_span_attribute_length
            )
            self._last_attributes = last = label, MappingProxyType(bounded)
        return last[1]

    def end(self, span: LightSpan, end_ns: int) -> None:
        """End a span; the processors get it now, or from `release_spans` if they would wait."""
        span._end_time = end_ns
        if self.put is not None or (span.device_timer is not None and not self.can_wait):
            span.awaits_release = True
        else:
            self.process(span)

    def process(self, span: LightSpan) -> None:
        span.awaits_release = False
        attributes = span.__dict__.get("_attributes")
        if attributes is not None:
            attributes._immutable = True
        if self._calls_on_ending:
            self.multi_processor._on_ending(span)
        for on_end in self._on_end:
            on_end(span)

    def wait_for(self, timer: DeviceTimer) -> float | None:
        """Return the measured seconds; wait for them unless an earlier wait was in vain."""
        until = time.monotonic() + self._device_wait_s
        seconds = timer.seconds()
        while timer.pending and time.monotonic() < until:
            time.sleep(0.002)
            seconds = timer.seconds()
        self._device_wait_s = 0.0 if timer.pending else MAX_DEVICE_WAIT_S
        return seconds


def _enqueue_of(processor: Any) -> Callable[[Any], None] | None:
    """Return what enqueues a sampled span in an unmodified batch processor; None for others."""
    if type(processor) is not BatchSpanProcessor or "on_end" in vars(processor):
        return None
    emit = getattr(getattr(processor, "_batch_processor", None), "emit", None)
    return emit if callable(emit) else None
