"""What a model's newest forward means for its calls, as memory that `observer.c` reads."""

from __future__ import annotations

import itertools
import threading
from array import array

from otel_torch import torch_private
from otel_torch.sources.modules.call_stack import thread_state
from otel_torch.sources.steps import warm_ups
from otel_torch.sources.steps.forwards import ForwardContext
from otel_torch.statistics.native_layout import FORWARD

_numbers = itertools.count(1)


class ForwardState:
    """The memory of one model; laid out as `FORWARD` says."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = array("q", bytes(8 * len(FORWARD)))
        self.address: int = self._memory.buffer_info()[0]

    def begin(self, context: ForwardContext) -> None:
        """Have this thread's calls belong to a forward. The caller keeps `context` alive."""
        counts, thread = context.calls, thread_state
        fields = {
            "thread": threading.get_ident(),
            "number": next(_numbers),
            "recording": context.recording,
            # torch does not count what collectives write
            "recognizes": context.phase != warm_ups.PHASE and not torch_private.has_other_ranks(),
            "context": id(context),
            "counts": id(counts),
            "first": id(counts.first),
            "stack": id(thread.stack),
            "entered": id(thread.entered),
        }
        # one assignment, so that a call in another thread sees all of it or nothing
        self._memory[:] = array("q", [fields[name] for name in FORWARD])
