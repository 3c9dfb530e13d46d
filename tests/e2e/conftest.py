"""Starts the whole stack once per session. A missing program fails the tests under `make e2e`, and
skips those that need it otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.e2e.build import Missing
from tests.e2e.ports import free_port
from tests.e2e.stack import Running
from tests.otlp_receiver import Receiver


def start(name: str, folder: Path, **variables: str) -> Running:
    """Return a program that is not started yet. If it was not built, skip, or fail where all
    programs are required.
    """
    try:
        return Running(name, folder, **variables)
    except Missing as problem:
        if os.environ.get("OTEL_TORCH_E2E_REQUIRED") == "1":
            pytest.fail(str(problem), pytrace=False)
        pytest.skip(str(problem))


class Stack:
    """The services of docker-compose.yml, with a receiver of the tests in place of Tempo, and
    without Grafana.

    A backend that was not built affects only the tests that use it.
    """

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.tempo = running.enter_context(Receiver())
        self._folder = folder
        self._backends: dict[str, Running] = {}
        for name in ("jaeger", "prometheus", "loki"):
            with suppress(Missing):
                self._backends[name] = running.enter_context(Running(name, folder / name))
        files = "collector-host.yaml collector-tempo.yaml"
        self.collector = running.enter_context(
            start("collector", folder / "collector", FILES=files, **self.endpoints())
        )

    def endpoints(self) -> dict[str, str]:
        """Return where a Collector sends to; for a missing backend, an address without a listener."""
        nobody = f"127.0.0.1:{free_port()}"
        address = {name: backend.address for name, backend in self._backends.items()}
        return {
            "JAEGER_ENDPOINT": address.get("jaeger", nobody),
            "TEMPO_ENDPOINT": self.tempo.grpc_endpoint.removeprefix("http://"),
            "PROMETHEUS_ENDPOINT": f"http://{address.get('prometheus', nobody)}",
            "LOKI_ENDPOINT": f"http://{address.get('loki', nobody)}",
        }

    def environment(self, service: str) -> dict[str, str]:
        """Return the variables that a user sets."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url("COLLECTOR_GRPC_PORT"),
            "OTEL_SERVICE_NAME": service,
        }

    @property
    def jaeger(self) -> Running:
        return self._backend("jaeger")

    @property
    def prometheus(self) -> Running:
        return self._backend("prometheus")

    @property
    def loki(self) -> Running:
        return self._backend("loki")

    def _backend(self, name: str) -> Running:
        return self._backends.get(name) or start(name, self._folder / name)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as running:
        yield Stack(tmp_path_factory.mktemp("stack"), running)


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Running]:
    """Yield a Collector that writes what arrives to files."""
    with start("collector", tmp_path / "collector", FILES="collector-laptop.yaml") as collector:
        yield collector
