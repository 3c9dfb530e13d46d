"""The real programs accept the files of `collector-config/`, which open no port to the network and
use no component that the tested Collector lacks.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.build import BACKENDS, PROGRAMS
from tests.e2e.conftest import start
from tests.e2e.stack import COMPOSE, SHIPPED, collector_arguments

COLLECTOR_FILES = sorted(path.name for path in SHIPPED.glob("collector-*.yaml"))
# the files that are started together; every file is included
SETS = [
    ("collector-laptop.yaml",), ("collector-agent.yaml",), ("collector-host.yaml",), ("collector-gateway.yaml",),
    ("collector-host.yaml", "collector-tempo.yaml"), ("collector-gateway.yaml", "collector-tempo.yaml"),
]  # fmt: skip
COMPOSE_FILES = sorted(SHIPPED.glob("docker-compose*.yml"))


def configuration(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((SHIPPED / name).read_text())
    return loaded


def services(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from yaml.safe_load(path.read_text())["services"].items()


@pytest.mark.e2e
@pytest.mark.parametrize("files", SETS, ids="+".join)
def test_the_collector_takes_every_file(tmp_path: Path, files: tuple[str, ...]) -> None:
    collector = start("collector", tmp_path)
    command = [str(collector.program), "validate", *collector_arguments(*files)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.e2e
def test_a_mistake_in_a_file_is_found(tmp_path: Path) -> None:
    """The test above relies on this."""
    collector = start("collector", tmp_path)
    broken = (
        (SHIPPED / "collector-laptop.yaml").read_text().replace("spike_limit_mib", "spike_limit")
    )
    (tmp_path / "broken.yaml").write_text(broken)
    command = [str(collector.program), "validate", "--config", str(tmp_path / "broken.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode and "spike_limit" in done.stderr


@pytest.mark.e2e
def test_loki_takes_its_file(tmp_path: Path) -> None:
    loki = start("loki", tmp_path)
    command = [
        str(loki.program),
        f"-config.file={SHIPPED / 'loki.yaml'}",
        "-config.expand-env=true",
        "-verify-config",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_collector_file_is_in_a_set() -> None:
    assert sorted({name for files in SETS for name in files}) == COLLECTOR_FILES


def test_the_tested_collector_has_what_the_files_ask_for_and_nothing_else() -> None:
    kinds = ("receivers", "processors", "exporters", "connectors", "extensions")
    loaded = [configuration(name) for name in COLLECTOR_FILES]
    asked = {
        kind: {key.partition("/")[0] for file in loaded for key in file.get(kind, {})}
        for kind in kinds
    }
    builder = yaml.safe_load((BACKENDS / "collector" / "builder.yaml").read_text())
    # a module's folder is the component's name without underscores, but for the two exporters that
    # have been renamed since
    folder = {
        "otlp_grpc": "otlpexporter",
        "otlp_http": "otlphttpexporter",
        "file_storage": "filestorage",
    }
    expected = {
        kind: {
            folder.get(key, key.replace("_", "") + kind.removesuffix("s")) for key in asked[kind]
        }
        for kind in kinds
    }
    built = {
        kind: {entry["gomod"].split()[0].rpartition("/")[2] for entry in builder.get(kind, [])}
        for kind in kinds
    }
    assert built == expected
    # and the sources that are built were made from it
    generated = (BACKENDS / "collector" / "components.go").read_text()
    assert all(
        f'"{entry["gomod"].split()[0]}"' in generated
        for kind in kinds
        for entry in builder.get(kind, [])
    )


@pytest.mark.parametrize("name", COLLECTOR_FILES)
def test_the_limiter_is_first_and_batches_are_made_in_the_queues(name: str) -> None:
    loaded = configuration(name)
    for pipeline in loaded["service"]["pipelines"].values():
        assert pipeline["processors"] == ["memory_limiter"]
    for exporter, options in loaded["exporters"].items():
        if exporter.startswith("otlp"):
            assert options["sending_queue"]["batch"]["max_size"] < 4 * 2**20


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_publishes_on_this_machine_only_and_pins_what_it_runs(path: Path) -> None:
    for name, service in services(path):
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+(\.\d+)?", service["image"]), name


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_mounts_only_what_is_there(path: Path) -> None:
    for _, service in services(path):
        for mount in service.get("volumes", []):
            if mount.startswith("."):
                assert (SHIPPED / mount.split(":")[0]).exists(), mount


def test_the_images_are_of_the_versions_that_are_tested() -> None:
    versions = {
        name: service["image"].rpartition(":")[2].removeprefix("v")
        for name, service in services(COMPOSE)
    }
    modules = {name: program.version.removeprefix("v") for name, program in PROGRAMS.items()}
    assert versions["collector"] == modules["collector"]
    assert versions["loki"] == modules["loki"]
    # the version of the same release, as a program and as a module
    assert (versions["prometheus"], modules["prometheus"]) == ("3.15.0", "0.315.0")
    assert (versions["jaeger"], modules["jaeger"]) == ("2.13.0", "1.76.0")


# addresses and folders of backends, which docker-compose.yml and the tests set
OF_BACKENDS = {
    "JAEGER_LISTEN_HOST", "JAEGER_GRPC_PORT", "JAEGER_HTTP_PORT", "JAEGER_HEALTH_PORT", "JAEGER_QUERY_GRPC_PORT",
    "JAEGER_METRICS_PORT", "JAEGER_MAX_TRACES", "LOKI_HOST", "LOKI_DATA", "LOKI_GRPC_PORT", "TEMPO_HOST", "TEMPO_DATA",
    "TEMPO_GRPC_PORT", "TEMPO_INTERNAL_PORT",
}  # fmt: skip


def test_the_tables_of_the_readme_have_every_variable_that_the_files_read() -> None:
    files = [path for path in SHIPPED.iterdir() if path.suffix in (".yaml", ".yml")]
    read = {
        name for path in files for name in re.findall(r"\$\{(?:env:)?([A-Z_]+)", path.read_text())
    }
    rows = [
        line for line in (SHIPPED / "README.md").read_text().splitlines() if line.startswith("|")
    ]
    documented = {name for row in rows for name in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", row)}
    assert documented - {"GOMEMLIMIT"} == read - OF_BACKENDS
