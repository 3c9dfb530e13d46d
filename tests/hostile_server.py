"""HTTP receivers that misbehave, one function each, on free ports of this process.

    with HostileServer(ANSWERS["a gzip bomb"]) as server:
        run_the_program(**server.environment)

A function gets the connection and the request's head, and may do as it likes: `server.stopped` ends its
waiting.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[["HostileServer", socket.socket, bytes], None]
# what a server sends that never ends
ENDLESS_BYTES = 2**30


class HostileServer:
    """Accepts connections and answers each request by `answer`.

    Args:
        reads: read a request before it is answered.
    """

    def __init__(self, answer: Answer, *, reads: bool = True) -> None:
        self.stopped = threading.Event()
        self._answer, self._reads = answer, reads
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables that export to this server."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }

    def __enter__(self) -> HostileServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while not self.stopped.is_set():
                    head = _read_request(connection) if self._reads else b""
                    if head is None:
                        return
                    self._answer(self, connection, head)
            except OSError:
                pass  # the client has had enough


def _read_request(connection: socket.socket) -> bytes | None:
    """Read a request to its end; return its head, or None where the client has closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(65536)
        if not received:
            return None
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    remaining = int(length[1]) - len(body) if length else 0
    while remaining > 0:
        received = connection.recv(min(remaining, 2**20))
        if not received:
            return None
        remaining -= len(received)
    return head


def respond(
    connection: socket.socket,
    status: str,
    body: bytes = b"",
    *headers: str,
    length: int | None = None,
) -> None:
    """Send a response; `length` announces more than `body` holds."""
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers, "", ""]
    connection.sendall("\r\n".join(lines).encode() + body)


def silent(server: HostileServer, connection: socket.socket, head: bytes) -> None:
    server.stopped.wait()


def drip(server: HostileServer, connection: socket.socket, data: Iterator[int] | bytes) -> None:
    for byte in data:
        connection.sendall(bytes([byte]))
        if server.stopped.wait(0.1):
            return


def drips_its_head(server: HostileServer, connection: socket.socket, head: bytes) -> None:
    drip(server, connection, b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 60_000)


def drips_its_body(server: HostileServer, connection: socket.socket, head: bytes) -> None:
    respond(connection, "200 OK", length=60_000)
    drip(server, connection, b"a" * 60_000)


def continues_for_ever(server: HostileServer, connection: socket.socket, head: bytes) -> None:
    while not server.stopped.wait(0.1):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def resets(server: HostileServer, connection: socket.socket, head: bytes) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def answers(status: str, *headers: str, body: bytes = b"") -> Answer:
    """Return an answer of this status, with `{authorization}` replaced by the request's."""

    def answer(server: HostileServer, connection: socket.socket, head: bytes) -> None:
        sent = re.search(rb"(?i)\r\nauthorization: *([^\r]*)", head)
        secret = sent[1].decode("latin-1") if sent else ""
        respond(connection, status.replace("{authorization}", secret), body, *headers)

    return answer


def endless(status: str) -> Answer:
    def answer(server: HostileServer, connection: socket.socket, head: bytes) -> None:
        respond(connection, status, length=ENDLESS_BYTES)
        for _ in range(ENDLESS_BYTES // 2**20):
            connection.sendall(bytes(2**20))

    return answer


def bomb(wbits: int) -> bytes:
    """Return a megabyte that becomes ENDLESS_BYTES; the end of the stream is missing."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, wbits)
    # after a full flush, equal bytes become equal pieces
    first, piece = (
        compressor.compress(bytes(2**20)) + compressor.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    return first + piece * (ENDLESS_BYTES // 2**20 - 1)


def explodes(status: str, encoding: str, wbits: int) -> Answer:
    def answer(server: HostileServer, connection: socket.socket, head: bytes) -> None:
        respond(connection, status, bomb(wbits), f"Content-Encoding: {encoding}")

    return answer


def rejects_at_length(server: HostileServer, connection: socket.socket, head: bytes) -> None:
    """Reject two items, and say why in ENDLESS_BYTES."""
    message = ENDLESS_BYTES - 40
    partial = b"\x08\x02\x12" + _varint(message)
    start = b"\x0a" + _varint(len(partial) + message) + partial
    respond(connection, "200 OK", start, length=len(start) + message)
    for _ in range(message // 2**20 + 1):
        connection.sendall(b"x" * min(2**20, message))
        message -= 2**20


def _varint(number: int) -> bytes:
    data = []
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


ESCAPES = "\x1b[31m\x07\x9b\u202e"
# name: what a server does with each request
ANSWERS: dict[str, Any] = {
    "is silent": silent,
    "drips its head": drips_its_head,
    "drips its body": drips_its_body,
    "continues for ever": continues_for_ever,
    "resets": resets,
    "is busy": answers("503 Service Unavailable"),
    "asks to wait": answers("429 Too Many Requests", "Retry-After: 1"),
    "answers at length": endless("200 OK"),
    "refuses at length": endless("400 Bad Request"),
    "is busy at length": endless("503 Service Unavailable"),
    "sends a gzip bomb": explodes("200 OK", "gzip", 31),
    "refuses with a gzip bomb": explodes("400 Bad Request", "gzip", 31),
    "sends a deflate bomb": explodes("200 OK", "deflate", 15),
    "rejects at length": rejects_at_length,
}
