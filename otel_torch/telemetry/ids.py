"""Trace and span ids that do not use the program's random numbers.

The SDK's generator draws from the global stream, so tracing would change the numbers of a seeded
program, and every run and rank with that seed would have the same ids.
"""

from __future__ import annotations

import os
import random

from opentelemetry.sdk.trace.id_generator import IdGenerator

from otel_torch.process import at_fork
from otel_torch.process.at_fork import ForkOrder

private = random.Random(os.urandom(16))

at_fork.register(ForkOrder.SPAN_IDS, in_child=lambda: private.seed(os.urandom(16)))


class PrivateIds(IdGenerator):
    """Random ids from a private stream. If `next_trace_id` is set, the next trace gets that id."""

    def __init__(self) -> None:
        self.next_trace_id: int | None = None

    def generate_trace_id(self) -> int:
        """Return 128 random bits, never 0."""
        chosen, self.next_trace_id = self.next_trace_id, None
        return chosen or private.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """Return 64 random bits, never 0."""
        return private.getrandbits(64) or 1
