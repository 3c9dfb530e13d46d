"""OTLP over gRPC."""

from __future__ import annotations

import copy
import re
import zlib
from importlib import import_module
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torch.telemetry.otlp.answer import ANSWER_BYTES, Answer, AnswerKind
from otel_torch.telemetry.otlp.otlp_requests import SHAPES
from otel_torch.telemetry.otlp.otlp_transport import CHANNEL_OPTIONS, OtlpTransport

_KINDS: dict[str, AnswerKind] = {
    "UNAVAILABLE": "unavailable",
    "ABORTED": "unavailable",
    "OUT_OF_RANGE": "unavailable",
    "DATA_LOSS": "unavailable",
    "RESOURCE_EXHAUSTED": "unavailable",
    "DEADLINE_EXCEEDED": "unconfirmed",
    "CANCELLED": "unconfirmed",
}
_READY = 2  # state of a channel


class GrpcTransport(OtlpTransport):
    """OTLP over gRPC, by the channel of the SDK's exporter, or one like it."""

    def __init__(
        self,
        signal: str,
        resource: Resource,
        scope: InstrumentationScope,
        exporter: Any = None,
    ) -> None:
        super().__init__(signal, resource, scope, "grpc", exporter)
        if self.is_of_program:
            self.exporter = _with_channel_of_its_own(exporter)
        self._channel = self.exporter._channel
        self._metadata, self._timeout_s = self.exporter._headers, self.exporter._timeout
        service = SHAPES[signal].service
        # without serializers: messages are bytes, and answers are read within a bound
        self._call: Any = self._channel.unary_unary(
            f"/opentelemetry.proto.collector.{service.lower()}.v1.{service}Service/Export"
        )

    @property
    def has_connected(self) -> bool:
        try:
            return bool(self._channel._channel.check_connectivity_state(False) == _READY)
        except Exception:  # not known in this version of gRPC, or closed
            return True

    def send_request(self, request: bytes) -> Answer:
        try:
            response = self._call(request, metadata=self._metadata, timeout=self._timeout_s)
        except Exception as error:
            return _read_error(error)
        return self.read_response(_decompress(response))

    def disconnect(self) -> None:
        self._channel.close()

    def shutdown(self) -> None:
        self._channel.close()


def _with_channel_of_its_own(exporter: Any) -> Any:
    """Return a copy of an exporter: closing its channel leaves the exporter's open."""
    exporter = copy.copy(exporter)
    ours = dict(CHANNEL_OPTIONS)
    theirs = [option for option in exporter._channel_options if option[0] not in ours]
    exporter._channel_options = (*theirs, *CHANNEL_OPTIONS)
    exporter._initialize_channel_and_stub()
    return exporter


def _decompress(response: bytes) -> bytes:
    """Return a response that may be compressed; a message of protobuf cannot begin like gzip."""
    if not response.startswith(b"\x1f\x8b"):
        return response
    try:
        decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
        return decompressor.decompress(response, ANSWER_BYTES)
    except zlib.error:
        return b""


def _read_error(error: Any) -> Answer:
    if not hasattr(error, "code"):
        is_closed = isinstance(error, ValueError) and "closed channel" in str(error)
        return Answer("shutdown" if is_closed else "refused", f"{type(error).__name__}: {error}")
    code, details = getattr(error.code(), "name", "UNKNOWN"), str(error.details() or "")
    if code == "RESOURCE_EXHAUSTED" and f"vs. {ANSWER_BYTES}" in details:
        return Answer("unconfirmed", f"its answer is longer than {ANSWER_BYTES} bytes")
    is_too_large = re.search(r"larger than max|message size|too large", details)
    if code == "RESOURCE_EXHAUSTED" and is_too_large:
        return Answer("too_large", details)
    text = details if code == "UNAVAILABLE" else f"{code}: {details}"
    return Answer(_KINDS.get(code, "refused"), text, wait_s=_read_wait(error))


def _read_wait(error: Any) -> float:
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
