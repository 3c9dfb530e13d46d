"""Spans of the SDK's that cost a third of its own: the parts of a span that nobody looks at are
never made.

A region's span has a name, two times and a parent; the SDK makes eight more objects for it, asks a
sampler whose answer is known, and does it all while the program waits. Here a span is the SDK's own
class, so that whatever a program or a processor does to its current span works as ever, but its
containers, its lock and its context come into being when they are first used: often in the thread
that exports it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, SynchronousMultiSpanProcessor, Tracer
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
from otel_torch.telemetry.providers import is_always_sampling, is_sdk_counting_spans

# seconds that a thread which exports may wait for the device; a device that let it wait so long is
# not waited for again
DEVICE_S = 0.5

# -- the current span
# --------------------------------------------------------------------------------------------------

# the key of the current span, and the variable that holds the context: private names of the API's
CURRENT: str = getattr(propagation, "_SPAN_KEY", "")
_variable = getattr(getattr(context_api, "_RUNTIME_CONTEXT", None), "_current_context", None)
_by_variable = isinstance(_variable, ContextVar)
# as `get_current`, `attach` and `detach`; the last raises ValueError where another context goes on
# than the one that began
read_context: Callable[[], Context] = _variable.get if _by_variable else context_api.get_current  # type: ignore[union-attr]
attach: Callable[[Context], Any] = _variable.set if _by_variable else context_api.attach  # type: ignore[union-attr]
detach: Callable[[Any], None] = _variable.reset if _by_variable else context_api.detach  # type: ignore[union-attr]


def _make_lock(span: LightSpan) -> Any:
    return threading.Lock()


def _make_context(span: LightSpan) -> SpanContext:
    trace_id, flags, state = span.trace
    return SpanContext(trace_id, span.span_id, False, flags, state)


def _make_parent(span: LightSpan) -> SpanContext | None:
    return span.above.get_span_context() if span.above is not None else None


def _make_attributes(span: LightSpan) -> BoundedAttributes:
    limits = span._limits
    return BoundedAttributes(
        limits.max_span_attributes,
        span.label.attributes,
        immutable=False,
        max_value_len=limits.max_span_attribute_length,
    )


def _make_links(span: LightSpan) -> Any:
    return span._new_links(() if span.linked is None else (Link(span.linked.get_span_context()),))


# what the SDK's span keeps in attributes of its own that nobody needs unless it is asked for
_PARTS: dict[str, Callable[[LightSpan], Any]] = {
    "_name": lambda span: span.label.span_name,
    "_lock": _make_lock,
    "_context": _make_context,
    "_parent": _make_parent,
    "_attributes": _make_attributes,
    "_events": lambda span: span._new_events(),  # type: ignore[no-untyped-call]
    "_links": _make_links,
}
# those of them that do not say that somebody has put something on the span
_OF_NO_WEIGHT = frozenset({"_name", "_context", "_parent"})
_UNSET = Status(StatusCode.UNSET)
_new: Any = object.__new__  # the SDK's own refuses what no tracer of its has made


# what all spans of a trace share, as they were begun here: its id, its flags and its state (None
# where it is empty)
Trace = tuple[int, TraceFlags, TraceState | None]


class LightSpan(RegionEntry, Span):
    """A stay in a region as a span, made by a `LightTracer`. It has started; its parts are made
    when they are first used.
    """

    _kind = SpanKind.INTERNAL
    _status = _UNSET
    _end_time: int | None = None
    _sampler = _trace_config = _instrumentation_info = _record_end_metrics = None
    _record_exception = _set_status_on_exception = True
    token: Any = None
    linked: AnySpan | None = None
    touched = False  # whether somebody may have put something on it
    has_span = True
    awaits_release = False  # it has ended and was not given to its processors yet
    _asked = False

    # what each has of its own, set by `LightTracer.start`: no constructor runs, as its call would
    # be a fifth of the cost
    home: LightTracer
    closer: RegionCloser
    label: RegionLabel
    above: AnySpan | None  # its parent; None of a root
    trace: Trace
    span_id: int

    def __getattr__(self, name: str) -> Any:
        make = _PARTS.get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in _OF_NO_WEIGHT:
            self.touched = True
        return self.__dict__.setdefault(
            name, make(self)
        )  # of two threads that make a part, both get the first's

    # of the tracer, whose resource a fork changes
    @property
    def _resource(self) -> Any:  # type: ignore[override]
        return self.home.tracer.resource

    @property
    def _instrumentation_scope(self) -> Any:  # type: ignore[override]
        return self.home.scope

    @property
    def _limits(self) -> Any:
        return self.home.limits

    @property
    def _span_processor(self) -> Any:  # type: ignore[override]
        return self.home.tracer.span_processor

    @property
    def start_ns(self) -> int:  # type: ignore[override]
        return self._start_time or 0

    def to_json(self, indent: int | None = 4) -> str:
        self._ask_device()
        text: str = super().to_json(indent)
        return text

    # what the thread that exports asks of every span, answered without making the part where nobody
    # has put anything on it

    @property
    def attributes(self) -> Any:
        """With `torch.device_timer.duration`, once it has ended; the thread that exports it may wait for
        that for a moment.
        """
        self._ask_device()
        return super().attributes if self.touched else self.home.attributes_of(self.label)

    @property
    def events(self) -> Any:
        return super().events if self.touched else ()

    @property
    def links(self) -> Any:
        return super().links if self.touched or self.linked is not None else ()

    @property
    def dropped_attributes(self) -> int:
        if self.touched:
            return super().dropped_attributes
        return len(self.label.attributes) - len(self.home.attributes_of(self.label))

    @property
    def dropped_events(self) -> int:
        return super().dropped_events if self.touched else 0

    @property
    def dropped_links(self) -> int:
        return super().dropped_links if self.touched else 0

    def _ask_device(self) -> None:
        if self.device_timer is None or self._asked or self._end_time is None:
            return
        self._asked = True
        seconds = self.home.wait(self.device_timer)
        if seconds is not None:
            kept: Any = self._attributes
            kept._immutable = False
            kept["torch.device_timer.duration"] = seconds
            kept._immutable = True


def _has_known_parts(tracer: Any) -> bool:
    """Whether the SDK's span still consists of what a light one has: asked of one of the SDK's that
    goes nowhere.
    """
    plain = _PlainSpan(
        "", SpanContext(1, 1, False), resource=tracer.resource, limits=tracer._span_limits
    )
    return bool(CURRENT) and set(vars(plain)) <= set(dir(LightSpan)) | set(_PARTS) | {
        "_name",
        "_start_time",
    }


class _PlainSpan(Span):
    """The SDK's, which refuses only to be made by its own name."""


def _overrides(processor: Any, method: str) -> bool:
    """Whether a processor does something of its own in a method; the SDK's two do nothing when a
    span starts.
    """
    known = [
        getattr(cls, method, None)
        for cls in (SpanProcessor, BatchSpanProcessor, SimpleSpanProcessor)
    ]
    return getattr(type(processor), method, None) not in known or method in getattr(
        processor, "__dict__", ()
    )


class LightTracer:
    """Makes light spans where an SDK's tracer would make its own, with its ids, its limits,
    resource and processors.

    collects: spans that end are not given to processors here, because somebody fetches them.
    """

    def __init__(self, tracer: Tracer, *, collects: bool) -> None:
        self.tracer, self.collects = tracer, collects
        self.limits, self.scope = tracer._span_limits, tracer._instrumentation_scope
        self.config = tracer._tracer_config
        self.all: Any = tracer.span_processor
        self.processors: tuple[Any, ...] = self.all._span_processors
        ids = tracer.id_generator
        random = TraceFlags.RANDOM_TRACE_ID if ids.is_trace_id_random() else 0
        self._root_flags = TraceFlags(TraceFlags.SAMPLED | random)
        own = type(ids) is PrivateIds
        self._draw_bits = private.getrandbits if own else lambda _: ids.generate_span_id()
        self._draw_trace = (
            functools.partial(private.getrandbits, 128) if own else ids.generate_trace_id
        )
        self._roots = is_always_sampling(tracer.sampler, "root")
        self._children = is_always_sampling(tracer.sampler, "local_parent_sampled")
        self._known: tuple[Any, Trace] = (
            None,
            (0, self._root_flags, None),
        )  # of the last parent that was no light span
        self._starts = any(_overrides(one, "on_start") for one in self.processors)
        self._endings = any(_overrides(one, "_on_ending") for one in self.processors)
        # a batch processor only puts a span in its queue: its other threads do the rest, and may
        # wait for a device
        queues = [_queue_of(one) for one in self.processors]
        self.can_wait = not self._endings and all(queue is not None for queue in queues)
        self.queue = (
            queues[0] if self.can_wait and len(queues) == 1 else None
        )  # all there is to do, as nearly always
        self._ends = [
            queue or one.on_end for queue, one in zip(queues, self.processors, strict=True)
        ]
        self._patience_s = DEVICE_S
        self._last: tuple[RegionLabel | None, Any] = (None, None)

    @classmethod
    def of(cls, tracer: Any, *, collects: bool) -> LightTracer | None:
        """None where the tracer is not the SDK's own, or not as this knows it."""
        try:
            if (
                type(tracer) is not Tracer
                or type(tracer.span_processor) is not SynchronousMultiSpanProcessor
            ):
                return None
            if (
                not tracer._tracer_config.is_enabled
                or is_sdk_counting_spans()
                or not _has_known_parts(tracer)
            ):
                return None
            return cls(tracer, collects=collects)
        except Exception:  # private names that another version of the SDK does not have
            return None

    def fresh(self) -> bool:
        """Whether the program has changed nothing about its provider since."""
        return (
            self.all._span_processors is self.processors
            and self.tracer._tracer_config is self.config
        )

    def start(
        self, closer: RegionCloser, label: RegionLabel, above: Any, context: Context, start_ns: int
    ) -> LightSpan | None:
        """A span under `above`, or the root of a trace of its own; not current yet. None where the
        sampler has to be asked.
        """
        if type(above) is LightSpan:
            if not self._children:
                return None
            trace = above.trace
        elif above is None:
            if not self._roots:
                return None
            trace = (self._draw_trace() or 1, self._root_flags, None)
        else:
            if self._known[0] is not above:
                found = self._know(above)
                if found is None:
                    return None
                self._known = above, found
            trace = self._known[1]
        span: LightSpan = _new(LightSpan)
        span.home = self
        span.closer = closer
        span.label = label
        span.above = above
        span.trace = trace
        span.span_id = self._draw_bits(64) or 1
        span._start_time = start_ns
        if self._starts:
            self.all.on_start(span, parent_context=context)
        return span

    def _know(self, above: Any) -> Trace | None:
        """What a child takes over from a parent, where it is sure to be sampled."""
        where = above.get_span_context()
        flags = where.trace_flags
        kind = f"{'remote' if where.is_remote else 'local'}_parent_{'' if flags.sampled else 'not_'}sampled"
        if not where.is_valid or not is_always_sampling(self.tracer.sampler, kind):
            return None
        random = flags & TraceFlags.RANDOM_TRACE_ID
        return where.trace_id, TraceFlags(random | TraceFlags.SAMPLED), where.trace_state or None

    def attributes_of(self, label: RegionLabel) -> Any:
        """The attributes of a span that nobody has put anything on."""
        last = self._last
        if last[0] is not label:
            limits = self.limits
            kept = BoundedAttributes(
                limits.max_span_attributes, label.attributes, True, limits.max_span_attribute_length
            )
            self._last = last = label, MappingProxyType(kept)
        return last[1]

    def end(self, span: LightSpan, end_ns: int) -> None:
        """End a span that has not ended; it goes to the processors now, or from another thread
        where they would wait.
        """
        span._end_time = end_ns
        if self.collects or (span.device_timer is not None and not self.can_wait):
            span.awaits_release = True
        else:
            self.give(span)

    def give(self, span: LightSpan) -> None:
        """Give a span that has ended to the processors."""
        span.awaits_release = False
        attributes = span.__dict__.get("_attributes")
        if attributes is not None:
            attributes._immutable = True
        if self._endings:
            self.all._on_ending(span)
        for end in self._ends:
            end(span)

    def wait(self, device: DeviceTimer) -> float | None:
        """What a device measured, waited for as long as there is hope."""
        until = time.monotonic() + self._patience_s
        seconds = device.seconds()
        while device.pending and time.monotonic() < until:
            time.sleep(0.002)
            seconds = device.seconds()
        self._patience_s = 0.0 if device.pending else DEVICE_S
        return seconds


def _queue_of(processor: Any) -> Callable[[Any], None] | None:
    """What puts a sampled span into a batch processor's queue; None where the processor is not
    exactly that.
    """
    if type(processor) is not BatchSpanProcessor or "on_end" in vars(processor):
        return None
    emit = getattr(getattr(processor, "_batch_processor", None), "emit", None)
    return emit if callable(emit) else None
