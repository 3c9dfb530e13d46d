"""Our losses under the names of OpenTelemetry's conventions for the SDK itself.

    ("log_event", "refused", 300)  →  otel.sdk.exporter.log.exported{error.type="refused"} 300
    ("span", "queue_full", 2)      →  otel.sdk.processor.span.processed{error.type="queue_full"} 2

Dashboards for exporters then show them. Where something was lost, what did arrive is counted as
well, without `error.type`, so that a share can be computed. Losses that these conventions have no
metric for, such as span events and records that a recording lost, are only in
`otel_torch.records.dropped`.

https://opentelemetry.io/docs/specs/semconv/otel/sdk-metrics/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from otel_torch.records import Losses

# reasons for which an item never reached its exporter; those of an export that failed
_PROCESSOR = frozenset({"queue_full", "shutdown"})
_EXPORTER = frozenset(
    {"refused", "rejected", "unconfirmed", "too_large", "unencodable", "disk", "max_bytes"}
)
# by metric: unit, the kind of item, the reasons; points have no processor
METRICS = {
    "otel.sdk.processor.span.processed": ("{span}", "span", _PROCESSOR),
    "otel.sdk.exporter.span.exported": ("{span}", "span", _EXPORTER),
    "otel.sdk.processor.log.processed": ("{log_record}", "log_event", _PROCESSOR),
    "otel.sdk.exporter.log.exported": ("{log_record}", "log_event", _EXPORTER),
    "otel.sdk.exporter.metric_data_point.exported": (
        "{data_point}",
        "metric_point",
        _PROCESSOR | _EXPORTER,
    ),
}
_TEXTS = {
    "processed": "Items whose processing has finished, either successful or failed",
    "exported": "Items whose export has finished, either successful or failed",
}


def create_counters(
    meter: Meter, losses: Losses, count_sent: Callable[[], Mapping[str, int]]
) -> None:
    """Create the counters, which are observed whenever the meter is read.

    Args:
        count_sent: returns how many items of each kind were accepted.
    """
    for name, (unit, kind, reasons) in METRICS.items():
        observe = partial(_observe, name, kind, reasons, losses, count_sent)
        text = _TEXTS[name.rpartition(".")[2]]
        meter.create_observable_counter(name, [observe], unit, text)


def _observe(
    metric: str,
    kind: str,
    reasons: frozenset[str],
    losses: Losses,
    count_sent: Callable[[], Mapping[str, int]],
    options: CallbackOptions,
) -> Iterable[Observation]:
    lost = Counter({reason: number for what, reason, number in losses.items() if what == kind})
    failed = {reason: number for reason, number in lost.items() if reason in reasons}
    if not failed:
        return []
    succeeded = count_sent().get(kind, 0)
    if metric.endswith(".processed"):  # passed to the exporter, whatever came of it
        succeeded += sum(number for reason, number in lost.items() if reason in _EXPORTER)
    observations = [Observation(number, {"error.type": name}) for name, number in failed.items()]
    return [*observations, Observation(succeeded, {})] if succeeded else observations
