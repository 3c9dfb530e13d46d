"""Where each signal goes: to the program's own provider where there is one, else through a queue to
our exporters.
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
from otel_torch.console import say_once
from otel_torch.job import Job
from otel_torch.records import Losses
from otel_torch.telemetry import resource
from otel_torch.telemetry.otlp_file import OtlpFiles
from otel_torch.telemetry.providers import find_provider
from otel_torch.telemetry.queue import ExportQueue, Patience
from otel_torch.telemetry.queue_items import Item
from otel_torch.telemetry.transport import is_otlp, load_exporter, open_transport

_METRIC_INTERVAL_S = 60.0
# how much longer the program's end may take where its disk has not kept up: a disk is waited for, a
# collector is not
_FILES_S = 8.0
# ... and what of the end is left for an endpoint then
_AFTER_FILES_S = 0.5


def _metric_interval(environ: Any = os.environ) -> float:
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return int(text) / 1000 if text.isdigit() and int(text) else _METRIC_INTERVAL_S


def _end(queues: Sequence[ExportQueue], deadline: float) -> None:
    for queue in queues:
        queue.close(deadline)
    for queue in queues:
        queue.wait()


class Pipelines:
    """The queues of one process, made when first used, and the program's providers.

    outlets: exporter names by signal. end_early: told once when a provider of the program's is
    used. files: where all signals are written, None where they are not. Then each goes there first,
    and what was encoded for the file goes on to the exporters; the program's providers are left
    alone, as what they are given cannot be written.
    """

    def __init__(
        self,
        job: Job,
        losses: Losses,
        outlets: dict[str, list[str]],
        end_early: Callable[[], None],
        files: OtlpFiles | None = None,
    ) -> None:
        self.job, self.patience = job, Patience()
        self.scope = InstrumentationScope("otel_torch", otel_torch.__version__)
        self._losses, self._outlets, self._end_early, self._files = (
            losses,
            outlets,
            end_early,
            files,
        )
        self._queues: dict[str, list[ExportQueue]] = {}
        self._behind_files: list[ExportQueue] = []
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
        if provider is not None and self._files is not None:
            say_once(
                "with OTEL_TORCH_OTLP_FILE everything goes to the files, and to the endpoint if one is set, instead of to the "
                "program's own providers"
            )
            return None
        if provider is not None and id(provider) not in self._providers:
            first = not self._providers
            self._providers[id(provider)] = provider
            if first:
                self._end_early()
        return provider

    def exports(self, signal: str) -> bool:
        """Whether we have an exporter of our own for a signal."""
        return self._files is not None or signal in self._outlets

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
                queues = self._queues.setdefault(signal, self._make_all(signal))
        return queues

    def _make_all(self, signal: str) -> list[ExportQueue]:
        collect, names, files = (
            self._collect.get(signal),
            self._outlets.get(signal, []),
            self._files,
        )
        if files is None:
            return [self._make(signal, name, collect) for name in names]
        behind = [self._make(signal, name, None) for name in names]
        self._behind_files += behind
        sender = self.resource, self.scope  # see `_make`
        keep_items = not all(map(is_otlp, names))

        def open_file() -> Any:
            return files.open(signal, *sender, behind, keep_items=keep_items)

        return [
            ExportQueue(
                f"{signal} files",
                open_file,
                self._losses,
                collect=collect,
                interval_s=_metric_interval(),
            )
        ]

    def _make(
        self, signal: str, name: str, collect: Callable[[], Iterable[Item]] | None
    ) -> ExportQueue:
        try:
            load_exporter(signal, name)
        except ImportError:
            pass  # said where it is opened
        sender = (
            self.resource,
            self.scope,
        )  # made here and not in the thread: a fork may come in between

        def open_sender() -> Any:
            return open_transport(signal, name, *sender)

        return ExportQueue(
            signal, open_sender, self._losses, collect=collect, interval_s=_metric_interval()
        )

    def drain(self, deadline: float) -> None:
        """Send what is queued now, and wait for it until `deadline`."""
        for queue in [*self._first(), *self._behind_files]:
            queue.drain(deadline)

    def finish(self, deadline: float) -> None:
        """Send what is queued, all signals at once, and flush the program's providers meanwhile."""
        flushed = self._flush_providers(deadline)
        _end(self._first(), deadline + (_FILES_S if self._files is not None else 0.0))
        _end(self._behind_files, max(deadline, time.monotonic() + _AFTER_FILES_S))
        flushed.wait(max(0.0, deadline - time.monotonic()))

    def _first(self) -> list[ExportQueue]:
        """Where items are put."""
        return [queue for queues in list(self._queues.values()) for queue in queues]

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
