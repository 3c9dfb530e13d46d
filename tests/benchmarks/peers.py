"""The overhead of other tools on the model of `six_statistics`, for reference and without a goal.

nnsight's cache keeps references to every output. msprobe (mindstudio-probe) at level L0 computes
max, min, mean and norm of the inputs and outputs of every module, once per step. Each runs in its
own process on its own model, because both change it. `pip install -e '.[bench]'` installs both.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.benchmarks.figures import Figure, Size, command, environment, module_command
from tests.benchmarks.pairing import BARE, CONTROL, interleave, plainly
from tests.benchmarks.sides import one_thread
from tests.benchmarks.six_statistics import llama

Body = Callable[[], object]


def nnsight_cache(model: Any, tokens: torch.Tensor, folder: str) -> Body:
    """Run a forward with all outputs in nnsight's cache."""
    import nnsight

    wrapped = nnsight.NNsight(model)

    def forward() -> None:
        with torch.no_grad(), wrapped.trace(tokens, use_cache=False) as tracer:
            cache = tracer.cache()  # noqa: F841  (the block is compiled from its source, and the name is what is kept)

    return forward


def msprobe_statistics(model: Any, tokens: torch.Tensor, folder: str) -> Body:
    """Run a forward as one step of msprobe's module statistics, written to its files."""
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(task="statistics", dump_path=folder, level="L0")

    def forward() -> None:
        debugger.start(model=model)
        with torch.no_grad():
            model(tokens, use_cache=False)
        debugger.stop()
        debugger.step()

    return forward


# package -> its name for people, and what makes the body that is timed
PEERS: dict[str, tuple[str, Callable[[Any, torch.Tensor, str], Body]]] = {
    "nnsight": ("nnsight's cache", nnsight_cache),
    "msprobe": ("msprobe's statistics, L0", msprobe_statistics),
}


def alone(package: str, size: Size) -> Figure:
    """Compare one tool with the bare model, in this process."""
    one_thread()
    label, make = PEERS[package]
    model, tokens = llama(size, torch.float32)

    def bare() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    with tempfile.TemporaryDirectory() as folder:
        peer = make(copy.deepcopy(model), tokens, folder)
        sides = {BARE: plainly(bare), CONTROL: plainly(bare), label: plainly(peer)}
        timings = interleave(sides, rounds=size.count(5))
    ratio = timings.cpu.ratio(label)
    detail = f"{ratio}; on the wall {timings.wall.ratio(label)}; bare with itself {timings.cpu.overhead(CONTROL)}"
    return Figure.estimated(f"{label}, float32, forward over bare", ratio, None, detail)


def measure(size: Size) -> list[Figure]:
    """Measure each tool that is installed."""
    figures = []
    for package, (label, _) in PEERS.items():
        missing = Figure(
            f"{label}, float32, forward over bare", None, None, f"{package} is not installed here"
        )
        if importlib.util.find_spec(package) is None:
            figures.append(missing)
            continue
        words = module_command(
            "peers",
            "--alone",
            package,
            str(size.count(5)),
            *(["--smallest"] if size.smallest else []),
        )
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
        timings = json.loads(done.stdout.strip().splitlines()[-1])
        spread = timings["spread"] and tuple(timings["spread"])
        figures.append(Figure(timings["name"], timings["ours"], None, timings["detail"], spread))
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    if argv[:1] == ["--alone"]:
        package, rounds = argv[1:3]
        print(json.dumps(alone(package, Size("--smallest" in argv, int(rounds))).plain()))
        return 0
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
