"""The cost of OpenTelemetry in a training program: CPU time per record, and time of the loop.

    python -m tests.benchmarks.telemetry [--rounds 7] [--modules 200] [--steps 300] [--protocol
    grpc] [--training] [--json -]

A loop of many small operations passes the records of a step to the sinks at its end, as the recorder
does, and the sinks send to a receiver in another process. The same loop without sinks, and with the
SDK's calls for the same events, runs in turns in the same process, and each is compared with the
bare loop of the same round. `--training` trains a model of small modules with hooks instead.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from otel_torch.records import Batch, Record, Scope
from tests.benchmarks.figures import Figure, Size, tell

BARE = "bare"
MEASURES = ("step", "training_thread", "other_threads")
SIGNALS = {
    "span_events": "spans,span_events",
    "metrics": "metrics",
    "both": "spans,span_events,metrics",
    "log_events": "log_events",
}
# given a step's scope and records
Take = Callable[[Scope, list[Record]], None]
# runs so many steps
Loop = Callable[[int], None]


# -- the other process


def receive() -> None:
    """Run a receiver until standard input is closed."""
    from tests.otlp_receiver import Receiver

    with Receiver() as receiver:
        print(receiver.grpc_endpoint, receiver.http_endpoint, flush=True)
        for _ in sys.stdin:
            print(
                len(receiver.events()),
                len(receiver.log_records()),
                len(receiver.metric_points()),
                flush=True,
            )
            for requests in receiver.requests.values():
                requests.clear()


class Elsewhere:
    """A receiver in another process."""

    def __init__(self, protocol: str) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.telemetry", "--receive"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self._read()[protocol == "http"]
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if protocol == "grpc" else "http/protobuf",
        }

    def _read(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def arrived(self) -> dict[str, int]:
        """Return what arrived since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(
            zip(
                ("span events", "log records", "metric points"), map(int, self._read()), strict=True
            )
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


# -- records by themselves


def records_of(step: int, modules: int) -> list[Record]:
    """Make the records of a step, with the default statistics."""
    found = []
    for n in range(modules):
        x = (n * 7919 + step * 104729) % 1000 / 7
        stats: dict[str, Any] = {
            "abs_mean": x,
            "sum": 3 * x,
            "min": -x,
            "max": x,
            "mean": x / 9,
            "std": x / 2,
            "nonfinite": 0,
        }
        stats |= {"shape": [2, 16 + n % 4, 64], "dtype": "torch.float32"}
        name, model = f"blocks.{n // 10}.attn1.to_{n % 10}", "WanTransformer3DModel"
        found.append(Record(name, "out", step, 0, 0, model, "forward", None, stats, time.time_ns()))
    return found


def make_loop(modules: int, take: Take | None) -> Loop:
    """Make a loop of small operations, followed by the records of a step."""
    import torch

    layers, data = [torch.nn.Linear(16, 16) for _ in range(modules)], torch.randn(4, 16)
    done = 0

    def run(steps: int) -> None:
        nonlocal done
        for step in range(done, done + steps):
            with torch.no_grad():
                for layer in layers:
                    torch.tanh(layer(data))
            scope = Scope(
                "step",
                "torch.step",
                False,
                {"torch.step": step, "torch.model": "Net"},
                training=True,
            )
            scope.start_ns = scope.end_ns = time.time_ns()
            records = records_of(step, modules)
            if take is not None:
                take(scope, records)
        done += steps

    return run


@contextmanager
def through_sinks(signals: str, elsewhere: Elsewhere, modules: int) -> Iterator[Loop]:
    """Send records through the sinks of a session."""
    from otel_torch.process.job import this_job
    from otel_torch.records import Losses
    from otel_torch.settings import Settings
    from otel_torch.telemetry.sinks.telemetry_sink import build_telemetry_sinks

    losses = Losses()
    with environment(elsewhere.environment):
        (sink,) = build_telemetry_sinks(
            Settings.from_env({"OTEL_TORCH_SIGNALS": signals}), this_job(), losses
        )

        def take(scope: Scope, records: list[Record]) -> None:
            sink.open(scope)
            sink.write(Batch(records, scope))
            sink.close(scope)

        yield make_loop(modules, take)
        sink.finish(time.monotonic() + 60)
    assert not losses.describe(), losses.describe()


@contextmanager
def through_sdk(signal: str, elsewhere: Elsewhere, modules: int) -> Iterator[Loop]:
    """Send the same events by the SDK's calls and exporters, with queues that drop nothing."""
    from opentelemetry._logs import LogRecord
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from otel_torch.telemetry.attributes import ACTIVATION, event_attributes

    provider: Any
    if signal == "log_events":
        provider = LoggerProvider(shutdown_on_exit=False)
        provider.add_log_record_processor(
            BatchLogRecordProcessor(OTLPLogExporter(elsewhere.endpoint), max_queue_size=10**7)
        )
        logger = provider.get_logger("sdk")

        def take(scope: Scope, records: list[Record]) -> None:
            for record in records:
                attributes = event_attributes(record)
                logger.emit(
                    LogRecord(
                        timestamp=record.time_ns,
                        event_name=ACTIVATION,
                        body=ACTIVATION,
                        attributes=attributes,
                    )
                )

    else:
        provider = TracerProvider(
            shutdown_on_exit=False, span_limits=SpanLimits(max_events=SpanLimits.UNSET)
        )
        # 16 spans of 200 events are half a message's limit
        exporter = OTLPSpanExporter(elsewhere.endpoint)
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=10**7, max_export_batch_size=16)
        )
        tracer = provider.get_tracer("sdk")

        def take(scope: Scope, records: list[Record]) -> None:
            with tracer.start_as_current_span("torch.step") as span:
                for record in records:
                    span.add_event(ACTIVATION, event_attributes(record), record.time_ns)

    yield make_loop(modules, take)
    provider.force_flush()
    provider.shutdown()


# -- a training loop


@contextmanager
def training(
    signals: str | None, on_disk: bool, elsewhere: Elsewhere, modules: int
) -> Iterator[Loop]:
    """Train a model of small modules, with a session or (signals: None) without."""
    import torch

    from otel_torch import bootstrap
    from otel_torch.recorder import Sink
    from otel_torch.session import current

    with (
        tempfile.TemporaryDirectory() as folder,
        environment(elsewhere.environment if signals else {}),
    ):
        if signals is not None:
            settings = {"signals": signals} if signals else {}
            assert bootstrap.start(
                jsonl=str(Path(folder) / "run.jsonl") if on_disk else "off", **settings
            )
            running = current()
            assert running is not None
            if not signals and not on_disk:
                running.recorder.add_sink(Sink())  # takes everything nowhere
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(16, 16) if n % 2 else torch.nn.Tanh() for n in range(modules - 1))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.randn(4, 16)

        def run(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()

        yield run
        bootstrap.stop()


# -- measuring

Side = Callable[[], AbstractContextManager[Loop]]


def measure(side: Side, steps: int) -> dict[str, float]:
    """Return per step: wall seconds, CPU seconds of the training thread, and of all other threads.

    The latter count until everything is sent.
    """
    gc.collect()
    with side() as loop:
        loop(5)
        everyone, mine, clock = time.process_time(), time.thread_time(), time.perf_counter()
        loop(steps)
        clock, training_thread = time.perf_counter() - clock, time.thread_time() - mine
    others = (time.process_time() - everyone) - (time.thread_time() - mine)
    return dict(
        zip(MEASURES, (taken / steps for taken in (clock, training_thread, others)), strict=True)
    )


def compare(
    sides: dict[str, Side], rounds: int, steps: int, records: int
) -> dict[str, dict[str, float]]:
    """Measure all sides in turns, in a new random order each round.

    Returns medians of the ratio of a step to the bare one of the same round, and of the difference
    in microseconds per record.
    """
    order = random.Random(0)
    found: list[dict[str, dict[str, float]]] = []
    for side in sides.values():  # first imports
        measure(side, 2)
    for _ in range(rounds):
        found.append(
            {name: measure(sides[name], steps) for name in order.sample(list(sides), len(sides))}
        )
    results = {}
    for name in sides:
        results[name] = {
            "step_ratio": statistics.median(one[name]["step"] / one[BARE]["step"] for one in found)
        }
        for which in MEASURES:
            differences = (one[name][which] - one[BARE][which] for one in found)
            results[name][f"{which}_us_per_record"] = 1e6 / records * statistics.median(differences)
    results[BARE]["step_ms"] = 1e3 * statistics.median(one[BARE]["step"] for one in found)
    return results


def choose(options: argparse.Namespace, elsewhere: Elsewhere) -> dict[str, Side]:
    """Parse what is compared."""
    modules = options.modules
    if options.training:
        sides: dict[str, Side] = {BARE: lambda: training(None, False, elsewhere, modules)}
        sides["measured only"] = lambda: training("", False, elsewhere, modules)
        sides["jsonl only"] = lambda: training("", True, elsewhere, modules)
        sides |= {
            name: lambda signals=signals: training(signals, False, elsewhere, modules)  # type: ignore[misc]
            for name, signals in SIGNALS.items()
        }
    else:

        @contextmanager
        def bare() -> Iterator[Loop]:
            yield make_loop(modules, None)

        sides = {BARE: bare}
        sides |= {
            name: lambda signals=signals: through_sinks(signals, elsewhere, modules)  # type: ignore[misc]
            for name, signals in SIGNALS.items()
        }
        if options.protocol == "grpc":
            sides |= {
                f"SDK {name}": lambda name=name: through_sdk(name, elsewhere, modules)  # type: ignore[misc]
                for name in ("span_events", "log_events")
            }
    only = options.only.split(",") if options.only else list(sides)
    return {name: side for name, side in sides.items() if name == BARE or name in only}


def figures(options: argparse.Namespace) -> list[Figure]:
    """Compare each signal with the bare loop, and with the SDK's calls where these exist."""
    import torch

    torch.set_num_threads(1)
    size = Size(options.smallest, options.rounds)
    options.modules, steps = size.of(options.modules, 10), size.of(options.steps, 10)
    elsewhere = Elsewhere(options.protocol)
    try:
        found = compare(choose(options, elsewhere), size.count(7), steps, options.modules)
        arrived = elsewhere.arrived()
    finally:
        elsewhere.close()
    rows = []
    for name, row in found.items():
        if name == BARE or name.startswith("SDK "):
            continue
        detail = (
            f"a record: training thread {row['training_thread_us_per_record']:.1f} µs, "
            f"other threads {row['other_threads_us_per_record']:.1f}"
        )
        if sdk := found.get(f"SDK {name}"):
            detail += f"; the SDK {sdk['training_thread_us_per_record']:.1f} and {sdk['other_threads_us_per_record']:.1f}"
        detail += f"; {options.modules} records a step of {found[BARE]['step_ms']:.2f} ms"
        rows.append(
            Figure(
                f"sending {name}: a step of small operations over one without",
                row["step_ratio"],
                None,
                detail,
            )
        )
    told = ", ".join(f"{count} {what}" for what, count in arrived.items())
    rows[-1:] = [replace(rows[-1], detail=f"{rows[-1].detail}; arrived in all: {told}")]
    return rows


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--modules", type=int, default=200, help="records a step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--training", action="store_true", help="train a model, with hooks")
    parser.add_argument(
        "--only", default="", help="comma list of what is compared with the bare loop"
    )
    parser.add_argument(
        "--json",
        help="write {'figures': […]} to this file, or print it (-), instead of lines for people",
    )
    parser.add_argument("--smallest", action="store_true", help="only show that it runs")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.receive:
        receive()
    else:
        tell(figures(options), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
