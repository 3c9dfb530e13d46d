"""Routes each signal: to the program's own provider if it has one, else to our exporters. A queue
of ours sends to either's OTLP endpoints; see `program_route`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

import otel_torch
from otel_torch.process import at_fork
from otel_torch.process.console import say_once
from otel_torch.process.exit_hooks import is_interpreter_ending, is_process_dying
from otel_torch.process.job import Job
from otel_torch.records import Losses
from otel_torch.telemetry.otlp.export_queue import BackpressureBudget, ExportQueue
from otel_torch.telemetry.otlp.otlp_file import OtlpFiles
from otel_torch.telemetry.otlp.patience import Pace
from otel_torch.telemetry.otlp.queue_items import QueueItem
from otel_torch.telemetry.otlp.transport import (
    endpoint_of,
    import_exporter,
    import_transport,
    is_otlp,
    open_transport,
    open_transport_like,
)
from otel_torch.telemetry.program_route import (
    ProgramRoute,
    find_route,
    members_of,
    protocol_of,
    resource_of,
)
from otel_torch.telemetry.providers import find_provider
from otel_torch.telemetry.resource import build_resource

_Collector = Callable[[], Iterable[QueueItem]]

_METRIC_INTERVAL_S = 60.0
# extra time at the program's end for files that are behind: unlike an endpoint, a disk is waited
# for
_FILES_S = 8.0
# the least time that an endpoint gets after the files
_AFTER_FILES_S = 0.5


def _read_metric_interval() -> float:
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return int(text) / 1000 if text.isdigit() and int(text) else _METRIC_INTERVAL_S


def _close_all(queues: Sequence[ExportQueue], deadline: float) -> None:
    for queue in queues:
        queue.close(deadline)
    for queue in queues:
        queue.wait()
    for queue in queues:
        queue.finish()


class Pipelines:
    """The export queues of one process, made at first use, and the program's providers.

    With files, every signal goes to its file first and from there to the exporters; the program's
    providers are then not used, as what they export cannot be written.

    Args:
        exporters: exporter names by OpenTelemetry signal.
        end_early: called once when a provider of the program is first used.
        files: where all signals are written, or None.
    """

    def __init__(
        self,
        job: Job,
        losses: Losses,
        exporters: dict[str, list[str]],
        end_early: Callable[[], None],
        files: OtlpFiles | None = None,
    ) -> None:
        self.job, self.backpressure = job, BackpressureBudget()
        self.scope = InstrumentationScope("otel_torch", otel_torch.__version__)
        self.losses, self._exporters = losses, exporters
        self._end_early, self._files = end_early, files
        self._queues: dict[str, list[ExportQueue]] = {}
        # by the exporter of the program, which is kept, whose endpoint they send to
        self._program_queues: dict[int, tuple[Any, ExportQueue]] = {}
        self._routes: dict[tuple[str, int], tuple[tuple[Any, ...], ProgramRoute]] = {}
        self._queues_after_files: list[ExportQueue] = []
        self._collectors: dict[str, _Collector] = {}
        self._providers: dict[int, tuple[str, Any]] = {}
        self._paces: dict[str, Pace] = {}  # by endpoint
        self._lock = threading.Lock()

    @cached_property
    def resource(self) -> Resource:
        return build_resource(self.job)

    def provider(self, signal: str) -> Any | None:
        """Return the program's own provider of a signal, if it is to be used."""
        provider = find_provider(signal)
        if provider is not None and self._files is not None:
            say_once(
                "with OTEL_TORCH_OTLP_FILE all data goes to the files, and to the endpoint if one "
                "is set, instead of to the program's own providers"
            )
            return None
        if provider is not None and id(provider) not in self._providers:
            is_first = not self._providers
            self._providers[id(provider)] = signal, provider
            if is_first:
                self._end_early()
        return provider

    def route(self, signal: str, provider: Any) -> ProgramRoute:
        """Return which of a provider's exporters our queues replace."""
        key, members = (signal, id(provider)), members_of(signal, provider)
        cached = self._routes.get(key)
        if cached is None or cached[0] != members:
            self._routes[key] = cached = members, find_route(signal, provider)
        return cached[1]

    def provider_to_call(self, signal: str) -> Any | None:
        """Return the program's own provider of a signal if our queues do not replace all of it."""
        provider = self.provider(signal)
        is_called = provider is not None and self.route(signal, provider).processors
        return provider if is_called else None

    def exports(self, signal: str) -> bool:
        """Return whether a signal goes to queues of ours: to exporters or files."""
        if self._files is not None:
            return True
        provider = self.provider(signal)
        if provider is not None:
            return bool(self.route(signal, provider).exporters)
        return signal in self._exporters

    def collect_with(self, signal: str, collect: _Collector) -> None:
        """Let the signal's queue call `collect` for items, regularly and at the end."""
        self._collectors[signal] = collect

    def put(self, signal: str, items: Sequence[QueueItem]) -> None:
        self.put_for(self.provider(signal), signal, items)

    def put_for(self, provider: Any | None, signal: str, items: Sequence[QueueItem]) -> None:
        """Enqueue items for the exporters of a provider of the program; for ours without one."""
        for queue in self._queues_of(signal, provider):
            queue.put(items, self.backpressure)

    def start(self, signal: str) -> None:
        """Start the signal's queues, because there is something to collect."""
        for queue in self._queues_of(signal, self.provider(signal)):
            queue.start()

    def _queues_of(self, signal: str, provider: Any | None) -> list[ExportQueue]:
        if provider is not None:
            exporters = self.route(signal, provider).exporters
            return [self._queue_like(exporter, signal, provider) for exporter in exporters]
        queues = self._queues.get(signal)
        if queues is None:
            with self._lock, at_fork.no_fork():
                queues = self._queues.setdefault(signal, self._make_queues(signal))
        return queues

    def _queue_like(self, exporter: Any, signal: str, provider: Any) -> ExportQueue:
        """Return the queue that sends to the endpoint of the program's exporter."""
        entry = self._program_queues.get(id(exporter))
        if entry is None:
            with self._lock, at_fork.no_fork():
                queue = self._make_queue_like(exporter, signal, provider)
                entry = self._program_queues.setdefault(id(exporter), (exporter, queue))
        return entry[1]

    def _make_queue_like(self, exporter: Any, signal: str, provider: Any) -> ExportQueue:
        protocol, resource, scope = protocol_of(exporter) or "", resource_of(provider), self.scope
        import_transport(protocol)
        return self._make_queue(
            signal,
            lambda: open_transport_like(exporter, signal, protocol, resource, scope),
            self._collectors.get(signal),
            self._paces.setdefault(exporter._endpoint, Pace()),
            interval_s=self.route(signal, provider).interval_s,
        )

    def _make_queues(self, signal: str) -> list[ExportQueue]:
        if is_interpreter_ending() and "resource" not in vars(self):  # whose detectors need threads
            return [self._make_closed_queue(signal)]
        collect = self._collectors.get(signal)
        names = self._exporters.get(signal, [])
        if self._files is None:
            return [self._make_exporter_queue(signal, name, collect) for name in names]
        downstream = [self._make_exporter_queue(signal, name, None) for name in names]
        self._queues_after_files += downstream
        return [self._make_file_queue(self._files, signal, downstream, collect)]

    def _make_closed_queue(self, signal: str) -> ExportQueue:
        """Return a queue that counts everything as lost: its exporter and the resource could not be
        made any more.
        """
        queue = self._make_queue(signal, lambda: None, None)
        queue.close(time.monotonic())
        return queue

    def _make_file_queue(
        self,
        files: OtlpFiles,
        signal: str,
        downstream: list[ExportQueue],
        collect: _Collector | None,
    ) -> ExportQueue:
        resource, scope = self.resource, self.scope  # made here, see `_make_exporter_queue`
        keep_items = not all(map(is_otlp, self._exporters.get(signal, [])))

        def open_file() -> Any:
            return files.open(signal, resource, scope, downstream, keep_items=keep_items)

        return self._make_queue(f"{signal} files", open_file, collect, is_local=True)

    def _make_exporter_queue(
        self, signal: str, exporter: str, collect: _Collector | None
    ) -> ExportQueue:
        try:
            import_exporter(signal, exporter)
        except ImportError:
            pass  # reported when it is opened
        # made here and not in the queue's thread, where a fork might interrupt it
        resource, scope = self.resource, self.scope

        def open_exporter() -> Any:
            return open_transport(signal, exporter, resource, scope)

        pace = self._paces.setdefault(endpoint_of(signal, exporter), Pace())
        return self._make_queue(signal, open_exporter, collect, pace)

    def _make_queue(
        self,
        name: str,
        open_queue_transport: Callable[[], Any],
        collect: _Collector | None,
        pace: Pace | None = None,
        *,
        is_local: bool = False,
        interval_s: float | None = None,
    ) -> ExportQueue:
        return ExportQueue(
            name,
            open_queue_transport,
            self.losses,
            collect=collect,
            interval_s=interval_s or _read_metric_interval(),
            is_local=is_local,
            pace=pace,
        )

    def count_sent(self) -> Counter[str]:
        """Return how many items of each kind were accepted by our exporters and files."""
        sent: Counter[str] = Counter()
        for queue in [*self._first_queues(), *self._queues_after_files]:
            sent.update(dict(queue.sent))  # a copy: the queue's thread goes on counting
        return sent

    def drain(self, deadline: float) -> None:
        """Send what is queued now, and wait for it until `deadline`."""
        for queues in (self._first_queues(), self._queues_after_files):
            for queue in queues:
                queue.begin_drain()
            for queue in queues:
                queue.wait_drained(deadline)

    def finish(self, deadline: float) -> None:
        """Send what is queued, all signals at once.

        The program's providers are flushed only if the process is about to die without their exit
        functions: these may take long, and the program would wait for what is not ours.
        """
        is_flushed = self._flush_providers(deadline) if is_process_dying() else None
        _close_all(self._first_queues(), deadline + (_FILES_S if self._files is not None else 0.0))
        _close_all(self._queues_after_files, max(deadline, time.monotonic() + _AFTER_FILES_S))
        if is_flushed is not None:
            is_flushed.wait(max(0.0, deadline - time.monotonic()))

    def _first_queues(self) -> list[ExportQueue]:
        """Return the queues into which items are put."""
        own = [queue for queues in list(self._queues.values()) for queue in queues]
        return own + [queue for _, queue in list(self._program_queues.values())]

    def _flush_providers(self, deadline: float) -> threading.Event | None:
        """Flush those that got something from us, in a separate thread: `force_flush` may ignore
        its timeout.
        """
        flushed = threading.Event()
        providers = [
            provider
            for signal, provider in self._providers.values()
            if self.route(signal, provider).processors
        ]
        if not providers:
            return None

        def flush() -> None:
            for provider in providers:
                try:
                    provider.force_flush(max(1, int(1000 * (deadline - time.monotonic()))))
                except Exception:
                    pass  # its own exporters report what is wrong
            flushed.set()

        try:
            threading.Thread(target=flush, name="otel_torch-flush", daemon=True).start()
        except RuntimeError:  # the interpreter is exiting, and the provider flushes itself
            return None
        return flushed
