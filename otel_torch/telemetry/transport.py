"""Sends messages with the SDK's exporters, which own TLS, headers, compression and retries.

What the exporters ignore is read here: partial success, and the reason of a refusal. All private
names of the exporters are in this file. If one is missing in another version, the public interface
is used, and one line says what can no longer be known.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any

from opentelemetry.context import attach, set_value
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util._importlib_metadata import entry_points

from otel_torch.process.console import say_once
from otel_torch.telemetry import ids, otlp_protobuf
from otel_torch.telemetry.answer import Answer, AnswerKind, explain, name_endpoint

# how long an answer may take unless OTEL_EXPORTER_OTLP_TIMEOUT is set
TIMEOUT_S = 5.0
_THREAD_PREFIX = "otel_torch-"


@dataclass(frozen=True)
class _SignalNames:
    """The names by which a signal's exporter and service differ from those of other signals."""

    module: str
    exporter: str
    response: str
    service: str
    rejected: str


_SIGNALS = {
    "traces": _SignalNames(
        "trace_exporter", "OTLPSpanExporter", "ExportTraceService", "trace", "rejected_spans"
    ),
    "metrics": _SignalNames(
        "metric_exporter",
        "OTLPMetricExporter",
        "ExportMetricsService",
        "metrics",
        "rejected_data_points",
    ),
    "logs": _SignalNames(
        "_log_exporter", "OTLPLogExporter", "ExportLogsService", "logs", "rejected_log_records"
    ),
}
_PROTOCOLS = {"otlp_proto_grpc": "grpc", "otlp_proto_http": "http"}

_GRPC_KINDS: dict[str, AnswerKind] = {
    "UNAVAILABLE": "unavailable",
    "ABORTED": "unavailable",
    "OUT_OF_RANGE": "unavailable",
    "DATA_LOSS": "unavailable",
    "RESOURCE_EXHAUSTED": "unavailable",
    "DEADLINE_EXCEEDED": "unconfirmed",
    "CANCELLED": "unconfirmed",
}
_HTTP_KINDS: dict[int, AnswerKind] = {
    429: "unavailable",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
    413: "too_large",
}


class _OurThreadsFilter(logging.Filter):
    """Drops what exporters log in our threads; the program's own exporters log as before."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.threadName or "").startswith(_THREAD_PREFIX)


_our_threads_filter = _OurThreadsFilter()


def _isolate_exporter(exporter_module: str) -> None:
    """Keep an exporter's modules from logging in the program's name, and from drawing its random
    numbers for retries.
    """
    names = (
        exporter_module,
        "opentelemetry.exporter.otlp.proto.grpc.exporter",
        "opentelemetry.exporter.otlp.common.http",
        "opentelemetry.exporter.otlp.proto.common._internal",
        "urllib3.connectionpool",
    )
    for name in names:
        logger = logging.getLogger(name)
        if _our_threads_filter not in logger.filters:
            logger.addFilter(_our_threads_filter)
    for name in names[1:3]:
        module: Any = sys.modules.get(name)
        if hasattr(module, "random"):
            module.random = ids.private


def _suppress_instrumentation() -> None:
    """Keep the program's instrumentation of HTTP and gRPC from tracing this thread's messages."""
    context: Any = import_module("opentelemetry.context")
    for key in ("_SUPPRESS_INSTRUMENTATION_KEY", "_SUPPRESS_HTTP_INSTRUMENTATION_KEY"):
        if hasattr(context, key):
            attach(set_value(getattr(context, key), True))


class _Transport:
    """Shared by all transports: reports an endpoint's error once."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        self.signal, self.resource, self.scope = signal, resource, scope
        self.endpoint = ""
        self.protocol = ""
        self.reports_errors = True

    def report(self, answer: Answer) -> Answer:
        """Print what is wrong, if anything, once per process. Return the answer."""
        is_fine = answer.kind in ("accepted", "shutdown") and not answer.rejected
        if self.reports_errors and not is_fine:
            text = explain(self.endpoint, self.protocol, answer)
            say_once(f"{text}. Losses are counted and reported at the end")
        return answer


class SdkTransport(_Transport):
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

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _OtlpTransport(_Transport):
    """Shared by both protocols of OTLP: messages are bytes, and the last answer is recorded where
    the exporter receives it.
    """

    def __init__(
        self, signal: str, resource: Resource, scope: InstrumentationScope, protocol: str
    ) -> None:
        super().__init__(signal, resource, scope)
        self.protocol = protocol
        self.endpoint = name_endpoint(signal, protocol)
        self._names = _SIGNALS[signal]
        self._head = encode_head(resource, scope)
        service_name = self._names.service
        service: Any = import_module(
            f"opentelemetry.proto.collector.{service_name}.v1.{service_name}_service_pb2"
        )
        self._response: Any = getattr(service, f"{self._names.response}Response")
        self._last_answer = Answer("unconfirmed", "no answer")
        self._exporter: Any = make_exporter(signal, protocol)

    def encode(self, item: Any) -> tuple[list[Any], int]:
        pieces = item.encode()
        return pieces, sum(map(len, pieces))

    def send(self, payload: list[Any]) -> Answer:
        return self.report(self.send_request(otlp_protobuf.request(*self._head, payload)))

    def send_request(self, request: bytes) -> Answer:
        """Send a complete message and return the answer, without reporting errors."""
        raise NotImplementedError

    def record_answer(self, answer: Answer) -> None:
        """Store the answer to a call; the exporter's retries overwrite it."""
        self._last_answer = answer

    def read_response(self, response: Any) -> Answer:
        """Return a response as an answer, with its partial success, which the exporters ignore."""
        partial = response.partial_success
        rejected = getattr(partial, self._names.rejected)
        if rejected or partial.error_message:
            detail = f"{rejected} of the {self.signal} rejected: {partial.error_message}"
            return Answer("accepted", detail, rejected)
        return Answer("accepted")

    def shutdown(self) -> None:
        self._exporter.shutdown()


class GrpcTransport(_OtlpTransport):
    """OTLP over gRPC."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        super().__init__(signal, resource, scope, "grpc")
        exporter = self._exporter
        exporter._export, exporter._stub  # noqa: B018 - both must exist
        # the exporter makes a new client whenever it loses its channel
        exporter._stub = lambda channel: _RecordingClient(channel, self)
        exporter._client = exporter._stub(exporter._channel)
        exporter._translate_data = lambda request: request
        exporter._count_data = lambda request: 1

    def make_call(self, channel: Any) -> Callable[..., Any]:
        """Return the function that sends a request by a channel. The SDK's own serializes messages;
        ours are bytes.
        """
        service = self._names.service
        method = f"/opentelemetry.proto.collector.{service}.v1.{service.title()}Service/Export"
        call: Callable[..., Any] = channel.unary_unary(
            method, response_deserializer=self._response.FromString
        )
        return call

    def send_request(self, request: bytes) -> Answer:
        self._last_answer = Answer("unconfirmed", "no answer")
        try:
            self._exporter._export(request)
        except Exception as error:
            # the client has recorded it, unless it came from the exporter itself
            if self._last_answer.kind == "unconfirmed":
                self._last_answer = Answer("refused", f"{type(error).__name__}: {error}")
        return self._last_answer


class _RecordingClient:
    """A gRPC client that sends bytes and records the answers."""

    def __init__(self, channel: Any, transport: GrpcTransport) -> None:
        self._call, self._transport = transport.make_call(channel), transport

    def Export(self, *args: Any, **kwargs: Any) -> Any:
        try:
            response = self._call(*args, **kwargs)
        except Exception as error:
            self._transport.record_answer(_read_grpc_error(error))
            raise
        self._transport.record_answer(self._transport.read_response(response))
        return response


def _read_grpc_error(error: Any) -> Answer:
    code = getattr(error.code(), "name", "UNKNOWN") if hasattr(error, "code") else "UNKNOWN"
    details = str(error.details() or "") if hasattr(error, "details") else str(error)
    is_too_large = re.search(r"larger than max|message size|too large", details)
    if code == "RESOURCE_EXHAUSTED" and is_too_large:
        return Answer("too_large", details)
    if code == "UNAVAILABLE":
        return Answer("unavailable", details, wait_s=_read_grpc_wait(error))
    if "closed channel" in details:
        return Answer("shutdown", details)
    kind = _GRPC_KINDS.get(code, "refused")
    return Answer(kind, f"{code}: {details}", wait_s=_read_grpc_wait(error))


def _read_grpc_wait(error: Any) -> float:
    """Return the seconds of an error's RetryInfo, 0 without one."""
    try:
        encoded = dict(error.trailing_metadata() or ()).get("google.rpc.retryinfo-bin")
        if not encoded:
            return 0.0
        details: Any = import_module("google.rpc.error_details_pb2")
        delay = details.RetryInfo.FromString(encoded).retry_delay
        return float(delay.seconds + delay.nanos / 1e9)
    except Exception:  # not a RetryInfo
        return 0.0


class HttpTransport(_OtlpTransport):
    """OTLP over HTTP."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        super().__init__(signal, resource, scope, "http")
        self._client = self._exporter._client
        self._client._transport = _record_results(self._client._transport, self)

    def send_request(self, request: bytes) -> Answer:
        self._last_answer = Answer("unconfirmed", "no answer")
        self._client.export(request)
        return self._last_answer

    def read_result(self, result: Any) -> Answer:
        """Return the result of one HTTP request as an answer."""
        status = result.status_code
        if status is None:
            return _read_http_error(result.error)
        if 200 <= status < 300:
            try:
                return self.read_response(self._response.FromString(result.content()))
            except Exception:  # OTLP: a 2xx with an unreadable body is still accepted
                return Answer("accepted")
        text = f"HTTP {status} {result.reason or ''}".strip()
        return Answer(_HTTP_KINDS.get(status, "refused"), text, wait_s=_read_http_wait(result))


def _record_results(wrapped: Any, transport: HttpTransport) -> Any:
    """Return a proxy of the exporter's HTTP session that records each result."""
    request: Callable[..., Any] = wrapped.request

    def recording_request(*args: Any, **kwargs: Any) -> Any:
        result = request(*args, **kwargs)
        transport.record_answer(transport.read_result(result))
        return result

    class _RecordingSession:
        def __getattr__(self, name: str) -> Any:
            return recording_request if name == "request" else getattr(wrapped, name)

    return _RecordingSession()


def _read_http_wait(result: Any) -> float:
    """Return the seconds of Retry-After, which may be a number or a date; 0 without one."""
    try:
        text = (result.headers().get("retry-after") or "0").strip()
        if text.replace(".", "", 1).isdigit():
            return float(text)
        return parsedate_to_datetime(text).timestamp() - time.time()
    except Exception:
        return 0.0


def _read_http_error(error: Exception | None) -> Answer:
    reason: Any = error
    if error is not None and error.args:
        reason = getattr(error.args[0], "reason", error.args[0])
    text = f"{type(error).__name__}: {reason}"
    kinds = [cls.__name__ for cls in type(error).__mro__]
    was_never_sent = (
        "ConnectTimeout" in kinds
        or "SSLError" in kinds
        or re.search(r"NewConnection|refused|NameResolution|SSL", text)
    )
    if "ConnectionError" in kinds and was_never_sent:
        return Answer("unavailable", text)
    return Answer("unconfirmed", text)


def encode_head(resource: Resource, scope: InstrumentationScope) -> tuple[bytes, bytes]:
    """Return the bytes of the Resource and InstrumentationScope messages."""
    data = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, [], "")], "")])
    encoded = encode_metrics(data).resource_metrics[0]
    return encoded.resource.SerializeToString(), encoded.scope_metrics[0].scope.SerializeToString()


def make_exporter(signal: str, protocol: str) -> Any:
    """Return the SDK's OTLP exporter of a signal, configured by the standard variables."""
    names = _SIGNALS[signal]
    module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{names.module}")
    _isolate_exporter(module.__name__)
    timeouts = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    has_timeout = any(os.environ.get(name) for name in timeouts)
    arguments = {} if has_timeout else {"timeout": TIMEOUT_S}
    return getattr(module, names.exporter)(**arguments)


def is_otlp(name: str) -> bool:
    """Return whether an exporter is one of OTLP's, which send bytes."""
    return name in _PROTOCOLS


def import_exporter(signal: str, name: str) -> None:
    """Import what `open_transport` needs, in the program's thread: a fork while another thread
    imports would leave the child with an import that never ends.
    """
    protocol = _PROTOCOLS.get(name)
    if protocol is not None:
        import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{_SIGNALS[signal].module}")
    if protocol == "http":
        import_module("requests")


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
        transport = GrpcTransport if protocol == "grpc" else HttpTransport
        try:
            return transport(signal, resource, scope)
        except AttributeError as error:
            say_once(
                "this version of the OTLP exporters is not supported in full "
                f"({error}): partial success cannot be detected"
            )
            return SdkTransport(signal, resource, scope, make_exporter(signal, protocol), name)
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
