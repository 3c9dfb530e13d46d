"""What a model's newest forward means for its calls, as memory that `observer.c` reads."""

from __future__ import annotations

import itertools
import threading
from array import array

from otel_torch import torch_private
from otel_torch.sources import warm_ups
from otel_torch.sources.call_stack import thread_state
from otel_torch.sources.forwards import ForwardContext

_FIELDS = 9
_numbers = itertools.count(1)


class ForwardState:
    """The memory of one model; laid out as `Forward` in `observer.c`."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = array("q", bytes(8 * _FIELDS))
        self.address: int = self._memory.buffer_info()[0]

    def begin(self, context: ForwardContext) -> None:
        """Have this thread's calls belong to a forward. The caller keeps `context` alive."""
        counts, thread = context.calls, thread_state
        fields = (
            threading.get_ident(),
            next(_numbers),
            context.recording,
            # torch does not count what collectives write
            context.phase != warm_ups.PHASE and not torch_private.has_other_ranks(),
            id(context),
            id(counts),
            id(counts.first),
            id(thread.stack),
            id(thread.entered),
        )
        # one assignment, so that a call in another thread sees all of it or nothing
        self._memory[:] = array("q", fields)
