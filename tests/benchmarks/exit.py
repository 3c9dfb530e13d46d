"""How much later a program ends because of its collector, and what a slow one loses by that.

The time is from the program's last statement to the end of its process, less that of the same
program without an endpoint. Spans, metrics and logs are sent, over HTTP and over gRPC, to a collector
that refuses connections, takes none, never answers, falls silent after some answers, or answers
slowly. The SDK's own exporters send about as much to the first three.
"""

from __future__ import annotations

import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.figures import Figure, Size, command, environment
from tests.benchmarks.pairing import Rounds
from tests.hostile_server import HostileServer, silent
from tests.otlp_receiver import Receiver

_LAST_STATEMENT = "print(time.monotonic(), time.process_time(), flush=True)"
_OURS = f"""
import sys, time
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
with torch.no_grad():
    for _ in range(5):
        model(torch.ones(2, 8))
        time.sleep(float(sys.argv[1]))
{_LAST_STATEMENT}
"""
_SDK = f"""
import time
import torch
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
tracers = TracerProvider()
tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
gauge = meters.get_meter("benchmark").create_gauge("mean")
tracer = tracers.get_tracer("benchmark")
for step in range(5):
    with tracer.start_as_current_span("forward"):
        for module in range(20):
            gauge.set(0.5, {{"module": module}})
{_LAST_STATEMENT}
"""
_PROTOCOLS = {"http": "http/protobuf", "grpc": "grpc"}
_SIGNALS = "spans,span_events,log_events,metrics"
# seconds more than without an endpoint: where nothing is worth waiting for, and where data moves
_GOAL_S, _MOVING_GOAL_S = 1.0, 2.0
# seconds that each of five steps takes: an end before the first message, and one after several
_SHORT, _LONG = 0.0, 0.4
_NO_ENDPOINT = "no endpoint"


class _SlowReceiver(Receiver):
    """Answers after a while, and of each signal only the first few messages."""

    def __init__(self, delay_s: float, answered: int | None = None) -> None:
        super().__init__()
        self._delay_s, self._answered = delay_s, answered
        self._seen: dict[str, int] = {}

    def store(self, signal: str, request: Any, headers: dict[str, str]) -> None:
        """Wait before the answer, for ever if enough were answered."""
        self._seen[signal] = self._seen.get(signal, 0) + 1
        is_answered = self._answered is None or self._seen[signal] <= self._answered
        self._closed.wait(self._delay_s if is_answered else None)
        super().store(signal, request, headers)


class _Collector(NamedTuple):
    """An endpoint by protocol, the seconds of a step of the program, and the goal in seconds."""

    endpoints: Mapping[str, str]
    step_s: float
    goal_s: float


class _End(NamedTuple):
    """One end: seconds by the clock and of the processor, and how many items were said to be lost."""

    seconds: float
    cpu_s: float
    lost: int


@contextmanager
def _refusing() -> Iterator[str]:
    """Yield an endpoint that refuses connections: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def _black_hole() -> Iterator[str]:
    """Yield an endpoint that neither takes a connection nor refuses it: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def _collectors() -> Iterator[dict[str, _Collector]]:
    """Yield the collectors by what they do."""
    with ExitStack() as stack:

        def of_any_protocol(endpoint: str) -> dict[str, str]:
            return dict.fromkeys(_PROTOCOLS, endpoint)

        def slow(delay_s: float, answered: int | None = None) -> dict[str, str]:
            receiver = stack.enter_context(_SlowReceiver(delay_s, answered))
            return {"http": receiver.http_endpoint, "grpc": receiver.grpc_endpoint}

        refusing = of_any_protocol(stack.enter_context(_refusing()))
        black_hole = of_any_protocol(stack.enter_context(_black_hole()))
        never = of_any_protocol(stack.enter_context(HostileServer(silent)).endpoint)
        yield {
            "refuses connections": _Collector(refusing, _SHORT, _GOAL_S),
            "takes no connection": _Collector(black_hole, _SHORT, _GOAL_S),
            "never answers": _Collector(never, _SHORT, _GOAL_S),
            "never answers a longer run": _Collector(never, _LONG, _GOAL_S),
            "falls silent after two answers": _Collector(slow(0, 2), _LONG, _GOAL_S),
            "answers in 0.3 s": _Collector(slow(0.3), _SHORT, _MOVING_GOAL_S),
            "answers in 0.7 s": _Collector(slow(0.7), _SHORT, _MOVING_GOAL_S),
            "answers a longer run in 0.7 s": _Collector(slow(0.7), _LONG, _MOVING_GOAL_S),
        }


def _ending(program: str, variables: Mapping[str, str], *arguments: str) -> _End:
    """Run a program, and measure from its last statement to the end of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - float(done.stdout.split()[-2])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (line,) = re.findall(r"otel_torch: lost: (.*)", done.stderr) or [""]
    lost = sum(map(int, re.findall(r"(\d+) [a-z ]+ \(", line)))
    return _End(seconds, spent - float(done.stdout.split()[-1]), lost)


def measure(size: Size) -> list[Figure]:
    """Measure all collectors in turns, each beside the same program without an endpoint."""
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, _collectors() as every:
        shown = ("refuses connections", "answers in 0.3 s") if size.smallest else every
        collectors = {name: every[name] for name in shown}
        ours = {
            "OTEL_TORCH_ENABLED": "1",
            "OTEL_TORCH_JSONL": str(Path(folder) / "run.jsonl"),
            "OTEL_TORCH_SIGNALS": _SIGNALS,
        }
        sides: dict[str, tuple[dict[str, str], float]] = {
            f"{_NO_ENDPOINT}, {step_s}": (ours, step_s) for step_s in (_SHORT, _LONG)
        }
        for name, collector in collectors.items():
            for protocol, endpoint in collector.endpoints.items():
                exported = {
                    "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                    "OTEL_EXPORTER_OTLP_PROTOCOL": _PROTOCOLS[protocol],
                }
                sides[f"{name}, {protocol}"] = ours | exported, collector.step_s
        ends: dict[str, list[_End]] = {name: [] for name in sides}
        for _ in range(size.of(size.count(7), 1)):
            for name in order.sample(list(sides), len(sides)):
                variables, step_s = sides[name]
                ends[name].append(_ending(_OURS, variables, str(step_s)))
        sdk = {
            name: _ending(_SDK, {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoints["http"]})
            for name, collector in list(collectors.items())[: 0 if size.smallest else 3]
        }
    measured = Rounds({name: [end.seconds for end in runs] for name, runs in ends.items()})
    spent = Rounds({name: [end.cpu_s for end in runs] for name, runs in ends.items()})
    figures = []
    for name, collector in collectors.items():
        bare = f"{_NO_ENDPOINT}, {collector.step_s}"
        for protocol in collector.endpoints:
            side = f"{name}, {protocol}"
            later = measured.estimated_surplus(side, bare)
            largest = max(
                seconds - without
                for seconds, without in zip(
                    measured.seconds[side], measured.seconds[bare], strict=True
                )
            )
            lost = [end.lost for end in ends[side]]
            detail = (
                f"{later}, at most {largest:.2f}; of the processor "
                f"{spent.estimated_surplus(side, bare)} s; without an endpoint "
                f"{min(measured.seconds[bare]):.2f} s; lost {min(lost)} to {max(lost)} items"
            )
            if name in sdk and protocol == "http":
                detail += f"; the SDK's exporters, once: {sdk[name].seconds:.1f} s"
            title = f"exit, the collector {name}, {protocol}: seconds later than without one"
            figures.append(Figure.estimated(title, later, collector.goal_s, detail))
            if collector.goal_s == _MOVING_GOAL_S:
                title = f"exit, the collector {name}, {protocol}: items lost"
                figures.append(Figure(title, max(lost), 0, f"in each run: {lost}"))
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
