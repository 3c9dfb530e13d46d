"""Sends one span, one log event and one metric where the standard variables say, and tells whether
each was accepted: what `otel-torch doctor` asks, before a long run finds out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from otel_torch.records import Record
from otel_torch.telemetry import TRACE_SIGNALS, outlets

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ProbeResult:
    """What became of one signal's message. endpoint: without credentials; empty where the signal
    goes nowhere.
    """

    signal: str
    endpoint: str
    accepted: bool
    detail: str


def probe(environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT_S) -> list[ProbeResult]:
    """Send one item of each signal that has an exporter, all at once; returns after `timeout`
    seconds at the latest.

    A signal that the variables send nowhere has no result. Exporters read the process's
    environment, which is `environ` meanwhile.
    """
    chosen = outlets(environ)
    if not chosen:
        return []
    results: dict[tuple[str, str], ProbeResult] = {}
    pairs = [(signal, name) for signal in TRACE_SIGNALS for name in chosen.get(signal, ())]
    with _as_environment(environ):
        threads = [
            threading.Thread(
                target=_try, args=(*pair, results), name=f"otel_torch-{pair[0]}", daemon=True
            )
            for pair in pairs
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    unanswered = "no answer in time"
    return [
        results.get(pair) or ProbeResult(pair[0], "", False, f"{pair[1]}: {unanswered}")
        for pair in pairs
    ]


def _try(signal: str, name: str, results: dict[tuple[str, str], ProbeResult]) -> None:
    try:
        results[signal, name] = _send(signal, name)
    except Exception as error:
        results[signal, name] = ProbeResult(
            signal, "", False, f"{name}: {type(error).__name__}: {error}"
        )


def _send(signal: str, name: str) -> ProbeResult:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags

    from otel_torch import __version__
    from otel_torch.job import this_job
    from otel_torch.telemetry.ids import PrivateIds
    from otel_torch.telemetry.queue_items import GaugeItem, Item, LogItem, SpanItem
    from otel_torch.telemetry.resource import describe
    from otel_torch.telemetry.transport import Answer, explain, open_transport

    now = time.time_ns()
    record = Record("", "out", 0, 0, 0, "doctor", "forward", None, {"mean": 0.0}, now)
    ids, resource, scope = (
        PrivateIds(),
        describe(this_job()),
        InstrumentationScope("otel_torch", __version__),
    )
    context = SpanContext(
        ids.generate_trace_id(), ids.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED)
    )
    span = ReadableSpan(
        "otel_torch.doctor",
        context,
        resource=resource,
        start_time=now,
        end_time=now,
        instrumentation_scope=scope,
    )
    items: dict[str, Item] = {
        "traces": SpanItem(span, [record], 1000),
        "logs": LogItem([record], 1000, now, context),
        "metrics": GaugeItem([record], 1000, with_step=False),
    }
    transport = open_transport(signal, name, resource, scope)
    transport.said = lambda answer: answer  # the result is said, not the line of a run
    answer: Answer = transport.send(transport.encode(items[signal])[0])
    transport.shutdown()
    if answer.kind == "accepted" and not answer.rejected:
        return ProbeResult(signal, transport.endpoint, True, f"accepted by {transport.endpoint}")
    return ProbeResult(
        signal,
        transport.endpoint,
        False,
        explain(transport.endpoint, transport.protocol, answer).split(". What is lost")[0],
    )


@contextmanager
def _as_environment(environ: Mapping[str, str]) -> Iterator[None]:
    if environ is os.environ:
        yield
        return
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
