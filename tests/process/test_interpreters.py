"""Commands of forked programs behave as the real ones do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreters import command_of_tests
from tests.support import environment

PROGRAM = """
import os, signal, sys, time
print(__name__, __file__, sys.argv, sys.path[:2], os.getcwd(), sys.stdin.read(), flush=True)
print("otel_torch.startup" in sys.modules, "torch" in sys.modules, file=sys.stderr)
if sys.argv[-1] == "raise":
    raise ValueError("mine")
if sys.argv[-1].isdecimal():
    sys.exit(int(sys.argv[-1]))
if sys.argv[-1].startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, sys.argv[-1]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["program.py", "a", "7"],
        ["-u", "program.py", "raise"],
        ["-m", "program", "SIGTERM"],
        ["program.py", "SIGKILL"],
        ["-c", "import sys; print(sys.argv)", "b"],
    ],
    ids=str,
)
def test_a_forked_program_is_what_python_would_run(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = environment(tmp_path)
    environ["PYTHONPATH"] = f"{tmp_path}:{environ.get('PYTHONPATH', '')}"
    real, forked = (
        subprocess.run(
            [python, *words],
            cwd=tmp_path,
            env=environ,
            input="typed",
            capture_output=True,
            text=True,
            timeout=60,
        )
        for python in (sys.executable, command_of_tests("python"))
    )
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert [line for line in forked.stderr.splitlines() if not line.startswith(" ")] == [
        line for line in real.stderr.splitlines() if not line.startswith(" ")
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_ends_the_program(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text("import time\nprint('runs', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [command_of_tests("python"), "program.py"], cwd=tmp_path, env=environment(tmp_path), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        process.send_signal(number)
        assert process.stdout.read() == ""  # nobody writes to it any more
        assert process.wait(20) == -number
