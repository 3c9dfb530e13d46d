"""The cost of a region, compared with the SDK's `start_as_current_span` and FastVideo's region.

    python -m tests.benchmarks.regions [--rounds 21] [--json -]

All cases run in one process, in turns, so that other load slows all of them. A figure is the median
of the rounds' ratios to the SDK with a BatchSpanProcessor and an exporter that does nothing.
`calling` is the CPU time of the thread that enters the regions; `all` is that of all threads until
the work of the round is done. Our exporters encode, as `sdk encoding` does; `sdk` does not.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import otel_torch
from otel_torch import session
from otel_torch.telemetry import pipeline
from otel_torch.telemetry.otlp.answer import Answer
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import Estimate, Rounds

NAME = "training_train_one_step"
Region = Callable[[], AbstractContextManager[Any]]


class NoExport(SpanExporter):
    """Drops all spans."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class EncodeOnly(NoExport):
    """Encodes each batch, as the OTLP exporter does, and drops it."""

    def export(self, spans: Any) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


class NoSender:
    """The counterpart for our exporter: encodes each message and drops it."""

    def encode(self, item: Any) -> tuple[list[Any], int]:
        messages = item.encode()
        return messages, sum(map(len, messages))

    def send(self, payload: list[Any]) -> Answer:
        return Answer("accepted")

    def shutdown(self) -> None:
        pass


def make_provider(exporter: type[SpanExporter] = NoExport) -> TracerProvider:
    """Make a tracer provider as a program does."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter(), max_queue_size=1 << 17))
    return provider


class FastVideoRegion:
    """FastVideo's work in a profiled region: three log lines, and collection switched on and off."""

    def __init__(self) -> None:
        self.activities = [torch.profiler.ProfilerActivity.CPU]
        self.profiler = torch.profiler.profile(activities=self.activities)
        self.log = logging.getLogger("fastvideo-like")
        self.log.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115
        self.log.setLevel(logging.INFO)
        self.log.propagate = False
        self.depth = 0

    def switch(self, on: bool) -> None:
        name = f"fastvideo.profiler.{'enable' if on else 'disable'}_collection"
        with torch.profiler.record_function(name):
            self.profiler.toggle_collection_dynamic(on, self.activities)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.depth += 1
        self.log.info(
            "PROFILER: Setting collection to True (depth=%s) for region %s", self.depth, NAME
        )
        self.switch(True)
        try:
            with torch.profiler.record_function(f"fastvideo.region::profiler_region_{NAME}"):
                yield
        finally:
            self.depth -= 1
            self.log.info("PROFILER: Decreasing active region depth to %s", self.depth)
            self.log.info("PROFILER: Setting collection to False upon exiting region %s", NAME)
            self.switch(False)


def visit(make: Region, count: int) -> None:
    """Enter and exit `count` regions."""
    for _ in range(count):
        with make():
            pass


@dataclass(frozen=True)
class Cost:
    """Cost of a region: µs of the calling thread; ratios to the SDK for that thread and for all threads."""

    us: float
    calling: Estimate
    all: Estimate


Costs = dict[str, Cost]


def measure(
    cases: dict[str, Region], settle: dict[str, Callable[[], Any]], rounds: int, count: int
) -> Costs:
    """Return the cost of each case: medians over the rounds."""
    calling: dict[str, list[float]] = {name: [] for name in cases}
    everything: dict[str, list[float]] = {name: [] for name in cases}
    for make in cases.values():
        visit(make, 50)
    for number in range(rounds):
        order = list(cases) if number % 2 else list(cases)[::-1]
        for name in order:
            few = count // 20 if name == "fastvideo" else count
            for done in settle.values():
                done()
            gc.collect()
            gc.disable()
            busy, began = time.process_time(), time.thread_time()
            visit(cases[name], few)
            calling[name].append((time.thread_time() - began) / few)
            gc.enable()
            settle.get(name, lambda: None)()
            everything[name].append((time.process_time() - busy) / few)

    by_thread, by_process = Rounds(calling), Rounds(everything)
    return {
        name: Cost(
            1e6 * statistics.median(calling[name]),
            by_thread.ratio(name, "sdk"),
            by_process.ratio(name, "sdk"),
        )
        for name in cases
    }


def settle_ours() -> None:
    """Wait until everything recorded so far is sent."""
    running = session.current()
    assert running is not None
    running.recorder.drain(10)


def settle_sdk(provider: TracerProvider) -> Callable[[], Any]:
    return lambda: provider.force_flush(10_000)


def compare(rounds: int, count: int) -> dict[str, Costs]:
    """Measure all cases: {destination of our spans: {case: figures}}."""
    plain, encoding = make_provider(), make_provider(EncodeOnly)
    tracer, encoding_tracer = plain.get_tracer("program"), encoding.get_tracer("program")
    sdk: Region = lambda: tracer.start_as_current_span(NAME)  # noqa: E731
    encoded: Region = lambda: encoding_tracer.start_as_current_span(NAME)  # noqa: E731
    ours: Region = lambda: otel_torch.region(NAME)  # noqa: E731
    fastvideo = FastVideoRegion()
    pipeline.open_transport = lambda *_: NoSender()  # type: ignore[assignment,return-value]
    results = {}
    modes: dict[str, dict[str, str]] = {
        "our own exporters": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"},
        "our own exporters, spans only": {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1",
            "OTEL_TORCH_SIGNALS": "spans",
        },
        "no spans asked for": {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1",
            "OTEL_TORCH_SIGNALS": "metrics",
        },
        "no endpoint": {},
        "the program's provider": {},
    }
    fastvideo.profiler.start()
    fastvideo.profiler.toggle_collection_dynamic(False, fastvideo.activities)
    for mode, variables in modes.items():
        if mode == "the program's provider":
            provider = make_provider()
            trace.set_tracer_provider(provider)
        os.environ.update(variables)
        with tempfile.TemporaryDirectory() as folder:
            assert otel_torch.start(jsonl=str(Path(folder, "run.jsonl")))
            settle = {
                "ours": settle_ours,
                "sdk": settle_sdk(plain),
                "sdk encoding": settle_sdk(encoding),
            }
            cases = {"ours": ours, "sdk": sdk, "sdk encoding": encoded, "fastvideo": fastvideo}
            results[mode] = measure(cases, settle, rounds, count)
            otel_torch.stop()
        for name in variables:
            os.environ.pop(name, None)
    otel_torch.start(jsonl="off")
    otel_torch.stop()
    fastvideo.profiler.stop()
    return results


# where our spans go -> what a region there may cost, in regions of the SDK's
GOALS = {"our own exporters": 0.3, "the program's provider": 0.3}


def figures(size: Size) -> list[Figure]:
    """Measure each destination of a region's span."""
    torch.set_num_threads(1)
    results = []
    for mode, cases in compare(size.count(21), size.of(1000, 40)).items():
        ours, sdk, fastvideo = cases["ours"], cases["sdk"], cases["fastvideo"]
        over_encoding = ours.all.value / cases["sdk encoding"].all.value
        detail = (
            f"{ours.calling}; calling thread {ours.us:.1f} µs, the SDK {sdk.us:.1f}, "
            f"FastVideo {fastvideo.us:.0f}; all threads until all is done {ours.all} of the SDK's, "
            f"which encodes nothing; of one that encodes {over_encoding:.2f}"
        )
        name = f"a region, {mode}: cost over the SDK's"
        results.append(Figure.estimated(name, ours.calling, GOALS.get(mode), detail))
    return results


if __name__ == "__main__":
    sys.exit(command(__doc__, figures, sys.argv[1:]))
