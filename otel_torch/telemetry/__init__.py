"""Which signals have somewhere to go, and the sink that takes them there. Importing this loads nothing of OpenTelemetry."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from otel_torch.console import say, say_once
from otel_torch.job import Job
from otel_torch.recorder import Sink
from otel_torch.records import Losses
from otel_torch.settings import Settings, words

TRACE_SIGNALS = ("traces", "metrics", "logs")
# what our signals need of OpenTelemetry's
NEEDS = {"spans": "traces", "span_events": "traces", "log_events": "logs", "metrics": "metrics"}
_EXPORTER_OF_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def outlets(environ: Mapping[str, str] = os.environ) -> dict[str, list[str]]:
    """The exporters that the standard variables name, by OpenTelemetry signal; a signal that goes nowhere is absent.

    Chosen as the SDK chooses them, except that an endpoint alone is enough to mean `otlp`.

    >>> outlets({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_LOGS_EXPORTER": "none"})
    {'traces': ['otlp_proto_grpc'], 'metrics': ['otlp_proto_grpc']}
    >>> outlets({})
    {}
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    chosen = {
        signal: [name for name in map(_resolver(signal, environ), _named(signal, environ)) if name] for signal in TRACE_SIGNALS
    }
    return {signal: names for signal, names in chosen.items() if names}


def _named(signal: str, environ: Mapping[str, str]) -> list[str]:
    names = words(environ.get(f"OTEL_{signal.upper()}_EXPORTER", ""))
    if names:
        return [name for name in names if name.lower() != "none"]
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return ["otlp"] if any(environ.get(name, "").strip() for name in endpoints) else []


def _resolver(signal: str, environ: Mapping[str, str]) -> Callable[[str], str | None]:
    """What turns `otlp` into the exporter of the protocol that is asked for."""
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name_of_protocol, protocol = next(
        ((name, environ[name].strip()) for name in variables if environ.get(name, "").strip()), ("", "grpc")
    )

    def resolve(name: str) -> str | None:
        if name != "otlp":
            return name
        if protocol not in _EXPORTER_OF_PROTOCOL:
            say_once(
                f"{name_of_protocol}={protocol!r} is not supported, {signal} are not sent; "
                f"use {' or '.join(_EXPORTER_OF_PROTOCOL)}"
            )
        return _EXPORTER_OF_PROTOCOL.get(protocol)

    return resolve


def build_sinks(settings: Settings, job: Job, losses: Losses, at_exit: Callable[[], Any] | None = None) -> list[Sink]:
    """The sinks that send what `settings` asks for; none for a rank that does not export. Loads nothing of OpenTelemetry
    until there is something to send and somewhere to send it to.

    at_exit: what ends the session. It is registered with `atexit` when the program's own provider is first used, so that
    it runs before that provider shuts down, as exit functions run in reverse order.
    """
    from otel_torch.telemetry.delivery import Telemetry

    if not settings.signals:
        return []
    where = outlets()
    if where and settings.ranks.text == "auto" and job.world_size > 16 and job.rank == 0:
        say(f"{job.world_size} ranks: only the first of each node exports by OTLP; OTEL_TORCH_RANKS=all changes that")
    if not settings.ranks.includes(rank=job.rank, local_rank=job.local_rank, world_size=job.world_size):
        return []
    if "span_events" in settings.signals and "spans" not in settings.signals:
        say_once("OTEL_TORCH_SIGNALS: span_events need spans, without them they are not sent; log_events stand alone")
    return [Telemetry(settings, job, losses, where, at_exit)]


def trace_id(job: Job, environ: Mapping[str, str] = os.environ) -> str:
    """The id, in hex, of the trace that the run's spans are in: that of TRACEPARENT where it is set, else the run's own.

    >>> trace_id(Job("run", 0, 0, 1, "host", 1), {"TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    '0af7651916cd43dd8448eb211c80319c'
    """
    parts = environ.get("TRACEPARENT", "").split("-")
    if len(parts) == 4 and len(parts[1]) == 32 and set(parts[1]) <= set("0123456789abcdef") and int(parts[1], 16):
        return parts[1]
    return f"{job.trace_id:032x}"
