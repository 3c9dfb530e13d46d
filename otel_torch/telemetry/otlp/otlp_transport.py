"""What both protocols of OTLP have in common: signals, requests as bytes, answers, and the SDK's
exporters, which know the endpoint, TLS, headers and compression.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torch.process.console import say_once
from otel_torch.telemetry.otlp import otlp_protobuf
from otel_torch.telemetry.otlp.answer import (
    ANSWER_BYTES,
    Answer,
    explain,
    name_endpoint,
    show_endpoint,
)
from otel_torch.telemetry.otlp.otlp_requests import request_class

# how long an answer may take unless OTEL_EXPORTER_OTLP_TIMEOUT is set
TIMEOUT_S = 5.0
# of a gRPC channel: an answer is bounded, and not decompressed by gRPC, which would not bound it
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_BYTES),
    ("grpc.per_message_decompression", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
# the start of a partial success: its length, the number of rejected items, the message's length
_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_PARTIAL_SUCCESS = re.compile(rb"\x0a%b\x08(%b)(?:\x12%b)?" % (_VARINT, _VARINT, _VARINT))


class SignalNames(NamedTuple):
    """The names by which a signal's exporter and answers differ from those of other signals."""

    module: str
    exporter: str
    rejected: str


SIGNALS = {
    "traces": SignalNames("trace_exporter", "OTLPSpanExporter", "rejected_spans"),
    "metrics": SignalNames("metric_exporter", "OTLPMetricExporter", "rejected_data_points"),
    "logs": SignalNames("_log_exporter", "OTLPLogExporter", "rejected_log_records"),
}


class ReportingTransport:
    """Shared by all transports: reports an endpoint's error once."""

    def __init__(self, signal: str, resource: Resource, scope: InstrumentationScope) -> None:
        self.signal, self.resource, self.scope = signal, resource, scope
        self.endpoint = ""
        self.protocol = ""
        self.reports_errors = True

    @property
    def has_connected(self) -> bool:
        """Whether a connection to the endpoint was ever made; True where that is not known."""
        return True

    @property
    def connected_at(self) -> float:
        """When the last connection was made, by `time.monotonic`; 0 if that is not known."""
        return 0.0

    def report(self, answer: Answer) -> Answer:
        """Print what is wrong, if anything, once per process. Return the answer."""
        is_fine = answer.kind in ("accepted", "shutdown") and not answer.rejected
        if self.reports_errors and not is_fine:
            text = explain(self.endpoint, self.protocol, answer)
            say_once(f"{text}. Losses are counted and reported at the end")
        return answer

    def report_silence(self) -> None:
        """Print, once per process, that the program's end did not wait longer for an answer."""
        end = "by the end of the program"
        if self.has_connected:
            self.report(Answer("unconfirmed", f"no answer {end}"))
        else:
            self.report(Answer("unavailable", f"failed to connect {end}"))


class OtlpTransport(ReportingTransport):
    """Sends messages of bytes to the endpoint of the SDK's exporter, one attempt each: the
    exporter's own retries know no end of the program.

    Args:
        exporter: of the program, whose settings are used and which is left alone; None for one of
            the standard variables.
    """

    def __init__(
        self,
        signal: str,
        resource: Resource,
        scope: InstrumentationScope,
        protocol: str,
        exporter: Any = None,
    ) -> None:
        super().__init__(signal, resource, scope)
        self.protocol = protocol
        self.endpoint = (
            name_endpoint(signal, protocol)
            if exporter is None
            else show_endpoint(exporter._endpoint)
        )
        self.names = SIGNALS[signal]
        self._head = encode_head(resource, scope)
        self._response: Any = request_class(signal, "Response")
        self.is_of_program = exporter is not None
        self.exporter: Any = exporter if self.is_of_program else make_exporter(signal, protocol)
        self._is_cancelled = False

    def encode(self, item: Any) -> tuple[list[Any], int]:
        pieces = item.encode()
        return pieces, sum(map(len, pieces))

    def send(self, payload: list[Any]) -> Answer:
        answer = self.send_request(otlp_protobuf.request(*self._head, payload))
        if self._is_cancelled and answer.kind not in ("accepted", "unavailable", "shutdown"):
            return Answer("unconfirmed", "no answer before the end of the program")
        return self.report(answer)

    def send_request(self, request: bytes) -> Answer:
        """Send a complete message and return the answer, without reporting errors."""
        raise NotImplementedError

    def read_response(self, body: bytes) -> Answer:
        """Return the body of a response, of which the end may be missing, as an answer."""
        try:
            partial = self._response.FromString(body).partial_success
            rejected, message = getattr(partial, self.names.rejected), partial.error_message
        except DecodeError:  # OTLP: a message with an unreadable answer is accepted all the same
            start = _PARTIAL_SUCCESS.match(body)
            if start is None:
                return Answer("accepted")
            rejected, message = _read_varint(start[1]), body[start.end() :].decode(errors="replace")
        if rejected > 0 or message:
            detail = f"{rejected} of the {self.signal} rejected: {message}"
            return Answer("accepted", detail, max(0, rejected))
        return Answer("accepted")

    def cancel(self) -> None:
        """End the current message; may be called from another thread."""
        self._is_cancelled = True
        self.disconnect()

    def disconnect(self) -> None:
        """Cut the connection while it is used."""
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


def _read_varint(data: bytes) -> int:
    """Return the integer of a varint.

    >>> _read_varint(bytes([0xAC, 0x02]))
    300
    """
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data))


def encode_head(resource: Resource, scope: InstrumentationScope) -> tuple[bytes, bytes]:
    data = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, [], "")], "")])
    encoded = encode_metrics(data).resource_metrics[0]
    return encoded.resource.SerializeToString(), encoded.scope_metrics[0].scope.SerializeToString()


def make_exporter(signal: str, protocol: str) -> Any:
    """Return the SDK's OTLP exporter of a signal, configured by the standard variables. Whatever
    uses it, its answers are bounded.
    """
    names = SIGNALS[signal]
    module = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{names.module}")
    timeouts = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    has_timeout = any(os.environ.get(name) for name in timeouts)
    arguments: dict[str, Any] = {} if has_timeout else {"timeout": TIMEOUT_S}
    if protocol == "grpc":
        arguments["channel_options"] = CHANNEL_OPTIONS
    else:
        arguments["session"] = _make_session(signal)
    return getattr(module, names.exporter)(**arguments)


def _make_session(signal: str) -> Any:
    """Return the session of the SDK's credential provider, if one is set, or a new one."""
    import requests

    from otel_torch.telemetry.otlp.bounded_http import bound_session

    common: Any = import_module("opentelemetry.exporter.otlp.proto.http._common")
    load = getattr(common, "_load_session_from_envvar", lambda variable: None)
    variable = f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{signal.upper()}_CREDENTIAL_PROVIDER"
    return bound_session(load(variable) or requests.Session())
