"""What a Python process pays before its first line because this package is installed: nothing,
while it is off.

Small environments of their own, with our start-up file and without, because the running one has it.
A process of them all is `python -c pass`; its time is what the kernel charged it, start of the
interpreter included.
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
    """A virtual environment with this package and its start-up file in it, or with the package
    alone, which nothing imports.
    """
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
    """Seconds of the processor and of the wall that `python -c PROGRAM` takes, start and end
    included.
    """
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
    """Run the program by each side once a round, after rounds that nobody counts: they compile, and
    warm the files' cache.
    """
    order = random.Random(0)
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    for at in range(warm_up + rounds):
        for name in order.sample(list(sides), len(sides)):
            found = spent(sides[name][0], program, sides[name][1])
            if at >= warm_up:
                cpu[name].append(found[0])
                wall[name].append(found[1])
    return Measured(Rounds(cpu), Rounds(wall))


def measure(size: Size) -> list[Figure]:
    """The interpreter's start by itself, and with the import of torch, which is when recording
    starts.
    """
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
        Figure(
            "interpreter start, installed and off, over without",
            ratio.value,
            1.1,
            f"{ratio}; {control}",
        ),
        Figure(
            "interpreter start, installed and on, over without",
            ratio_on.value,
            None,
            f"{ratio_on}; {surplus}",
        ),
        Figure("`import torch`, installed and on, over without", ratio_torch.value, None, detail),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and tell."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
