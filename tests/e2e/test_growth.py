"""Ranks, an agent, a gateway and the backends, all from the shipped files: every record of every
rank arrives once, whichever of them was down for a while. When the agent's disk limit is
reached, the ranks report how much was lost.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.apis import whole_lines
from tests.e2e.conftest import start
from tests.e2e.stack import SHIPPED, Running, eventually
from tests.support import environment
from tests.telemetry_support import DRIVER
from tests.test_growth import PAGE, inputs_of

pytestmark = pytest.mark.e2e

RANKS, MODULES, STEPS, PARTS = 4, 40, 5, 3
MANY_MODULES = 250  # a part of all ranks is more than a queue of 1 MB holds
GAUGES = 2  # of the driver's records
# training steps, whose spans are sent at once; a part of them, then it waits to be told
PROGRAM = f"""{DRIVER}
import sys
modules, seconds = int(sys.argv[1]), float(sys.argv[2])
for part in range({PARTS}):
    for step in range(part * {STEPS}, (part + 1) * {STEPS}):
        run_step(step, [record(f"layer.{{n}}", step) for n in range(modules)], training=True)
    recorder.drain(seconds)
    print(part, flush=True)
    sys.stdin.readline()
finish(2)
print(sum(number for _, _, number in losses.items()), losses.items(), file=sys.stderr)
"""


class Ranks:
    """The processes of a job. Each makes a part of its records on request, and waits up to a number
    of seconds until they are accepted.
    """

    def __init__(
        self,
        folder: Path,
        agent: Running,
        running: ExitStack,
        modules: int = MODULES,
        seconds: float = 30,
    ) -> None:
        pipe = subprocess.PIPE
        shared = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": agent.url("COLLECTOR_GRPC_PORT"), "WORLD_SIZE": str(RANKS),
            "OTEL_TORCH_SIGNALS": "spans,span_events,log_events,metrics", "OTEL_TORCH_RUN_ID": "growth",
        }  # fmt: skip
        command, self._processes = [sys.executable, "-c", PROGRAM, str(modules), str(seconds)], []
        for rank in range(RANKS):
            variables = environment(folder, **shared, RANK=str(rank))
            process = subprocess.Popen(
                command, env=variables, cwd=folder, text=True, stdin=pipe, stdout=pipe, stderr=pipe
            )
            running.callback(process.wait)
            running.callback(process.kill)
            self._processes.append(process)
        self._wait()

    def _wait(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise AssertionError(process.communicate(timeout=60)[1])

    def _tell(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def next_part(self) -> None:
        """Make the next part of the records, and try to send it."""
        self._tell()
        self._wait()

    def end(self) -> Counter[str]:
        """End all ranks, and return what they report as lost, by kind."""
        self._tell()
        told: Counter[str] = Counter()
        for process in self._processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
            for what, number in re.findall(r"\('(\w+)', '\w+', (\d+)\)", said.splitlines()[-1]):
                told[what] += int(number)
        return told


class Shape:
    """Agent, gateway, and a Collector that writes files in place of Jaeger, Prometheus and Loki."""

    def __init__(self, folder: Path, running: ExitStack, **agent: str) -> None:
        # the addresses at which Prometheus and Loki take OTLP, which no other receiver has
        paths = {"metrics_url_path": "/api/v1/otlp/v1/metrics", "logs_url_path": "/otlp/v1/logs"}
        as_backends = folder / "as-backends.yaml"
        as_backends.write_text(
            json.dumps({"receivers": {"otlp": {"protocols": {"http": paths}}}})
        )  # JSON is YAML
        self.backends = running.enter_context(
            start("collector", folder / "backends", FILES=f"collector-laptop.yaml {as_backends}")
        )
        http = self.backends.url("COLLECTOR_HTTP_PORT")
        endpoints = {
            "JAEGER_ENDPOINT": self.backends.address,
            "PROMETHEUS_ENDPOINT": http,
            "LOKI_ENDPOINT": http,
        }
        self.gateway = running.enter_context(
            start("collector", folder / "gateway", FILES="collector-gateway.yaml", **endpoints)
        )
        self.agent = running.enter_context(
            start(
                "collector",
                folder / "agent",
                FILES="collector-agent.yaml",
                GATEWAY_ENDPOINT=self.gateway.address,
                **agent,
            )
        )

    def arrived(self) -> dict[str, Counter[tuple[Any, ...]]]:
        """Return how often each record of each rank is in the files, by kind of item."""
        folder = Path(self.backends.variables["COLLECTOR_FILES"])
        found: dict[str, Counter[tuple[Any, ...]]] = {
            "span_event": Counter(),
            "log_event": Counter(),
            "metric_point": Counter(),
        }
        for rank, span in each(folder / "traces.jsonl", "resourceSpans", "scopeSpans", "spans"):
            events = [plain(event) for event in span.get("events", [])]
            found["span_event"].update(
                (rank, event["torch.module"], event["torch.step"]) for event in events
            )
        for rank, log in each(folder / "logs.jsonl", "resourceLogs", "scopeLogs", "logRecords"):
            event = plain(log)
            found["log_event"][rank, event["torch.module"], event["torch.step"]] += 1
        for rank, metric in each(
            folder / "metrics.jsonl", "resourceMetrics", "scopeMetrics", "metrics"
        ):
            if "gauge" in metric and metric["name"].startswith("torch.module.activation."):
                for point in metric["gauge"]["dataPoints"]:
                    found["metric_point"][
                        rank, metric["name"], plain(point)["torch.module"], point["timeUnixNano"]
                    ] += 1
        return found

    def waits_for(self, parts: int, modules: int = MODULES) -> None:
        """Wait until a number of parts of all ranks have arrived."""
        eventually(lambda: counts(self.arrived()) == made(parts, modules))


def each(path: Path, *fields: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (rank, item) of a Collector's file; the Collector's own metrics have no rank."""
    for line in whole_lines(path):
        for resource in json.loads(line).get(fields[0], []):
            rank = plain(resource["resource"]).get("dl.rank")
            for scope in resource[fields[1]]:
                if rank is not None and scope["scope"].get("name") == "otel_torch":
                    yield from ((rank, item) for item in scope[fields[2]])


def plain(item: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an item, integers and strings."""
    values = {pair["key"]: pair["value"] for pair in item.get("attributes", [])}
    return {
        key: int(value["intValue"]) if "intValue" in value else value.get("stringValue")
        for key, value in values.items()
    }  # fmt: skip


def made(parts: int, modules: int = MODULES) -> dict[str, int]:
    """Return how many different items of each kind there are."""
    records = RANKS * modules * STEPS * parts
    return {"span_event": records, "log_event": records, "metric_point": records * GAUGES}


def counts(found: dict[str, Counter[tuple[Any, ...]]]) -> dict[str, int]:
    return {kind: len(seen) for kind, seen in found.items()}


def twice(found: dict[str, Counter[tuple[Any, ...]]]) -> dict[str, int]:
    """Return how many items arrived more than once."""
    return {kind: more for kind, seen in found.items() if (more := sum(seen.values()) - len(seen))}


def waiting(collector: Running) -> float:
    """Return the bytes in the queues of a Collector's exporters."""
    with urllib.request.urlopen(
        collector.url("COLLECTOR_METRICS_PORT", "/metrics"), timeout=10
    ) as answer:
        sizes = re.findall(
            r"^otelcol_exporter_queue_size\{.*?\} (\S+)", answer.read().decode(), re.M
        )
    return sum(map(float, sizes))


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_every_record_of_every_rank_arrives_once(tmp_path: Path, running: ExitStack) -> None:
    shape = Shape(tmp_path, running)
    ranks = Ranks(tmp_path, shape.agent, running)
    ranks.next_part()
    ranks.next_part()
    assert ranks.end() == {}
    # each forwards its data when it is stopped
    for collector in (shape.agent, shape.gateway, shape.backends):
        collector.stop()
    found = shape.arrived()
    assert counts(found) == made(PARTS) and twice(found) == {}
    assert {rank for rank, *_ in found["span_event"]} == set(range(RANKS))


def test_the_gateway_is_away_and_the_agent_is_restarted_meanwhile(
    tmp_path: Path, running: ExitStack
) -> None:
    """Records made without a gateway are queued on the agent's disk, also over a restart of the
    agent.
    """
    shape = Shape(tmp_path, running)
    ranks = Ranks(tmp_path, shape.agent, running)
    shape.waits_for(1)
    shape.gateway.stop()
    ranks.next_part()
    assert waiting(shape.agent) > 0 and counts(shape.arrived()) == made(1)
    shape.agent.stop()
    shape.agent.start()
    ranks.next_part()
    assert ranks.end() == {}
    assert counts(shape.arrived()) == made(1)
    shape.gateway.start()
    shape.waits_for(PARTS)
    assert twice(shape.arrived()) == {}


def test_the_backends_are_away_and_the_gateway_is_killed_meanwhile(
    tmp_path: Path, running: ExitStack
) -> None:
    """The same one tier later: the gateway's disk holds what no backend accepts."""
    shape = Shape(tmp_path, running)
    ranks = Ranks(tmp_path, shape.agent, running)
    shape.waits_for(1)
    shape.backends.stop()
    ranks.next_part()
    ranks.next_part()
    assert ranks.end() == {}
    eventually(lambda: waiting(shape.agent) == 0 and waiting(shape.gateway) > 0)
    shape.gateway.kill()
    shape.backends.start()
    shape.gateway.start()
    shape.waits_for(PARTS)


def test_an_agent_whose_disk_is_full_refuses_and_the_ranks_count_it(
    tmp_path: Path, running: ExitStack
) -> None:
    shape = Shape(tmp_path, running, AGENT_QUEUE_BYTES="1000000")
    ranks = Ranks(tmp_path, shape.agent, running, MANY_MODULES, seconds=3)
    ranks.next_part()
    shape.waits_for(2, MANY_MODULES)
    shape.gateway.stop()
    ranks.next_part()
    told = ranks.end()
    shape.gateway.start()
    eventually(lambda: waiting(shape.agent) == 0)
    for collector in (shape.agent, shape.gateway, shape.backends):
        collector.stop()
    found = counts(shape.arrived())
    for kind, number in made(PARTS, MANY_MODULES).items():
        assert told[kind] > 0, kind
        assert found[kind] < number <= found[kind] + told[kind], kind
        # of metrics, counters and histograms are among the lost as well
        assert found[kind] + told[kind] == number or kind == "metric_point", kind


def test_lokis_own_limits_are_those_of_the_page(tmp_path: Path) -> None:
    """Limits that the shipped file does not set are the program's defaults."""
    loki = start("loki", tmp_path)
    shipped = yaml.safe_load((SHIPPED / "loki.yaml").read_text())
    (tmp_path / "loki.yaml").write_text(yaml.safe_dump(shipped | {"limits_config": {}}))
    flags = ["-config.expand-env=true", "-print-config-stderr", "-verify-config"]
    command = [str(loki.program), f"-config.file={tmp_path / 'loki.yaml'}", *flags]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    own = dict(re.findall(r"^  (\w+): (\d+)(?:KB|MB)?$", done.stderr, re.M))
    named = {
        name: value
        for name, value in inputs_of(PAGE.read_text()).items()
        if name.startswith("Loki's own")
    }
    assert len(named) == 4
    assert {name: float(own[name.split("`")[1]]) for name in named} == named
    assert not set(shipped["limits_config"]) & {
        "max_global_streams_per_user",
        "max_structured_metadata_size",
    }


def test_prometheus_has_no_flag_for_how_many_series_there_may_be(tmp_path: Path) -> None:
    prometheus = start("prometheus", tmp_path)
    done = subprocess.run(
        [str(prometheus.program), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    flags = re.findall(r"^ +--(?:\[no-\])?([\w.-]+)", done.stdout + done.stderr, re.M)
    assert "storage.tsdb.path" in flags
    assert {flag for flag in flags if "series" in flag} == {
        "storage.agent.checkpoint-from-in-memory-series"
    }
