"""A connection to a server that can be slow, fall silent or be cut."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Forwards connections to a port of this machine, from entering the context to leaving it.

    Args:
        port: Of the server.
        delay: Seconds that each piece of at most 64 KiB is held back.
        cut_after: After how many bytes, in both directions and over all connections, everything is
            closed, and new connections too.
        silent_after: After how many bytes nothing is forwarded any more.
    """

    def __init__(
        self,
        port: str,
        *,
        delay: float = 0.0,
        cut_after: float = float("inf"),
        silent_after: float = float("inf"),
    ) -> None:
        self._server = ("127.0.0.1", int(port))
        self._delay, self._cut_after, self._silent_after = delay, cut_after, silent_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.forwarded = 0

    @property
    def port(self) -> str:
        return str(self._listener.getsockname()[1])

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for one in (self._listener, *self._open):
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self.forwarded > self._cut_after:
                    client.close()
                    continue
                server = socket.create_connection(self._server)
                self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.forwarded += len(data)
                if self.forwarded > self._cut_after:
                    break
                while self.forwarded > self._silent_after:
                    time.sleep(0.1)
                time.sleep(self._delay)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
