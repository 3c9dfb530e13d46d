"""The one sink for everything that goes to OpenTelemetry. It starts when there is an exporter, a
file or a provider, and ends all signals together, so that the program's end waits for one deadline.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_torch.process import at_fork
from otel_torch.process.console import say, say_once
from otel_torch.process.exit_hooks import is_interpreter_ending
from otel_torch.process.job import Job
from otel_torch.recorder import Sink
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.records import Batch, Losses, Scope
from otel_torch.regions.closer import RegionCloser, RegionEntry, RegionLabel, RegionSpans
from otel_torch.settings import Settings
from otel_torch.telemetry.otlp.exporters import (
    CARRIERS,
    exporters_by_signal,
    find_config_file,
    is_sdk_disabled,
)
from otel_torch.telemetry.providers import find_provider, watch_tracer_provider
from otel_torch.telemetry.sinks.training import add_step_attributes, split_batch

if TYPE_CHECKING:
    from otel_torch.telemetry.pipeline import Pipelines
    from otel_torch.telemetry.sinks.metric_sink import MetricSink
    from otel_torch.telemetry.sinks.span_sink import SpanSink


def build_telemetry_sinks(
    settings: Settings,
    job: Job,
    losses: Losses,
    at_exit: Callable[[], Any] | None = None,
    budget: DiskBudget | None = None,
) -> list[Sink]:
    """Return the sink that sends and writes the signals of `settings`, in a list; an empty list for
    a rank that does neither. Imports nothing of OpenTelemetry until there is data and a
    destination.

    Args:
        at_exit: ends the session. Registered with `atexit` when the program's own provider is first
            used: exit functions run in reverse order, so it runs before that provider shuts down.
        budget: bounds what this process writes to disk; a new one by default.
    """
    if not settings.signals:
        return []
    rank = {"rank": job.rank, "local_rank": job.local_rank, "world_size": job.world_size}
    writes = (
        settings.otlp_file is not None
        and settings.jsonl_ranks.includes(**rank)
        and not is_sdk_disabled(os.environ)
    )
    exports = settings.ranks.includes(**rank)
    exporters = exporters_by_signal() if exports else {}
    if exporters and settings.ranks.text == "auto" and job.world_size > 16 and job.rank == 0:
        say(
            f"{job.world_size} ranks: only the first rank of each node exports by OTLP; "
            "set OTEL_TORCH_RANKS=all to export from all"
        )
    if exports and find_config_file() and find_provider("traces") is None:
        say_once(
            "OTEL_CONFIG_FILE takes the place of the OTEL_EXPORTER_… variables: start the program "
            "with opentelemetry-instrument (pip install opentelemetry-distro "
            "opentelemetry-configuration), which makes the providers that are used here"
        )
    if not (exports or writes):
        return []
    if "span_events" in settings.signals and "spans" not in settings.signals:
        say_once(
            "OTEL_TORCH_SIGNALS: span_events are not sent, because they need spans; "
            "log_events do not"
        )
    file_budget = (budget or DiskBudget(settings.max_bytes)) if writes else None
    return [TelemetrySink(settings, job, losses, exporters, at_exit, file_budget)]


class TelemetrySink(Sink):
    """Spans, log events and metrics of one process.

    Imports nothing of OpenTelemetry until there is a destination: an exporter in `exporters`,
    files, or a provider that the program has installed. From then on it passes everything to the
    sinks of the selected signals.

    Args:
        exporters: exporter names by OpenTelemetry signal.
        file_budget: bounds the OTLP files; None if none are written.
    """

    accepts_deferred_regions = True  # their spans start and end through `region_spans`

    def __init__(
        self,
        settings: Settings,
        job: Job,
        losses: Losses,
        exporters: dict[str, list[str]],
        at_exit: Callable[[], Any] | None = None,
        file_budget: DiskBudget | None = None,
    ) -> None:
        self._settings, self._job, self._losses = settings, job, losses
        carriers = {CARRIERS[signal] for signal in settings.signals}
        self._exporters = {
            signal: names for signal, names in exporters.items() if signal in carriers
        }
        self._carriers = tuple(carriers)
        self._at_exit, self._file_budget = at_exit, file_budget
        self._sinks: list[Sink] | None = None
        self._spans: SpanSink | None = None
        self._metrics: MetricSink | None = None
        self._pipelines: Pipelines | None = None
        self._last_step: Scope | None = None
        self._lock = threading.Lock()

    @property
    def has_destination(self) -> bool:
        return (
            bool(self._exporters)
            or self._file_budget is not None
            or any(map(find_provider, self._carriers))
        )

    @property
    def region_spans(self) -> RegionSpans | None:
        """The span sink; before there is a destination an object that waits for one; None if spans
        are not selected.
        """
        if "spans" not in self._settings.signals:
            return None
        self._start()
        return self._spans if self._spans is not None else _WaitingRegionSpans(self)

    def detach_scope(self, scope: Scope) -> None:
        """Make the span of `scope` no longer current, if there are spans by now."""
        if self._spans is not None:
            self._spans.detach_scope(scope)

    def open(self, scope: Scope) -> None:
        for sink in self._start():
            sink.open(scope)

    def close(self, scope: Scope) -> None:
        for sink in reversed(self._start()):
            sink.close(scope)

    def write(self, batch: Batch) -> None:
        sinks = self._start()
        if not sinks and not self.has_destination:
            return
        if self._pipelines is not None and (
            batch.step is None or batch.step is not self._last_step
        ):
            self._last_step = batch.step
            self._pipelines.backpressure.renew()
        activations, training = split_batch(batch)
        if training.records:
            self._write_training(training)
        if activations.records:
            for sink in sinks:
                sink.write(activations)
            if not sinks:
                self._count_unstarted(activations)

    def _write_training(self, batch: Batch) -> None:
        """Pass values of a training on: they are attributes of the step and metrics, no events."""
        if batch.step is not None:
            add_step_attributes(batch.step.attributes, batch.records)
        if self._metrics is not None:
            self._metrics.write(batch)

    def drain(self, deadline: float) -> None:
        if self._pipelines is not None:
            self._pipelines.drain(deadline)

    def finish(self, deadline: float) -> None:
        """End what is open, then send everything, all signals at once; count what remains at the
        deadline as lost.
        """
        if self._sinks is None or self._pipelines is None:
            return
        for sink in self._sinks:
            try:
                sink.finish(deadline)
            except Exception as error:
                say_once(f"{type(sink).__name__} could not end: {type(error).__name__}: {error}")
        self._pipelines.finish(deadline)

    def _start(self) -> list[Sink]:
        """Return the sinks of the selected signals; make them if there is a destination now."""
        if self._sinks is None and self.has_destination and not is_interpreter_ending():
            self._make_sinks()
        return self._sinks or []

    def _count_unstarted(self, batch: Batch) -> None:
        """Count what came when the interpreter was ending and nothing could be started any more."""
        for signal, kind in (("span_events", "span_event"), ("log_events", "log_event")):
            if signal in self._settings.signals:
                self._losses.count(kind, "shutdown", len(batch.records))

    def _make_sinks(self) -> None:
        with self._lock, at_fork.no_fork():
            if self._sinks is not None:
                return
            from otel_torch.telemetry.otlp.otlp_file import OtlpFiles
            from otel_torch.telemetry.pipeline import Pipelines
            from otel_torch.telemetry.sinks.event_sink import EventSink
            from otel_torch.telemetry.sinks.metric_sink import MetricSink
            from otel_torch.telemetry.sinks.span_sink import SpanSink

            signals, files = self._settings.signals, None
            if self._file_budget is not None and self._settings.otlp_file is not None:
                files = OtlpFiles(
                    self._settings.otlp_file, self._job, self._losses, self._file_budget
                )
            pipelines = Pipelines(
                self._job, self._losses, self._exporters, self._end_before_providers, files
            )
            self._pipelines = pipelines
            sinks: list[Sink] = []
            spans: SpanSink | None = None
            if "spans" in signals:
                self._spans = spans = SpanSink(self._settings, self._job, self._losses, pipelines)
                sinks.append(spans)
            if "log_events" in signals:
                is_only_form = "span_events" not in signals
                sinks.append(EventSink(pipelines, spans, is_only_form=is_only_form))
            if "metrics" in signals:
                self._metrics = MetricSink(self._settings, self._losses, pipelines)
                sinks.append(self._metrics)
            self._sinks = sinks

    def _end_before_providers(self) -> None:
        """End the session before the program's provider shuts down at exit: exit functions run in
        reverse order, and its own was registered earlier.
        """
        if self._at_exit is not None:
            atexit.register(self._at_exit)


class _WaitingRegionSpans(RegionSpans):
    """Starts regions without spans until the program installs a tracer provider."""

    def __init__(self, telemetry: TelemetrySink) -> None:
        self._telemetry = telemetry
        self._read_provider = watch_tracer_provider()
        self._provider = self._read_provider()

    def start_region(
        self, closer: RegionCloser, label: RegionLabel, start_ns: int
    ) -> RegionEntry | None:
        """Start a region without a span; None if the program's provider has changed."""
        if self._read_provider() is self._provider:
            return RegionEntry(closer, label, start_ns)
        closer.reconnect_spans()
        return None

    def detach_scope(self, scope: Scope) -> None:
        """Make the span of `scope` no longer current, if there are spans by now."""
        self._telemetry.detach_scope(scope)
