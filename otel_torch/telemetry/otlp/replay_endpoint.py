"""The endpoint that a replay of OTLP files is sent to: rate limit, retries, and giving up."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from otel_torch.telemetry.otlp.answer import Answer, explain, name_endpoint
from otel_torch.telemetry.otlp.exporters import OTEL_SIGNALS, find_otlp_exporter

if TYPE_CHECKING:
    from otel_torch.telemetry.otlp.replay import ReplayOutcome

GIVE_UP_S = 60.0
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_WORTH_RETRYING = ("unavailable", "unconfirmed", "broken")
# errors that any other message would get as well
_PERMANENT_ERRORS = re.compile(
    r"UNAUTHENTICATED|PERMISSION_DENIED|UNIMPLEMENTED|HTTP 40[1345]\b|WRONG_VERSION_NUMBER"
    r"|(?i:certificate.verify|handshake)"
)
_UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30}


class ReplayError(ValueError):
    """An input that cannot be sent at all; the message is one line for the user."""


@dataclass(slots=True)
class RateLimit:
    """A limit in requests or bytes per second; 0 is no limit.

    >>> limit = RateLimit.parse("2/s")
    >>> [limit.wait_s(1000, now=now) for now in (0.0, 0.0, 10.0)]
    [0.0, 0.5, 0.0]
    >>> RateLimit.parse("4kB/s").cost_s(1000)
    0.25
    """

    requests: float = 0.0
    bytes: float = 0.0
    _next_start: float = 0.0

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        """Parse `5MB/s` or `20/s`; raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)(/s)?", text.strip(), re.IGNORECASE)
        if match and float(match[1]) > 0:
            number, unit, is_per_second = float(match[1]), match[2], match[3]
            if unit.upper() in _UNITS:
                return cls(bytes=number * _UNITS[unit.upper()])
            if is_per_second and unit.lower() in ("", "requests", "request"):
                return cls(requests=number)
        raise ValueError(f"{text!r} is not a rate; use for example 5MB/s, or 20/s for requests")

    def cost_s(self, size: int) -> float:
        """Return the seconds that a message of `size` bytes uses up."""
        byte_cost = size / self.bytes if self.bytes else 0.0
        request_cost = 1 / self.requests if self.requests else 0.0
        return byte_cost + request_cost

    def wait_s(self, size: int, now: float) -> float:
        """Return the seconds to wait before a message of `size` bytes may be sent, and count it.

        Args:
            now: seconds of a monotonic clock.
        """
        start = max(now, self._next_start)
        self._next_start = start + self.cost_s(size)
        return start - now


class Endpoint:
    """The endpoints of the standard variables, by signal; connected when first needed.

    Args:
        give_up_s: how long a message is retried.
        report: prints one line for the user.
        pause: sleeps for a number of seconds.
    """

    def __init__(
        self,
        rate: RateLimit,
        give_up_s: float,
        report: Callable[[str], None],
        pause: Callable[[float], Any],
    ) -> None:
        self._rate, self._give_up_s, self._report, self._pause = rate, give_up_s, report, pause
        self._transports: dict[str, Any] = {}
        self._exporters: dict[str, str] = {}
        for signal in OTEL_SIGNALS:
            exporter = find_otlp_exporter(signal)
            if exporter is not None:
                self._exporters[signal] = exporter
        self._addresses = {
            signal: name_endpoint(signal, "grpc" if exporter.endswith("grpc") else "http")
            for signal, exporter in self._exporters.items()
        }
        self._reachable = set(self._exporters)  # signals that are worth another message

    @property
    def name(self) -> str:
        """All addresses without credentials; progress is stored under this name."""
        return " ".join(dict.fromkeys(self._addresses.values()))

    @property
    def is_unreachable(self) -> bool:
        """Return whether no signal can be sent any more."""
        return not self._reachable

    def can_send(self, signal: str) -> bool:
        """Return whether a signal is worth another message.

        Raises:
            ReplayError: no endpoint is configured for it.
        """
        if signal not in self._exporters:
            raise ReplayError(
                f"no usable endpoint for {signal}: set OTEL_EXPORTER_OTLP_ENDPOINT, and "
                "OTEL_EXPORTER_OTLP_PROTOCOL to grpc or http/protobuf"
            )
        return signal in self._reachable

    def send(self, signal: str, message: bytes, outcome: ReplayOutcome) -> Answer:
        """Send a message until the answer is final, and return that answer."""
        transport = self._transport(signal)
        started, attempt = time.monotonic(), 0
        while True:
            self._pause(self._rate.wait_s(len(message), time.monotonic()))
            answer: Answer = transport.send_request(message)
            outcome.requests += 1
            is_permanent = answer.kind != "accepted" and bool(
                _PERMANENT_ERRORS.search(answer.detail)
            )
            if is_permanent or answer.kind not in _WORTH_RETRYING:
                break
            delay_s = _RETRY_S[min(attempt, len(_RETRY_S) - 1)] * random.uniform(0.8, 1.2)
            delay_s = max(answer.wait_s, delay_s)
            if time.monotonic() - started + delay_s > self._give_up_s:
                break
            text = explain(transport.endpoint, transport.protocol, answer)
            self._report(f"{text}. Retrying for up to {self._give_up_s:g} s")
            self._pause(delay_s)
            outcome.sent_again += answer.kind != "unavailable"
            attempt += 1
        if answer.kind != "accepted" or answer.rejected:
            self._report(explain(transport.endpoint, transport.protocol, answer))
        if is_permanent:
            self._reachable.discard(signal)
        elif answer.kind in _WORTH_RETRYING:
            self._drop_address(self._addresses[signal])
        return answer

    def close(self) -> None:
        for transport in self._transports.values():
            transport.shutdown()

    def _drop_address(self, address: str) -> None:
        """Send nothing more to an address, of any signal."""
        self._reachable = {
            signal for signal in self._reachable if self._addresses[signal] != address
        }

    def _transport(self, signal: str) -> Any:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from otel_torch.telemetry.otlp.transport import open_transport

        if signal in self._transports:
            return self._transports[signal]
        resource, scope = Resource.get_empty(), InstrumentationScope("")  # messages have their own
        try:
            transport = open_transport(signal, self._exporters[signal], resource, scope)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ReplayError(
                f"the OTEL_EXPORTER_OTLP_* variables for {signal} make no exporter: {reason}"
            ) from None
        if not hasattr(transport, "send_request"):
            raise ReplayError(
                "the installed version of OpenTelemetry's OTLP exporters is not supported, nothing "
                "is sent; a Collector with the otlpjsonfile receiver can read these files instead"
            )
        self._transports[signal] = transport
        return transport
