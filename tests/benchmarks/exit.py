"""How much later a program ends if its collector does not answer.

The time is from the program's last statement to the end of its process, less that of the same
program without an endpoint. The SDK's own exporters send about as much to the same collectors.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.figures import Figure, Size, command, environment
from tests.benchmarks.pairing import Rounds
from tests.hostile_server import HostileServer, silent

_LAST_STATEMENT = "print(time.monotonic(), flush=True)"
_OURS = f"""
import time
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
with torch.no_grad():
    for _ in range(5):
        model(torch.ones(2, 8))
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
_NO_ENDPOINT = "no endpoint"
_GOAL_S = 1.0


@contextmanager
def _refusing() -> Iterator[str]:
    """Yield an endpoint that refuses connections: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def _ending(program: str, variables: Mapping[str, str]) -> float:
    """Return the seconds from the program's last statement to the end of its process."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return time.monotonic() - float(done.stdout.split()[-1])


def measure(size: Size) -> list[Figure]:
    """Measure a collector that refuses connections, and one that accepts them and never answers."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _refusing() as refusing,
        HostileServer(silent) as server,
    ):
        endpoints = {"refuses connections": refusing, "never answers": server.endpoint}
        ours = {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_JSONL": str(Path(folder) / "run.jsonl")}
        sides = {_NO_ENDPOINT: ours} | {
            name: ours | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
            for name, endpoint in endpoints.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        order = random.Random(0)
        for _ in range(size.count(10)):
            for name in order.sample(list(sides), len(sides)):
                seconds[name].append(_ending(_OURS, sides[name]))
        sdk = {
            name: _ending(_SDK, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
            for name, endpoint in endpoints.items()
            if not size.smallest
        }
    measured = Rounds(seconds)
    figures = []
    for name in endpoints:
        later = measured.estimated_surplus(name, _NO_ENDPOINT)
        detail = f"{later}; without an endpoint {min(seconds[_NO_ENDPOINT]):.2f} s"
        if name in sdk:
            detail += f"; the SDK's exporters, once: {sdk[name]:.1f} s"
        title = f"exit, the collector {name}: seconds later than without one"
        figures.append(Figure.estimated(title, later, _GOAL_S, detail))
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
