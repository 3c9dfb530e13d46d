"""Scaling: many modules, many steps, many processes. Costs stay constant or grow linearly.

Each runs in its own process, because a process rarely gives memory back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.figures import Figure, Size, command, environment
from tests.benchmarks.pairing import Rounds

_BEGINNING = """
import json, os, resource, sys, time
import torch
from torch import nn
import otel_torch
torch.set_num_threads(1)
torch.manual_seed(0)

def model(modules):
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(modules))).eval()

def seconds(body):
    start = time.process_time()
    body()
    return time.process_time() - start

def megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

values = torch.randn(2, 16)
torch.set_grad_enabled(False)
"""

# what the first recorded forward takes on top of a later one, twice for each size
_ATTACHING = """
sizes = [int(word) for word in sys.argv[2:]]
otel_torch.start(jsonl=sys.argv[1], stats="abs_mean")
found = {}
for size in [sizes[0], *sizes]:  # the first one is not counted: it imports
    made = model(size)
    first = seconds(lambda: made(values))
    found[size] = first - min(seconds(lambda: made(values)) for _ in range(2))
otel_torch.stop()
print(json.dumps([found[size] for size in sizes]))
"""

_STEPS = """
modules, few, many = (int(word) for word in sys.argv[2:])
made = model(modules)
otel_torch.start(jsonl=sys.argv[1])
found = []
for step in range(many):
    with otel_torch.trace_step(step):
        made(values)
    if step + 1 in (few, many):
        found.append(megabytes())
otel_torch.stop()
print(json.dumps(found))
"""

# a barrier of files: everybody says that it is ready, and begins when told to
_ONE_OF_MANY = """
modules, steps = (int(word) for word in sys.argv[2:])
made = model(modules)
otel_torch.start(jsonl=sys.argv[1])
made(values)
print("ready", flush=True)
sys.stdin.readline()

def run():
    for step in range(steps):
        made(values)
    otel_torch.stop()

start = time.perf_counter()
spent = seconds(run)
print(json.dumps([spent, time.perf_counter() - start, megabytes()]))
"""


def child(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that runs the program."""
    words = [sys.executable, "-c", _BEGINNING + program, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def finished(process: subprocess.Popen[str]) -> Any:
    """Return the last line that the process printed. Raises RuntimeError if it failed."""
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process of the benchmark failed: {errors.strip().splitlines()[-1:]}")
    return json.loads(output.strip().splitlines()[-1])


def attaching(size: Size, folder: Path) -> Figure:
    """Compare the time per module of attaching to 10,000 and to 1,000 modules."""
    sizes = [10, 30, 100] if size.smallest else [1_000, 3_000, 10_000]
    runs = [
        finished(child(_ATTACHING, folder / f"attach{turn}.jsonl", *sizes))
        for turn in range(size.count(5))
    ]
    times = [median(run[index] for run in runs) for index in range(len(sizes))]
    each = [1e6 * seconds / count for seconds, count in zip(times, sizes, strict=True)]
    shown = "; ".join(
        f"{count:,} modules {1e3 * seconds:.0f} ms"
        for count, seconds in zip(sizes, times, strict=True)
    )
    last = f"{sizes[-1]:,}"
    name = f"attaching, time a module: {last} modules over {sizes[0]:,}"
    growth = Rounds(
        {
            "few": [run[0] / sizes[0] for run in runs],
            "many": [run[-1] / sizes[-1] for run in runs],
        }
    ).ratio("many", "few")
    detail = f"{growth}; {shown}; {each[-1]:.0f} µs a module of {last}"
    return Figure.estimated(name, growth, 1.2, detail)


def remembering(size: Size, folder: Path) -> Figure:
    """Compare resident memory after 1,000 and after 100 recorded steps."""
    modules, few, many = size.of(200, 5), size.of(100, 3), size.of(1_000, 10)
    early, late = finished(child(_STEPS, folder / "steps.jsonl", modules, few, many))
    detail = f"{modules} modules: {early:.1f} MB after {few} steps, {late:.1f} MB after {many:,}: {late - early:+.1f} MB"
    return Figure(f"memory after {many:,} steps over after {few}", late / early, 1.02, detail)


def together(size: Size, folder: Path) -> list[Figure]:
    """Compare the cost of each of eight processes that record at once with that of one; count losses."""
    modules, steps = size.of(1_000, 5), size.of(20, 2)

    def run(count: int) -> tuple[float, float, int]:
        paths = [folder / f"{count}.{index}.jsonl" for index in range(count)]
        processes = [child(_ONE_OF_MANY, path, modules, steps) for path in paths]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        reports = [finished(process) for process in processes]
        written = sum(len(path.read_bytes().splitlines()) for path in paths)
        for path in paths:
            path.unlink()
        each = median(spent for spent, _, _ in reports)
        return (
            each,
            max(memory for _, _, memory in reports),
            count * (modules + 1) * (steps + 1) - written,
        )

    many = size.of(8, 2)
    turns = [(run(1), run(many)) for _ in range(size.count(3))]
    ratio = Rounds(
        {"alone": [alone[0] for alone, _ in turns], "crowded": [crowded[0] for _, crowded in turns]}
    ).ratio("crowded", "alone")
    each, memory, lost = (max(crowded[index] for _, crowded in turns) for index in range(3))
    detail = (
        f"{ratio}; {modules:,} modules, {steps} steps each; at most {each:.2f} s of the processor "
        f"each, {memory:.0f} MB at the end"
    )
    return [
        Figure.estimated(
            f"{many} processes at once, processor time of each over one alone", ratio, 1.5, detail
        ),
        Figure(f"{many} processes at once, records lost", lost, 0, "missing from their files"),
    ]


def measure(size: Size) -> list[Figure]:
    """Measure all of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        return [attaching(size, folder), remembering(size, folder), *together(size, folder)]


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
