"""Which signals have somewhere to go, and the sink that takes them there. Importing this loads
nothing of OpenTelemetry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from otel_torch.console import say, say_once
from otel_torch.job import Job
from otel_torch.recorder import Sink
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.records import Losses
from otel_torch.settings import Settings, words

TRACE_SIGNALS = ("traces", "metrics", "logs")
# what our signals need of OpenTelemetry's
NEEDS = {"spans": "traces", "span_events": "traces", "log_events": "logs", "metrics": "metrics"}
_EXPORTER_OF_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def outlets(environ: Mapping[str, str] = os.environ) -> dict[str, list[str]]:
    """The exporters that the standard variables name, by OpenTelemetry signal; a signal that goes
    nowhere is absent.

    Chosen as the SDK chooses them, except that an endpoint alone is enough to mean `otlp`.

    >>> outlets({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_LOGS_EXPORTER": "none"})
    {'traces': ['otlp_proto_grpc'], 'metrics': ['otlp_proto_grpc']}
    >>> outlets({})
    {}
    """
    if _disabled(environ):
        return {}
    chosen = {
        signal: [name for name in map(_resolver(signal, environ), _named(signal, environ)) if name]
        for signal in TRACE_SIGNALS
    }
    return {signal: names for signal, names in chosen.items() if names}


def otlp_exporter(signal: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The OTLP exporter for the endpoint that the standard variables name for a signal, whatever
    else they choose; None where they name none, or a protocol that is not supported.

    >>> otlp_exporter("logs", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_LOGS_EXPORTER": "console"})
    'otlp_proto_grpc'
    """
    return _resolver(signal, environ)("otlp") if _has_endpoint(signal, environ) else None


def _disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _has_endpoint(signal: str, environ: Mapping[str, str]) -> bool:
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environ.get(name, "").strip() for name in names)


def _named(signal: str, environ: Mapping[str, str]) -> list[str]:
    names = words(environ.get(f"OTEL_{signal.upper()}_EXPORTER", ""))
    if names:
        return [name for name in names if name.lower() != "none"]
    return ["otlp"] if _has_endpoint(signal, environ) else []


def _resolver(signal: str, environ: Mapping[str, str]) -> Callable[[str], str | None]:
    """What turns `otlp` into the exporter of the protocol that is asked for."""
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name_of_protocol, protocol = next(
        ((name, environ[name].strip()) for name in variables if environ.get(name, "").strip()),
        ("", "grpc"),
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


def build_sinks(
    settings: Settings,
    job: Job,
    losses: Losses,
    at_exit: Callable[[], Any] | None = None,
    budget: DiskBudget | None = None,
) -> list[Sink]:
    """The sinks that send what `settings` asks for, and write it to files; none for a rank that
    does neither. Loads nothing of OpenTelemetry until there is something to send and somewhere to
    send it to.

    budget: how much this process may write to disk; one of its own unless given. at_exit: what ends
    the session. It is registered with `atexit` when the program's own provider is first used, so
    that it runs before that provider shuts down, as exit functions run in reverse order.
    """
    from otel_torch.telemetry.telemetry_sink import Telemetry

    if not settings.signals:
        return []
    place = {"rank": job.rank, "local_rank": job.local_rank, "world_size": job.world_size}
    writes = (
        settings.otlp_file is not None
        and settings.jsonl_ranks.includes(**place)
        and not _disabled(os.environ)
    )
    exports = settings.ranks.includes(**place)
    where = outlets() if exports else {}
    if where and settings.ranks.text == "auto" and job.world_size > 16 and job.rank == 0:
        say(
            f"{job.world_size} ranks: only the first of each node exports by OTLP; OTEL_TORCH_RANKS=all changes that"
        )
    if not (exports or writes):
        return []
    if "span_events" in settings.signals and "spans" not in settings.signals:
        say_once(
            "OTEL_TORCH_SIGNALS: span_events need spans, without them they are not sent; log_events stand alone"
        )
    file_budget = (budget or DiskBudget(settings.max_bytes)) if writes else None
    return [Telemetry(settings, job, losses, where, at_exit, file_budget)]


def trace_id(job: Job, environ: Mapping[str, str] = os.environ) -> str:
    """The id, in hex, of the trace that the run's spans are in: that of TRACEPARENT where it is
    set, else the run's own.

    >>> trace_id(Job("run", 0, 0, 1, "host", 1), {"TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    '0af7651916cd43dd8448eb211c80319c'
    """
    parts = environ.get("TRACEPARENT", "").split("-")
    if (
        len(parts) == 4
        and len(parts[1]) == 32
        and set(parts[1]) <= set("0123456789abcdef")
        and int(parts[1], 16)
    ):
        return parts[1]
    return f"{job.trace_id:032x}"
