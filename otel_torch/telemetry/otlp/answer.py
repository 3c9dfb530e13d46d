"""The answer of an endpoint to one message, and one line that explains it to a user.

Knows neither the SDK nor its exporters: `transport` makes answers out of their errors.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from otel_torch.telemetry.redact import redact

AnswerKind = Literal[
    "accepted",
    "unavailable",  # not accepted, worth another attempt
    "refused",
    "too_large",
    "shutdown",  # never sent, the process ended first
    "unconfirmed",  # no answer, so the message may have arrived
    "broken",  # the connection broke before the answer: it may have arrived; worth another attempt
]

# how much of an answer is read: it is one short message
ANSWER_BYTES = 2**16


@dataclass(frozen=True)
class Answer:
    """What happened to a message.

    Attributes:
        detail: the error's text, which may be the server's; `explain` makes it fit to print.
        rejected: how many of the message's spans, log records or points were left out by a receiver
            that accepted the rest.
        wait_s: how long the receiver asked to wait before the next attempt, in seconds.
        hint: what to do, if the request itself shows it.
    """

    kind: AnswerKind
    detail: str = ""
    rejected: int = 0
    wait_s: float = 0.0
    hint: str = ""


_DEFAULT_ENDPOINT = {"grpc": "http://localhost:4317", "http": "http://localhost:4318"}
_COMPLAINTS = {
    "unavailable": "cannot take the data",
    "refused": "refuses the data",
    "too_large": "finds a message too large",
    "unconfirmed": "did not answer",
    "broken": "closed the connection",
}
# (pattern of the error's text, what to do)
_HINTS = (
    (
        r"(?i)WRONG_VERSION_NUMBER|wrong version number|record layer failure",
        "it does not use TLS: write http:// in the endpoint",
    ),
    (
        r"Misformatted domain",
        "an endpoint must not hold credentials: use OTEL_EXPORTER_OTLP_HEADERS",
    ),
    (
        r"(?i)certificate",
        "its certificate is not trusted: set OTEL_EXPORTER_OTLP_CERTIFICATE to the authority's",
    ),
    (
        r"(?i)handshake|SSL|TLS",
        "the TLS handshake failed: check http:// or https:// in the endpoint",
    ),
    (
        r"UNAUTHENTICATED|PERMISSION_DENIED|\b40[13]\b",
        "it denies access: check OTEL_EXPORTER_OTLP_HEADERS",
    ),
    (
        r"UNIMPLEMENTED|\b404\b|\b405\b",
        "it does not take this signal: give it a pipeline, or do not select the signal; "
        "for Jaeger set OTEL_TORCH_SIGNALS=spans,span_events",
    ),
    (
        r"(?i)refused|failed to connect|Name or service|name resolution|DNS|unreachable|No route",
        "start a collector there or correct OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (
        r"[Tt]imed? ?out|DEADLINE",
        "it is too slow: check its load, or raise OTEL_EXPORTER_OTLP_TIMEOUT",
    ),
)
_HTTP_PORT_HINT = (
    "4318 is the port of OTLP over HTTP: set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
)
_GRPC_PORT_HINT = "4317 is the port of OTLP over gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"


def show_endpoint(endpoint: str) -> str:
    """Return an endpoint without credentials, path and query, which may be secret.

    >>> show_endpoint("https://user:secret@collector:4318/v1/traces?token=1")
    'https://collector:4318'
    >>> show_endpoint("collector:4317")
    'collector:4317'
    """
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that cannot be read"
    host = parts.hostname or "an address without a host"
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"{parts.scheme}://{host}{port}" if parts.scheme else f"{host}{port}"


def name_endpoint(signal: str, protocol: str) -> str:
    """Return the endpoint of a signal for a user, as `show_endpoint` does."""
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return show_endpoint(endpoint or _DEFAULT_ENDPOINT[protocol])


def explain_path(url: str, signal: str) -> str:
    """Return what is wrong with the path of a signal's URL, which is not printed; empty if nothing.

    >>> explain_path("http://collector:4318/v1/traces/v1/traces", "traces")
    'OTEL_EXPORTER_OTLP_ENDPOINT takes no signal path: leave out its /v1/traces, which is added'
    >>> explain_path("http://collector:4318", "traces")
    'its address has to end in /v1/traces: nothing is added to OTEL_EXPORTER_OTLP_TRACES_ENDPOINT'
    >>> explain_path("http://collector:4318/v1/traces", "traces")
    ''
    """
    path = re.sub(r"[?#].*", "", url).rstrip("/")
    if twice := re.search(r"(/v1/(?:traces|metrics|logs))/*/v1/\w+$", path):
        return (
            "OTEL_EXPORTER_OTLP_ENDPOINT takes no signal path: "
            f"leave out its {twice[1]}, which is added"
        )
    if not path.endswith(f"/v1/{signal}"):
        variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        return f"its address has to end in /v1/{signal}: nothing is added to {variable}"
    return ""


def explain(endpoint: str, protocol: str, answer: Answer) -> str:
    """Return what is wrong at an endpoint and what to do.

    >>> print(explain("http://host:4317", "grpc", Answer("unavailable", "connection refused")))
    ... # doctest: +NORMALIZE_WHITESPACE
    http://host:4317 cannot take the data (connection refused);
    start a collector there or correct OTEL_EXPORTER_OTLP_ENDPOINT
    """
    complaint = _COMPLAINTS.get(answer.kind, "accepts only a part of the data")
    hint = answer.hint or _find_hint(endpoint, protocol, answer)
    return f"{endpoint} {complaint} ({_shorten(answer.detail)}); {hint}"


def _find_hint(endpoint: str, protocol: str, answer: Answer) -> str:
    if protocol == "grpc" and endpoint.endswith(":4318"):
        return _HTTP_PORT_HINT
    if protocol == "http" and endpoint.endswith(":4317"):
        return _GRPC_PORT_HINT
    if answer.rejected:
        return "its log says why"
    for pattern, hint in _HINTS:
        if re.search(pattern, answer.detail):
            return hint
    return "its log may say why"


def _shorten(detail: str) -> str:
    """Return an error's text in one line, without secrets, addresses, paths and queries."""
    detail = re.sub(r"\w+://\S+|<[^>]*>|[^\s@]+@|ipv[46]:\S+", "…", redact(detail))
    return detail if len(detail) <= 140 else detail[:139] + "…"
