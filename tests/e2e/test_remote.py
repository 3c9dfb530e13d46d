"""Recordings on a real S3 server: uploaded by a program with nothing but its environment set, and
read back; with wrong credentials, and over a connection that is slow, falls silent or is cut.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_torch.recording.remote.remote_files import PATIENCE_S
from tests.e2e.conftest import start
from tests.e2e.proxy import Proxy
from tests.e2e.stack import Running, eventually
from tests.support import environment, lines

pytestmark = pytest.mark.e2e

PROGRAM = """
import os, sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(9)])
for step in range(int(sys.argv[1])):
    model(torch.ones(1, 4))
print(time.time(), flush=True)
if sys.argv[2:] == ["_exit"]:
    os._exit(0)
if sys.argv[2:] == ["wait"]:
    time.sleep(60)
"""
# steps: a recording of 20 kB, and one of 13 MB, which is uploaded in parts of 5 MB
FEW, MANY = "3", "3000"
URL = "s3://bucket/run/0.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("s3")
    (folder / "data" / "bucket").mkdir(parents=True)
    (folder / "sidecar").mkdir()
    with start("versitygw", folder) as running:
        yield running


@pytest.fixture
def bucket(server: Running) -> Iterator[Path]:
    """Yield the folder with the objects of the runs, which is empty."""
    folder = server.folder / "data" / "bucket" / "run"
    yield folder
    for path in folder.glob("*"):
        path.unlink()


def variables(server: Running, tmp_path: Path, port: str = "", **others: str) -> dict[str, str]:
    """Return what a user sets. The host has a name, which must be looked up, as those of stores."""
    own = {
        "OTEL_TORCH_JSONL": "s3://bucket/run/<rank>.jsonl",
        "AWS_ENDPOINT_URL": f"http://localhost:{port or server.variables['S3_PORT']}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "TMPDIR": str(tmp_path),
    }
    return environment(tmp_path, **own | others)


def run(tmp_path: Path, environ: dict[str, str], *arguments: str) -> tuple[list[str], float]:
    """Run the program; return what it said on stderr, and how long its end took."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("otel_torch")]
    return said, ended - float(done.stdout)


def command(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "otel_torch", *arguments],
        env=environ | {"OTEL_TORCH_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("otel_torch.*/**/*.json*"))


@pytest.mark.parametrize("steps", [FEW, MANY])
def test_a_recording_is_uploaded_and_read_back(
    steps: str, server: Running, bucket: Path, tmp_path: Path
) -> None:
    environ = variables(server, tmp_path, OTEL_TORCH_CAPTURE="parity")
    said, _ = run(tmp_path, environ, steps)
    assert said[-1].endswith(f" records in {URL}")
    count = int(said[-1].split()[1])
    assert len(lines(bucket / "0.jsonl")) == count
    assert kept(tmp_path) == []
    shown = command(environ, "show", URL)
    assert shown.returncode == 0 and shown.stdout.startswith(f"{URL}: {count:,} records")
    run(tmp_path, environ | {"OTEL_TORCH_JSONL": "s3://bucket/run/port/<rank>.jsonl"}, steps)
    compared = command(environ, "diff", URL, "s3://bucket/run/port")
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.startswith(f"reference {URL}, port s3://bucket/run/port\n")
    for path in (bucket / "port").iterdir():
        path.unlink()
    (bucket / "port").rmdir()
    assert list(tmp_path.glob("otel_torch.*")) == []


def test_an_earlier_run_is_renamed(server: Running, bucket: Path, tmp_path: Path) -> None:
    for _ in range(2):
        run(tmp_path, variables(server, tmp_path), FEW)
    assert sorted(path.name for path in bucket.iterdir()) == [
        "0.1.jsonl", "0.1.meta.json", "0.jsonl", "0.meta.json",
    ]  # fmt: skip


def test_with_wrong_credentials_it_stays_and_one_line_says_why(
    server: Running, bucket: Path, tmp_path: Path
) -> None:
    environ = variables(server, tmp_path, AWS_SECRET_ACCESS_KEY="wrong")
    said, seconds = run(tmp_path, environ, FEW)
    assert any(f"{URL}: not uploaded (not allowed" in line for line in said)
    count, path = said[-2].split()[1], said[-2].split()[-1]
    assert said[-1] == f"otel_torch: lost: {count} records (not_uploaded)"
    assert len(lines(Path(path))) == int(count) and list(bucket.glob("*")) == []
    assert seconds < PATIENCE_S
    for words in (["show", URL], ["diff", URL, URL], ["export", URL, "--pprof", "x.gz"]):
        failed = command(environ, *words)
        assert failed.returncode == 2
        (line,) = failed.stderr.splitlines()
        assert line.startswith(f"otel_torch: {URL}: not allowed")


def test_doctor_says_whether_the_place_can_be_written(
    server: Running, bucket: Path, tmp_path: Path
) -> None:
    fine = command(variables(server, tmp_path), "doctor").stdout
    assert "ok recording  s3://bucket/run/<rank>.jsonl: can be written" in fine
    wrong = command(variables(server, tmp_path, AWS_SECRET_ACCESS_KEY="wrong"), "doctor").stdout
    assert "NO recording  s3://bucket/run/<rank>.jsonl: cannot be written: not allowed" in wrong
    assert "wrong" not in wrong.replace("what is wrong", "") and list(bucket.glob("*")) == []


def test_a_slow_connection_is_waited_for(server: Running, bucket: Path, tmp_path: Path) -> None:
    with Proxy(server.variables["S3_PORT"], delay=0.02) as proxy:
        environ = variables(server, tmp_path, proxy.port)
        said, _ = run(tmp_path, environ, MANY)
        assert said[-1].endswith(f" records in {URL}") and kept(tmp_path) == []
        assert command(environ, "show", URL).returncode == 0


@pytest.mark.parametrize("after", [0, 6e6])
def test_a_silent_connection_is_given_up_and_the_program_ends(
    after: float, server: Running, bucket: Path, tmp_path: Path
) -> None:
    with Proxy(server.variables["S3_PORT"], silent_after=after) as proxy:
        said, seconds = run(tmp_path, variables(server, tmp_path, proxy.port), MANY)
    assert any("not uploaded (no answer for 10 s)" in line for line in said)
    assert PATIENCE_S < seconds < PATIENCE_S + 15
    assert kept(tmp_path) == ["0.jsonl", "0.meta.json"] and not (bucket / "0.jsonl").exists()


def test_a_cut_connection_leaves_no_half_of_a_recording(
    server: Running, bucket: Path, tmp_path: Path
) -> None:
    with Proxy(server.variables["S3_PORT"], cut_after=6e6) as proxy:
        said, _ = run(tmp_path, variables(server, tmp_path, proxy.port), MANY)
    assert any(f"{URL}: not uploaded (" in line for line in said)
    assert kept(tmp_path) == ["0.jsonl", "0.meta.json"] and not (bucket / "0.jsonl").exists()


@pytest.mark.parametrize("trouble", ["cut_after", "silent_after"])
def test_a_command_whose_connection_fails_is_one_line(
    trouble: str, server: Running, bucket: Path, tmp_path: Path
) -> None:
    run(tmp_path, variables(server, tmp_path), MANY)
    with Proxy(server.variables["S3_PORT"], **{trouble: 1e6}) as proxy:
        failed = command(variables(server, tmp_path, proxy.port), "show", URL)
    assert failed.returncode == 2, failed.stdout[:500]
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"otel_torch: {URL}: ")
    assert list(tmp_path.glob("otel_torch.*")) == []


def test_an_upload_goes_on_where_the_program_is_ended(
    server: Running, bucket: Path, tmp_path: Path
) -> None:
    with Proxy(server.variables["S3_PORT"], delay=0.02) as proxy:
        _, seconds = run(tmp_path, variables(server, tmp_path, proxy.port), MANY, "_exit")
        assert seconds < 4
        eventually(lambda: kept(tmp_path) == [])
    assert (bucket / "0.jsonl").exists()


def test_a_killed_program_leaves_its_recording_here(
    server: Running, bucket: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", PROGRAM, FEW, "wait"]
    environ = variables(server, tmp_path)
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert kept(tmp_path) == ["0.jsonl", "0.meta.json"] and not (bucket / "0.jsonl").exists()
