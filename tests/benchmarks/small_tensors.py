"""The cost of a record of a tiny tensor: 200 Linear(16, 16), with almost no arithmetic.

This is the cost in programs of many small modules: calling kernels, walking outputs, writing lines.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import CONTROL, interleave
from tests.benchmarks.sides import Sides, one_thread

FASTVIDEO, TWO, DEFAULTS, BOTH = (
    "FastVideo's hook, 2 statistics",
    "ours, the same 2",
    "ours, by default",
    "ours, inputs too",
)


def measure(size: Size) -> list[Figure]:
    """Measure our CPU time per record as a share of FastVideo's."""
    one_thread()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(size.of(200, 10)))).eval()
    values = torch.randn(4, 16)

    def forward() -> None:
        with torch.no_grad():
            model(values)

    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(model, forward, Path(folder))
        timings = interleave(
            sides.bare()
            | {
                FASTVIDEO: sides.fastvideo(FASTVIDEO, ("abs_mean", "sum")),
                TWO: sides.ours(TWO, stats="abs_mean,sum"),
                DEFAULTS: sides.ours(DEFAULTS),
                BOTH: sides.ours(BOTH, capture="inputs,outputs"),
            },
            rounds=size.count(21),
            times=10,
            warm_up=2,
        ).cpu
    costs = "; ".join(
        f"{side} {1e6 * timings.surplus(side) / count:.1f} µs"
        for side, count in sides.records.items()
    )
    control = f"bare with itself {timings.overhead(CONTROL)}"

    def figure(label: str, side: str, more: str = "") -> Figure:
        share = timings.cost_share(side, FASTVIDEO, sides.records)
        name = f"tiny tensors, {label}: cost of a record over FastVideo's hook of 2 statistics"
        return Figure.estimated(name, share, None, f"{share}{more}")

    return [
        figure("by default", DEFAULTS, f"; a record: {costs}; {control}"),
        figure("the same 2 statistics", TWO),
        figure("inputs too", BOTH),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
