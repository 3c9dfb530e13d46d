"""OTLP over HTTP."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any

import requests
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_torch.telemetry.otlp.answer import Answer, AnswerKind, explain_path
from otel_torch.telemetry.otlp.bounded_http import (
    SessionClosed,
    copy_session,
    describe_error,
    was_never_sent,
)
from otel_torch.telemetry.otlp.otlp_transport import OtlpTransport

_KINDS: dict[int, AnswerKind] = {
    429: "unavailable",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
    413: "too_large",
}


class HttpTransport(OtlpTransport):
    """OTLP over HTTP, by the session of the SDK's exporter, or one like it."""

    def __init__(
        self,
        signal: str,
        resource: Resource,
        scope: InstrumentationScope,
        exporter: Any = None,
    ) -> None:
        super().__init__(signal, resource, scope, "http", exporter)
        client = self.exporter._client
        session: Any = client._transport._session
        self._session = copy_session(session) if self.is_of_program else session
        self._is_shared = self.is_of_program and self._session is session
        self._url: str = client._endpoint
        self._adapter: Any = self._session.get_adapter(self._url)
        self._headers, self._timeout_s = client._headers, client._timeout
        self._compress = client._compress

    @property
    def has_connected(self) -> bool:
        return self._is_shared or self.connected_at > 0

    @property
    def connected_at(self) -> float:
        connected_at: float = getattr(self._adapter, "connected_at", 0.0)
        return connected_at

    def send_request(self, request: bytes) -> Answer:
        try:
            response = self._session.post(
                self._url,
                data=self._compress(request),
                headers=self._headers,
                timeout=self._timeout_s,
                allow_redirects=False,
            )
        except Exception as error:
            return _read_error(error)
        if 200 <= response.status_code < 300:
            return self.read_response(response.content)
        kind = _KINDS.get(response.status_code, "refused")
        detail = f"HTTP {response.status_code} {response.reason or ''}".strip()
        wait_s = _read_wait(response.headers.get("retry-after"))
        is_unknown = response.status_code in (404, 405)
        hint = explain_path(self._url, self.signal) if is_unknown else ""
        return Answer(kind, detail, wait_s=wait_s, hint=hint)

    def disconnect(self) -> None:
        if not self._is_shared:
            self._adapter.cancel()

    def shutdown(self) -> None:
        if not self._is_shared:
            self._session.close()


def _read_wait(retry_after: str | None) -> float:
    """Return the seconds of Retry-After, which may be a number or a date; 0 without one."""
    text = (retry_after or "0").strip()
    try:
        if text.replace(".", "", 1).isdigit():
            return float(text)
        return parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _read_error(error: Exception) -> Answer:
    """Return a request that got no answer as an answer."""
    text = describe_error(error)
    if isinstance(error, SessionClosed):
        return Answer("shutdown", text)
    if was_never_sent(error):
        return Answer("unavailable", text)
    if isinstance(error, requests.Timeout):
        return Answer("unconfirmed", text)
    if not isinstance(error, requests.ConnectionError):
        return Answer("refused", text)  # the request cannot be made, such as one with a bad URL
    return Answer("broken", text)
