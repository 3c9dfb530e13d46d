"""Scopes as spans, and activation records as the events of their step's span.

Prevents what breaks traces of long runs: spans without their parent because a step is no lexical
block, events beyond a span's limit dropped in silence, a trace that outgrows what a backend takes,
and spans lost because they were open at the end.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import otel_torch
from otel_torch.job import Job
from otel_torch.recorder import Sink
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.regions.closer import RegionCloser, RegionEntry, RegionLabel, RegionSpans
from otel_torch.settings import Settings
from otel_torch.telemetry.attributes import (
    ACTIVATION,
    estimate_event_bytes,
    event_attributes,
    to_attributes,
)
from otel_torch.telemetry.ids import PrivateIds
from otel_torch.telemetry.light_span import (
    CURRENT,
    LightSpan,
    LightTracer,
    attach,
    detach,
    read_context,
)
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.providers import read_event_limit, watch_tracer_provider
from otel_torch.telemetry.queue_items import CHUNK_BYTES, SpanItem, chunk_records
from otel_torch.telemetry.trace_size import JOINED, SPAN_BYTES, TraceSize

# the run's span links to so many of the traces that its steps began; each of them links back to the
# run
LINKS = 100
# a region's span that nobody has put anything on
_REGION_BYTES = SPAN_BYTES + 100
# events of a program's span that are left for others than activations
_RESERVED_EVENTS = 8
_put = dict.__setitem__  # a context refuses its own, for nobody may change one that others have
_CARRIER = "TRACEPARENT"
_propagator = TraceContextTextMapPropagator()


@dataclass(slots=True, eq=False)
class _Open:
    """A scope that has begun. span: None where the scope has none and only hands its parent's
    context on.
    """

    scope: Scope
    span: Span | None
    tracing: _Tracing
    under: int = 0  # the span id that was current when it began
    began_at: int = 0  # the size of its trace then
    attached: tuple[Token[Context], int] | None = None
    records: list[Record] = field(default_factory=list)
    size: int = 0
    ended: bool = False


class _ToQueue(SpanProcessor):
    """Takes our own spans to the queue when they end, with the records that are their events."""

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines
        self.events: dict[int, tuple[list[Record], int]] = {}

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        records, size = (
            self.events.pop(context.span_id, ([], 0)) if context is not None else ([], 0)
        )
        if context is not None and context.trace_flags.sampled:
            self._pipelines.put("traces", [SpanItem(span, records, size + _size_of(span))])


def _size_of(span: ReadableSpan) -> int:
    events = sum(120 + _size_of_attributes(event.attributes or {}) for event in span.events)
    return SPAN_BYTES + _size_of_attributes(span.attributes or {}) + events + 60 * len(span.links)


def _size_of_attributes(attributes: Any) -> int:
    return sum(
        24 + len(key) + (4 * len(value) if isinstance(value, (str, tuple, list)) else 8)
        for key, value in attributes.items()
    )


class _Tracing:
    """Makes spans: with the program's provider, or with one of our own that nobody else sees."""

    def __init__(
        self, tracer: Tracer, ids: PrivateIds | None, processor: _ToQueue | None, provider: Any
    ) -> None:
        self.tracer, self.ids, self.processor, self.provider = tracer, ids, processor, provider
        self._light: LightTracer | None = None

    def light(self) -> LightTracer | None:
        """What makes light spans in the tracer's stead; None where only the tracer can."""
        if self._light is None or not self._light.fresh():
            self._light = LightTracer.of(self.tracer, collects=self.processor is not None)
        return self._light if self._light is not None and self._light.fresh() else None

    @classmethod
    def of_program(cls, provider: Any) -> _Tracing:
        tracer = provider.get_tracer("otel_torch", otel_torch.__version__)
        if (
            type(getattr(tracer, "id_generator", None)) is RandomIdGenerator
        ):  # it draws from the program's random numbers
            tracer.id_generator = PrivateIds()
        return cls(tracer, None, None, provider)

    @classmethod
    def own(cls, pipelines: Pipelines) -> _Tracing:
        ids, processor = PrivateIds(), _ToQueue(pipelines)
        provider = TracerProvider(
            resource=pipelines.resource,
            shutdown_on_exit=False,
            id_generator=ids,
            span_limits=SpanLimits(max_events=SpanLimits.UNSET),
        )
        provider.add_span_processor(processor)
        return cls(
            provider.get_tracer("otel_torch", otel_torch.__version__), ids, processor, provider
        )

    def event_limit(self, span: Span) -> int | None:
        """How many activation events a span takes; None is as many as fit into a message."""
        if self.processor is not None:
            return None
        limit = read_event_limit(span)
        return None if limit is None else max(limit - _RESERVED_EVENTS, limit // 2)


class SpanSink(Sink):
    """Spans of one process, under the span of the run."""

    def __init__(self, settings: Settings, job: Job, losses: Losses, pipelines: Pipelines) -> None:
        self._job, self._losses, self._pipelines = job, losses, pipelines
        self._with_events = "span_events" in settings.signals
        self._with_message = settings.exceptions == "message"
        self._region_prefix = settings.region_prefix
        self._tracings: dict[int | None, _Tracing] = {}
        self._open: dict[Scope, _Open] = {}
        # open scopes that are no thread's current span: steps, and regions around them. Replaced,
        # never changed
        self._standing: tuple[_Open, ...] = ()
        self._ours: set[int] = set()
        self._lit: dict[
            LightSpan, bool
        ] = {}  # open spans of regions that never were scopes; whether they are registered
        self._light: LightTracer | None = None
        # the program's tracer provider when `_light` was found
        self._read_provider: Callable[[], object] = lambda: None
        self._provider: object = self
        self._run: Span | None = None
        self._run_context: SpanContext | None = None
        self._run_trace, self._full = 0, False  # whether the run's trace is
        self._carrier: str | None = None
        self._links = self._linked = 0
        self._size = TraceSize(job.world_size)
        self._last_step = 0
        self._lock = threading.RLock()

    # -- scopes
    # ----------------------------------------------------------------------------------------------

    def open(self, scope: Scope) -> None:
        tracing = self._tracing()
        if tracing is None:
            return
        with self._lock:
            run = self._run_span(tracing, scope.start_ns)
            current = get_current_span()
            parent, context = self._parent(current, run)
            if scope.kind == "forward" and self._in_region():
                opened = _Open(scope, None, tracing)
                if parent is current:
                    return
            else:
                opened = _Open(scope, self._start(tracing, scope, parent, context, run), tracing)
                opened.under = current.get_span_context().span_id
                opened.began_at = (
                    self._size[opened.span.get_span_context().trace_id] if opened.span else 0
                )
                context = set_span_in_context(opened.span or INVALID_SPAN, context)
            self._open[scope] = opened
            if not scope.lexical:
                self._standing = (*self._standing, opened)
        if scope.lexical:
            opened.attached = context_api.attach(context), threading.get_ident()

    def close(self, scope: Scope) -> None:
        with self._lock:
            opened = self._open.pop(scope, None)
            if opened is None:
                return
            self._leave_current(opened)
        if opened.span is not None and not opened.ended:
            self._end(opened, opened.span, scope.end_ns)

    def detach_scope(self, scope: Scope) -> None:
        """The scope ends, and its span is no longer current; `close` follows."""
        with self._lock:
            opened = self._open.get(scope)
            if opened is None:
                return
            self._leave_current(opened)
        if (
            opened.span is not None
            and scope.error is not None
            and not opened.ended
            and opened.span.is_recording()
        ):
            self._mark_error(opened.span, scope.error, scope.end_ns)
        scope.error = None  # its frames hold the program's tensors, and it is a while until `close`

    def _leave_current(self, opened: _Open) -> None:
        if opened in self._standing:
            self._standing = tuple(other for other in self._standing if other is not opened)
        attached, opened.attached = opened.attached, None
        if attached is not None and attached[1] == threading.get_ident():
            context_api.detach(attached[0])

    def context_of(self, scope: Scope | None) -> SpanContext | None:
        """The context of an open scope's span, else of the run's span."""
        opened = self._open.get(scope) if scope is not None else None
        if opened is not None and opened.span is not None:
            return opened.span.get_span_context()
        return self._run_context

    def _parent(self, current: Span, run: Span) -> tuple[Span, Context]:
        """The current span, the program's own or ours; else the innermost step that is going on;
        else the run's.
        """
        where = current.get_span_context()
        parent = self._above(current, where.span_id if where.is_valid else 0, run)
        return parent, set_span_in_context(parent, get_current())

    def _above(self, current: Span, under: int, run: Span) -> Span:
        for opened in reversed(self._standing):
            if opened.span is not None and (not under or opened.under == under):
                return opened.span
        return current if under else run

    def _in_region(self) -> bool:
        """Whether a registered region that was entered at a call site is open: it names what the
        forward is part of.
        """
        prefix = self._region_prefix
        if True in list(self._lit.values()):
            return True
        return any(scope.kind == "region" and scope.name.startswith(prefix) for scope in self._open)

    def _start(
        self, tracing: _Tracing, scope: Scope, parent: Span, context: Context, run: Span
    ) -> Span:
        run_context = run.get_span_context()
        step = scope.kind == "step"
        parent_context = parent.get_span_context()
        of_program = (
            type(parent) is not LightSpan
            and parent_context.span_id not in self._ours
            and parent is not run
        )
        above = parent_context if of_program else run_context
        full = self._size.is_full(above.trace_id, max(self._last_step if step else 0, SPAN_BYTES))
        attributes = to_attributes(scope.attributes)
        if (step and (full or (scope.training and not of_program))) or (full and parent is run):
            span = self._start_root(tracing, scope.name, context, above, attributes, scope.start_ns)
            self._linked += 1
            if self._links < LINKS and span.get_span_context().is_valid:
                self._links += 1
                run.add_link(span.get_span_context())
        else:
            span = tracing.tracer.start_span(
                scope.name, context, attributes=attributes, start_time=scope.start_ns
            )
        self._ours.add(span.get_span_context().span_id)
        return span

    def _start_root(
        self,
        tracing: _Tracing,
        name: str,
        context: Context,
        linked: SpanContext,
        attributes: Any,
        start_ns: int,
    ) -> Span:
        """A span that is the root of its own trace, with a link to where it would have stood."""
        nowhere = set_span_in_context(INVALID_SPAN, context)
        return tracing.tracer.start_span(
            name, nowhere, attributes=attributes, links=[Link(linked)], start_time=start_ns
        )

    def _end(self, opened: _Open, span: Span, end_ns: int) -> None:
        """Everything that is known at the end goes on the span."""
        scope = opened.scope
        processor = opened.tracing.processor
        if span.is_recording():
            span.set_attributes(to_attributes(scope.attributes))
            if scope.device_s is not None:
                span.set_attribute("torch.device.duration", float(scope.device_s))
            for time_ns, name, attributes in scope.events:
                span.add_event(name, to_attributes(attributes), time_ns)
            if scope.error is not None:
                self._mark_error(span, scope.error, end_ns)
        context = span.get_span_context()
        self._size.grow(context.trace_id, opened.size + _estimate_span(scope))
        if processor is not None and opened.records:
            processor.events[context.span_id] = opened.records, opened.size
        span.end(end_ns)
        self._ours.discard(context.span_id)
        if scope.kind == "step":
            self._last_step = max(self._size[context.trace_id] - opened.began_at, 0)

    def _mark_error(self, span: Span, error: BaseException, end_ns: int) -> None:
        cls = type(error)
        name = (
            cls.__qualname__
            if cls.__module__ == "builtins"
            else f"{cls.__module__}.{cls.__qualname__}"
        )
        attributes = {"exception.type": name}
        description = name
        if self._with_message:
            attributes["exception.message"] = str(error)
            description = f"{name}: {error}"
        span.set_status(Status(StatusCode.ERROR, description))
        span.add_event("exception", attributes, end_ns)

    # -- regions that never were scopes
    # --------------------------------------------------------------------------------

    @property
    def region_spans(self) -> RegionSpans:
        return self

    def _find_light_tracer(self) -> None:
        """Look for the program's provider again; regions get light spans if its tracer can."""
        self._read_provider = watch_tracer_provider()
        self._provider = self._read_provider()
        tracing = self._tracing()
        self._light = tracing.light() if tracing is not None else None

    def start_region(
        self, closer: RegionCloser, label: RegionLabel, start_ns: int
    ) -> LightSpan | None:
        """The span of a region that begins now, as the current one; None where that takes more: the
        run's span is not begun, or a sampler of the program's has to be asked. As `_parent` and
        `_start`, without what only steps need.
        """
        if self._read_provider() is not self._provider:
            self._find_light_tracer()
        light, run = self._light, self._run
        if light is None or run is None:
            return None
        if (
            light.all._span_processors is not light.processors
            or light.tracer._tracer_config is not light.config
        ):
            self._find_light_tracer()
            return self.start_region(closer, label, start_ns)
        context = read_context()
        parent: Any = context.get(CURRENT)
        if type(parent) is LightSpan:
            under = parent.span_id
        elif parent is None:
            under = 0
        else:
            parent = get_current_span(context)
            where = parent.get_span_context()
            under = where.span_id if where.is_valid else 0
        if self._standing:
            parent = self._above(parent, under, run)
        elif not under:
            parent = run
        if parent is run and (self._full or self._size.is_full(self._run_trace, SPAN_BYTES)):
            self._full = True  # it never shrinks
            span = light.start(closer, label, None, context, start_ns)
            if span is not None:
                span.linked = run
                self._linked += 1
                if self._links < LINKS:
                    self._links += 1
                    run.add_link(span.get_span_context())
        else:
            span = light.start(closer, label, parent, context, start_ns)
        if span is not None:
            self._lit[span] = label.is_registered
            within = Context(context)
            _put(within, CURRENT, span)
            span.token = attach(within)
        return span

    def end_region(self, span: LightSpan, end_ns: int, error: BaseException | None) -> None:
        """The region ends, and so does its span."""
        try:
            detach(span.token)
        except (
            ValueError,
            RuntimeError,
        ):  # a generator's end, in another context than its beginning
            pass
        if self._lit.pop(span, None) is None:
            return  # it was ended when the session was, or is the parent process's
        span.token = None
        if span._end_time is not None:
            return  # by the program itself
        if error is not None:
            self._mark_error(span, error, end_ns)
        touched = span.touched
        if (
            touched or span.above is not None
        ):  # of a trace that has only a root nobody needs to know the size
            self._size.grow_a_little(span.trace[0], _size_of(span) if touched else _REGION_BYTES)
        home = span.home
        if home.queue is None or touched:
            home.end(span, end_ns)
        else:
            span._end_time = end_ns
            home.queue(span)

    def release_spans(self, entries: list[RegionEntry]) -> None:
        """Spans go with what the device took: to our own exporters, or to the program's
        processors.
        """
        items = []
        for span in entries:
            if not isinstance(span, LightSpan) or not span.awaits_release:
                continue
            if span.home.collects:
                span.awaits_release = False
                items.append(SpanItem(span, [], _size_of(span) if span.touched else _REGION_BYTES))
            else:
                span.home.give(span)
        if items:
            self._pipelines.put("traces", items)

    def discard_open_spans(self) -> None:
        """In a forked child the open spans are the parent's."""
        self._lit.clear()

    # -- activations
    # ----------------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        if not self._with_events or not batch.records:
            return
        tracing = self._tracing()
        if tracing is None:
            return
        with self._lock:
            run = self._run_span(tracing, batch.records[0].time_ns)
            opened = self._open.get(batch.step) if batch.step is not None else None
            if opened is None or opened.span is None or opened.ended:
                parent, context = self._parent(get_current_span(), run)
                self._spread(tracing, batch.records, parent, context)
                return
            span = opened.span
            if not span.is_recording():
                return  # sampled out, as the program asked for
            rest = self._fill(opened, span, batch.records)
            self._spread(opened.tracing, rest, span, set_span_in_context(span))

    def _fill(self, opened: _Open, span: Span, records: Sequence[Record]) -> Sequence[Record]:
        """Put as many records on a step's own span as it takes; the rest is returned."""
        limit = opened.tracing.event_limit(span)
        trace = span.get_span_context().trace_id
        for position, record in enumerate(records):
            size = estimate_event_bytes(record)
            if (
                opened.size + size > CHUNK_BYTES
                or (limit is not None and len(opened.records) >= limit)
                or self._size.is_full(trace, opened.size + size)
            ):
                return records[position:]
            opened.size += size
            opened.records.append(record)
            if opened.tracing.processor is None:
                span.add_event(ACTIVATION, event_attributes(record), record.time_ns)
        return ()

    def _spread(
        self, tracing: _Tracing, records: Sequence[Record], parent: Span, context: Context
    ) -> None:
        """Put records on spans `torch.step.events` beneath `parent`, or, where its trace is full,
        linked to it.
        """
        where = parent.get_span_context()
        position, beginning, count = 0, None, len(records)
        while position < count:
            pieces = chunk_records(records[position:])
            some, size = next(pieces)
            start_ns, end_ns = some[0].time_ns, max(record.time_ns for record in some)
            if self._size.is_full(where.trace_id, size + SPAN_BYTES):
                span = self._start_root(
                    tracing, "torch.step.events", context, parent.get_span_context(), {}, start_ns
                )
                beginning = span
            else:
                span = tracing.tracer.start_span("torch.step.events", context, start_time=start_ns)
            limit = tracing.event_limit(span)
            if limit is not None and limit < len(some):
                some = some[:limit]
                size = sum(map(estimate_event_bytes, some))
            own = span.get_span_context()
            if not some:  # the program's provider allows no events at all
                self._losses.count("span_event", "event_limit", count - position)
                span.end(end_ns)
                return
            self._size.grow(own.trace_id, size + SPAN_BYTES)
            if tracing.processor is not None:
                tracing.processor.events[own.span_id] = some, size
            elif span.is_recording():
                for record in some:
                    span.add_event(ACTIVATION, event_attributes(record), record.time_ns)
            span.end(end_ns)
            if beginning is not None:  # go on in the new trace until that is full as well
                where, context = own, set_span_in_context(span)
                parent, beginning = span, None
            position += len(some)

    # -- the run
    # ----------------------------------------------------------------------------------------------

    def _tracing(self) -> _Tracing | None:
        provider = self._pipelines.provider("traces")
        if provider is None and not self._pipelines.exports("traces"):
            return None
        key = None if provider is None else id(provider)
        tracing = self._tracings.get(key)
        if tracing is None:
            with self._lock:
                tracing = self._tracings.get(key)
                if tracing is None:
                    tracing = (
                        _Tracing.own(self._pipelines)
                        if provider is None
                        else _Tracing.of_program(provider)
                    )
                    self._tracings[key] = tracing
        return tracing

    def _run_span(self, tracing: _Tracing, start_ns: int) -> Span:
        """The span of this process's run, started at the first call; its trace is handed on to
        processes started later.
        """
        if self._run is not None:
            return self._run
        carried = {
            name.lower(): os.environ[name]
            for name in (_CARRIER, "TRACESTATE")
            if name in os.environ
        }
        joined = _propagator.extract(carried, Context())
        context = joined
        in_trace = get_current_span(joined).get_span_context().is_valid
        if in_trace or multiprocessing.parent_process() is not None:
            self._size.share = JOINED
        if not in_trace and tracing.ids is not None:
            tracing.ids.next_trace_id = self._job.trace_id
        elif not in_trace:
            context = self._stand_in(tracing)
        attributes: dict[str, Any] = {
            "otel_torch.run.id": self._job.run_id,
            "dl.rank": self._job.rank,
        }
        self._run = tracing.tracer.start_span(
            "torch.run", context, attributes=attributes, start_time=start_ns
        )
        self._run_context = self._run.get_span_context()
        self._size.run = self._run_trace = self._run_context.trace_id
        self._ours.add(self._run_context.span_id)
        self._size.grow(self._run_context.trace_id, SPAN_BYTES + 60 * LINKS)
        if not os.environ.get(_CARRIER) and self._run_context.is_valid:
            carrier: dict[str, str] = {}
            _propagator.inject(carrier, set_span_in_context(self._run))
            self._carrier = os.environ[_CARRIER] = carrier["traceparent"]
        return self._run

    def _stand_in(self, tracing: _Tracing) -> Context:
        """A remote parent that gives a span of the program's provider the run's trace id, and its
        sampler's own decision.
        """
        sampled = TraceFlags.SAMPLED
        sampler = getattr(tracing.provider, "sampler", None)
        if sampler is not None:
            decision = sampler.should_sample(None, self._job.trace_id, "torch.run").decision
            sampled = TraceFlags.SAMPLED if decision.is_sampled() else TraceFlags.DEFAULT
        span_id = (
            int.from_bytes(hashlib.sha256(f"run:{self._job.run_id}".encode()).digest()[:8], "big")
            or 1
        )
        return set_span_in_context(
            NonRecordingSpan(SpanContext(self._job.trace_id, span_id, True, TraceFlags(sampled))),
            Context(),
        )

    def finish(self, deadline: float) -> None:
        """End what is still open, marked as such: an open span never leaves the process."""
        now = time.time_ns()
        with self._lock:
            for opened in reversed(list(self._open.values())):
                if opened.span is not None and not opened.ended:
                    opened.span.set_attribute("otel_torch.unfinished", True)
                    self._end(opened, opened.span, now)
                    opened.ended = True
            lit = list(self._lit)
            for span in reversed(lit):
                if self._lit.pop(span, None) is not None and span.is_recording():
                    span.set_attribute("otel_torch.unfinished", True)
                    span.home.end(span, now)
            self.release_spans(list(lit))
            if self._run is not None and self._run.is_recording():
                if self._linked:
                    self._run.set_attribute("otel_torch.linked_traces", self._linked)
                self._run.end(now)
        if self._carrier is not None and os.environ.get(_CARRIER) == self._carrier:
            del os.environ[_CARRIER]


def _estimate_span(scope: Scope) -> int:
    events = sum(120 + _size_of_attributes(attributes) for _, _, attributes in scope.events)
    return SPAN_BYTES + _size_of_attributes(scope.attributes) + events
