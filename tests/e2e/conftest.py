"""The whole stack, once a session; and what a missing program means: a failure where `make e2e`
asked for it, else a skip of the tests that need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.e2e.build import Missing
from tests.e2e.stack import Running, free_ports
from tests.otlp_receiver import Receiver


def start(name: str, folder: Path, **variables: str) -> Running:
    """A program that is not started yet; skips, or fails where all programs are required, when it
    has not been built.
    """
    try:
        return Running(name, folder, **variables)
    except Missing as problem:
        if os.environ.get("OTEL_TORCH_E2E_REQUIRED") == "1":
            pytest.fail(str(problem), pytrace=False)
        pytest.skip(str(problem))


class Stack:
    """What docker-compose.yml starts, but for Tempo, in whose place a receiver of ours stands, and
    Grafana.

    A backend that has not been built is missed by the tests that ask for it, and by no other.
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
        """Where a Collector sends to; a backend that is not there is an address where nobody
        listens.
        """
        nobody = f"127.0.0.1:{free_ports(1)[0]}"
        address = {name: backend.address for name, backend in self._backends.items()}
        return {
            "JAEGER_ENDPOINT": address.get("jaeger", nobody),
            "TEMPO_ENDPOINT": self.tempo.grpc_endpoint.removeprefix("http://"),
            "PROMETHEUS_ENDPOINT": f"http://{address.get('prometheus', nobody)}",
            "LOKI_ENDPOINT": f"http://{address.get('loki', nobody)}",
        }

    def environment(self, service: str) -> dict[str, str]:
        """What a user sets."""
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
    """A Collector that writes what arrives into files."""
    with start("collector", tmp_path / "collector", FILES="collector-laptop.yaml") as collector:
        yield collector
