"""The start-up cost of a Python process with this package installed: none while it is off.

Measured in two small virtual environments, with and without the start-up file. A process is
`python -c pass`; its time is the CPU time charged by the operating system, including the
interpreter's start.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.figures import ROOT, Figure, Size, command, environment
from tests.benchmarks.pairing import BARE, CONTROL, Measured, Rounds

OFF, ON = "installed and off", "installed and on"


def interpreter(folder: Path, installed: bool) -> Path:
    """Make a virtual environment with this package and its start-up file, or without that file."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True
    )
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    shutil.copytree(
        ROOT / "otel_torch", packages / "otel_torch", ignore=shutil.ignore_patterns("__pycache__")
    )
    if installed:
        for name in ("otel_torch.pth", "otel_torch.start"):
            shutil.copy(ROOT / "packaging" / name, packages)
    return folder / "bin" / "python"


def spent(python: Path, program: str, variables: dict[str, str]) -> tuple[float, float]:
    """Return the CPU and wall seconds of `python -c PROGRAM`, including start and end."""
    start = time.perf_counter()
    pid = os.posix_spawn(python, [str(python), "-c", program], variables)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(
            f"{python} -c {program!r} ended with {os.waitstatus_to_exitcode(status)}"
        )
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def interleaved(
    program: str, sides: dict[str, tuple[Path, dict[str, str]]], rounds: int, warm_up: int
) -> Measured:
    """Run the program with each side once per round, after uncounted rounds that warm the caches."""
    order = random.Random(0)
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(warm_up + rounds):
        for name in order.sample(list(sides), len(sides)):
            seconds = spent(sides[name][0], program, sides[name][1])
            if round_index >= warm_up:
                cpu[name].append(seconds[0])
                wall[name].append(seconds[1])
    return Measured(Rounds(cpu), Rounds(wall))


def measure(size: Size) -> list[Figure]:
    """Measure the interpreter's start alone, and with the import of torch, where recording starts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        without = interpreter(folder / "without", installed=False)
        installed = interpreter(folder / "with", installed=True)
        plain = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        on = {"OTEL_TORCH_ENABLED": "1", "OTEL_TORCH_JSONL": str(folder / "run.jsonl")}
        bare = {BARE: (without, plain), CONTROL: (without, plain)}
        start = interleaved(
            "pass",
            bare | {OFF: (installed, plain), ON: (installed, plain | on)},
            size.count(60),
            warm_up=2,
        )
        # a folder on this path brings packages and no start-up files
        torch = plain | {"PYTHONPATH": sysconfig.get_path("purelib")}
        sides = {BARE: (without, torch), OFF: (installed, torch), ON: (installed, torch | on)}
        importing = interleaved("import torch", sides, size.of(5, 1), warm_up=size.of(1, 0))
    ratio, ratio_on = start.cpu.ratio(OFF), start.cpu.ratio(ON)
    milliseconds = 1e3 * min(start.cpu.seconds[BARE])
    control = f"without, twice: {start.cpu.ratio(CONTROL)}; without: {milliseconds:.1f} ms; on the wall {start.wall.ratio(OFF)}"
    surplus = f"{1e3 * start.cpu.surplus(ON):.1f} ms, before torch is imported"
    ratio_torch = importing.cpu.ratio(ON)
    detail = f"{ratio_torch}: {importing.cpu.surplus(ON):.2f} s more; installed and off {importing.cpu.ratio(OFF)}"
    return [
        Figure.estimated(
            "interpreter start, installed and off, over without",
            ratio,
            1.1,
            f"{ratio}; {control}",
        ),
        Figure.estimated(
            "interpreter start, installed and on, over without",
            ratio_on,
            None,
            f"{ratio_on}; {surplus}",
        ),
        Figure.estimated(
            "`import torch`, installed and on, over without", ratio_torch, None, detail
        ),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
