"""A healthy Collector gets everything. If it is stopped, slow, full, selective or restarted, losses
are counted: what arrived and what the recording's metadata lists as lost add up to what was
made.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.apis import arrived, items
from tests.e2e.conftest import start
from tests.e2e.stack import Running, eventually
from tests.otlp_receiver import Receiver
from tests.support import environment, lines, metadata
from tests.telemetry.otlp.test_delivery import BURST, lost
from tests.telemetry_support import drive

pytestmark = pytest.mark.e2e

SIGNALS = {"OTEL_TORCH_SIGNALS": "spans,span_events,log_events,metrics"}
PROTOCOLS = {"grpc": "COLLECTOR_GRPC_PORT", "http/protobuf": "COLLECTOR_HTTP_PORT"}

# stops in the middle, says so, and goes on when it is told to; the steps' spans are traces of their
# own, so they leave at once
PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(9)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # nothing becomes infinite, of which there would be no points
for step in range(60):
    if step in (20, 40):
        print(step, flush=True)
        input()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
STEPS, MODULES = 60, 10


def endpoint(collector: Running, protocol: str = "grpc") -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url(PROTOCOLS[protocol]),
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
    }


class Program:
    """The program above in a child process, which runs from pause to pause to its end."""

    def __init__(self, tmp_path: Path, **variables: str) -> None:
        self.recording = tmp_path / "run.jsonl"
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment(tmp_path, **SIGNALS | variables), cwd=tmp_path, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdin is not None
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise AssertionError(self._process.communicate(timeout=60)[1])

    def go_on(self) -> None:
        """Run to the next pause."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._wait()

    def end(self) -> Counter[tuple[str, str]]:
        """Run to the end, and return what it counted as lost: {(kind, reason): count}."""
        _, said = self._process.communicate("\n", timeout=120)
        assert self._process.returncode == 0, said
        counted = Counter(
            {(one["what"], one["reason"]): one["count"] for one in metadata(self.recording)["lost"]}
        )
        # the line at the end reports the same
        assert lost(subprocess.CompletedProcess("", 0, "", said)) == dict(counted)
        return counted

    def made(self) -> Counter[str]:
        """Return what would arrive without losses: the run's span and four per step (step, forward,
        backward, optimizer), one event of each kind per activation, and per activation one point of
        each of six gauges. The health of the training becomes metrics that are not counted here.
        """
        rows = [row for row in lines(self.recording) if row["phase"] != "train"]
        assert len(rows) == STEPS * MODULES
        return Counter(
            span=1 + 4 * STEPS,
            span_event=len(rows),
            log_event=len(rows),
            metric_point=6 * len(rows),
        )


def assert_accounted(
    made: Counter[str], found: Counter[str], counted: Counter[tuple[str, str]]
) -> None:
    """Check that arrived and lost add up to made. What was not confirmed may have arrived. Of
    metrics only gauges are predicted, while counters and histograms are among the lost as well.
    """
    for what in ("span", "span_event", "log_event", "metric_point"):
        all_lost = sum(count for (kind, _), count in counted.items() if kind == what)
        unconfirmed = counted[what, "unconfirmed"]
        assert found[what] <= made[what], (what, made, found, counted)
        assert made[what] <= found[what] + all_lost, (what, made, found, counted)
        if what != "metric_point":
            assert found[what] + all_lost - unconfirmed <= made[what], (what, made, found, counted)


def files(collector: Running) -> Path:
    return Path(collector.variables["COLLECTOR_FILES"])


# -- healthy


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_burst_of_a_hundred_thousand_records_arrives_whole(
    tmp_path: Path, laptop: Running, protocol: str
) -> None:
    done = drive(tmp_path, BURST + "finish(120)", **SIGNALS, **endpoint(laptop, protocol))
    assert lost(done) == {}
    laptop.stop()  # what it holds is then written
    found = arrived(files(laptop))
    assert (found["span_event"], found["log_event"]) == (100_000, 100_000)
    means = (
        metric
        for metric in items(files(laptop), "metrics")
        if metric["name"] == "torch.module.activation.mean"
    )
    assert sum(len(metric["gauge"]["dataPoints"]) for metric in means) == 100_000


def test_all_that_a_program_makes_arrives(tmp_path: Path, laptop: Running) -> None:
    """The numbers that the tests below use for a program are what it makes."""
    program = Program(tmp_path, **endpoint(laptop))
    program.go_on()
    assert program.end() == {}
    laptop.stop()
    assert arrived(files(laptop)) == program.made()


# -- unhealthy


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_stopped_for_good(tmp_path: Path, laptop: Running, protocol: str) -> None:
    program = Program(tmp_path, **endpoint(laptop, protocol))
    eventually(lambda: arrived(files(laptop))["log_event"] >= 20 * MODULES)
    laptop.stop()
    program.go_on()
    counted = program.end()
    found = arrived(files(laptop))
    assert_accounted(program.made(), found, counted)
    assert found["log_event"] == 20 * MODULES
    assert counted["log_event", "refused"] == 40 * MODULES


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_stopped_and_started_again_loses_nothing(
    tmp_path: Path, laptop: Running, protocol: str
) -> None:
    program = Program(tmp_path, **endpoint(laptop, protocol))
    laptop.stop()
    program.go_on()  # twenty steps without a receiver
    laptop.start()
    # what waited is sent again before the program ends, as it would be in a longer one
    eventually(lambda: arrived(files(laptop))["log_event"] >= 40 * MODULES)
    eventually(lambda: arrived(files(laptop))["metric_point"] >= 40 * 6 * MODULES)
    eventually(lambda: arrived(files(laptop))["span_event"] >= 39 * MODULES)
    counted = program.end()
    laptop.stop()
    assert counted == {}
    assert_accounted(program.made(), arrived(files(laptop)), counted)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_paused_and_never_back_before_the_end(
    tmp_path: Path, laptop: Running, protocol: str
) -> None:
    """The kernel accepts its connections and nothing answers: what was sent may have arrived, and
    is counted as unconfirmed.
    """
    program = Program(tmp_path, **endpoint(laptop, protocol))
    eventually(lambda: arrived(files(laptop))["log_event"] >= 20 * MODULES)
    laptop.pause()
    program.go_on()
    counted = program.end()
    laptop.resume()
    laptop.stop()
    assert any(reason == "unconfirmed" for _, reason in counted)
    assert_accounted(program.made(), arrived(files(laptop)), counted)


@contextmanager
def slowed(collector: Running) -> Iterator[None]:
    """Suspend it most of the time."""
    over = threading.Event()

    def turns() -> None:
        while not over.wait(0.05):
            collector.pause()
            over.wait(0.4)
            collector.resume()

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        collector.resume()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_slow(tmp_path: Path, laptop: Running, protocol: str) -> None:
    with slowed(laptop):
        program = Program(tmp_path, **endpoint(laptop, protocol))
        program.go_on()
        counted = program.end()
    laptop.stop()
    assert {reason for _, reason in counted} <= {"shutdown", "unconfirmed"}
    assert_accounted(program.made(), arrived(files(laptop)), counted)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_refusing_because_its_memory_is_full(tmp_path: Path, protocol: str) -> None:
    """The limiter is first in the pipelines, and refuses all data."""
    full = start(
        "collector",
        tmp_path / "full",
        FILES="collector-laptop.yaml",
        COLLECTOR_MEMORY_MIB="2",
        COLLECTOR_SPIKE_MIB="1",
    )
    with full:
        program = Program(tmp_path, **endpoint(full, protocol))
        program.go_on()
        counted = program.end()
    found = arrived(files(full))
    assert_accounted(program.made(), found, counted)
    assert found["log_event"] < counted["log_event", "refused"] <= STEPS * MODULES


class Choosy(Receiver):
    """Forwards every second log record of a request to a Collector, and reports how many it
    rejected.
    """

    def __init__(self, collector: Running) -> None:
        super().__init__("reject")
        self._logs = collector.url("COLLECTOR_HTTP_PORT", "/v1/logs")
        self.left_out = 0

    def store(self, signal: str, request: Any, headers: dict[str, str]) -> None:
        super().store(signal, request, headers)
        self.rejecting = 0
        for resource in request.resource_logs:
            for scope in resource.scope_logs:
                self.rejecting += len(scope.log_records[1::2])
                del scope.log_records[1::2]
        self.left_out += self.rejecting
        headers = {"content-type": "application/x-protobuf"}
        urllib.request.urlopen(
            urllib.request.Request(self._logs, request.SerializeToString(), headers), timeout=30
        ).close()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_accepting_in_part(tmp_path: Path, laptop: Running, protocol: str) -> None:
    with Choosy(laptop) as choosy:
        program = Program(tmp_path, **choosy.environment(protocol), OTEL_TORCH_SIGNALS="log_events")
        program.go_on()
        counted = program.end()
    laptop.stop()
    assert counted == {("log_event", "rejected"): choosy.left_out}
    assert arrived(files(laptop))["log_event"] + choosy.left_out == STEPS * MODULES


# -- a node's Collector, and its gateway


def taken(agent: Running) -> int:
    """Return how many log records it reported as accepted."""
    with urllib.request.urlopen(
        agent.url("COLLECTOR_METRICS_PORT", "/metrics"), timeout=10
    ) as answer:
        found = [
            line
            for line in answer.read().decode().splitlines()
            if line.startswith("otelcol_receiver_accepted_log_records")
        ]
    return sum(int(float(line.rpartition(" ")[2])) for line in found)


def test_an_agent_keeps_what_the_gateway_cannot_take_over_restarts_of_both(
    tmp_path: Path, laptop: Running
) -> None:
    """The Collector that writes files takes the gateway's place, so that arrivals can be counted."""
    laptop.stop()
    gateway = f"127.0.0.1:{laptop.variables['COLLECTOR_GRPC_PORT']}"
    with start(
        "collector", tmp_path / "agent", FILES="collector-agent.yaml", GATEWAY_ENDPOINT=gateway
    ) as agent:
        program = Program(tmp_path, **endpoint(agent))
        program.go_on()
        counted = program.end()
        assert counted == {}
        assert taken(agent) == STEPS * MODULES
        assert arrived(files(laptop)) == Counter()
        agent.kill()  # and not stopped: its queue is on disk
        agent.start()
        laptop.start()
        eventually(lambda: arrived(files(laptop)) >= program.made())
    laptop.stop()
    assert arrived(files(laptop)) == program.made()
