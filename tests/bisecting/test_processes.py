"""Commands as `otel-torch bisect` runs them: what they get, how they end, what is taken over."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otel_torch.bisecting.processes import CommandPrograms
from otel_torch.bisecting.runs import RunFailed


def programs(tmp_path: Path, *command: str, timeout: float | None = None) -> CommandPrograms:
    return CommandPrograms(command, command, tmp_path / "runs", timeout=timeout)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def dies(process: int, seconds: float = 10.0) -> bool:
    """Return whether a process that was killed is gone: the kernel ends it a moment later."""
    deadline = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(process)


def test_a_command_that_fails_is_said_with_what_it_printed(tmp_path: Path) -> None:
    failing = programs(tmp_path, *python("import sys; print('no such weights'); sys.exit(3)"))
    with pytest.raises(RunFailed, match=r"ended with 3: no such weights \(all of it: .*output.txt"):
        failing.run("port", "as it is", {})


def test_a_command_that_dies_is_said_with_its_signal(tmp_path: Path) -> None:
    dying = programs(tmp_path, *python("import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(RunFailed, match="was ended by SIGKILL: it printed nothing"):
        dying.run("reference", "as it is", {})


def test_a_command_without_torch_records_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the reference recorded no operations"):
        programs(tmp_path, *python("pass")).run("reference", "as it is", {})


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no-such-program: No such file or directory"):
        programs(tmp_path, "no-such-program").run("reference", "as it is", {})


def test_a_run_that_takes_too_long_ends_with_all_its_processes(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(process.pid))\n"
        "time.sleep(60)"
    )
    with pytest.raises(RunFailed, match="longer than 8 s, and was ended"):
        programs(tmp_path, *python(code), timeout=8.0).run("reference", "as it is", {})
    assert dies(int(child.read_text()))


def test_settings_of_the_caller_do_not_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TORCH_STEPS", "7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:1")
    code = "import os; print(sorted(n for n in os.environ if n.startswith('OTEL_')), flush=True)"
    with pytest.raises(RunFailed):
        programs(tmp_path, *python(code)).run("port", "as it is", {"capture": "graph"})
    printed = (tmp_path / "runs" / "1-port" / "output.txt").read_text().splitlines()[-1]
    assert printed == str(
        ["OTEL_TORCH_CAPTURE", "OTEL_TORCH_ENABLED", "OTEL_TORCH_JSONL", "OTEL_TORCH_RUN_ID"]
    )


def test_an_interrupt_ends_the_run(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-m", "otel_torch", "bisect", "--out", str(tmp_path / "out"), "--"]
    command += [*python(code), "--", *python(code)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    while not (child.exists() and child.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert dies(int(child.read_text()))
