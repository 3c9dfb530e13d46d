"""Where the program's own provider sends, as far as our own queues can send there.

A processor of the SDK sends what it is given when it likes, waits for a dead endpoint for tens of
seconds at the end of the program, and counts no losses. So what we record does not go through the
SDK's processors and readers for OTLP: our queues send it to the same endpoint, by a connection of
their own with the same headers and credentials. Whatever else the provider has is called as ever.

    provider's processors                        exporters    processors
    BatchSpanProcessor(OTLPSpanExporter(…))      [the OTLP]   []
    the same, and a processor of the program     [the OTLP]   [the program's]
    SimpleSpanProcessor(ConsoleSpanExporter())   []           [Simple…]

Private names of the SDK are read here; where one is missing, the provider is called for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics import Histogram
from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanProcessor, SynchronousMultiSpanProcessor, Tracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

from otel_torch.telemetry.otlp.otlp_transport import SIGNALS
from otel_torch.telemetry.otlp.temporality import read_temporalities


@dataclass(frozen=True)
class ProgramRoute:
    """What of a provider our queues replace.

    Args:
        exporters: OTLP exporters; our queues send to their endpoints.
        processors: processors or readers that only the provider itself can call.
        interval_s: how often metrics are collected.
    """

    exporters: tuple[Any, ...]
    processors: tuple[Any, ...]
    interval_s: float | None = None


def members_of(signal: str, provider: Any) -> tuple[Any, ...]:
    """Return the processors of a provider, or the readers; nothing if they are not known."""
    try:
        return tuple(_MEMBERS[signal](provider))
    except (AttributeError, TypeError):
        return ()


def find_route(signal: str, provider: Any) -> ProgramRoute:
    """Return which of a provider's exporters our queues replace."""
    try:
        if not getattr(provider, "_disabled", False):
            return _FINDERS[signal](provider)
    except (AttributeError, TypeError):  # another version, or another kind of provider
        pass
    return ProgramRoute((), (provider,))


def resource_of(provider: Any) -> Any:
    """Return the resource of a provider of the SDK. A fork changes it."""
    config = getattr(provider, "_sdk_config", provider)  # of a meter provider
    return config.resource


def protocol_of(exporter: Any) -> str | None:
    """Return `grpc` or `http` for an unmodified OTLP exporter of the SDK, else None."""
    module, name = type(exporter).__module__, type(exporter).__qualname__
    for signal in SIGNALS.values():
        for protocol in ("grpc", "http"):
            is_type = module == f"opentelemetry.exporter.otlp.proto.{protocol}.{signal.module}"
            if is_type and name == signal.exporter and "export" not in vars(exporter):
                return protocol if _has_private_names(exporter, protocol) else None
    return None


def _has_private_names(exporter: Any, protocol: str) -> bool:
    if protocol == "grpc":
        return hasattr(exporter, "_initialize_channel_and_stub")
    return hasattr(getattr(exporter._client, "_transport", None), "_session")


def _split(processors: Sequence[Any], exporters_by_type: dict[type, str]) -> ProgramRoute:
    """Split processors into the exporters that can be replaced and the remaining processors."""
    exporters, remaining = [], []
    for processor in processors:
        path = exporters_by_type.get(type(processor))
        is_modified = not {"on_end", "on_emit"}.isdisjoint(vars(processor))
        exporter: Any = None if path is None or is_modified else processor
        for name in path.split(".") if exporter is not None and path else ():
            exporter = getattr(exporter, name)
        if exporter is not None and protocol_of(exporter) is not None:
            exporters.append(exporter)
        else:
            remaining.append(processor)
    return ProgramRoute(tuple(exporters), tuple(remaining))


_SPAN_EXPORTERS: dict[type, str] = {
    BatchSpanProcessor: "_batch_processor._exporter",
    SimpleSpanProcessor: "span_exporter",
}


class ProgramProcessors(SynchronousMultiSpanProcessor):
    """The processors of the program's provider, for our spans: with our queue in place of those
    that send by OTLP.
    """

    def __init__(self, provider: Any, queue: SpanProcessor) -> None:
        self._provider, self._queue = provider, queue
        self._members: tuple[SpanProcessor, ...] | None = None
        self._current: tuple[SpanProcessor, ...] = ()

    @property
    def has_others(self) -> bool:
        """Whether there are processors beside our queue."""
        return self._span_processors != (self._queue,)

    @property
    def _span_processors(self) -> tuple[SpanProcessor, ...]:  # type: ignore[override]
        members = self._provider._active_span_processor._span_processors
        if members is not self._members:  # at first, or the program has added one
            route = _split(members, _SPAN_EXPORTERS)
            replaced = (*route.processors, self._queue)
            self._members, self._current = members, replaced if route.exporters else members
        return self._current


def can_replace_processors(tracer: Any) -> bool:
    """Return whether a tracer is the SDK's and calls its processors one after the other."""
    multi_types = (SynchronousMultiSpanProcessor, ProgramProcessors)
    return type(tracer) is Tracer and type(tracer.span_processor) in multi_types


def _find_span_route(provider: Any) -> ProgramRoute:
    if type(provider._active_span_processor) is not SynchronousMultiSpanProcessor:
        return ProgramRoute((), (provider,))
    # spans are read-only at their end, so any processor may remain
    return _split(members_of("traces", provider), _SPAN_EXPORTERS)


def _find_log_route(provider: Any) -> ProgramRoute:
    """Return the route of log records. A processor of the program may change them for those after
    it, so all is left to the provider if it has one.
    """
    from opentelemetry.sdk._logs import export as sdk

    exporters: dict[type, str] = {
        sdk.BatchLogRecordProcessor: "_batch_processor._exporter",
        sdk.SimpleLogRecordProcessor: "_exporter",
    }
    multi = provider._multi_log_record_processor
    route = _split(members_of("logs", provider), exporters)
    is_of_sdk = type(multi).__name__ == "SynchronousMultiLogRecordProcessor"
    is_enabled = provider.get_logger("otel_torch")._is_enabled()
    can_split = all(type(each) in exporters for each in route.processors)
    return route if is_of_sdk and is_enabled and can_split else ProgramRoute((), (provider,))


def restrict_logger(logger: Any, provider: Any, route: ProgramRoute) -> None:
    """Have a logger call the processors of its provider that our queues do not replace."""
    multi: Any = getattr(provider, "_multi_log_record_processor", None)
    if route.exporters:
        multi = type(multi)()
        multi._log_record_processors = route.processors
    if multi is not None:
        logger._multi_log_record_processor = multi


def _find_metric_route(provider: Any) -> ProgramRoute:
    """Return the route of metrics. An instrument is read by all readers and by all views, so all is
    left to the provider if it has any but readers for OTLP.
    """
    readers = members_of("metrics", provider)
    route = _split(readers, {PeriodicExportingMetricReader: "_exporter"})
    cumulative = AggregationTemporality.CUMULATIVE
    expected = read_temporalities().get(Histogram, cumulative)
    is_plain = (
        not provider._sdk_config.views
        and provider.get_meter("otel_torch")._meter_config.is_enabled
        and all(
            exporter._preferred_temporality.get(Histogram, cumulative) is expected
            for exporter in route.exporters
        )
    )
    if route.processors or not is_plain or not route.exporters:
        return ProgramRoute((), (provider,))
    interval_s = min(reader._export_interval_millis for reader in readers) / 1000
    return ProgramRoute(route.exporters, (), interval_s)


_MEMBERS = {
    "traces": lambda provider: provider._active_span_processor._span_processors,
    "logs": lambda provider: provider._multi_log_record_processor._log_record_processors,
    "metrics": lambda provider: provider._measurement_consumer._reader_storages,
}
_FINDERS = {
    "traces": _find_span_route,
    "logs": _find_log_route,
    "metrics": _find_metric_route,
}
