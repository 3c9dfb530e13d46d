"""Sends one span, one log event and one metric point to the configured endpoints, so that
`otel-torch doctor` finds a broken endpoint before a long run does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from otel_torch.records import Record
from otel_torch.telemetry.otlp.exporters import OTEL_SIGNALS, exporters_by_signal

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ProbeResult:
    """The answer to one signal's message. `endpoint` has no credentials."""

    signal: str
    endpoint: str
    accepted: bool
    detail: str


def probe(environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT_S) -> list[ProbeResult]:
    """Send one item of each signal to each of its exporters, all at once, and return the results
    within `timeout` seconds.

    Exporters read the process's environment, so it is replaced by `environ` meanwhile.
    """
    exporters = exporters_by_signal(environ)
    if not exporters:
        return []
    results: dict[tuple[str, str], ProbeResult] = {}
    pairs = [(signal, name) for signal in OTEL_SIGNALS for name in exporters.get(signal, ())]
    with _environment(environ):
        threads = [
            threading.Thread(
                target=_try_exporter,
                args=(*pair, results),
                name=f"otel_torch-{pair[0]}",
                daemon=True,
            )
            for pair in pairs
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    return [
        results.get((signal, name)) or ProbeResult(signal, "", False, f"{name}: no answer in time")
        for signal, name in pairs
    ]


def _try_exporter(signal: str, name: str, results: dict[tuple[str, str], ProbeResult]) -> None:
    try:
        results[signal, name] = _send(signal, name)
    except Exception as error:
        detail = f"{name}: {type(error).__name__}: {error}"
        results[signal, name] = ProbeResult(signal, "", False, detail)


def _send(signal: str, name: str) -> ProbeResult:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    from otel_torch import __version__
    from otel_torch.process.job import this_job
    from otel_torch.telemetry.ids import PrivateIds
    from otel_torch.telemetry.otlp.answer import Answer, explain
    from otel_torch.telemetry.otlp.queue_items import GaugeItem, LogItem, QueueItem, SpanItem
    from otel_torch.telemetry.otlp.transport import open_transport
    from otel_torch.telemetry.resource import build_resource

    now = time.time_ns()
    record = Record("", "out", 0, 0, 0, "doctor", "forward", None, {"mean": 0.0}, now)
    resource, scope = build_resource(this_job()), InstrumentationScope("otel_torch", __version__)
    ids, flags = PrivateIds(), TraceFlags(TraceFlags.SAMPLED)
    context = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, flags)
    span = ReadableSpan(
        "otel_torch.doctor",
        context,
        resource=resource,
        start_time=now,
        end_time=now,
        instrumentation_scope=scope,
    )
    items: dict[str, QueueItem] = {
        "traces": SpanItem(span, [record], 1000),
        "logs": LogItem([record], 1000, now, context),
        "metrics": GaugeItem([record], 1000, with_step=False),
    }
    transport = open_transport(signal, name, resource, scope)
    transport.reports_errors = False  # the result is reported instead
    answer: Answer = transport.send(transport.encode(items[signal])[0])
    transport.shutdown()
    endpoint: str = transport.endpoint
    if answer.kind == "accepted" and not answer.rejected:
        return ProbeResult(signal, endpoint, True, f"accepted by {endpoint}")
    return ProbeResult(signal, endpoint, False, explain(endpoint, transport.protocol, answer))


@contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    if environ is os.environ:
        yield
        return
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
