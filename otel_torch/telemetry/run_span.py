"""The span of a process's run, and the trace that it shares with the other processes of the run."""

from __future__ import annotations

import hashlib
import multiprocessing
import os

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_torch.process.job import Job
from otel_torch.telemetry.sinks.trace_size import JOINED_SHARE, SPAN_BYTES, TraceSize
from otel_torch.telemetry.tracing import LINK_BYTES, Tracing

# links from the run's span to traces that steps start; every one of these links back to the run
MAX_LINKS = 100
_CARRIER = "TRACEPARENT"
_propagator = TraceContextTextMapPropagator()


class RunSpan:
    """Starts the span of the run, links it to the traces that steps start, and ends it.

    Attributes:
        span: None until the first scope or record.
        context: of the span; None likewise.
        trace_id: of the span; 0 likewise.
    """

    def __init__(self, job: Job, size: TraceSize) -> None:
        self._job, self._size = job, size
        self.span: Span | None = None
        self.context: SpanContext | None = None
        self.trace_id = 0
        self._carrier: str | None = None
        self._links = self._linked_traces = 0

    def get(self, tracing: Tracing, start_ns: int) -> Span:
        """Return the span, and start it at the first call.

        Processes that are started later join its trace through the environment.
        """
        if self.span is None:
            self.span = self._start(tracing, start_ns)
        return self.span

    def _start(self, tracing: Tracing, start_ns: int) -> Span:
        span = tracing.tracer.start_span(
            "torch.run",
            self._parent(tracing),
            attributes={"otel_torch.run.id": self._job.run_id, "dl.rank": self._job.rank},
            start_time=start_ns,
        )
        self.context = span.get_span_context()
        self._size.run = self.trace_id = self.context.trace_id
        self._size.grow(self.trace_id, SPAN_BYTES + LINK_BYTES * MAX_LINKS)
        if not os.environ.get(_CARRIER) and self.context.is_valid:
            carrier: dict[str, str] = {}
            _propagator.inject(carrier, set_span_in_context(span))
            self._carrier = os.environ[_CARRIER] = carrier["traceparent"]
        return span

    def _parent(self, tracing: Tracing) -> Context:
        """Return the context in which the run's span starts.

        It is the trace of the environment, if any; else the trace that all ranks of the run share.
        """
        variables = (_CARRIER, "TRACESTATE")
        carried = {name.lower(): os.environ[name] for name in variables if name in os.environ}
        context = _propagator.extract(carried, Context())
        is_joining = get_current_span(context).get_span_context().is_valid
        if is_joining or multiprocessing.parent_process() is not None:
            self._size.share = JOINED_SHARE
        if is_joining:
            return context
        if tracing.ids is not None:
            tracing.ids.next_trace_id = self._job.trace_id
            return context
        return self._remote_parent(tracing)

    def _remote_parent(self, tracing: Tracing) -> Context:
        """Return a made-up remote parent, which gives a span of the program's provider the run's
        trace id; sampled as the provider's sampler decides.
        """
        flags = TraceFlags.SAMPLED
        sampler = getattr(tracing.provider, "sampler", None)
        if sampler is not None:
            decision = sampler.should_sample(None, self._job.trace_id, "torch.run").decision
            flags = TraceFlags.SAMPLED if decision.is_sampled() else TraceFlags.DEFAULT
        digest = hashlib.sha256(f"run:{self._job.run_id}".encode()).digest()
        span_id = int.from_bytes(digest[:8], "big") or 1
        parent = SpanContext(self._job.trace_id, span_id, True, TraceFlags(flags))
        return set_span_in_context(NonRecordingSpan(parent), Context())

    def link(self, root: Span) -> None:
        """Link to the root of a trace that a step or region has started."""
        self._linked_traces += 1
        if self.span is not None and self._links < MAX_LINKS and root.get_span_context().is_valid:
            self._links += 1
            self.span.add_link(root.get_span_context())

    def finish(self, end_ns: int) -> None:
        """End the span, and take it out of the environment."""
        if self.span is not None and self.span.is_recording():
            if self._linked_traces:
                self.span.set_attribute("otel_torch.linked_traces", self._linked_traces)
            self.span.end(end_ns)
        if self._carrier is not None and os.environ.get(_CARRIER) == self._carrier:
            del os.environ[_CARRIER]
