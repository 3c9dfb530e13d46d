"""What a model's newest forward means for its calls, as memory that `observer.c` reads."""

from __future__ import annotations

import threading
from array import array

from otel_torch.sources.forwards import ForwardContext


class ForwardState:
    """The memory of one model; laid out as `Forward` in `observer.c`."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = array("q", bytes(8 * 5))
        self.address: int = self._memory.buffer_info()[0]

    def begin(self, context: ForwardContext) -> None:
        """Have this thread's calls belong to a forward. The caller keeps `context` alive."""
        calls = context.calls
        # one assignment, so that a call in another thread sees all of it or nothing
        self._memory[:] = array(
            "q", (threading.get_ident(), context.recording, id(context), id(calls), id(calls.first))
        )
