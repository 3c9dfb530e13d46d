"""The SDK's exporters as transport: they own TLS, headers, compression and retries. What they
ignore is read here: a receiver that accepts in part, and why it refuses. All private names of the
exporters are in this file; where one is gone, their public face is used and one line says what
cannot be known any more.
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
from urllib.parse import urlsplit

from opentelemetry.context import attach, set_value
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util._importlib_metadata import entry_points

from otel_torch.console import say_once
from otel_torch.telemetry import ids, otlp_protobuf

# seconds that an answer may take, where OTEL_EXPORTER_OTLP_TIMEOUT does not say
TIMEOUT_S = 5.0
_THREADS = "otel_torch-"


@dataclass(frozen=True)
class Answer:
    """What became of a message. kind: `accepted`, `unavailable` (not taken, worth another try),
    `refused`, `too_large`, `shutdown` (never sent, the end came first) or `unconfirmed` (no answer
    came, so it may have arrived). rejected: how many of the message's spans, log records or points
    a receiver that accepted it left out. wait_s: how long it asked to be left alone; 0 where it did
    not.
    """

    kind: str
    detail: str = ""
    rejected: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class _Signal:
    """Where the names of a signal differ."""

    module: str
    exporter: str
    response: str
    service: str
    rejected: str


_SIGNALS = {
    "traces": _Signal(
        "trace_exporter", "OTLPSpanExporter", "ExportTraceService", "trace", "rejected_spans"
    ),
    "metrics": _Signal(
        "metric_exporter",
        "OTLPMetricExporter",
        "ExportMetricsService",
        "metrics",
        "rejected_data_points",
    ),
    "logs": _Signal(
        "_log_exporter", "OTLPLogExporter", "ExportLogsService", "logs", "rejected_log_records"
    ),
}
_PROTOCOLS = {"otlp_proto_grpc": "grpc", "otlp_proto_http": "http"}
_DEFAULT_ENDPOINT = {"grpc": "http://localhost:4317", "http": "http://localhost:4318"}

_GRPC_KINDS = {
    "UNAVAILABLE": "unavailable",
    "ABORTED": "unavailable",
    "OUT_OF_RANGE": "unavailable",
    "DATA_LOSS": "unavailable",
    "RESOURCE_EXHAUSTED": "unavailable",
    "DEADLINE_EXCEEDED": "unconfirmed",
    "CANCELLED": "unconfirmed",
}
_HTTP_KINDS = {
    429: "unavailable",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
    413: "too_large",
}

# what of an error's text says which fault it is, and what people can do about it
_EXPLANATIONS = (
    (r"(?i)WRONG_VERSION_NUMBER|wrong version number|record layer failure", "it speaks no TLS: use http:// in the endpoint"),
    (r"Misformatted domain", "an endpoint holds no credentials: they belong in OTEL_EXPORTER_OTLP_HEADERS"),
    (r"(?i)certificate", "its certificate is not trusted: name the authority's in OTEL_EXPORTER_OTLP_CERTIFICATE"),
    (r"(?i)handshake|SSL|TLS", "the TLS handshake failed: does the endpoint's http:// or https:// match what it speaks?"),
    (r"UNAUTHENTICATED|PERMISSION_DENIED|\b40[13]\b", "it does not let us in: check OTEL_EXPORTER_OTLP_HEADERS"),
    (r"UNIMPLEMENTED|\b404\b|\b405\b", "it does not take this signal: give it a pipeline, or set OTEL_…_EXPORTER=none"),
    (
        r"(?i)refused|failed to connect|Name or service|name resolution|DNS|unreachable|No route",
        "start a collector there or correct OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (r"[Tt]imed? ?out|DEADLINE", "it takes too long: look at its load, or raise OTEL_EXPORTER_OTLP_TIMEOUT"),
)  # fmt: skip


def show_endpoint(endpoint: str) -> str:
    """An endpoint without credentials, path and query.

    >>> show_endpoint("https://user:secret@collector:4318/v1/traces?token=1"), show_endpoint("collector:4317")
    ('https://collector:4318', 'collector:4317')
    """
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    host = parts.hostname or "an endpoint without a host"
    return f"{parts.scheme}://{host}{port}" if parts.scheme else f"{host}{port}"


def name_endpoint(signal: str, protocol: str) -> str:
    """The endpoint that the standard variables name for a signal, as `show_endpoint` shows it."""
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return show_endpoint(
        next(
            (os.environ[name] for name in names if os.environ.get(name)),
            _DEFAULT_ENDPOINT[protocol],
        )
    )


def explain(endpoint: str, protocol: str, answer: Answer) -> str:
    """One line about what is wrong at an endpoint and what to do."""
    what = {
        "unavailable": "cannot take what is sent",
        "refused": "refuses what is sent",
        "too_large": "finds a message too large",
        "unconfirmed": "did not answer",
    }.get(answer.kind, "accepts only in part")
    hint = next((hint for pattern, hint in _EXPLANATIONS if re.search(pattern, answer.detail)), "")
    if protocol == "grpc" and endpoint.endswith(":4318"):
        hint = "4318 is the port of OTLP over HTTP: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    elif protocol == "http" and endpoint.endswith(":4317"):
        hint = "4317 is the port of OTLP over gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
    elif answer.rejected:
        hint = "its log says why"
    hint = hint or "its log may say why"
    return f"{endpoint} {what} ({_brief(answer.detail)}); {hint}. What is lost is counted and said at the end"


def _brief(detail: str) -> str:
    """The telling part of an error's text: no addresses of objects or hosts, no paths or queries,
    one line.
    """
    detail = re.sub(r"\w+://\S+|<[^>]*>|[^\s@]+@|ipv[46]:\S+", "…", " ".join(detail.split()))
    return detail if len(detail) <= 140 else detail[:139] + "…"


class _QuietHere(logging.Filter):
    """Keeps the exporters' warnings and tracebacks about our own messages off the terminal; the
    program's stay.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.threadName or "").startswith(_THREADS)


_quiet = _QuietHere()


def _calm(exporter_module: str) -> None:
    """What an exporter's modules would do to the program: log in its name, and draw from its random
    numbers to retry.
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
        if _quiet not in logger.filters:
            logger.addFilter(_quiet)
    for name in names[1:3]:
        module: Any = sys.modules.get(name)
        if hasattr(module, "random"):
            module.random = ids.private


def _keep_unobserved() -> None:
    """Keep the program's own instrumentation of HTTP and gRPC from tracing this thread's messages."""
    context: Any = import_module("opentelemetry.context")
    for key in ("_SUPPRESS_INSTRUMENTATION_KEY", "_SUPPRESS_HTTP_INSTRUMENTATION_KEY"):
        if hasattr(context, key):
            attach(set_value(getattr(context, key), True))


class _Transport:
    """What all ways of sending share: the error that is said once, in the words of the endpoint."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        self.signal, self.resource, self.scope = signal, resource, scope
        self.endpoint = ""
        self.protocol = ""

    def said(self, answer: Answer) -> Answer:
        """Say once what is wrong, if anything is."""
        if answer.kind not in ("accepted", "shutdown") or answer.rejected:
            say_once(explain(self.endpoint, self.protocol, answer))
        return answer


class SdkTransport(_Transport):
    """Any exporter, by its public face: knows only whether it succeeded."""

    def __init__(
        self, signal: str, resource: Resource, scope: InstrumentationScope, exporter: Any, name: str
    ) -> None:
        super().__init__(signal, resource, scope)
        self._exporter = exporter
        self.endpoint = f"the exporter {name}"

    def encode(self, item: Any) -> tuple[list[Any], int]:
        return item.readable(self.resource, self.scope), item.size

    def send(self, payload: list[Any]) -> Answer:
        data: Any = payload
        if self.signal == "metrics":
            data = MetricsData(
                [ResourceMetrics(self.resource, [ScopeMetrics(self.scope, payload, "")], "")]
            )
        result = self._exporter.export(data)
        return self.said(
            Answer("accepted")
            if getattr(result, "name", "") == "SUCCESS"
            else Answer("refused", "export failed")
        )

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _OtlpTransport(_Transport):
    """What is shared by both protocols of OTLP: messages are bytes, and the answer to the last call
    is kept.
    """

    def __init__(
        self, signal: str, resource: Resource, scope: InstrumentationScope, protocol: str
    ) -> None:
        super().__init__(signal, resource, scope)
        self.protocol = protocol
        self.endpoint = name_endpoint(signal, protocol)
        self._names = _SIGNALS[signal]
        self._head = encode_head(resource, scope)
        service: Any = import_module(
            f"opentelemetry.proto.collector.{self._names.service}.v1.{self._names.service}_service_pb2"
        )
        self._response: Any = getattr(service, f"{self._names.response}Response")
        self._last = Answer("unconfirmed", "no answer")
        self._exporter: Any = make_exporter(signal, protocol)

    def encode(self, item: Any) -> tuple[list[Any], int]:
        pieces = item.encode()
        return pieces, sum(map(len, pieces))

    def send(self, payload: list[Any]) -> Answer:
        return self.said(self.send_request(otlp_protobuf.request(*self._head, payload)))

    def send_request(self, request: bytes) -> Answer:
        """Send what is a whole message already, and wait for the answer; says nothing."""
        raise NotImplementedError

    def heard(self, answer: Answer) -> None:
        """Keep what a call was answered; retries overwrite it."""
        self._last = answer

    def read_response(self, response: Any) -> Answer:
        """An answer's partial success, which the exporters ignore."""
        partial = response.partial_success
        rejected = getattr(partial, self._names.rejected)
        if rejected or partial.error_message:
            return Answer(
                "accepted",
                f"{rejected} of the {self.signal} rejected: {partial.error_message}",
                rejected,
            )
        return Answer("accepted")

    def shutdown(self) -> None:
        self._exporter.shutdown()


class GrpcTransport(_OtlpTransport):
    """OTLP over gRPC."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        super().__init__(signal, resource, scope, "grpc")
        exporter = self._exporter
        exporter._export, exporter._stub  # noqa: B018 - must be there
        exporter._stub = lambda channel: _ReadingClient(
            channel, self
        )  # a lost channel is made anew
        exporter._client = exporter._stub(exporter._channel)
        exporter._translate_data = lambda request: request
        exporter._count_data = lambda request: 1

    def make_call(self, channel: Any) -> Callable[..., Any]:
        """What sends a request by a channel. The SDK's own takes messages that it makes bytes of;
        ours are bytes.
        """
        method = f"/opentelemetry.proto.collector.{self._names.service}.v1.{self._names.service.title()}Service/Export"
        call: Callable[..., Any] = channel.unary_unary(
            method, response_deserializer=self._response.FromString
        )
        return call

    def send_request(self, request: bytes) -> Answer:
        self._last = Answer("unconfirmed", "no answer")
        try:
            self._exporter._export(request)
        except (
            Exception
        ) as error:  # the stub has heard of it, unless it came from the exporter itself
            if self._last.kind == "unconfirmed":
                self._last = Answer("refused", f"{type(error).__name__}: {error}")
        return self._last


class _ReadingClient:
    """Makes a client's calls, of requests that are bytes already, and listens to them."""

    def __init__(self, channel: Any, transport: GrpcTransport) -> None:
        self._call, self._transport = transport.make_call(channel), transport

    def Export(self, *args: Any, **kwargs: Any) -> Any:
        try:
            response = self._call(*args, **kwargs)
        except Exception as error:
            self._transport.heard(_read_grpc_error(error))
            raise
        self._transport.heard(self._transport.read_response(response))
        return response


def _read_grpc_error(error: Any) -> Answer:
    code = getattr(error.code(), "name", "UNKNOWN") if hasattr(error, "code") else "UNKNOWN"
    details = str(error.details() or "") if hasattr(error, "details") else str(error)
    if code == "RESOURCE_EXHAUSTED" and re.search(
        r"larger than max|message size|too large", details
    ):
        return Answer("too_large", details)
    if code == "UNAVAILABLE":
        return Answer("unavailable", details, wait_s=_read_grpc_wait(error))
    if "closed channel" in details:
        return Answer("shutdown", details)
    return Answer(
        _GRPC_KINDS.get(code, "refused"), f"{code}: {details}", wait_s=_read_grpc_wait(error)
    )


def _read_grpc_wait(error: Any) -> float:
    """The seconds of an error's RetryInfo."""
    try:
        found = dict(error.trailing_metadata() or ()).get("google.rpc.retryinfo-bin")
        if not found:
            return 0.0
        delay = (
            import_module("google.rpc.error_details_pb2").RetryInfo.FromString(found).retry_delay
        )
        return float(delay.seconds + delay.nanos / 1e9)
    except Exception:  # no RetryInfo after all
        return 0.0


class HttpTransport(_OtlpTransport):
    """OTLP over HTTP."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        super().__init__(signal, resource, scope, "http")
        self._client = self._exporter._client
        self._client._transport = _listen(self._client._transport, self)

    def send_request(self, request: bytes) -> Answer:
        self._last = Answer("unconfirmed", "no answer")
        self._client.export(request)
        return self._last

    def read_result(self, result: Any) -> Answer:
        """What became of one request."""
        status = result.status_code
        if status is None:
            return _read_http_error(result.error)
        if 200 <= status < 300:
            try:
                return self.read_response(self._response.FromString(result.content()))
            except (
                Exception
            ):  # an answer that is no protobuf: accepted all the same, says the protocol
                return Answer("accepted")
        text = f"HTTP {status} {result.reason or ''}".strip()
        return Answer(_HTTP_KINDS.get(status, "refused"), text, wait_s=_read_http_wait(result))


def _listen(inner: Any, transport: HttpTransport) -> Any:
    """`inner`, with its results heard. A subclass of its own class, as the exporters ask for more
    than requests.
    """
    request: Callable[..., Any] = inner.request

    def listening(*args: Any, **kwargs: Any) -> Any:
        result = request(*args, **kwargs)
        transport.heard(transport.read_result(result))
        return result

    class _Listening:
        def __getattr__(self, name: str) -> Any:
            return listening if name == "request" else getattr(inner, name)

    return _Listening()


def _read_http_wait(result: Any) -> float:
    """The seconds of an answer's Retry-After, which may also name a time."""
    try:
        text = (result.headers().get("retry-after") or "0").strip()
        return (
            float(text)
            if text.replace(".", "", 1).isdigit()
            else parsedate_to_datetime(text).timestamp() - time.time()
        )
    except Exception:
        return 0.0


def _read_http_error(error: Exception | None) -> Answer:
    reason = (
        getattr(error.args[0], "reason", error.args[0])
        if error is not None and error.args
        else error
    )
    text = f"{type(error).__name__}: {reason}"
    kinds = [cls.__name__ for cls in type(error).__mro__]
    never_sent = (
        "ConnectTimeout" in kinds
        or "SSLError" in kinds
        or re.search(r"NewConnection|refused|NameResolution|SSL", text)
    )
    if "ConnectionError" in kinds and never_sent:
        return Answer("unavailable", text)
    return Answer("unconfirmed", text)


def encode_head(resource: Resource, scope: InstrumentationScope) -> tuple[bytes, bytes]:
    """The Resource and InstrumentationScope messages."""
    encoded = encode_metrics(
        MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, [], "")], "")])
    ).resource_metrics[0]
    return encoded.resource.SerializeToString(), encoded.scope_metrics[0].scope.SerializeToString()


def make_exporter(signal: str, protocol: str) -> Any:
    """The SDK's OTLP exporter of a signal, configured by the standard variables."""
    names = _SIGNALS[signal]
    module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{names.module}")
    _calm(module.__name__)
    timeouts = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    arguments = {} if any(os.environ.get(name) for name in timeouts) else {"timeout": TIMEOUT_S}
    return getattr(module, names.exporter)(**arguments)


def is_otlp(name: str) -> bool:
    """Whether an exporter's name is one of OTLP's, whose messages are bytes."""
    return name in _PROTOCOLS


def load_exporter(signal: str, name: str) -> None:
    """Import what `open_transport` will need, in the program's thread: a fork while another imports
    would leave the child with an import that never ends.
    """
    protocol = _PROTOCOLS.get(name)
    if protocol is not None:
        import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{_SIGNALS[signal].module}")
    if protocol == "http":
        import_module("requests")


def open_transport(signal: str, name: str, resource: Resource, scope: InstrumentationScope) -> Any:
    """What sends a signal by the exporter `name` (an entry point's, or one of OTLP's). Raises where
    there is none.
    """
    _keep_unobserved()
    protocol = _PROTOCOLS.get(name)
    if protocol is not None:
        try:
            return (GrpcTransport if protocol == "grpc" else HttpTransport)(signal, resource, scope)
        except AttributeError as error:
            say_once(
                f"this OTLP exporter is not a known one ({error}): what a receiver accepts only in part cannot be known"
            )
            return SdkTransport(signal, resource, scope, make_exporter(signal, protocol), name)
    found = next(iter(entry_points(group=f"opentelemetry_{signal}_exporter", name=name)), None)
    if found is None:
        raise LookupError(f"OTEL_{signal.upper()}_EXPORTER names {name!r}, which is not installed")
    exporter = found.load()()
    if not hasattr(exporter, "export"):
        raise LookupError(
            f"OTEL_{signal.upper()}_EXPORTER names {name!r}, which waits to be asked; use one that sends"
        )
    return SdkTransport(signal, resource, scope, exporter, name)
