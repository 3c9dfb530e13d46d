"""The cost of recording on a GPU: how often a forward waits for the device, and its time.

Each statistic that FastVideo reads by `.item()` stops the host until the device is done: 882 times
in a forward of a 12-layer Llama. torch counts these waits. Without a GPU there are no figures.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import otel_torch
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import CONTROL, Side, interleave
from tests.benchmarks.sides import SIX, Sides
from tests.benchmarks.six_statistics import FASTVIDEO, INPUTS, OUTPUTS, PARITY, llama

SYNCHRONISATIONS = "device synchronisations in a forward"
OVERHEAD = "six statistics on a GPU, inputs and outputs: overhead over FastVideo's"


def synchronisations(side: Side, forward: Callable[[], object]) -> tuple[int, int]:
    """Count a side's waits for the device during one forward, and after it in the same step."""
    with side() as body:
        body()  # attaches, and compiles kernels
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as all_warnings:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with otel_torch.trace_step(1):
                    forward()
                    within = len(all_warnings)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = ["synchroniz" in str(warning.message) for warning in all_warnings]
    return sum(waits[:within]), sum(waits[within:])


def measure(size: Size) -> list[Figure]:
    """Measure both figures."""
    if not torch.cuda.is_available():
        return [Figure(f"{SYNCHRONISATIONS}, and overhead", None, None, "no GPU here")]
    torch.manual_seed(0)
    model, tokens = llama(size, torch.bfloat16)
    model, tokens = model.cuda(), tokens.cuda()

    def forward() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    def finished() -> None:
        forward()
        torch.cuda.synchronize()

    statistics = ",".join(SIX)
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(model, finished, Path(folder))
        recorders = {
            FASTVIDEO: sides.fastvideo(FASTVIDEO, SIX),
            OUTPUTS: sides.ours(OUTPUTS, stats=statistics),
            INPUTS: sides.ours(INPUTS, stats=statistics, capture="inputs,outputs"),
            PARITY: sides.ours(PARITY, stats=statistics, capture="parity"),
        }
        waits = {name: synchronisations(side, forward) for name, side in recorders.items()}
        # the wall's clock: while the host waits for the device it may sleep
        timings = interleave(sides.bare() | recorders, size.count(21), times=5, warm_up=2).wall
    device_name = torch.cuda.get_device_name()
    counts = "; ".join(
        f"{name} {within}, behind it {behind}" for name, (within, behind) in waits.items()
    )
    share = timings.share(INPUTS, FASTVIDEO)
    over = "; ".join(f"{name} {timings.overhead(name)}" for name in (CONTROL, *recorders))
    most = max(waits[name][0] for name in (OUTPUTS, INPUTS, PARITY))
    return [
        Figure(SYNCHRONISATIONS, most, 0, f"{device_name}: {counts}"),
        Figure.estimated(OVERHEAD, share, 1 / 4, f"{share}; over bare: {over}"),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
