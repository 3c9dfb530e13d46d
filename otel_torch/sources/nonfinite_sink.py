"""Watches records for values that are not finite: around one, OTEL_TORCH_BUDGET gives way to full
recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from otel_torch.recorder import Sink
from otel_torch.records import Batch, Record


class NonFiniteSink(Sink):
    """Tells of every record whether it is finite: saw(place, finite)."""

    late = True  # regions mean nothing to it, whenever it is told of them

    def __init__(self, saw: Callable[[Hashable, bool], None]) -> None:
        self._saw = saw

    @property
    def wanted(self) -> bool:
        return False  # what it sees goes nowhere

    def write(self, batch: Batch) -> None:
        for record in batch.records:
            self._saw((record.model, record.module, record.tensor, record.phase), is_finite(record))


def is_finite(record: Record) -> bool:
    """Whether all values of a record's tensor are, as far as its statistics tell."""
    count = record.stats.get("nonfinite")
    if count is not None:
        return not count
    return all(math.isfinite(value) for value in record.stats.values() if isinstance(value, float))
