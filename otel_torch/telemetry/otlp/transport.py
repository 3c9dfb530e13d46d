"""Opens what sends a signal's messages: OTLP's two protocols, or any other exporter.

TLS, headers and compression are those of the SDK's exporters; what they ignore is read here:
partial success, and the reason of a refusal. If a private name of theirs is missing in another
version, the public interface is used, and one line says what can no longer be known.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from opentelemetry.context import attach, set_value
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util._importlib_metadata import entry_points

from otel_torch.process.console import say_once
from otel_torch.telemetry import ids
from otel_torch.telemetry.otlp.answer import Answer, name_endpoint
from otel_torch.telemetry.otlp.otlp_transport import SIGNALS, ReportingTransport, make_exporter

_PROTOCOLS = {"otlp_proto_grpc": "grpc", "otlp_proto_http": "http"}
_THREAD_PREFIX = "otel_torch-"
# modules of the exporters that log in the program's name, or draw its random numbers
_RETRYING_MODULES = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.common.http",
)
_LOGGING_MODULES = (
    *_RETRYING_MODULES,
    "opentelemetry.exporter.otlp.proto.common._internal",
    "urllib3.connectionpool",
)


class SdkTransport(ReportingTransport):
    """Sends by the public interface of any exporter, which only tells success from failure."""

    def __init__(
        self, signal: str, resource: Resource, scope: InstrumentationScope, exporter: Any, name: str
    ) -> None:
        super().__init__(signal, resource, scope)
        self._exporter = exporter
        self.endpoint = f"the exporter {name}"

    def encode(self, item: Any) -> tuple[list[Any], int]:
        return item.to_sdk_objects(self.resource, self.scope), item.size

    def send(self, payload: list[Any]) -> Answer:
        data: Any = payload
        if self.signal == "metrics":
            scope_metrics = ScopeMetrics(self.scope, payload, "")
            data = MetricsData([ResourceMetrics(self.resource, [scope_metrics], "")])
        result = self._exporter.export(data)
        if getattr(result, "name", "") == "SUCCESS":
            return self.report(Answer("accepted"))
        return self.report(Answer("refused", "export failed"))

    def cancel(self) -> None:
        """Leave the exporter alone: how long its shutdown takes is not known."""

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _OurThreadsFilter(logging.Filter):
    """Drops what exporters log in our threads; the program's own exporters log as before."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.threadName or "").startswith(_THREAD_PREFIX)


_our_threads_filter = _OurThreadsFilter()


def _isolate_exporter(signal: str, protocol: str) -> None:
    """Keep an exporter's modules from logging in the program's name, and from drawing its random
    numbers for retries.
    """
    own = f"opentelemetry.exporter.otlp.proto.{protocol}.{SIGNALS[signal].module}"
    for name in (own, *_LOGGING_MODULES):
        logger = logging.getLogger(name)
        if _our_threads_filter not in logger.filters:
            logger.addFilter(_our_threads_filter)
    for name in _RETRYING_MODULES:
        module: Any = sys.modules.get(name)
        if hasattr(module, "random"):
            module.random = ids.private


def _suppress_instrumentation() -> None:
    """Keep the program's instrumentation of HTTP and gRPC from tracing this thread's messages."""
    context: Any = import_module("opentelemetry.context")
    for key in ("_SUPPRESS_INSTRUMENTATION_KEY", "_SUPPRESS_HTTP_INSTRUMENTATION_KEY"):
        if hasattr(context, key):
            attach(set_value(getattr(context, key), True))


def is_otlp(name: str) -> bool:
    """Return whether an exporter is one of OTLP's, which send bytes."""
    return name in _PROTOCOLS


def endpoint_of(signal: str, name: str) -> str:
    """Return what an exporter sends to: signals with the same one share an endpoint."""
    protocol = _PROTOCOLS.get(name)
    if protocol is None:
        return f"{signal} by {name}"
    return name_endpoint(signal, protocol)


def import_exporter(signal: str, name: str) -> None:
    """Import what `open_transport` needs, in the program's thread: a fork while another thread
    imports would leave the child with an import that never ends.
    """
    protocol = _PROTOCOLS.get(name)
    if protocol is not None:
        import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{SIGNALS[signal].module}")
        import_transport(protocol)


def import_transport(protocol: str) -> Any:
    """Import what the transport of an OTLP protocol needs, and return its class."""
    module = import_module(f"otel_torch.telemetry.otlp.{protocol}_transport")
    return module.GrpcTransport if protocol == "grpc" else module.HttpTransport


def open_transport(signal: str, name: str, resource: Resource, scope: InstrumentationScope) -> Any:
    """Return the transport of a signal.

    Args:
        name: an exporter's entry point, or one of OTLP's.

    Raises:
        LookupError: no such exporter is installed, or it only answers requests.
    """
    _suppress_instrumentation()
    protocol = _PROTOCOLS.get(name)
    if protocol is not None:
        return _open_otlp(signal, name, protocol, resource, scope)
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    entry_point = next(
        iter(entry_points(group=f"opentelemetry_{signal}_exporter", name=name)), None
    )
    if entry_point is None:
        raise LookupError(f"{variable} names {name!r}, which is not installed")
    exporter = entry_point.load()()
    if not hasattr(exporter, "export"):
        raise LookupError(
            f"{variable} names {name!r}, which only answers requests; use an exporter that sends"
        )
    return SdkTransport(signal, resource, scope, exporter, name)


def open_transport_like(
    exporter: Any, signal: str, protocol: str, resource: Resource, scope: InstrumentationScope
) -> Any:
    """Return a transport to the endpoint of the program's OTLP exporter, with its settings."""
    _suppress_instrumentation()
    _isolate_exporter(signal, protocol)
    return import_transport(protocol)(signal, resource, scope, exporter)


def _open_otlp(
    signal: str, name: str, protocol: str, resource: Resource, scope: InstrumentationScope
) -> Any:
    import_exporter(signal, name)
    _isolate_exporter(signal, protocol)
    try:
        return import_transport(protocol)(signal, resource, scope)
    except AttributeError as error:
        say_once(
            "this version of the OTLP exporters is not supported in full "
            f"({error}): partial success cannot be detected"
        )
        return SdkTransport(signal, resource, scope, make_exporter(signal, protocol), name)
