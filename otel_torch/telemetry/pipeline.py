"""Routes each signal: to the program's own provider if it has one, else through a queue to our
exporters.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

import otel_torch
from otel_torch.process import at_fork
from otel_torch.process.console import say_once
from otel_torch.process.exit_hooks import is_interpreter_ending
from otel_torch.process.job import Job
from otel_torch.records import Losses
from otel_torch.telemetry.export_queue import BackpressureBudget, ExportQueue
from otel_torch.telemetry.otlp_file import OtlpFiles
from otel_torch.telemetry.patience import Pace
from otel_torch.telemetry.providers import find_provider
from otel_torch.telemetry.queue_items import QueueItem
from otel_torch.telemetry.resource import build_resource
from otel_torch.telemetry.transport import endpoint_of, import_exporter, is_otlp, open_transport

_Collector = Callable[[], Iterable[QueueItem]]

_METRIC_INTERVAL_S = 60.0
# extra time at the program's end for files that are behind: unlike an endpoint, a disk is waited
# for
_FILES_S = 8.0
# the least time that an endpoint gets after the files
_AFTER_FILES_S = 0.5


def _read_metric_interval(environ: Any = os.environ) -> float:
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
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
        self._losses, self._exporters = losses, exporters
        self._end_early, self._files = end_early, files
        self._queues: dict[str, list[ExportQueue]] = {}
        self._queues_after_files: list[ExportQueue] = []
        self._collectors: dict[str, _Collector] = {}
        self._providers: dict[int, Any] = {}
        self._paces: dict[str, Pace] = {}  # by endpoint
        self._lock = threading.Lock()

    @cached_property
    def resource(self) -> Resource:
        """The resource of this process."""
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
            self._providers[id(provider)] = provider
            if is_first:
                self._end_early()
        return provider

    def exports(self, signal: str) -> bool:
        """Return whether a signal goes to our own exporters or files."""
        return self._files is not None or signal in self._exporters

    def collect_with(self, signal: str, collect: _Collector) -> None:
        """Let the signal's queue call `collect` for items, regularly and at the end."""
        self._collectors[signal] = collect

    def put(self, signal: str, items: Sequence[QueueItem]) -> None:
        """Enqueue items for our own exporters of a signal."""
        for queue in self._queues_of(signal):
            queue.put(items, self.backpressure)

    def start(self, signal: str) -> None:
        """Start the signal's queues, because there is something to collect."""
        for queue in self._queues_of(signal):
            queue.start()

    def _queues_of(self, signal: str) -> list[ExportQueue]:
        queues = self._queues.get(signal)
        if queues is None:
            with self._lock, at_fork.no_fork():
                queues = self._queues.setdefault(signal, self._make_queues(signal))
        return queues

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
    ) -> ExportQueue:
        return ExportQueue(
            name,
            open_queue_transport,
            self._losses,
            collect=collect,
            interval_s=_read_metric_interval(),
            is_local=is_local,
            pace=pace,
        )

    def drain(self, deadline: float) -> None:
        """Send what is queued now, and wait for it until `deadline`."""
        for queues in (self._first_queues(), self._queues_after_files):
            for queue in queues:
                queue.begin_drain()
            for queue in queues:
                queue.wait_drained(deadline)

    def finish(self, deadline: float) -> None:
        """Send what is queued, all signals at once, and flush the program's providers meanwhile."""
        flushed = self._flush_providers(deadline)
        _close_all(self._first_queues(), deadline + (_FILES_S if self._files is not None else 0.0))
        _close_all(self._queues_after_files, max(deadline, time.monotonic() + _AFTER_FILES_S))
        flushed.wait(max(0.0, deadline - time.monotonic()))

    def _first_queues(self) -> list[ExportQueue]:
        """Return the queues into which items are put."""
        return [queue for queues in list(self._queues.values()) for queue in queues]

    def _flush_providers(self, deadline: float) -> threading.Event:
        """Flush in a separate thread, as `force_flush` may ignore its timeout."""
        flushed = threading.Event()
        if not self._providers:
            flushed.set()
            return flushed

        def flush() -> None:
            for provider in self._providers.values():
                try:
                    provider.force_flush(max(1, int(1000 * (deadline - time.monotonic()))))
                except Exception:
                    pass  # its own exporters report what is wrong
            flushed.set()

        try:
            threading.Thread(target=flush, name="otel_torch-flush", daemon=True).start()
        except RuntimeError:  # the interpreter is exiting, and the provider flushes itself
            flushed.set()
        return flushed
