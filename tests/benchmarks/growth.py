"""Measures how agent and gateway scale with ranks: cost of a record, bytes on the wire, queues,
losses, and the number of ranks at which the first component saturates.

    python -m tests.benchmarks.growth [--ranks 1,2,4,8,16,32] [--records 1020] [--steps 10]
    [--period 1] [--json -]
                                      [--page docs/cluster.md]

The Collectors are real and run the shipped `collector-agent.yaml` and `collector-gateway.yaml`. A
rank is a separate process with the recorder, sinks, queue and exporters of a session; only the
tensors are missing, and their statistics are random numbers of full length. All ranks end their
steps at the same time. After the gateway, a receiver replaces Jaeger, Prometheus and Loki, and
counts what arrives from each rank. Then ranks export to the real Prometheus, Loki and Jaeger, one
at a time, with their shipped files. Processor time and memory are those of the processes (`/proc`),
bytes those that a Collector read from its sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import ROOT, Figure, Size, environment, module_command, tell

RANKS = (1, 2, 4, 8, 16, 32)
# what a record is sent as, by signals; the first, which the page's tables of ranks are measured with,
# was the default of OTEL_TORCH_SIGNALS then
SIGNALS = {
    "spans, span events, metrics": "spans,span_events,metrics",
    "span events": "spans,span_events",
    "metrics": "metrics",
    "log events": "spans,log_events",
}
DEFAULT = next(iter(SIGNALS))
GAUGES = ("abs_mean", "sum", "min", "max", "mean", "std")
# how long everything may take to arrive once the ranks have made it
_ARRIVAL_S = 120
# nothing more comes when nothing waits and nothing has come for so long
_QUIET_S = 5
# a second of the shipped files is a second here: the tests shorten these
AS_SHIPPED = {
    "COLLECTOR_FLUSH": "1s", "SPAN_METRICS_INTERVAL": "15s", "COLLECTOR_METRICS_INTERVAL_MS": "15000", "AGENT_RETRY_MAX": "30s",
}  # fmt: skip


# -- a rank


def records_of(step: int, count: int, numbers: random.Random) -> list[Any]:
    """Return the records of a step, with the default statistics and the module names of a large
    transformer.
    """
    from otel_torch.records import Record

    leaves = (
        "",
        ".norm1",
        ".attn1",
        ".attn1.to_q",
        ".attn1.norm_q",
        ".attn1.to_out.0",
        ".attn2",
        ".attn2.to_k",
        ".ffn.net.0.proj",
    )
    draw, found = numbers.random, []
    for n in range(count):
        stats: dict[str, Any] = {name: draw() for name in GAUGES}
        stats |= {"nonfinite": 0, "shape": [1, 75600, 5120], "dtype": "torch.bfloat16"}
        name = f"blocks.{n // len(leaves)}{leaves[n % len(leaves)]}"
        found.append(
            Record(
                name,
                "out",
                step,
                0,
                0,
                "WanTransformer3DModel",
                "forward",
                None,
                stats,
                time.time_ns(),
            )
        )
    return found


def be_a_rank(records: int, steps: int, period: float) -> None:
    """Run a rank (child process): print `ready`, wait for a line, then print counts, losses, usage."""
    from otel_torch.process.console import say
    from otel_torch.process.job import this_job
    from otel_torch.recorder import Recorder
    from otel_torch.records import Losses, Scope
    from otel_torch.settings import Settings
    from otel_torch.telemetry.sinks.telemetry_sink import build_telemetry_sinks

    class Here:
        """Return records whose numbers are already on the host."""

        def __init__(self, pending: list[Any]) -> None:
            self._pending = pending

        def ready(self) -> bool:
            return True

        def records(self) -> list[Any]:
            return self._pending

    job, losses = this_job(), Losses()
    settings = Settings.from_env(report=say)
    recorder = Recorder(Here, lambda: build_telemetry_sinks(settings, job, losses), losses)
    numbers = random.Random(job.rank)

    def step_of(count: int, step: int) -> None:
        attributes = {"torch.step": step, "torch.loop": 0, "torch.model": "WanTransformer3DModel"}
        scope = Scope("step", "torch.step", False, attributes, training=True)
        recorder.open(scope)
        for record in records_of(step, count, numbers):
            recorder.add(record)
        recorder.flush(scope)
        recorder.close(scope)

    step_of(1, 0)  # imports, connects
    recorder.drain(30)
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    late, before = 0.0, time.process_time()
    for step in range(steps):
        due = start + step * period
        time.sleep(max(0.0, due - time.monotonic()))
        late = max(late, time.monotonic() - due)
        step_of(records, step + 1)
    made_at = time.monotonic()
    recorder.finish(made_at + _ARRIVAL_S)
    lost: Counter[str] = Counter()
    for what, _, count in losses.items():
        lost[what] += count
    print(
        json.dumps(
            {"late": late, "made_at": made_at, "lost": lost, "cpu": time.process_time() - before}
        ),
        flush=True,
    )


# -- what stands behind the gateway


def be_the_backends() -> None:
    """Run the receiver (child process): for each input line, print how many items of each kind
    arrived from each rank.
    """
    from tests.otlp_receiver import Receiver

    counts: Counter[str] = Counter()

    class Counting(Receiver):
        def store(self, signal: str, request: Any, headers: dict[str, str]) -> None:
            for kind, rank, number in counted(signal, request):
                counts[f"{kind} {rank}"] += number

    with Counting() as receiver:
        print(receiver.grpc_endpoint, receiver.http_endpoint, flush=True)
        for _ in sys.stdin:
            print(json.dumps(counts), flush=True)


def counted(signal: str, request: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, rank, count) of our items in a request; kinds are those of counted losses."""
    for resource in getattr(request, f"resource_{'spans' if signal == 'traces' else signal}"):
        ranks = [
            pair.value.int_value for pair in resource.resource.attributes if pair.key == "dl.rank"
        ]
        if not ranks:
            continue  # the Collector's own metrics
        for scope in getattr(resource, f"scope_{'spans' if signal == 'traces' else signal}"):
            if signal == "traces":
                yield "span_event", ranks[0], sum(len(span.events) for span in scope.spans)
            elif signal == "logs":
                yield "log_event", ranks[0], len(scope.log_records)
            else:
                ours = (
                    metric
                    for metric in scope.metrics
                    if metric.name.startswith("torch.module.activation.")
                )
                yield (
                    "metric_point",
                    ranks[0],
                    sum(len(metric.gauge.data_points) for metric in ours),
                )


def made_by_each(signals: str, records: int, steps: int) -> dict[str, int]:
    """Return how many items of each kind a rank exports, its first record included."""
    kinds = {
        "span_events": ("span_event", 1),
        "log_events": ("log_event", 1),
        "metrics": ("metric_point", len(GAUGES)),
    }
    return {
        kind: times * (1 + records * steps)
        for name, (kind, times) in kinds.items()
        if name in signals.split(",")
    }


# -- processes


class Child:
    """A rank or receiver in a child process, driven by lines of text."""

    def __init__(self, *arguments: object, **variables: str) -> None:
        command = module_command("growth", *map(str, arguments))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**variables), stdin=pipe, stdout=pipe, text=True
        )

    def read(self) -> str:
        """Return its next line. Raise RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self._process.wait(60)}")
        return line.strip()

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ask(self) -> Any:
        self.tell("")
        return json.loads(self.read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait(60)

    @property
    def pid(self) -> int:
        return self._process.pid


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process, user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_and_all() -> tuple[int, int]:
    """Return the idle and the total ticks of all cores."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def most_memory(pid: int) -> float:
    """Return the peak resident memory in MB."""
    return (
        int(re.findall(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)[0])
        * 1024
        / 1e6
    )


def bytes_read(pid: int) -> int:
    """Return the bytes read from sockets; the queue on disk is mapped and never read."""
    return int(re.findall(r"^rchar: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.M)[0])


def own_metrics(address: str) -> dict[str, float]:
    """Return a Collector's own metrics, summed over labels; queue sizes are in bytes."""
    found: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(address, timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("otelcol_"):
                found[re.split(r"[{ ]", line, maxsplit=1)[0].removesuffix("_total")] += float(
                    line.rpartition(" ")[2]
                )
    return found


def accepted(metrics: dict[str, float]) -> float:
    return sum(
        value for name, value in metrics.items() if name.startswith("otelcol_receiver_accepted_")
    )


def refused(metrics: dict[str, float]) -> float:
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith(("otelcol_receiver_refused_", "otelcol_receiver_failed_"))
    )


class Watch:
    """Polls a Collector several times a second for the time of the last item and the peak queue."""

    def __init__(self, collector: Any, pid: int) -> None:
        self.address, self._pid = collector.url("COLLECTOR_METRICS_PORT", "/metrics"), pid
        self.last_taken, self.queue_bytes = time.monotonic(), 0.0
        self._over = threading.Event()
        self._taken = accepted(own_metrics(self.address))
        self._before = processor_seconds(pid), bytes_read(pid)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.25):
            try:
                metrics = own_metrics(self.address)
            except OSError:
                continue  # too busy to say it
            if accepted(metrics) > self._taken:
                self._taken, self.last_taken = accepted(metrics), time.monotonic()
            self.queue_bytes = max(self.queue_bytes, metrics["otelcol_exporter_queue_size"])

    def end(self, records: int, start: float) -> Collected:
        """Return the cost since polling began."""
        self._over.set()
        self._thread.join()
        metrics = own_metrics(self.address)
        cpu, read = (
            processor_seconds(self._pid) - self._before[0],
            bytes_read(self._pid) - self._before[1],
        )
        return Collected(
            records / max(self.last_taken - start, 0.25), 1e6 * cpu / records, most_memory(self._pid), read / records,
            self.queue_bytes / 1e6, int(refused(metrics)),
        )  # fmt: skip


@dataclass(frozen=True)
class Collected:
    """A Collector in one run.

    Attributes:
        rate: Records a second, from the first to the last.
        cpu: Processor seconds a million records.
        memory: Peak, in MB.
        wire: Bytes received a record.
        queue: Peak, in MB.
        refused: Items.
    """

    rate: float
    cpu: float
    memory: float
    wire: float
    queue: float
    refused: int


@dataclass(frozen=True)
class Run:
    """The measurements with one number of ranks.

    Attributes:
        offered: Records a second that the ranks were supposed to make.
        late: The largest delay of a rank's step, in seconds.
        drained: Seconds from the last record made to the last arrival.
        lost: Items that did not arrive.
        uncounted: Lost items that the rank did not count as lost.
        twice: Items that arrived more than once.
        *_cpu: Processor seconds a million records.
        stand_in_cores: Cores that the receiver kept busy.
        idle: Unused share of the machine's processor time.
    """

    ranks: int
    records: int
    offered: float
    agent: Collected
    gateway: Collected
    late: float
    drained: float
    lost: int
    uncounted: int
    twice: int
    rank_cpu: float
    stand_in_cpu: float
    stand_in_cores: float
    idle: float

    def saturated(self, period: float) -> list[str]:
        """Return what is saturated, causes first; empty while everything keeps up. Losses are not
        listed: they are a consequence.
        """
        # a queue on disk holds what comes in a flush interval; more than three of them is a backlog
        second = self.offered * self.agent.wire / 1e6
        causes = {
            "a rank's steps are late": self.late > period,
            "the agent refuses": self.agent.refused > 0,
            "the gateway refuses": self.gateway.refused > 0,
            "the agent's queue grows": self.agent.queue > 3 * second,
            "the gateway's queues grow": self.gateway.queue > 3 * second,
            "arrivals lag behind": self.drained
            > 3 * period + 2,  # two flush intervals are as they should be
        }
        found = [cause for cause, holds in causes.items() if holds]
        why = {
            "all cores are busy": self.idle < 0.1,
            "the stand-in has one core's worth": self.stand_in_cores > 0.9,
        }
        return [cause for cause, holds in why.items() if found and holds] + found


@contextmanager
def shape() -> Iterator[tuple[Any, Any, Child]]:
    """Start a fresh agent, gateway and receiver.

    Raises:
        tests.e2e.build.Missing: If the Collector has not been built.
    """
    from tests.e2e.stack import Running

    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        # both first: neither is started where the program is missing
        agent = Running("collector", folder / "agent", FILES="collector-agent.yaml", **AS_SHIPPED)
        behind = Child("--as-backends")
        stack.callback(behind.close)
        grpc, http = behind.read().split()
        backends = {
            "JAEGER_ENDPOINT": grpc.removeprefix("http://"),
            "PROMETHEUS_ENDPOINT": http,
            "LOKI_ENDPOINT": http,
        }
        gateway = Running(
            "collector",
            folder / "gateway",
            FILES="collector-gateway.yaml",
            **AS_SHIPPED,
            **backends,
        )
        stack.enter_context(gateway)
        agent.variables["GATEWAY_ENDPOINT"] = gateway.address
        stack.enter_context(agent)
        yield agent, gateway, behind


def run(ranks: int, signals: str, records: int, steps: int, period: float) -> Run:
    """Run this many ranks at once, and measure from the first step to the last arrival."""
    with shape() as (agent, gateway, behind), ExitStack() as stack:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": agent.url("COLLECTOR_GRPC_PORT"), "OTEL_SERVICE_NAME": "growth",
            "OTEL_TORCH_RUN_ID": "growth", "OTEL_TORCH_SIGNALS": signals, "OTEL_TORCH_RANKS": "all", "WORLD_SIZE": str(ranks),
        }  # fmt: skip
        children = []
        for rank in range(ranks):
            child = Child(
                "--as-rank",
                records,
                steps,
                period,
                **variables,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )
            stack.callback(child.close)
            children.append(child)
        for child in children:
            child.read()
        watches = [Watch(collector, collector.pid) for collector in (agent, gateway)]
        behind_before, (idle_before, all_before) = processor_seconds(behind.pid), idle_and_all()
        start = time.monotonic() + 0.1
        for child in children:
            child.tell(start)
        reports = [json.loads(child.read()) for child in children]
        last_made = max(report["made_at"] for report in reports)
        made = made_by_each(signals, records, steps)
        expected = {
            f"{kind} {rank}": count for kind, count in made.items() for rank in range(ranks)
        }
        found = behind.ask()
        quiet_since = time.monotonic()
        while (
            any(found.get(name, 0) < count for name, count in expected.items())
            and time.monotonic() < last_made + _ARRIVAL_S
        ):
            time.sleep(0.1)
            before, found = found, behind.ask()
            waiting = sum(
                own_metrics(watch.address)["otelcol_exporter_queue_size"] for watch in watches
            )
            quiet_since = time.monotonic() if found != before or waiting else quiet_since
            if time.monotonic() > quiet_since + _QUIET_S:
                break
        arrived_at = time.monotonic()
        total = ranks * records * steps
        agents, gateways = (watch.end(total, start) for watch in watches)
        rank_cpu, stand_in = (
            sum(report["cpu"] for report in reports),
            processor_seconds(behind.pid) - behind_before,
        )
        idle_after, all_after = idle_and_all()
        differences = {name: count - found.get(name, 0) for name, count in expected.items()}
        lost = {name: count for name, count in differences.items() if count > 0}
        own_count = {
            f"{kind} {rank}": count
            for rank, report in enumerate(reports)
            for kind, count in report["lost"].items()
        }
        return Run(
            ranks=ranks,
            records=total,
            offered=ranks * records / period,
            agent=agents,
            gateway=gateways,
            late=max(report["late"] for report in reports),
            drained=arrived_at - last_made,
            lost=sum(lost.values()),
            uncounted=sum(max(0, count - own_count.get(name, 0)) for name, count in lost.items()),
            twice=-sum(count for count in differences.values() if count < 0),
            rank_cpu=1e6 * rank_cpu / total,
            stand_in_cpu=1e6 * stand_in / total,
            stand_in_cores=stand_in / (arrived_at - start),
            idle=(idle_after - idle_before) / max(all_after - all_before, 1),
        )


# -- the backends themselves


@dataclass(frozen=True)
class Kind:
    """How ranks export to a backend.

    Attributes:
        signals: The signals it accepts.
        variable: The standard's variable for its address.
        port, path: That address.
        metrics: The port of its own metrics.
        counts: The metric that grows with received data, and its unit; None if there is none.
    """

    signals: str
    variable: str
    port: str
    path: str
    metrics: str
    counts: str | None
    unit: str


BACKENDS = {
    "prometheus": Kind("metrics", "METRICS", "PROMETHEUS_PORT", "/api/v1/otlp/v1/metrics", "PROMETHEUS_PORT",
                       "prometheus_tsdb_head_series", "series"),
    "loki": Kind("log_events", "LOGS", "LOKI_PORT", "/otlp/v1/logs", "LOKI_PORT", "loki_distributor_bytes_received_total",
                 "bytes by its own count"),
    "jaeger": Kind("spans,span_events", "TRACES", "JAEGER_GRPC_PORT", "", "JAEGER_METRICS_PORT", None, "records"),
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """The measurements of a backend.

    Attributes:
        count: In the backend's own unit.
        memory: Growth of resident memory, in bytes.
        cpu: Processor seconds a million records.
    """

    backend: str
    ranks: int
    records: int
    count: float
    memory: float
    cpu: float


def resident(pid: int) -> int:
    """Return the resident memory in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def store(name: str, ranks: int, records: int, steps: int, period: float) -> Stored:
    """Run ranks that export directly to a backend.

    Raises:
        tests.e2e.build.Missing: If the backend has not been built.
        RuntimeError: If it lost data, which makes costs a record meaningless.
    """
    from tests.e2e.stack import Running

    kind = BACKENDS[name]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        backend = stack.enter_context(Running(name, Path(temporary) / name))
        pid = backend.pid
        variables = {
            f"OTEL_EXPORTER_OTLP_{kind.variable}_ENDPOINT": backend.url(kind.port, kind.path), "OTEL_TORCH_SIGNALS": kind.signals,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf" if kind.path else "grpc", "OTEL_SERVICE_NAME": "growth",
            "OTEL_TORCH_RANKS": "all", "OTEL_TORCH_RUN_ID": "growth", "WORLD_SIZE": str(ranks),
        }  # fmt: skip

        def own_count() -> float:
            if kind.counts is None:
                return 0.0
            with urllib.request.urlopen(
                backend.url(kind.metrics, "/metrics"), timeout=30
            ) as answer:
                found = re.findall(
                    rf"^{kind.counts}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.M
                )
            return sum(map(float, found))

        children = [
            Child(
                "--as-rank",
                records,
                steps,
                period,
                **variables,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )
            for rank in range(ranks)
        ]
        for child in children:
            stack.callback(child.close)
            child.read()
        before = own_count(), resident(pid), processor_seconds(pid)
        start = time.monotonic() + 0.1
        for child in children:
            child.tell(start)
        reports = [json.loads(child.read()) for child in children]
        total = ranks * records * steps
        if lost := [report["lost"] for report in reports if report["lost"]]:
            raise RuntimeError(
                f"no figures of {name}: it did not take everything in time ({lost[0]})"
            )
        count = own_count() - before[0] if kind.counts else total
        return Stored(
            name, ranks, total, count, resident(pid) - before[1], 1e6 * (processor_seconds(pid) - before[2]) / total
        )  # fmt: skip


def backends_table(found: Sequence[Stored]) -> str:
    """Return the costs of the backends as a Markdown table."""
    lines = [
        "| backend | ranks | records | it counts | | memory more, MB | B of memory for a record (of Prometheus: a series) | "
        "CPU s a million records |",
        "|---|--:|--:|--:|---|--:|--:|--:|",
    ]
    for backend in found:
        kind = BACKENDS[backend.backend]
        each = backend.memory / (backend.count if kind.unit == "series" else backend.records)
        cells = [
            backend.backend,
            backend.ranks,
            f"{backend.records:,}",
            f"{backend.count:,.0f}",
            kind.unit,
            f"{backend.memory / 1e6:.0f}",
        ]
        cells += [f"{each:,.0f}", f"{backend.cpu:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


# -- what it comes to


def growth_table(runs: Sequence[Run], period: float) -> str:
    """Return the runs as a Markdown table, one line for each number of ranks."""
    lines = [
        "| ranks | offered, records/s | through the agent | through the gateway | "
        "agent, CPU s a million | gateway, CPU s a million | a rank's exporters, CPU s a million | "
        "idle cores, % | agent, MB | gateway, MB | agent's queue, MB | gateway's, MB | "
        "last arrival, s later | lost | of it uncounted | twice | saturated |",
        "|--:" * 16 + "|---|",
    ]
    for growth_run in runs:
        cells = [
            growth_run.ranks, f"{growth_run.offered:,.0f}", f"{growth_run.agent.rate:,.0f}", f"{growth_run.gateway.rate:,.0f}", f"{growth_run.agent.cpu:.1f}",
            f"{growth_run.gateway.cpu:.1f}", f"{growth_run.rank_cpu:.1f}",
            f"{100 * growth_run.idle:.0f}", f"{growth_run.agent.memory:.0f}", f"{growth_run.gateway.memory:.0f}",
            f"{growth_run.agent.queue:.1f}", f"{growth_run.gateway.queue:.1f}", f"{growth_run.drained:.1f}", f"{growth_run.lost:,}", growth_run.uncounted, growth_run.twice,
            ", ".join(growth_run.saturated(period)) or "nothing",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def signals_table(found: dict[str, Run], jsonl: tuple[int, int]) -> str:
    """Return bytes and costs of a record as each signal, as a Markdown table. Bytes from a rank to
    the agent are uncompressed, from the agent to the gateway gzip.
    """
    lines = [
        "| a record as | B | B, gzip | agent, CPU s a million | gateway, CPU s a million |",
        "|---|--:|--:|--:|--:|",
        f"| a line of JSONL | {jsonl[0]} | {jsonl[1]} | – | – |",
    ]
    lines += [
        f"| {name} | {signal_run.agent.wire:.0f} | {signal_run.gateway.wire:.0f} | {signal_run.agent.cpu:.1f} | {signal_run.gateway.cpu:.1f} |"
        for name, signal_run in found.items()
    ]
    return "\n".join(lines)


def jsonl_bytes(records: int) -> tuple[int, int]:
    """Return the bytes of a record in a recording, uncompressed and compressed."""
    import gzip

    from otel_torch.recording.rows import encode_rows

    data = encode_rows(records_of(0, records, random.Random(0)))
    return round(len(data) / records), round(len(gzip.compress(data, 6)) / records)


def figures(options: argparse.Namespace) -> list[Figure]:
    """Run all measurements, and write the tables into the page if one was given."""
    from tests.benchmarks.__main__ import machine, rewritten
    from tests.e2e.build import Missing

    size = Size(options.smallest)
    ranks = (
        [int(word) for word in options.ranks.split(",")]
        if options.ranks
        else [*RANKS[: size.of(len(RANKS), 2)]]
    )
    records, steps, period = (
        size.of(options.records, 20),
        size.of(options.steps, 3),
        0.2 if size.smallest else options.period,
    )
    runs: list[Run] = []
    try:
        for count in ranks:
            runs.append(run(count, SIGNALS[DEFAULT], records, steps, period))
            print(growth_table(runs[-1:], period).splitlines()[-1], file=sys.stderr, flush=True)
        by_signal = {
            name: run(min(2, max(ranks)), signals, records, steps, period)
            for name, signals in SIGNALS.items()
            if not size.smallest
        }
    except Missing as problem:
        return [
            Figure(
                "agent and gateway: lost where nothing is saturated",
                None,
                0,
                f"the Collector is not installed here: {problem}",
            )
        ]
    stored: list[Stored] = []
    for backend in BACKENDS if not size.smallest else ():
        with suppress(Missing):
            try:
                stored.append(store(backend, 4, records, steps, 2 * period))
            except RuntimeError as error:
                print(error, file=sys.stderr)
    tables = {
        "growth": growth_table(runs, period),
        "signals": signals_table(by_signal, jsonl_bytes(records)),
        "backends": backends_table(stored),
    }
    setting = (
        f"{records:,} records a step, {steps} steps, one every {period:g} s, signals {DEFAULT}; agent, gateway, "
        f"{', '.join(map(str, ranks))} ranks and a stand-in for the backends share the cores. {machine()}"
    )
    if options.page:
        page = Path(options.page)
        page.write_text(rewritten(page.read_text(), setting=setting, **tables))
    print("\n\n".join([setting, *tables.values()]), file=sys.stderr)
    return summed_up(runs, period)


def summed_up(runs: Sequence[Run], period: float) -> list[Figure]:
    """Return the lines for the table of all benchmarks."""
    first, last = runs[0], runs[-1]
    keeps_up = [growth_run for growth_run in runs if not growth_run.saturated(period)]
    best = keeps_up[-1] if keeps_up else first
    full = next((growth_run for growth_run in runs if growth_run.saturated(period)), None)
    until = (
        f"{full.ranks} ranks are the first too many: {', '.join(full.saturated(period))}"
        if full
        else f"nothing was saturated up to {last.ranks} ranks"
    )
    in_all, twice = (
        sum(growth_run.records for growth_run in runs),
        sum(growth_run.twice for growth_run in runs),
    )
    both = [(growth_run.agent.cpu + growth_run.gateway.cpu) for growth_run in (first, best)]
    return [
        Figure("agent and gateway: lost where nothing is saturated", sum(growth_run.lost for growth_run in keeps_up), 0,
               f"of {in_all:,} records in {len(runs)} runs; {twice} events or points arrived twice; {until}"),
        Figure("agent and gateway: lost and not counted by the rank", sum(growth_run.uncounted for growth_run in runs), 0,
               f"in all runs, where {sum(growth_run.lost for growth_run in runs):,} events and points were lost"),
        Figure(f"agent and gateway: processor time of a record, {best.ranks} ranks over {first.ranks}", both[1] / both[0], 1.5,
               f"seconds for a million records: agent {best.agent.cpu:.1f}, gateway {best.gateway.cpu:.1f}; a rank's exporters "
               f"{best.rank_cpu:.1f}"),
        Figure("agent to gateway: bytes on the wire over those from the ranks", best.gateway.wire / best.agent.wire, None,
               f"a record: {best.agent.wire:.0f} B from its rank, {best.gateway.wire:.0f} B from agent to gateway (gzip)"),
        Figure(f"agent: memory at {best.ranks} ranks over at {first.ranks}", best.agent.memory / first.agent.memory, None,
               f"{best.agent.memory:.0f} MB, the gateway {best.gateway.memory:.0f} MB, where all that is offered arrives: "
               f"{best.gateway.rate:,.0f} records/s"),
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the benchmark and print its figures."""
    if argv[:1] == ["--as-rank"]:
        be_a_rank(int(argv[1]), int(argv[2]), float(argv[3]))
        return 0
    if argv[:1] == ["--as-backends"]:
        be_the_backends()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", default="", help=f"comma list, instead of {','.join(map(str, RANKS))}"
    )
    parser.add_argument("--records", type=int, default=1020, help="records of a rank in a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--period", type=float, default=1.0, help="seconds between steps")
    parser.add_argument("--page", help="page to write the tables into")
    parser.add_argument(
        "--json",
        help="write {'figures': […]} to this file, or print it (-), instead of lines for people",
    )
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--smallest", action="store_true", help="only show that it runs")
    options = parser.parse_args(argv)
    tell(figures(options), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
