"""Starts the real programs from the files of `collector-config/`, as they are shipped, on free
ports of the loopback.

What a test changes is what a user can change: environment variables that the files read, and
Prometheus' flags. A program writes its log beside its data, and a start that fails says the end of
it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import yaml

from tests.e2e.build import find
from tests.e2e.ports import free_port

SHIPPED = Path(__file__).parents[2] / "collector-config"
COMPOSE = SHIPPED / "docker-compose.yml"


@dataclass(frozen=True)
class Recipe:
    """How to start one program.

    ports: the variables that get a free port. command: returns the arguments, from the variables
    and the program's folder. health: where it reports that it is ready. environment: further
    variables, with `{folder}` for the program's folder.
    """

    ports: tuple[str, ...]
    command: Callable[[Mapping[str, str], Path], list[str]]
    health: str
    environment: Mapping[str, str]


def collector_arguments(*files: str) -> list[str]:
    """Return the arguments of a Collector for shipped files."""
    return [part for file in files for part in ("--config", str(SHIPPED / file))]


def prometheus_arguments(environ: Mapping[str, str], folder: Path) -> list[str]:
    """Return the flags of docker-compose.yml, with another address and folder."""
    own = {
        "--config.file": str(SHIPPED / "prometheus.yaml"),
        "--storage.tsdb.path": str(folder / "data"),
        "--web.listen-address": f"127.0.0.1:{environ['PROMETHEUS_PORT']}",
    }
    shipped = yaml.safe_load(COMPOSE.read_text())["services"]["prometheus"]["command"]
    return [flag for flag in shipped if flag.partition("=")[0] not in own] + [
        f"{name}={value}" for name, value in own.items()
    ]


def loki_arguments(environ: Mapping[str, str], folder: Path) -> list[str]:
    """Return the flags of docker-compose.yml, with another path of the file."""
    shipped = yaml.safe_load(COMPOSE.read_text())["services"]["loki"]["command"]
    return [
        f"-config.file={SHIPPED / 'loki.yaml'}" if flag.startswith("-config.file=") else flag
        for flag in shipped
    ]


COLLECTOR_PORTS = (
    "COLLECTOR_GRPC_PORT",
    "COLLECTOR_HTTP_PORT",
    "COLLECTOR_HEALTH_PORT",
    "COLLECTOR_METRICS_PORT",
)
JAEGER_PORTS = (
    "JAEGER_GRPC_PORT", "JAEGER_HTTP_PORT", "JAEGER_HEALTH_PORT", "JAEGER_UI_PORT", "JAEGER_QUERY_GRPC_PORT",
    "JAEGER_METRICS_PORT",
)  # fmt: skip

RECIPES = {
    "collector": Recipe(
        COLLECTOR_PORTS,
        lambda environ, folder: collector_arguments(*environ["FILES"].split()),
        "http://127.0.0.1:{COLLECTOR_HEALTH_PORT}",
        # a gateway listens on all addresses, but not in a test
        {
            "COLLECTOR_HOST": "127.0.0.1", "COLLECTOR_FILES": "{folder}/files", "AGENT_QUEUE": "{folder}/queue",
            "GATEWAY_QUEUE": "{folder}/queue", "COLLECTOR_FLUSH": "200ms", "SPAN_METRICS_INTERVAL": "1s",
            "COLLECTOR_METRICS_INTERVAL_MS": "1000", "AGENT_RETRY_MAX": "1s",
        },
    ),
    "prometheus": Recipe(("PROMETHEUS_PORT",), prometheus_arguments, "http://127.0.0.1:{PROMETHEUS_PORT}/-/ready", {}),
    "jaeger": Recipe(
        JAEGER_PORTS,
        lambda environ, folder: ["--config", str(SHIPPED / "jaeger.yaml")],
        "http://127.0.0.1:{JAEGER_HEALTH_PORT}/status",
        {},
    ),
    "loki": Recipe(
        ("LOKI_PORT", "LOKI_GRPC_PORT"), loki_arguments, "http://127.0.0.1:{LOKI_PORT}/ready", {"LOKI_DATA": "{folder}/data"}
    ),
    # an S3 server whose buckets are folders
    "versitygw": Recipe(
        ("S3_PORT",),
        lambda environ, folder: [
            "--port", f"127.0.0.1:{environ['S3_PORT']}", "--health", "/health",
            "posix", "--sidecar", str(folder / "sidecar"), str(folder / "data"),
        ],
        "http://127.0.0.1:{S3_PORT}/health",
        {"ROOT_ACCESS_KEY": "key", "ROOT_SECRET_KEY": "a-secret"},
    ),
}  # fmt: skip


class Running:
    """One program, from entering the context to leaving it.

    name: of `RECIPES`. folder: for its log and its data. variables: the environment on top of the
    recipe's; of a Collector, `FILES` are the shipped files that it gets, in order.

    Raises:
        build.Missing: the program has not been built.
        RuntimeError: it does not become healthy.
    """

    def __init__(self, name: str, folder: Path, **variables: str) -> None:
        self.name, self.folder, self.recipe = name, folder, RECIPES[name]
        self.program = find(name)
        own = {key: value.format(folder=folder) for key, value in self.recipe.environment.items()}
        self.variables = own | {port: str(free_port()) for port in self.recipe.ports} | variables
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Running:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def url(self, port: str, path: str = "") -> str:
        """Return where it listens, by the name of the port's variable."""
        return f"http://127.0.0.1:{self.variables[port]}{path}"

    @property
    def address(self) -> str:
        """Return where it receives data: its first port."""
        return f"127.0.0.1:{self.variables[self.recipe.ports[0]]}"

    @property
    def pid(self) -> int:
        """The id of the process, which must be started."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Start it, also again after `stop` or `kill`, and wait until it is healthy."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith("OTEL_")
        } | self.variables
        command = [str(self.program), *self.recipe.command(self.variables, self.folder)]
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environ, stdout=log, stderr=subprocess.STDOUT
            )
        self._process = process
        health = self.recipe.health.format(**self.variables)
        with suppress(TimeoutError):
            eventually(lambda: answers(health) or process.poll() is not None, timeout=120)
        if not answers(health):
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(
                f"{self.name} is not healthy at {health}; the end of {self.log}:\n{tail}"
            )

    def stop(self) -> None:
        """End it as a service manager would: send SIGTERM, and wait until it has written its data."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Suspend it: the kernel accepts connections, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(number)
        self._signal(signal.SIGCONT)  # a paused process would not receive it
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def answers(url: str) -> bool:
    """Return whether an address answers with a 2xx status."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return 200 <= answer.status < 300
    except OSError:
        return False


def eventually(condition: Callable[[], object], timeout: float = 60) -> None:
    """Call until the result is true: there is no other way to wait for what arrives at a server.

    Raises:
        TimeoutError: it never was.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:.0f} s")
        time.sleep(0.1)
