"""The build of the backends: one line without Go or on failure, one build for several callers, a
new program for a changed module.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import build

ROOT = Path(__file__).parents[2]
# a slow Go that writes the requested program and counts its calls
GO = """#!/bin/sh
echo asked >> "$COUNT"
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo program > "$2"
"""


def run(
    tmp_path: Path, *names: str, path: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = (
        os.environ
        | {
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PATH": path,
            "COUNT": str(tmp_path / "count"),
        }
        | variables
    )
    command = [sys.executable, "-m", "tests.e2e.build", *names]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def write_go(folder: Path, script: str) -> str:
    (folder / "bin").mkdir()
    (folder / "bin" / "go").write_text(script)
    (folder / "bin" / "go").chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def test_without_go_one_line_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "jaeger", path="/nowhere")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "jaeger cannot be built" in line and "there is no Go" in line and "1.26" in line


def test_a_build_that_fails_says_the_end_of_what_go_said_and_leaves_no_program(
    tmp_path: Path,
) -> None:
    done = run(
        tmp_path, "loki", path=write_go(tmp_path, "#!/bin/sh\necho no such module\nexit 3\n")
    )
    assert (
        done.returncode == 1
        and "go build ended with 3" in done.stderr
        and "no such module" in done.stderr
    )
    assert not list(tmp_path.glob("cache/otel_torch/backends/loki-*/loki"))


def test_several_askers_at_the_same_time_build_once(tmp_path: Path) -> None:
    path = write_go(tmp_path, GO)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run(tmp_path, "prometheus", path=path), range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert (tmp_path / "count").read_text() == "asked\n"
    (program,) = tmp_path.glob("cache/otel_torch/backends/prometheus-v0.315.0-*/prometheus")
    assert program.read_text() == "program\n"


def test_a_changed_module_is_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BACKENDS", tmp_path)
    (tmp_path / "loki").mkdir()
    (tmp_path / "loki" / "go.sum").write_text("one\n")
    before = build.PROGRAMS["loki"].path
    (tmp_path / "loki" / "go.sum").write_text("two\n")
    assert build.PROGRAMS["loki"].path != before


def test_versions_are_those_of_the_modules() -> None:
    for program in build.PROGRAMS.values():
        pinned = (program.folder / "go.mod").read_text() + "".join(
            path.read_text() for path in program.folder.glob("builder.yaml")
        )
        assert f" {program.version}\n" in pinned
        assert (program.folder / "go.sum").exists()


def test_an_unknown_name_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "grafana", path=os.environ["PATH"])
    assert done.returncode == 2 and "no such program: grafana" in done.stderr


@pytest.mark.parametrize(("required", "outcome"), [("1", "1 failed"), ("", "1 skipped")])
def test_a_program_that_is_missing_is_a_failure_only_where_it_was_asked_for(
    tmp_path: Path, required: str, outcome: str
) -> None:
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OTEL_TORCH_E2E_REQUIRED": required}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "markers=e2e",
        "tests/e2e/test_shipped_files.py",
    ]
    done = subprocess.run(
        [*command, "-k", "loki_takes"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome in done.stdout
    assert "loki is not built; run: python -m tests.e2e.build loki" in done.stdout
