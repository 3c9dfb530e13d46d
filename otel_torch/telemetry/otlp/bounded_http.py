"""HTTP requests of which neither the answer's size nor its duration is up to the server.

Requests itself reads any answer to its end, decompresses all of it, and its timeout is that of one
read: a server that sends a byte a second is never given up. All of this is in an adapter, which any
session and any exporter can use.
"""

from __future__ import annotations

import contextlib
import copy
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from otel_torch.telemetry.otlp.answer import ANSWER_BYTES

_NOT_CONNECTED = re.compile("NewConnection|refused|NameResolution|SSL")
# by content encoding; an answer in any other is taken as it is
_WINDOW_BITS = {
    "gzip": zlib.MAX_WBITS | 32,
    "x-gzip": zlib.MAX_WBITS | 32,
    "deflate": zlib.MAX_WBITS,
}


class SessionClosed(requests.ConnectionError):
    """A request was made after `BoundedAdapter.cancel`."""


def was_never_sent(error: Exception) -> bool:
    """Return whether a request failed before there was a connection."""
    if isinstance(error, requests.ConnectTimeout | requests.exceptions.SSLError):
        return True
    is_of_connection = isinstance(error, requests.ConnectionError)
    return is_of_connection and bool(_NOT_CONNECTED.search(describe_error(error)))


def describe_error(error: Exception) -> str:
    """Return the type and the reason of an error of requests, which wraps those of urllib3."""
    reason: Any = error.args[0] if error.args else error
    return f"{type(error).__name__}: {getattr(reason, 'reason', reason)}"


def bound_session(session: requests.Session) -> requests.Session:
    """Let a session read at most ANSWER_BYTES of an answer, and end each request at its timeout."""
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter())
    session.headers["Accept-Encoding"] = "identity"
    return session


def copy_session(session: requests.Session) -> requests.Session:
    """Return a bounded session with the settings of another one; that one itself if it connects or
    authenticates in a way of its own.
    """
    adapters = session.adapters.values()
    is_plain = type(session) is requests.Session and {*map(type, adapters)} == {HTTPAdapter}
    if not is_plain:
        return session
    own = requests.Session()
    for name in requests.Session.__attrs__:
        if name != "adapters":
            setattr(own, name, copy.copy(getattr(session, name)))
    return bound_session(own)


class BoundedAdapter(HTTPAdapter):
    """Sends one request at a time.

    Attributes:
        connected_at: when the last connection was made, by `time.monotonic`; 0 if none was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.connected_at = 0.0
        self._connection: Any = None  # the last one that was opened
        self._is_closed = False

    def send(  # type: ignore[override]  # what requests passes by keyword is passed on
        self, request: Any, stream: bool = False, timeout: Any = None, **options: Any
    ) -> Any:
        """Send a request. The response's content is at most ANSWER_BYTES, however it is encoded.

        Args:
            timeout: of the whole request, in seconds.

        Raises:
            requests.RequestException: no connection was made, or no answer came in time.
        """
        if self._is_closed:
            raise SessionClosed("the session is closed")
        with self._ended_after(timeout) as is_over:
            try:
                response = super().send(request, stream=True, timeout=timeout, **options)
                response._content = _read_bounded(response.raw)
                response._content_consumed = True
            except (requests.RequestException, HTTPError, OSError, ValueError) as error:
                failure = _as_request_error(error)
                if was_never_sent(failure) or not (is_over.is_set() or self._is_closed):
                    raise failure from None
        if is_over.is_set() or self._is_closed:  # what was read until then looks like an answer
            raise requests.ReadTimeout("Read timed out")
        if not response.raw.closed:
            response.raw.close()  # there is more, which is not read
        return response

    def cancel(self) -> None:
        """End the current request; may be called from another thread."""
        self._is_closed = True
        self._disconnect()

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        """Return a pool whose connections tell this adapter that they are opened."""
        pool: Any = super().get_connection_with_tls_context(*args, **options)
        if not hasattr(pool.ConnectionCls, "reports_to"):
            pool.ConnectionCls = _reporting(pool.ConnectionCls, self)
        return pool

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Iterator[threading.Event]:
        """Cut the connection after `seconds`; yield an event that is set then."""
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            self._disconnect()

        timer = threading.Timer(seconds, end)
        timer.name, timer.daemon = "otel_torch-timeout", True
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and waits for no thread
            timer.start()
        try:
            yield is_over
        finally:
            timer.cancel()

    def _disconnect(self) -> None:
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                # the method of a TLS socket would change what the reading thread uses
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _as_request_error(error: Exception) -> requests.RequestException:
    if isinstance(error, requests.RequestException):
        return error
    return requests.ConnectionError(error)


def _reporting(connection_class: Any, adapter: BoundedAdapter) -> Any:
    class ReportingConnection(connection_class):  # type: ignore[misc]
        reports_to = adapter

        def connect(self) -> None:
            self.reports_to._connection = self
            super().connect()
            self.reports_to.connected_at = time.monotonic()

    ReportingConnection.__name__ = connection_class.__name__  # which is part of errors
    return ReportingConnection


def _read_bounded(raw: Any) -> bytes:
    """Return the first ANSWER_BYTES of a response, before and after decompression."""
    data: bytes = raw.read(ANSWER_BYTES, decode_content=False)
    window_bits = _WINDOW_BITS.get((raw.headers.get("content-encoding") or "").strip().lower())
    if window_bits is None:
        return data
    try:
        return zlib.decompressobj(window_bits).decompress(data, ANSWER_BYTES)
    except zlib.error:
        return b""
