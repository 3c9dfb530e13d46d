"""Trace and span ids that leave the program's random numbers alone: the SDK's generator draws from
the global stream, so a seeded program would change its numbers under tracing, and repeat its ids in
every run and rank.
"""

from __future__ import annotations

import os
import random

from opentelemetry.sdk.trace.id_generator import IdGenerator

from otel_torch import at_fork
from otel_torch.at_fork import ForkOrder

private = random.Random(os.urandom(16))

at_fork.register(ForkOrder.SPAN_IDS, in_child=lambda: private.seed(os.urandom(16)))


class PrivateIds(IdGenerator):
    """Random ids from a stream of our own. `next_trace_id`, once set, is the id of the next trace,
    and only of that.
    """

    def __init__(self) -> None:
        self.next_trace_id: int | None = None

    def generate_trace_id(self) -> int:
        """128 bits, not 0."""
        chosen, self.next_trace_id = self.next_trace_id, None
        return chosen or private.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """64 bits, not 0."""
        return private.getrandbits(64) or 1
