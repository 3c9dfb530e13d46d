"""Runs the program of the attacks, bare and recorded, and the commands."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.interpreters import run_script
from tests.support import PROGRAMS, environment

ROOT = Path(__file__).parents[2]
# what a command may take of the memory, and a program of the time, before it has failed
COMMAND_BYTES = 6 * 2**30
TIMEOUT_S = 120.0


class BrokenPromise(Exception):
    """What was promised and not kept."""


@dataclass(frozen=True)
class Plan:
    """What the program does.

    Args:
        odd: the name of an odd module, in `odd.ODD`.
        end: a signal, or `os._exit`, after `after_s` seconds; or `raise` after the last step.
        handler: whether the program handles SIGINT by leaving.
    """

    seed: int = 0
    steps: int = 20
    pause_s: float = 0.01
    threads: int = 0
    forks: int = 0
    odd: str | None = None
    end: str | None = None
    after_s: float | None = None
    handler: bool = False

    @property
    def undisturbed(self) -> Plan:
        """The same plan without its end."""
        return dataclasses.replace(self, end=None, after_s=None, handler=False)


@dataclass(frozen=True)
class Run:
    """What a program has left.

    Args:
        told: the digests of the steps, by role.
        exit_s: from the last step to the end of the process.
    """

    folder: Path
    status: int
    stderr: str
    told: dict[str, list[str]]
    exit_s: float


class Arena:
    """Where one attack takes place: its folder and its random numbers."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self._runs = 0

    def run(self, plan: Plan, *, recorded: bool = True, **variables: str) -> Run:
        """Run the program in a new folder.

        Raises:
            BrokenPromise: it does not end.
        """
        folder = self.make_folder()
        variables = {"CHAOS_PLAN": json.dumps(dataclasses.asdict(plan))} | variables
        variables |= {"OTEL_TORCH_ENABLED": str(int(recorded)), "PYTHONPATH": str(ROOT)}
        try:
            done = run_script(
                [str(PROGRAMS / "chaos.py")],
                environment(folder, **variables),
                folder,
                TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise BrokenPromise(f"the program did not end within {TIMEOUT_S:g} s") from None
        ended = time.monotonic()
        told, last = read_told(folder)
        return Run(folder, done.returncode, done.stderr, told, ended - last if last else 0.0)

    def command(
        self, *arguments: str | Path, **variables: str
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command of otel-torch.

        Raises:
            BrokenPromise: it does not end.
        """
        try:
            return subprocess.run(
                [sys.executable, "-m", "otel_torch", *map(str, arguments)],
                env=environment(self.folder, **variables, OTEL_TORCH_ENABLED="0"),
                cwd=ROOT,
                capture_output=True,
                timeout=TIMEOUT_S,
                preexec_fn=_limit_memory,
            )
        except subprocess.TimeoutExpired:
            raise BrokenPromise(f"{arguments[0]} did not end within {TIMEOUT_S:g} s") from None

    def make_folder(self) -> Path:
        """Return a new folder."""
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        folder.mkdir()
        return folder

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)


def read_told(folder: Path) -> tuple[dict[str, list[str]], float]:
    """Return the digests of each role's steps, and when the last step ended (`monotonic`)."""
    told: dict[str, list[str]] = {}
    last = 0.0
    for path in folder.iterdir():
        if path.name == "main" or path.name.startswith(("thread", "fork")):
            rows = [line.split() for line in path.read_text().splitlines()]
            told[path.name] = [f"{step} {digest}" for step, digest, _ in rows]
            last = max([last, *(float(seconds) for _, _, seconds in rows)])
    return told, last


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (COMMAND_BYTES, COMMAND_BYTES))
    os.setpriority(os.PRIO_PROCESS, 0, 5)
