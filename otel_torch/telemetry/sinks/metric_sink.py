"""Exports activation statistics as metrics: gauges, counters and histograms.

Gauge points are made by hand with the time of their record, because an SDK gauge exports only the
last value before an export: of sixty steps a minute, one. The number of series is bounded, and what
is dropped for that is counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from math import isfinite
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import (
    AlwaysOffExemplarFilter,
    Counter,
    Histogram,
    MeterProvider,
    ObservableCounter,
    UpDownCounter,
)
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

import otel_torch
from otel_torch.process.console import say_once
from otel_torch.recorder import Sink
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.settings import Settings
from otel_torch.telemetry import self_observation
from otel_torch.telemetry.attributes import (
    ACTIVATION,
    COUNTERS,
    counter_values,
    estimate_total_bytes,
    gauge_values,
    metric_text,
)
from otel_torch.telemetry.otlp.queue_items import (
    DeferredItems,
    GaugeItem,
    IntegerGaugeItem,
    QueueItem,
    iterate_metrics,
    make_metric_items,
)
from otel_torch.telemetry.otlp.temporality import read_temporalities
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.sinks.histograms import DurationMetric, MagnitudeMetric
from otel_torch.telemetry.sinks.metric_series import SeriesKey, SeriesTable
from otel_torch.telemetry.sinks.training import is_training_step, rate_records
from otel_torch.training_quantities import STEP_DURATION

_MAGNITUDE = f"{ACTIVATION}.magnitude"
_MAGNITUDE_TEXT = "The abs_mean of each record"
_REGION_DURATION, _STEP_DURATION = "torch.region.duration", STEP_DURATION.metric
# histograms of seconds: description, and the attribute of their series
_DURATIONS = {
    _REGION_DURATION: ("How long a region took", "torch.region"),
    _STEP_DURATION: (STEP_DURATION.text, "torch.model"),
}
_DURATION_BOUNDS_S = [
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
    *(600, 1800, 3600),
]
_REGION_KINDS = frozenset({"region", "natural", "stage"})


class _Instruments:
    """The counters and histograms of one meter."""

    def __init__(
        self, meter: Meter, losses: Losses, count_sent: Callable[[], Mapping[str, int]]
    ) -> None:
        self._counters = {
            name: meter.create_counter(name, unit, text) for name, (unit, text) in COUNTERS.items()
        }
        self.magnitude = meter.create_histogram(_MAGNITUDE, "", _MAGNITUDE_TEXT)
        self.durations = {
            name: meter.create_histogram(
                name, "s", text, explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S
            )
            for name, (text, _) in _DURATIONS.items()
        }

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(count, {"reason": reason, "what": kind})
                for kind, reason, count in losses.items()
            ]

        meter.create_observable_counter(
            "otel_torch.records.dropped", [observe], "{record}", "What did not arrive, and why"
        )
        self_observation.create_counters(meter, losses, count_sent)

    def count(self, record: Record, attributes: dict[str, Any]) -> None:
        """Add a record to the counters; `attributes` are those of its series."""
        for name, number, more in counter_values(record):
            self._counters[name].add(number, attributes | more)


@dataclass(slots=True)
class _ProgramMeter:
    """The instruments on a meter of the program's own provider."""

    meter: Meter
    instruments: _Instruments
    gauges: dict[str, Any] = field(default_factory=dict)

    def gauge(self, name: str) -> Any:
        if name not in self.gauges:
            text, unit = metric_text(name)
            self.gauges[name] = self.meter.create_gauge(name, unit, text)
        return self.gauges[name]


class MetricSink(Sink):
    """The metrics of one process, by the program's meter provider or by our own exporters.

    With our own exporters, the program's thread only stores the batches of the current step. The
    sending thread finds their series, counts them and makes their items (`_make_step_items`).
    """

    def __init__(self, settings: Settings, losses: Losses, pipelines: Pipelines) -> None:
        self._losses, self._pipelines = losses, pipelines
        self._batches: list[Batch] = []  # of the current step
        self._step_scope: Scope | None = None
        self._batches_lock = threading.RLock()  # held only for an append

        self._series = SeriesTable(settings.metric_step, settings.metric_series)
        self._limit = settings.metric_series
        self._program_meters: dict[int, _ProgramMeter] = {}
        self._reader: InMemoryMetricReader | None = None
        self._own: _Instruments | None = None
        self._provider: MeterProvider | None = None
        self._deferred_steps: deque[DeferredItems] = deque()
        self._state_lock = (
            threading.RLock()
        )  # guards the series, the instruments and the histograms
        start_ns, delta = time.time_ns(), Histogram in read_temporalities()
        self._magnitudes: MagnitudeMetric[SeriesKey] = MagnitudeMetric(
            _MAGNITUDE, _MAGNITUDE_TEXT, start_ns, delta=delta
        )
        self._durations = {
            name: DurationMetric(name, text, attribute, _DURATION_BOUNDS_S, start_ns, delta=delta)
            for name, (text, attribute) in _DURATIONS.items()
        }
        pipelines.collect_with("metrics", self._collect)

    # -- scopes

    def close(self, scope: Scope) -> None:
        if scope.kind == "step":
            if is_training_step(scope):
                self._add_duration(_STEP_DURATION, scope, scope.attributes.get("torch.model", ""))
                if records := rate_records(scope):
                    self.write(Batch(records, scope))
            with self._batches_lock:
                items = self._take_step() if scope is self._step_scope else []
            self._enqueue([*items, *self._make_step_number(scope)])
        elif scope.kind in _REGION_KINDS:
            name = scope.attributes.get("torch.region", scope.name)
            self._add_duration(_REGION_DURATION, scope, name)

    def _add_duration(self, metric: str, scope: Scope, series: object) -> None:
        """Add the duration of a scope to a histogram, in the series of a region or a model."""
        seconds = max(0, scope.end_ns - scope.start_ns) / 1e9
        provider = self._pipelines.provider_to_call("metrics")
        if provider is not None:
            histogram = self._program_meter(provider).instruments.durations[metric]
            histogram.record(seconds, {_DURATIONS[metric][1]: str(series)})
        elif self._pipelines.exports("metrics"):
            self._durations[metric].add(str(series), seconds)
            self._pipelines.start("metrics")

    def _make_step_number(self, scope: Scope) -> list[QueueItem]:
        """Return the gauge with the step's number; with the program's provider, set it instead."""
        step = scope.attributes.get("torch.step")
        if not isinstance(step, int):
            return []
        model = scope.attributes.get("torch.model")
        attributes = {"torch.model": str(model)} if model is not None else {}
        provider = self._pipelines.provider_to_call("metrics")
        if provider is not None:
            self._program_meter(provider).gauge("torch.step").set(step, attributes)
            return []
        return [IntegerGaugeItem("torch.step", attributes, scope.end_ns, step)]

    # -- records

    def write(self, batch: Batch) -> None:
        with self._batches_lock:
            items: list[QueueItem] = []
            if batch.step is not self._step_scope:
                items = self._take_step()
                self._step_scope = batch.step
            self._batches.append(batch)
            if batch.step is None:
                items += self._take_step()
        self._enqueue(items)

    def finish(self, deadline: float) -> None:
        with self._batches_lock:
            items = self._take_step()
        self._enqueue(items)
        if self._losses.items() and self._pipelines.provider_to_call("metrics") is None:
            self._pipelines.start("metrics")

    def _take_step(self) -> list[QueueItem]:
        """Return the items of the batches so far, which belong to one step; with the program's
        provider, export them instead.
        """
        batches, self._batches = self._batches, []
        if not batches:
            return []
        provider = self._pipelines.provider_to_call("metrics")
        if provider is not None:
            self._export_by_program(provider, batches)
            return []
        if not self._pipelines.exports("metrics"):
            return []
        step = DeferredItems(
            sum(estimate_total_bytes(batch.records) for batch in batches),
            lambda: self._make_step_items(batches, step),
        )
        self._deferred_steps.append(step)
        return [step]

    def _enqueue(self, items: list[QueueItem]) -> None:
        if items and self._pipelines.exports("metrics"):
            self._pipelines.put("metrics", items)

    def _make_step_items(self, batches: list[Batch], step: DeferredItems) -> list[QueueItem]:
        """Count a step's records and return the items of its gauges; in the sending thread."""
        with self._state_lock:
            self._deferred_steps.remove(step)
            instruments = self._own_instruments()
            gauges = self._count_step(batches, instruments, self._magnitudes.add_all)
        items: list[QueueItem] = []
        for labels_step, records_by_key in gauges.items():
            records = list(records_by_key.values())
            if records:
                items += GaugeItem(records, estimate_total_bytes(records), labels_step).expand()
        return items

    def _count_step(
        self,
        batches: list[Batch],
        instruments: _Instruments,
        add_magnitudes: Callable[[Iterable[SeriesKey], Iterable[float]], None],
    ) -> dict[bool, dict[SeriesKey, Record]]:
        """Count a step's records in counters and histogram, and return the records of its gauges,
        by whether the step is an attribute. Of several calls with equal attributes the last counts.
        """
        gauges: dict[bool, dict[SeriesKey, Record]] = {False: {}, True: {}}
        for batch in batches:
            labels_step = self._series.should_label_step(batch)
            records = batch.records
            keys, allowed = self._series.find(records, labels_step=labels_step)
            if not all(allowed):
                dropped = [
                    record for record, fits in zip(records, allowed, strict=True) if not fits
                ]
                dropped_points = sum(len(gauge_values(record)) for record in dropped)
                self._losses.count("metric_point", "series_limit", dropped_points)
                records, keys = list(compress(records, allowed)), list(compress(keys, allowed))
            gauges[labels_step].update(zip(keys, records, strict=True))
            magnitudes: list[Any] = [record.stats.get("abs_mean") for record in records]
            finite = [
                isinstance(magnitude, (int, float)) and isfinite(magnitude)
                for magnitude in magnitudes
            ]
            add_magnitudes(compress(keys, finite), map(abs, compress(magnitudes, finite)))
            for key, record in zip(keys, records, strict=True):
                if record.stats.get("nonfinite") != 0:
                    instruments.count(record, self._series.attributes_of(key))
        return gauges

    # -- the program's provider

    def _export_by_program(self, provider: Any, batches: list[Batch]) -> None:
        meter = self._program_meter(provider)

        def add_magnitudes(keys: Iterable[SeriesKey], magnitudes: Iterable[float]) -> None:
            for key, magnitude in zip(keys, magnitudes, strict=True):
                meter.instruments.magnitude.record(magnitude, self._series.attributes_of(key))

        with self._state_lock:
            gauges = self._count_step(batches, meter.instruments, add_magnitudes)
        for records_by_key in gauges.values():
            for key, record in records_by_key.items():
                attributes = self._series.attributes_of(key)
                for name, value in gauge_values(record):
                    meter.gauge(name).set(value, attributes)
        if gauges[False]:
            say_once(
                "metrics use the program's own meter provider, which exports only the last value "
                "of a gauge per interval; OTEL_TORCH_METRIC_STEP=label exports every step's"
            )

    def _program_meter(self, provider: Any) -> _ProgramMeter:
        entry = self._program_meters.get(id(provider))
        if entry is None:
            meter = provider.get_meter("otel_torch", otel_torch.__version__)
            entry = _ProgramMeter(
                meter, _Instruments(meter, self._losses, self._pipelines.count_sent)
            )
            self._program_meters[id(provider)] = entry
        return entry

    # -- our own counters and histograms

    def _own_instruments(self) -> _Instruments:
        if self._own is None:
            instruments = (Counter, Histogram, ObservableCounter, UpDownCounter)
            limits: Any = dict.fromkeys(instruments, max(self._limit, 1) + 1000)
            self._reader = InMemoryMetricReader(
                preferred_temporality=read_temporalities(), cardinality_limits=limits
            )
            self._provider = MeterProvider(
                [self._reader],
                resource=Resource.get_empty(),  # the queue has that of the signal
                # exemplars draw from the program's random numbers
                exemplar_filter=AlwaysOffExemplarFilter(),
                shutdown_on_exit=False,
            )
            meter = self._provider.get_meter("otel_torch", otel_torch.__version__)
            self._own = _Instruments(meter, self._losses, self._pipelines.count_sent)
        return self._own

    def _collect(self) -> list[QueueItem]:
        """Return what has accumulated; in the sending thread."""
        for step in list(self._deferred_steps):
            step.expand()
        now = time.time_ns()
        with self._state_lock:
            attributes: Mapping[SeriesKey, dict[str, Any]] = self._series.allowed_attributes()
            histograms = [
                self._magnitudes.collect(attributes, now),
                *(durations.collect(now) for durations in self._durations.values()),
            ]
            if self._pipelines.provider_to_call("metrics") is None:
                self._own_instruments()
            reader = self._reader
        metrics = list(iterate_metrics(reader.get_metrics_data())) if reader is not None else []
        metrics += [metric for metric in histograms if metric is not None]
        return list(make_metric_items(metrics))
