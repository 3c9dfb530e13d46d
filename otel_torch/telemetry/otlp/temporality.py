"""Reads which instruments OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE makes delta."""

from __future__ import annotations

import os

from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality

_DELTA_INSTRUMENTS: dict[str, tuple[type, ...]] = {
    "CUMULATIVE": (),
    "DELTA": (Counter, Histogram, ObservableCounter),
    "LOWMEMORY": (Counter, Histogram),
}


def read_temporalities() -> dict[type, AggregationTemporality]:
    """Return the delta instruments; all others are cumulative."""
    preference = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "")
    instruments = _DELTA_INSTRUMENTS.get(preference.strip().upper(), ())
    return dict.fromkeys(instruments, AggregationTemporality.DELTA)
