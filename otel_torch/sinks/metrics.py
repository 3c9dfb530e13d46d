"""Activation statistics as metrics. Gauge points are made by hand with their own times, because an SDK gauge delivers only
the last value before an export: of sixty steps a minute, one. Bounded in series, and every one that is left out is counted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from math import isfinite
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, Counter, Histogram, MeterProvider, ObservableCounter, UpDownCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, InMemoryMetricReader, Metric, NumberDataPoint

import otel_torch
from otel_torch.console import say_once
from otel_torch.recorder import Sink
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.settings import Settings
from otel_torch.telemetry.attributes import ACTIVATION, count_nonfinite, gauges, identify
from otel_torch.telemetry.items import GaugeItem, Item, MetricItem, chunk, metric_items, read_metrics
from otel_torch.telemetry.magnitudes import Magnitudes
from otel_torch.telemetry.pipeline import Pipelines

_MAGNITUDE = f"{ACTIVATION}.magnitude"
_OF_MAGNITUDE = "The abs_mean of each record"
_NONFINITE = f"{ACTIVATION}.nonfinite"
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600]
_REGION_KINDS = frozenset({"region", "natural", "stage"})

# OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE: which instruments are delta
_DELTA: dict[str, tuple[type, ...]] = {
    "CUMULATIVE": (),
    "DELTA": (Counter, Histogram, ObservableCounter),
    "LOWMEMORY": (Counter, Histogram),
}

_Series = tuple[str, str, str, str, str | None, int | None]


class _Instruments:
    """What accumulates: counters and histograms on one meter."""

    def __init__(self, meter: Meter, losses: Losses) -> None:
        self.nonfinite = meter.create_counter(_NONFINITE, "{element}", "Elements that are NaN or infinite")
        self.magnitude = meter.create_histogram(_MAGNITUDE, "", _OF_MAGNITUDE)
        self.duration = meter.create_histogram(
            "torch.region.duration", "s", "How long a region took", explicit_bucket_boundaries_advisory=_SECONDS
        )

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(number, {"reason": reason, "what": what}) for what, reason, number in losses.items()]

        meter.create_observable_counter("otel_torch.records.dropped", [observe], "{record}", "What did not arrive, and why")


def _count_series(record: Record) -> int:
    """The series of a record: its gauges and, with `abs_mean`, the histogram of magnitudes."""
    return len(gauges(record)) + ("abs_mean" in record.stats)


class MetricSink(Sink):
    """Gauges, counters and histograms of one process, by the program's meter provider or our own exporters."""

    def __init__(self, settings: Settings, losses: Losses, pipelines: Pipelines) -> None:
        self._mode, self._limit = settings.metric_step, settings.metric_series
        self._losses, self._pipelines = losses, pipelines
        self._known: dict[_Series, tuple[int, int]] = {}  # what of each series is sent: gauges, and all
        self._series = 0
        self._exhausted = False  # `auto` has no room for a label any more
        self._step: dict[_Series, Record] = {}
        self._step_scope: Scope | None = None
        self._attributes: dict[_Series, dict[str, Any]] = {}
        self._program: dict[int, tuple[Meter, _Instruments, dict[str, Any]]] = {}
        self._lock = threading.RLock()
        self._reader: InMemoryMetricReader | None = None
        self._own: _Instruments | None = None
        self._provider: MeterProvider | None = None
        self._magnitudes: Magnitudes[_Series] = Magnitudes(_MAGNITUDE, _OF_MAGNITUDE, time.time_ns(), delta=False)
        pipelines.collect_with("metrics", self._collect)

    # -- scopes --------------------------------------------------------------------------------------------------------

    def close(self, scope: Scope) -> None:
        if scope.kind == "step":
            with self._lock:
                if scope is self._step_scope:
                    self._send_step()
            self._send_step_number(scope)
        elif scope.kind in _REGION_KINDS:
            instruments = self._instruments()
            if instruments is not None:
                name = str(scope.attributes.get("torch.region", scope.name))
                instruments.duration.record(max(0, scope.end_ns - scope.start_ns) / 1e9, {"torch.region": name})
                self._pipelines.start("metrics")

    def _send_step_number(self, scope: Scope) -> None:
        step = scope.attributes.get("torch.step")
        if not isinstance(step, int):
            return
        model = scope.attributes.get("torch.model")
        attributes = {"torch.model": str(model)} if model is not None else {}
        provider = self._pipelines.provider("metrics")
        if provider is not None:
            self._gauge(provider, "torch.step").set(step, attributes)
        elif self._pipelines.exports("metrics"):
            point = NumberDataPoint(attributes, 0, scope.end_ns, step)
            self._pipelines.put("metrics", [MetricItem(Metric("torch.step", "", "", Gauge([point])), 120)])

    # -- records -------------------------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        with self._lock:
            if batch.step is not self._step_scope:
                self._send_step()
                self._step_scope = batch.step
            label = self._labels(batch)
            instruments = self._instruments()
            if instruments is None:
                return
            for record in batch.records:
                self._take(record, label, instruments)
            if batch.step is None:
                self._send_step()

    def _take(self, record: Record, label: bool, instruments: _Instruments) -> None:
        series = (record.model, record.module, record.tensor, record.phase, record.branch, record.step if label else None)
        allowed = self._known.get(series)
        if allowed is None:
            allowed = self._admit(series, record)
        if not allowed[1]:
            self._losses.count("metric_point", "series_limit", len(gauges(record)))
            return
        self._step[series] = record
        magnitude = record.stats.get("abs_mean")
        if isinstance(magnitude, (int, float)) and isfinite(magnitude):
            if instruments is self._own:
                self._magnitudes.add(series, abs(magnitude))
            else:
                instruments.magnitude.record(abs(magnitude), self._attributes[series])
        if number := count_nonfinite(record):
            instruments.nonfinite.add(number, self._attributes[series])

    def _admit(self, series: _Series, record: Record) -> tuple[int, int]:
        """Make room for a series, or not; decided once."""
        number = len(gauges(record))
        needed = _count_series(record)
        if self._series + needed > self._limit:
            say_once(
                f"more than {self._limit} metric series: those of further modules"
                f"{' and steps' if series[-1] is not None else ''} are not sent, but counted; raise OTEL_TORCH_METRIC_SERIES, "
                "or select less with OTEL_TORCH_MODULES and OTEL_TORCH_STATS"
            )
            self._known[series] = (0, 0)
        else:
            self._series += needed
            self._known[series] = (number, needed)
            found: dict[str, Any] = identify(record)
            if series[-1] is not None:
                found["torch.step"] = series[-1]
            self._attributes[series] = found
        return self._known[series]

    def _labels(self, batch: Batch) -> bool:
        """Whether the step is an attribute of this batch's metrics."""
        if self._mode != "auto":
            return self._mode == "label"
        if batch.step is None or not batch.step.bounded or self._exhausted:
            return False
        fresh = {(r.model, r.module, r.tensor, r.phase, r.branch, r.step): r for r in batch.records}
        needed = sum(_count_series(record) for series, record in fresh.items() if series not in self._known)
        # leave room for the same without a label, which is what the metrics go on with
        if self._series + 2 * needed > self._limit:
            self._exhausted = True
            say_once(
                f"metrics go on without torch.step as an attribute, each value at its own time: with it there would be more than "
                f"{self._limit} series (OTEL_TORCH_METRIC_SERIES)"
            )
            return False
        return True

    def _send_step(self) -> None:
        """Send the gauges of a step: of several calls with equal attributes the last."""
        step, self._step = self._step, {}
        if not step:
            return
        provider = self._pipelines.provider("metrics")
        if provider is not None:
            self._set_gauges(provider, step)
            return
        for label in (False, True):
            records = [record for series, record in step.items() if (series[-1] is not None) is label and gauges(record)]
            self._pipelines.put("metrics", [GaugeItem(some, size, label) for some, size in chunk(records)])
        self._pipelines.start("metrics")

    # -- the program's provider ----------------------------------------------------------------------------------------

    def _set_gauges(self, provider: Any, step: dict[_Series, Record]) -> None:
        for series, record in step.items():
            for name, value in gauges(record):
                self._gauge(provider, f"{ACTIVATION}.{name}").set(value, self._attributes[series])
        if any(series[-1] is None for series in step):
            say_once(
                "metrics go by the program's own meter provider, which delivers of each gauge only the last value before an "
                "export; OTEL_TORCH_METRIC_STEP=label delivers every step's"
            )

    def _of_program(self, provider: Any) -> tuple[Meter, _Instruments, dict[str, Any]]:
        found = self._program.get(id(provider))
        if found is None:
            meter = provider.get_meter("otel_torch", otel_torch.__version__)
            found = self._program[id(provider)] = (meter, _Instruments(meter, self._losses), {})
        return found

    def _gauge(self, provider: Any, name: str) -> Any:
        meter, _, made = self._of_program(provider)
        if name not in made:
            made[name] = meter.create_gauge(name)
        return made[name]

    # -- counters and histograms ---------------------------------------------------------------------------------------

    def _instruments(self) -> _Instruments | None:
        provider = self._pipelines.provider("metrics")
        if provider is not None:
            return self._of_program(provider)[1]
        if not self._pipelines.exports("metrics"):
            return None
        if self._own is None:
            with self._lock:
                self._own = self._own or self._make_own()
        return self._own

    def _make_own(self) -> _Instruments:
        preference = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().upper()
        kinds: dict[type, AggregationTemporality] = dict.fromkeys(_DELTA.get(preference, ()), AggregationTemporality.DELTA)
        limits: Any = dict.fromkeys((Counter, Histogram, ObservableCounter, UpDownCounter), max(self._limit, 1) + 1000)
        self._reader = InMemoryMetricReader(preferred_temporality=kinds, cardinality_limits=limits)
        self._provider = MeterProvider(
            [self._reader],
            resource=self._pipelines.resource,
            exemplar_filter=AlwaysOffExemplarFilter(),  # exemplars draw from the program's random numbers
            shutdown_on_exit=False,
        )
        self._magnitudes = Magnitudes(_MAGNITUDE, _OF_MAGNITUDE, time.time_ns(), delta=Histogram in kinds)
        return _Instruments(self._provider.get_meter("otel_torch", otel_torch.__version__), self._losses)

    def _collect(self) -> list[Item]:
        """What has accumulated, for the thread that sends."""
        self._instruments()
        if self._reader is None:
            return []
        with self._lock:
            magnitudes = self._magnitudes.collect(self._attributes, time.time_ns())
        found = list(read_metrics(self._reader.get_metrics_data()))
        return list(metric_items([*found, magnitudes] if magnitudes is not None else found))

    def finish(self, deadline: float) -> None:
        with self._lock:
            self._send_step()
        if self._losses.items() and self._pipelines.provider("metrics") is None:
            self._pipelines.start("metrics")
