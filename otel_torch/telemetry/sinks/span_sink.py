"""Turns scopes into spans, and activation records into events of their step's span.

What it prevents in the traces of long runs: spans without a parent because a step is not a lexical
block, events dropped silently beyond a span's limit, traces larger than a backend accepts, and
spans lost because they were open at exit.

A step of a training loop is a trace of its own, linked from and to the span of the run:

    torch.run                             one per process; its trace id is derived from the run id
      fastvideo.region::…_model_loading   a region
    torch.step  (linked to torch.run)     the root of a trace
      torch.forward                       a child, also if the step is not the current span
      torch.step.events                   records that do not fit on the step's span
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context, get_current
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanContext,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)

from otel_torch.process.job import Job
from otel_torch.recorder import Sink
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.regions.closer import RegionCloser, RegionLabel, RegionSpans
from otel_torch.settings import Settings
from otel_torch.telemetry.attributes import (
    ACTIVATION,
    estimate_event_bytes,
    event_attributes,
    to_attributes,
)
from otel_torch.telemetry.light_span import (
    CURRENT,
    LightSpan,
    LightTracer,
    attach,
    detach,
    read_context,
)
from otel_torch.telemetry.limits import count_dropped
from otel_torch.telemetry.otlp.queue_items import CHUNK_BYTES, SpanItem, chunk_records
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.providers import watch_tracer_provider
from otel_torch.telemetry.run_span import RunSpan
from otel_torch.telemetry.sinks.trace_size import SPAN_BYTES, TraceSize
from otel_torch.telemetry.tracing import Tracing, estimate_scope, estimate_span

# an unmodified span of a region
_REGION_BYTES = SPAN_BYTES + 100
# a Context refuses item assignment, because contexts are usually shared; ours is new
_set_item = dict.__setitem__


@dataclass(slots=True, eq=False)
class _OpenScope:
    """An open scope with its span. span: None if the scope only passes its parent's context on."""

    scope: Scope
    span: Span | None
    tracing: Tracing
    parent_span_id: int = 0  # the current span's id when the scope started
    trace_bytes_before: int = 0  # the size of its trace then
    attached: tuple[Token[Context], int] | None = None  # with the thread's id
    records: list[Record] = field(default_factory=list)
    size: int = 0  # estimated bytes of the records
    ended: bool = False
    attributes: Any = field(default_factory=dict)  # with which the span started

    def has_set(self, key: str, attributes: Any) -> bool:
        """Return whether the span started with the value that an attribute has now."""
        return key in self.attributes and self.attributes[key] == attributes[key]


class SpanSink(Sink, RegionSpans):
    """Makes the spans of one process, under the span of its run."""

    accepts_deferred_regions = True

    def __init__(self, settings: Settings, job: Job, losses: Losses, pipelines: Pipelines) -> None:
        self._losses, self._pipelines = losses, pipelines
        self._has_event_signal = "span_events" in settings.signals
        self._has_messages = settings.exceptions == "message"
        self._region_prefix = settings.region_prefix
        # by id of the program's provider; None for our own
        self._tracings: dict[int | None, Tracing] = {}
        self._open: dict[Scope, _OpenScope] = {}
        # open scopes that are not the current span of a thread: steps, and regions around them;
        # replaced at each change, so that it is read without the lock
        self._detached: tuple[_OpenScope, ...] = ()
        self._own_span_ids: set[int] = set()
        # open spans of regions without a scope, and whether the region is registered
        self._open_regions: dict[LightSpan, bool] = {}
        self._light_tracer: LightTracer | None = None
        # the program's tracer provider when `_light_tracer` was made
        self._read_provider: Callable[[], object] = lambda: None
        self._provider: object = self
        self._size = TraceSize(job.world_size)
        self._run = RunSpan(job, self._size)
        self._is_run_full = False
        self._last_step_bytes = 0
        self._lock = threading.RLock()

    # -- scopes

    def open(self, scope: Scope) -> None:
        tracing = self._tracing()
        if tracing is None or not scope.has_span:
            return
        with self._lock:
            run = self._run.get(tracing, scope.start_ns)
            current = get_current_span()
            parent, context = self._parent_of_new(current, run)
            if scope.kind == "forward" and self._is_in_region():
                # the region's span stands for the forward
                if parent is current:
                    return
                opened = _OpenScope(scope, None, tracing)
            else:
                opened = self._start_scope(tracing, scope, parent, context, run)
                opened.parent_span_id = current.get_span_context().span_id
                context = set_span_in_context(opened.span or INVALID_SPAN, context)
            self._open[scope] = opened
            if not scope.lexical:
                self._detached = (*self._detached, opened)
        if scope.lexical:
            opened.attached = context_api.attach(context), threading.get_ident()

    def close(self, scope: Scope) -> None:
        with self._lock:
            opened = self._open.pop(scope, None)
            if opened is None:
                return
            self._detach(opened)
        if opened.span is not None and not opened.ended:
            self._end(opened, opened.span, scope.end_ns)

    def detach_scope(self, scope: Scope) -> None:
        """End the scope's time as the current span; `close` follows, maybe from another thread."""
        with self._lock:
            opened = self._open.get(scope)
            if opened is None:
                return
            self._detach(opened)
        span, error = opened.span, scope.error
        if span is not None and error is not None and not opened.ended and span.is_recording():
            self._mark_error(span, error, scope.end_ns)
        scope.error = None  # its traceback keeps the program's tensors alive until `close`

    def _detach(self, opened: _OpenScope) -> None:
        if opened in self._detached:
            self._detached = tuple(each for each in self._detached if each is not opened)
        attached, opened.attached = opened.attached, None
        if attached is not None and attached[1] == threading.get_ident():
            context_api.detach(attached[0])

    def context_of(self, scope: Scope | None) -> SpanContext | None:
        """Return the context of an open scope's span, or else of the run's span."""
        opened = self._open.get(scope) if scope is not None else None
        if opened is not None and opened.span is not None:
            return opened.span.get_span_context()
        return self._run.context

    def _parent_of_new(self, current: Span, run: Span) -> tuple[Span, Context]:
        """Return the parent of a new span, and the context in which it is the current one."""
        span_context = current.get_span_context()
        current_id = span_context.span_id if span_context.is_valid else 0
        parent = self._find_parent(current, current_id, run)
        return parent, set_span_in_context(parent, get_current())

    def _find_parent(self, current: Span, current_id: int, run: Span) -> Span:
        """Return the innermost detached scope's span that started under the current one; else the
        current span; else the run's.
        """
        for opened in reversed(self._detached):
            if opened.span is not None and (not current_id or opened.parent_span_id == current_id):
                return opened.span
        return current if current_id else run

    def _is_in_region(self) -> bool:
        """Return whether a registered region is open at a call site: its span names the forward."""
        if True in list(self._open_regions.values()):
            return True
        prefix = self._region_prefix
        return any(scope.kind == "region" and scope.name.startswith(prefix) for scope in self._open)

    def _start_scope(
        self, tracing: Tracing, scope: Scope, parent: Span, context: Context, run: Span
    ) -> _OpenScope:
        """Start the scope's span under `parent`, or as the root of a trace that is linked to it.

        A root is started for a training step, and if the trace of the parent would grow too large.
        """
        is_step = scope.kind == "step"
        parent_context = parent.get_span_context()
        is_of_program = (
            type(parent) is not LightSpan
            and parent_context.span_id not in self._own_span_ids
            and parent is not run
        )
        linked = parent_context if is_of_program else run.get_span_context()
        expected_bytes = max(self._last_step_bytes if is_step else 0, SPAN_BYTES)
        is_full = self._size.is_full(linked.trace_id, expected_bytes)
        starts_trace = is_full and (is_step or parent is run)
        if is_step and scope.training and not is_of_program:
            starts_trace = True
        attributes = to_attributes(scope.attributes)
        if starts_trace:
            span = self._start_root(
                tracing, scope.name, context, linked, attributes, scope.start_ns
            )
            self._run.link(span)
        else:
            span = tracing.tracer.start_span(
                scope.name, context, attributes=attributes, start_time=scope.start_ns
            )
        span_context = span.get_span_context()
        self._own_span_ids.add(span_context.span_id)
        opened = _OpenScope(scope, span, tracing, attributes=attributes)
        opened.trace_bytes_before = self._size[span_context.trace_id]
        return opened

    def _start_root(
        self,
        tracing: Tracing,
        name: str,
        context: Context,
        linked: SpanContext,
        attributes: Any,
        start_ns: int,
    ) -> Span:
        """Start the root of a new trace, with a link to what would have been its parent."""
        without_parent = set_span_in_context(INVALID_SPAN, context)
        return tracing.tracer.start_span(
            name, without_parent, attributes=attributes, links=[Link(linked)], start_time=start_ns
        )

    def _end(self, opened: _OpenScope, span: Span, end_ns: int) -> None:
        """Set the attributes, events and error of an ended scope, and end its span."""
        scope = opened.scope
        processor = opened.tracing.processor
        if span.is_recording():
            attributes = to_attributes(scope.attributes)
            # a limit would drop, and count, again what it has dropped at the start
            span.set_attributes(
                {key: attributes[key] for key in attributes if not opened.has_set(key, attributes)}
            )
            if scope.device_s is not None:
                span.set_attribute("torch.device.duration", float(scope.device_s))
            for time_ns, name, attributes in scope.events:
                span.add_event(name, to_attributes(attributes), time_ns)
            if scope.error is not None:
                self._mark_error(span, scope.error, end_ns)
        context = span.get_span_context()
        self._size.grow(context.trace_id, opened.size + estimate_scope(scope))
        if processor is not None and opened.records:
            processor.events[context.span_id] = opened.records, opened.size
        span.end(end_ns)
        self._own_span_ids.discard(context.span_id)
        if scope.kind == "step":
            trace_bytes = self._size[context.trace_id]
            self._last_step_bytes = max(trace_bytes - opened.trace_bytes_before, 0)

    def _mark_error(self, span: Span, error: BaseException, end_ns: int) -> None:
        cls = type(error)
        name = cls.__qualname__
        if cls.__module__ != "builtins":
            name = f"{cls.__module__}.{name}"
        attributes = {"exception.type": name}
        description = name
        if self._has_messages:
            attributes["exception.message"] = str(error)
            description = f"{name}: {error}"
        span.set_status(Status(StatusCode.ERROR, description))
        span.add_event("exception", attributes, end_ns)

    # -- regions without a scope

    @property
    def region_spans(self) -> RegionSpans:
        return self

    def _find_light_tracer(self) -> None:
        """Look up the program's tracer provider again, and whether it can make light spans."""
        self._read_provider = watch_tracer_provider()
        self._provider = self._read_provider()
        tracing = self._tracing()
        self._light_tracer = tracing.light_tracer() if tracing is not None else None

    def start_region(
        self, closer: RegionCloser, label: RegionLabel, start_ns: int
    ) -> LightSpan | None:
        """Start a region's span as the current one. Does what `open` does, but not for steps.

        None if the run's span has not started, or if a sampler of the program has to decide.
        """
        if self._read_provider() is not self._provider:
            self._find_light_tracer()
        tracer, run = self._light_tracer, self._run.span
        if tracer is None or run is None:
            return None
        # `tracer.is_current()`, without the call
        if (
            tracer.multi_processor._span_processors is not tracer.processors
            or tracer.tracer._tracer_config is not tracer.config
        ):
            self._find_light_tracer()
            return self.start_region(closer, label, start_ns)
        context = read_context()
        parent: Any = context.get(CURRENT)
        if type(parent) is LightSpan:
            current_id = parent.span_id
        elif parent is None:
            current_id = 0
        else:
            parent = get_current_span(context)
            span_context = parent.get_span_context()
            current_id = span_context.span_id if span_context.is_valid else 0
        if self._detached:
            parent = self._find_parent(parent, current_id, run)
        elif not current_id:
            parent = run
        if parent is run and (
            self._is_run_full or self._size.is_full(self._run.trace_id, SPAN_BYTES)
        ):
            self._is_run_full = True  # a trace never shrinks
            span = tracer.start(closer, label, None, context, start_ns)
            if span is not None:
                span.linked_span = run
                self._run.link(span)
        else:
            span = tracer.start(closer, label, parent, context, start_ns)
        if span is not None:
            self._open_regions[span] = label.is_registered
            inner = Context(context)
            _set_item(inner, CURRENT, span)
            span.context_token = attach(inner)
        return span

    def end_region(self, span: LightSpan, end_ns: int, error: BaseException | None) -> None:
        """End a region's span, which is then no longer the current one."""
        try:
            detach(span.context_token)
        except (ValueError, RuntimeError):
            pass  # a generator that ends in another context than it started in
        if self._open_regions.pop(span, None) is None:
            return  # ended with the session, or open in the parent process
        span.context_token = None
        if span._end_time is not None:
            return  # ended by the program
        if error is not None:
            self._mark_error(span, error, end_ns)
        is_modified = span.is_modified
        if is_modified or span.parent_span is not None:  # a trace of one root stays small
            size = estimate_span(span) if is_modified else _REGION_BYTES
            self._size.grow_unlocked(span.trace[0], size)
        tracer = span.light_tracer
        if tracer.enqueue is None or is_modified:
            tracer.end(span, end_ns)
        else:
            span._end_time = end_ns
            tracer.enqueue(span)

    def release_spans(self, entries: Sequence[Any]) -> None:
        """Give spans whose device time is known to our exporters or the program's processors."""
        items: dict[LightTracer, list[SpanItem]] = {}
        for span in entries:
            if not (span.has_span and span.awaits_release):
                continue
            tracer: LightTracer = span.light_tracer
            if tracer.put is not None:
                span.awaits_release = False
                size = estimate_span(span) if span.is_modified else _REGION_BYTES
                if span.is_modified or tracer.may_drop_attributes:
                    count_dropped(span, self._losses)
                items.setdefault(tracer, []).append(SpanItem(span, [], size))
            else:
                tracer.process(span)
        for tracer, collected in items.items():
            if tracer.put is not None:
                tracer.put(collected)

    def discard_open_spans(self) -> None:
        """In a forked child, forget the open spans: the parent ends them."""
        self._open_regions.clear()

    # -- activations

    def write(self, batch: Batch) -> None:
        if not self._has_event_signal or not batch.records:
            return
        tracing = self._tracing()
        if tracing is None:
            return
        with self._lock:
            run = self._run.get(tracing, batch.records[0].time_ns)
            opened = self._open.get(batch.step) if batch.step is not None else None
            if opened is None or opened.span is None or opened.ended:
                parent, context = self._parent_of_new(get_current_span(), run)
                self._add_event_spans(tracing, batch.records, parent, context)
                return
            span = opened.span
            if not span.is_recording():
                return  # not sampled
            remaining = self._add_events(opened, span, batch.records)
            self._add_event_spans(opened.tracing, remaining, span, set_span_in_context(span))

    def _add_events(
        self, opened: _OpenScope, span: Span, records: Sequence[Record]
    ) -> Sequence[Record]:
        """Add as many records to a step's span as it takes; return the remaining ones."""
        limit = opened.tracing.event_limit(span)
        trace_id = span.get_span_context().trace_id
        for position, record in enumerate(records):
            size = estimate_event_bytes(record)
            if (
                opened.size + size > CHUNK_BYTES
                or (limit is not None and len(opened.records) >= limit)
                or self._size.is_full(trace_id, opened.size + size)
            ):
                return records[position:]
            opened.size += size
            opened.records.append(record)
            if opened.tracing.processor is None:
                span.add_event(ACTIVATION, event_attributes(record), record.time_ns)
        return ()

    def _add_event_spans(
        self, tracing: Tracing, records: Sequence[Record], parent: Span, context: Context
    ) -> None:
        """Put records on spans `torch.step.events` under `parent`.

        If its trace is full, such a span starts a new trace and is the parent of the next ones.
        """
        position, count = 0, len(records)
        while position < count:
            part, size = next(chunk_records(records[position:]))
            parent_context = parent.get_span_context()
            starts_trace = self._size.is_full(parent_context.trace_id, size + SPAN_BYTES)
            start_ns = part[0].time_ns
            end_ns = max(record.time_ns for record in part)
            name = "torch.step.events"
            if starts_trace:
                span = self._start_root(tracing, name, context, parent_context, {}, start_ns)
            else:
                span = tracing.tracer.start_span(name, context, start_time=start_ns)
            limit = tracing.event_limit(span)
            if limit is not None and limit < len(part):
                part = part[:limit]
                size = sum(map(estimate_event_bytes, part))
            if not part:  # the program's provider allows no events
                self._losses.count("span_event", "event_limit", count - position)
                span.end(end_ns)
                return
            span_context = span.get_span_context()
            self._size.grow(span_context.trace_id, size + SPAN_BYTES)
            if tracing.processor is not None:
                tracing.processor.events[span_context.span_id] = part, size
            elif span.is_recording():
                for record in part:
                    span.add_event(ACTIVATION, event_attributes(record), record.time_ns)
            span.end(end_ns)
            if starts_trace:
                parent, context = span, set_span_in_context(span)
            position += len(part)

    def _tracing(self) -> Tracing | None:
        """Return the tracing for the program's current provider; None if spans go nowhere."""
        provider = self._pipelines.provider("traces")
        if provider is None and not self._pipelines.exports("traces"):
            return None
        key = None if provider is None else id(provider)
        if key not in self._tracings:
            with self._lock:
                if key not in self._tracings:
                    self._tracings[key] = (
                        Tracing.private(self._pipelines)
                        if provider is None
                        else Tracing.of_program(provider, self._pipelines)
                    )
        return self._tracings[key]

    def finish(self, deadline: float) -> None:
        """End the open spans, marked as unfinished: an open span is never exported."""
        now = time.time_ns()
        with self._lock:
            for opened in reversed(list(self._open.values())):
                if opened.span is not None and not opened.ended:
                    opened.span.set_attribute("otel_torch.unfinished", True)
                    self._end(opened, opened.span, now)
                    opened.ended = True
            open_regions = list(self._open_regions)
            for span in reversed(open_regions):
                if self._open_regions.pop(span, None) is not None and span.is_recording():
                    span.set_attribute("otel_torch.unfinished", True)
                    span.light_tracer.end(span, now)
            self.release_spans(open_regions)
            self._run.finish(now)
