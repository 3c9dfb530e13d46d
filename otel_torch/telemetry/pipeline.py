"""Where each signal goes: to the program's own provider where there is one, else through a queue to our exporters."""

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
from otel_torch.job import Job
from otel_torch.records import Losses
from otel_torch.telemetry import resource
from otel_torch.telemetry.items import Item
from otel_torch.telemetry.providers import find_provider
from otel_torch.telemetry.queue import ExportQueue, Patience
from otel_torch.telemetry.transport import load_exporter, open_transport

_METRIC_INTERVAL_S = 60.0


def _metric_interval(environ: Any = os.environ) -> float:
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return int(text) / 1000 if text.isdigit() and int(text) else _METRIC_INTERVAL_S


class Pipelines:
    """The queues of one process, made when first used, and the program's providers.

    outlets: exporter names by signal. end_early: told once when a provider of the program's is used.
    """

    def __init__(self, job: Job, losses: Losses, outlets: dict[str, list[str]], end_early: Callable[[], None]) -> None:
        self.job, self.patience = job, Patience()
        self.scope = InstrumentationScope("otel_torch", otel_torch.__version__)
        self._losses, self._outlets, self._end_early = losses, outlets, end_early
        self._queues: dict[str, list[ExportQueue]] = {}
        self._collect: dict[str, Callable[[], Iterable[Item]]] = {}
        self._providers: dict[int, Any] = {}
        self._lock = threading.Lock()

    @cached_property
    def resource(self) -> Resource:
        """Who sends."""
        return resource.describe(self.job)

    def provider(self, signal: str) -> Any | None:
        """The program's own provider of a signal."""
        provider = find_provider(signal)
        if provider is not None and id(provider) not in self._providers:
            first = not self._providers
            self._providers[id(provider)] = provider
            if first:
                self._end_early()
        return provider

    def exports(self, signal: str) -> bool:
        """Whether we have an exporter of our own for a signal."""
        return signal in self._outlets

    def collect_with(self, signal: str, collect: Callable[[], Iterable[Item]]) -> None:
        """Ask `collect` for a signal's items now and then, and at the end."""
        self._collect[signal] = collect

    def put(self, signal: str, items: Sequence[Item]) -> None:
        """Send items by our own exporters of a signal."""
        for queue in self._of(signal):
            queue.put(items, self.patience)

    def start(self, signal: str) -> None:
        """There is something to collect."""
        for queue in self._of(signal):
            queue.start()

    def _of(self, signal: str) -> list[ExportQueue]:
        queues = self._queues.get(signal)
        if queues is None:
            with self._lock:
                queues = self._queues.setdefault(signal, [self._make(signal, name) for name in self._outlets.get(signal, ())])
        return queues

    def _make(self, signal: str, name: str) -> ExportQueue:
        try:
            load_exporter(signal, name)
        except ImportError:
            pass  # said where it is opened
        sender = self.resource, self.scope  # made here and not in the thread: a fork may come in between

        def open_sender() -> Any:
            return open_transport(signal, name, *sender)

        collect = self._collect.get(signal)
        return ExportQueue(signal, open_sender, self._losses, collect=collect, interval_s=_metric_interval())

    def drain(self, deadline: float) -> None:
        """Send what is queued now, and wait for it until `deadline`."""
        for queues in list(self._queues.values()):
            for queue in queues:
                queue.drain(deadline)

    def finish(self, deadline: float) -> None:
        """Send what is queued, all signals at once, and flush the program's providers meanwhile."""
        flushed = self._flush_providers(deadline)
        queues = [queue for queues in self._queues.values() for queue in queues]
        for queue in queues:
            queue.close(deadline)
        for queue in queues:
            queue.wait()
        flushed.wait(max(0.0, deadline - time.monotonic()))

    def _flush_providers(self, deadline: float) -> threading.Event:
        """`force_flush` may ignore its timeout, so it runs where nobody has to wait for it."""
        flushed = threading.Event()
        if not self._providers:
            flushed.set()
            return flushed

        def flush() -> None:
            for provider in self._providers.values():
                try:
                    provider.force_flush(max(1, int(1000 * (deadline - time.monotonic()))))
                except Exception:
                    pass  # its own exporters say what is wrong
            flushed.set()

        try:
            threading.Thread(target=flush, name="otel_torch-flush", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and the provider flushes itself
            flushed.set()
        return flushed
