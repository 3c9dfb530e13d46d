"""Activation statistics as metrics. Gauge points are made by hand with their own times, because an
SDK gauge delivers only the last value before an export: of sixty steps a minute, one. Bounded in
series, and every one that is left out is counted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from math import isfinite
from operator import attrgetter
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
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader

import otel_torch
from otel_torch.console import say_once
from otel_torch.recorder import Sink
from otel_torch.records import Batch, Losses, Record, Scope
from otel_torch.settings import Settings
from otel_torch.telemetry.attributes import (
    ACTIVATION,
    count_nonfinite,
    estimate_all,
    gauges,
    identify,
)
from otel_torch.telemetry.magnitudes import Durations, Magnitudes
from otel_torch.telemetry.pipeline import Pipelines
from otel_torch.telemetry.queue_items import (
    Deferred,
    GaugeItem,
    Item,
    NumberItem,
    metric_items,
    read_metrics,
)

_MAGNITUDE = f"{ACTIVATION}.magnitude"
_OF_MAGNITUDE = "The abs_mean of each record"
_NONFINITE = f"{ACTIVATION}.nonfinite"
_DURATION = "torch.region.duration"
_OF_DURATION = "How long a region took"
_SECONDS = [
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
    1800,
    3600,
]
_REGION_KINDS = frozenset({"region", "natural", "stage"})

# OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE: which instruments are delta
_DELTA: dict[str, tuple[type, ...]] = {
    "CUMULATIVE": (),
    "DELTA": (Counter, Histogram, ObservableCounter),
    "LOWMEMORY": (Counter, Histogram),
}


def _temporalities() -> dict[type, AggregationTemporality]:
    preference = (
        os.environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().upper()
    )
    return dict.fromkeys(_DELTA.get(preference, ()), AggregationTemporality.DELTA)


# model, module, tensor, phase and branch, and the step where that is an attribute as well
_Key = tuple[str | int | None, ...]
_who = attrgetter("model", "module", "tensor", "phase", "branch")
_LABELLED = 6


@dataclass(frozen=True, slots=True)
class _Series:
    """What is known of the records of one place. allowed: whether they are sent."""

    attributes: dict[str, Any]
    allowed: bool


class _Instruments:
    """What accumulates: counters and histograms on one meter."""

    def __init__(self, meter: Meter, losses: Losses) -> None:
        self.nonfinite = meter.create_counter(
            _NONFINITE, "{element}", "Elements that are NaN or infinite"
        )
        self.magnitude = meter.create_histogram(_MAGNITUDE, "", _OF_MAGNITUDE)
        self.duration = meter.create_histogram(
            _DURATION, "s", _OF_DURATION, explicit_bucket_boundaries_advisory=_SECONDS
        )

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(number, {"reason": reason, "what": what})
                for what, reason, number in losses.items()
            ]

        meter.create_observable_counter(
            "otel_torch.records.dropped", [observe], "{record}", "What did not arrive, and why"
        )


def _count_series(record: Record) -> int:
    """The series of a record: its gauges and, with `abs_mean`, the histogram of magnitudes."""
    return len(gauges(record)) + ("abs_mean" in record.stats)


def _keys(records: Sequence[Record], label: bool) -> list[_Key]:
    """The series of each record."""
    keys: list[_Key] = list(map(_who, records))
    return (
        [(*key, record.step) for key, record in zip(keys, records, strict=True)] if label else keys
    )


class MetricSink(Sink):
    """Gauges, counters and histograms of one process, by the program's meter provider or our own
    exporters.

    With our own, the program's thread only keeps what it is given: which series there are, what
    they count and what is sent of them is found out by the thread that sends (`_make_step`).
    """

    def __init__(self, settings: Settings, losses: Losses, pipelines: Pipelines) -> None:
        self._mode, self._limit = settings.metric_step, settings.metric_series
        self._losses, self._pipelines = losses, pipelines
        self._batches: list[Batch] = []  # of the step that is going on
        self._step_scope: Scope | None = None
        self._lock = threading.RLock()  # held for as long as an append takes

        self._known: dict[_Key, _Series] = {}
        self._series = 0
        self._exhausted = False  # `auto` has no room for a label any more
        self._program: dict[int, tuple[Meter, _Instruments, dict[str, Any]]] = {}
        self._reader: InMemoryMetricReader | None = None
        self._own: _Instruments | None = None
        self._provider: MeterProvider | None = None
        self._waiting: deque[Deferred] = deque()  # steps that nobody has looked at yet
        self._making = threading.RLock()  # held while what is above changes
        kinds, start_ns = _temporalities(), time.time_ns()
        self._magnitudes: Magnitudes[_Key] = Magnitudes(
            _MAGNITUDE, _OF_MAGNITUDE, start_ns, delta=Histogram in kinds
        )
        self._durations = Durations(
            _DURATION, _OF_DURATION, "torch.region", _SECONDS, start_ns, delta=Histogram in kinds
        )
        pipelines.collect_with("metrics", self._collect)

    # -- scopes
    # ----------------------------------------------------------------------------------------------

    def close(self, scope: Scope) -> None:
        if scope.kind == "step":
            with self._lock:
                items = self._take_step() if scope is self._step_scope else []
            self._send([*items, *self._step_number(scope)])
        elif scope.kind in _REGION_KINDS:
            name = str(scope.attributes.get("torch.region", scope.name))
            seconds = max(0, scope.end_ns - scope.start_ns) / 1e9
            provider = self._pipelines.provider("metrics")
            if provider is not None:
                self._of_program(provider)[1].duration.record(seconds, {"torch.region": name})
            elif self._pipelines.exports("metrics"):
                self._durations.add(name, seconds)
                self._pipelines.start("metrics")

    def _step_number(self, scope: Scope) -> list[Item]:
        """The item that says which step it was; the program's own gauge is set at once."""
        step = scope.attributes.get("torch.step")
        if not isinstance(step, int):
            return []
        model = scope.attributes.get("torch.model")
        attributes = {"torch.model": str(model)} if model is not None else {}
        provider = self._pipelines.provider("metrics")
        if provider is not None:
            self._gauge(provider, "torch.step").set(step, attributes)
            return []
        return [NumberItem("torch.step", attributes, scope.end_ns, step)]

    # -- records
    # ----------------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        with self._lock:
            items: list[Item] = []
            if batch.step is not self._step_scope:
                items = self._take_step()
                self._step_scope = batch.step
            self._batches.append(batch)
            if batch.step is None:
                items += self._take_step()
        self._send(items)

    def _take_step(self) -> list[Item]:
        """What is sent of the batches so far, which are a step's."""
        batches, self._batches = self._batches, []
        if not batches:
            return []
        provider = self._pipelines.provider("metrics")
        if provider is not None:
            self._tell_program(provider, batches)
            return []
        if not self._pipelines.exports("metrics"):
            return []
        step = Deferred(
            sum(estimate_all(batch.records) for batch in batches),
            lambda: self._make_step(batches, step),
        )
        self._waiting.append(step)
        return [step]

    def _send(self, items: list[Item]) -> None:
        if items and self._pipelines.exports("metrics"):
            self._pipelines.put("metrics", items)

    def _make_step(self, batches: list[Batch], step: Deferred) -> list[Item]:
        """Count a step's records, and make the items of its gauges; in the thread that sends."""
        with self._making:
            self._waiting.remove(step)
            found = self._take(
                batches, self._own_instruments().nonfinite.add, self._magnitudes.add_all
            )
        items: list[Item] = []
        for label, chosen in found.items():
            records = list(chosen.values())
            items += GaugeItem(records, estimate_all(records), label).parts() if records else ()
        return items

    def _take(
        self,
        batches: list[Batch],
        count: Callable[[int, dict[str, Any]], None],
        sample: Callable[[Iterable[_Key], Iterable[float]], None],
    ) -> dict[bool, dict[_Key, Record]]:
        """Count a step's records; what its gauges are, with and without the step as an attribute:
        of several calls with equal attributes the last.
        """
        found: dict[bool, dict[_Key, Record]] = {False: {}, True: {}}
        for batch in batches:
            label = self._labels(batch)
            records, keys = batch.records, _keys(batch.records, label)
            allowed = [
                (self._known.get(key) or self._admit(key, one)).allowed
                for key, one in zip(keys, records, strict=True)
            ]
            if not all(allowed):
                refused = [record for record, one in zip(records, allowed, strict=True) if not one]
                self._losses.count(
                    "metric_point", "series_limit", sum(len(gauges(record)) for record in refused)
                )
                records, keys = list(compress(records, allowed)), list(compress(keys, allowed))
            found[label].update(zip(keys, records, strict=True))
            magnitudes = [record.stats.get("abs_mean") for record in records]
            finite = [
                isinstance(magnitude, (int, float)) and isfinite(magnitude)
                for magnitude in magnitudes
            ]
            sample(compress(keys, finite), map(abs, compress(magnitudes, finite)))  # type: ignore[arg-type]
            for key, record in zip(keys, records, strict=True):
                if record.stats.get("nonfinite") != 0 and (number := count_nonfinite(record)):
                    count(number, self._known[key].attributes)
        return found

    def _admit(self, key: _Key, record: Record) -> _Series:
        """Make room for a series, or not; decided once."""
        needed = _count_series(record)
        allowed = self._series + needed <= self._limit
        attributes: dict[str, Any] = dict(identify(record)) if allowed else {}
        if allowed:
            self._series += needed
            if len(key) == _LABELLED:
                attributes["torch.step"] = record.step
        else:
            say_once(
                f"more than {self._limit} metric series: those of further modules"
                f"{' and steps' if len(key) == _LABELLED else ''} are not sent, but counted; raise OTEL_TORCH_METRIC_SERIES, "
                "or select less with OTEL_TORCH_MODULES and OTEL_TORCH_STATS"
            )
        series = self._known[key] = _Series(attributes, allowed)
        return series

    def _labels(self, batch: Batch) -> bool:
        """Whether the step is an attribute of this batch's metrics."""
        if self._mode != "auto":
            return self._mode == "label"
        if batch.step is None or not batch.step.bounded or self._exhausted:
            return False
        fresh = dict(zip(_keys(batch.records, True), batch.records, strict=True))
        needed = sum(
            _count_series(record) for key, record in fresh.items() if key not in self._known
        )
        # leave room for the same without a label, which is what the metrics go on with
        if self._series + 2 * needed > self._limit:
            self._exhausted = True
            say_once(
                f"metrics go on without torch.step as an attribute, each value at its own time: with it there would be more than "
                f"{self._limit} series (OTEL_TORCH_METRIC_SERIES)"
            )
            return False
        return True

    # -- the program's provider
    # ----------------------------------------------------------------------------------------

    def _tell_program(self, provider: Any, batches: list[Batch]) -> None:
        _, instruments, _ = self._of_program(provider)

        def sample(keys: Iterable[_Key], magnitudes: Iterable[float]) -> None:
            for key, magnitude in zip(keys, magnitudes, strict=True):
                instruments.magnitude.record(magnitude, self._known[key].attributes)

        with self._making:
            found = self._take(batches, instruments.nonfinite.add, sample)
        for chosen in found.values():
            for key, record in chosen.items():
                for name, value in gauges(record):
                    self._gauge(provider, f"{ACTIVATION}.{name}").set(
                        value, self._known[key].attributes
                    )
        if found[False]:
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

    # -- counters and histograms of our own
    # ----------------------------------------------------------------------------

    def _own_instruments(self) -> _Instruments:
        if self._own is None:
            limits: Any = dict.fromkeys(
                (Counter, Histogram, ObservableCounter, UpDownCounter), max(self._limit, 1) + 1000
            )
            self._reader = InMemoryMetricReader(
                preferred_temporality=_temporalities(), cardinality_limits=limits
            )
            self._provider = MeterProvider(
                [self._reader],
                resource=self._pipelines.resource,
                exemplar_filter=AlwaysOffExemplarFilter(),  # exemplars draw from the program's random numbers
                shutdown_on_exit=False,
            )
            self._own = _Instruments(
                self._provider.get_meter("otel_torch", otel_torch.__version__), self._losses
            )
        return self._own

    def _collect(self) -> list[Item]:
        """What has accumulated, for the thread that sends."""
        for step in list(self._waiting):
            step.parts()
        now = time.time_ns()
        with self._making:
            attributes = {
                key: series.attributes for key, series in self._known.items() if series.allowed
            }
            ours = [self._magnitudes.collect(attributes, now), self._durations.collect(now)]
            if self._pipelines.provider("metrics") is None:
                self._own_instruments()
            reader = self._reader
        theirs = list(read_metrics(reader.get_metrics_data())) if reader is not None else []
        return list(metric_items([*theirs, *(metric for metric in ours if metric is not None)]))

    def finish(self, deadline: float) -> None:
        with self._lock:
            items = self._take_step()
        self._send(items)
        if self._losses.items() and self._pipelines.provider("metrics") is None:
            self._pipelines.start("metrics")
