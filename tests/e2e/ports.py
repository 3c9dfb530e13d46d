"""Free ports for the servers that tests start.

A port that the kernel picks comes from the range of outgoing connections, so another process's next
connection may take it before the server starts. These lie below that range, and each worker of
pytest-xdist has its own.
"""

from __future__ import annotations

import itertools
import os
import re
import socket

FIRST, EACH, WORKERS = 20_000, 1_000, 12  # up to 31,999; Linux connects from 32,768 on

_worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % WORKERS
_ports = range(FIRST + _worker * EACH, FIRST + (_worker + 1) * EACH)
# the children of a worker begin at different places
_next = itertools.islice(itertools.cycle(_ports), os.getpid() % EACH, None)


def free_port() -> int:
    """Return a free port on 127.0.0.1. A process reuses a port only after a thousand others.

    Raises:
        RuntimeError: all ports of this worker are taken.
    """
    for port in itertools.islice(_next, EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"all {EACH:,} ports of worker {_worker} are taken")
