"""Looks for NaN and Inf in the records. Under OTEL_TORCH_BUDGET, they cause full recording."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from otel_torch.recorder import Sink
from otel_torch.records import Batch, Record


class NonFiniteSink(Sink):
    """Calls `report(key, is_finite)` for every record."""

    accepts_deferred_regions = True

    def __init__(self, report: Callable[[Hashable, bool], None]) -> None:
        self._report = report

    @property
    def has_destination(self) -> bool:
        return False  # it is no reason to record

    def write(self, batch: Batch) -> None:
        for record in batch.records:
            key = record.model, record.module, record.tensor, record.phase
            self._report(key, is_finite(record))


def is_finite(record: Record) -> bool:
    """Return whether a record's tensor has no NaN or Inf, as far as its statistics show."""
    count = record.stats.get("nonfinite")
    if count is not None:
        return not count
    return all(math.isfinite(value) for value in record.stats.values() if isinstance(value, float))
