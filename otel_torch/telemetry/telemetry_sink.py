"""One sink for all that goes to OpenTelemetry: it wakes when there is somewhere to send to, and
ends all signals together, so that the end of the program takes one deadline and not three.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from otel_torch.console import say_once
from otel_torch.job import Job
from otel_torch.recorder import Sink
from otel_torch.recording.disk_budget import DiskBudget
from otel_torch.records import Batch, Losses, Scope
from otel_torch.regions.closer import RegionCloser, RegionEntry, RegionLabel
from otel_torch.settings import Settings
from otel_torch.telemetry import NEEDS
from otel_torch.telemetry.providers import find_provider, watch_tracer_provider

if TYPE_CHECKING:
    from otel_torch.regions.closer import RegionSpans
    from otel_torch.telemetry.pipeline import Pipelines
    from otel_torch.telemetry.span_sink import SpanSink


class Telemetry(Sink):
    """Spans, log events and metrics of one process. Asleep, and nothing of OpenTelemetry loaded,
    until `outlets` names an exporter, files are to be written or the program has installed a
    provider; then it hands everything to the sinks of the chosen signals.

    file_budget: how much may be written where OTEL_TORCH_OTLP_FILE says; None where nothing is.
    """

    accepts_deferred_regions = True  # their spans start and end through `region_spans`

    def __init__(
        self,
        settings: Settings,
        job: Job,
        losses: Losses,
        outlets: dict[str, list[str]],
        at_exit: Callable[[], Any] | None = None,
        file_budget: DiskBudget | None = None,
    ) -> None:
        self._settings, self._job, self._losses = settings, job, losses
        needed = {NEEDS[signal] for signal in settings.signals}
        self._outlets = {signal: names for signal, names in outlets.items() if signal in needed}
        self._needed = tuple(needed)
        self._at_exit, self._file_budget = at_exit, file_budget
        self._sinks: list[Sink] | None = None
        self._spans: SpanSink | None = None
        self._pipelines: Pipelines | None = None
        self._last_step: Scope | None = None
        self._lock = threading.Lock()

    @property
    def wanted(self) -> bool:
        return (
            bool(self._outlets)
            or self._file_budget is not None
            or any(find_provider(signal) for signal in self._needed)
        )

    @property
    def region_spans(self) -> RegionSpans | None:
        """The span sink; while asleep an object that wakes it; None if no spans are wanted."""
        if "spans" not in self._settings.signals:
            return None
        self._awake()
        return self._spans if self._spans is not None else _AsleepRegionSpans(self)

    def detach_scope(self, scope: Scope) -> None:
        """Make the span of `scope` no longer current, if there are spans by now."""
        if self._spans is not None:
            self._spans.detach_scope(scope)

    def open(self, scope: Scope) -> None:
        for sink in self._awake():
            sink.open(scope)

    def close(self, scope: Scope) -> None:
        for sink in reversed(self._awake()):
            sink.close(scope)

    def write(self, batch: Batch) -> None:
        sinks = self._awake()
        if self._pipelines is not None and (
            batch.step is None or batch.step is not self._last_step
        ):
            self._last_step = batch.step
            self._pipelines.patience.renew()
        for sink in sinks:
            sink.write(batch)

    def drain(self, deadline: float) -> None:
        if self._pipelines is not None:
            self._pipelines.drain(deadline)

    def finish(self, deadline: float) -> None:
        """End what is open, then send everything, all signals at once; counts what is left at the
        deadline.
        """
        if self._sinks is None or self._pipelines is None:
            return
        for sink in self._sinks:
            try:
                sink.finish(deadline)
            except Exception as error:
                say_once(f"{type(sink).__name__} could not end: {type(error).__name__}: {error}")
        self._pipelines.finish(deadline)

    def _awake(self) -> list[Sink]:
        if self._sinks is None:
            if not self.wanted:
                return []
            self._wake()
        return self._sinks or []

    def _wake(self) -> None:
        with self._lock:
            if self._sinks is not None:
                return
            from otel_torch.telemetry.event_sink import EventSink
            from otel_torch.telemetry.metric_sink import MetricSink
            from otel_torch.telemetry.otlp_file import OtlpFiles
            from otel_torch.telemetry.pipeline import Pipelines
            from otel_torch.telemetry.span_sink import SpanSink

            files = None
            if self._file_budget is not None and self._settings.otlp_file is not None:
                files = OtlpFiles(
                    self._settings.otlp_file, self._job, self._losses, self._file_budget
                )
            pipelines = Pipelines(
                self._job, self._losses, self._outlets, self._end_before_providers, files
            )
            self._pipelines = pipelines
            sinks: list[Sink] = []
            spans: SpanSink | None = None
            if "spans" in self._settings.signals:
                self._spans = spans = SpanSink(self._settings, self._job, self._losses, pipelines)
                sinks.append(spans)
            if "log_events" in self._settings.signals:
                sinks.append(EventSink(pipelines, spans))
            if "metrics" in self._settings.signals:
                sinks.append(MetricSink(self._settings, self._losses, pipelines))
            self._sinks = sinks

    def _end_before_providers(self) -> None:
        """The program's provider shuts down at exit, in an exit function that was registered after
        ours, so before it.
        """
        if self._at_exit is not None:
            atexit.register(self._at_exit)


class _AsleepRegionSpans:
    """Starts regions without spans until the program installs a tracer provider."""

    def __init__(self, telemetry: Telemetry) -> None:
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
        """Make the span of `scope` no longer current, if telemetry is awake by now."""
        self._telemetry.detach_scope(scope)

    def end_region(self, entry: Any, end_ns: int, error: BaseException | None) -> None: ...

    def release_spans(self, entries: list[Any]) -> None: ...

    def discard_open_spans(self) -> None: ...
