"""The cost of recording every operation, over the bare forward of the Llama of `six_statistics`.

    python -m tests.benchmarks.graph [--rounds N] [--json FILE] [--smallest]

The first recorded step also measures the parameters; later ones know them. A chain of small products
shows what an operation costs by size.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.large import child, finished
from tests.benchmarks.pairing import BARE, CONTROL, Measured, Side, interleave
from tests.benchmarks.sides import Sides, one_thread
from tests.benchmarks.six_statistics import llama

FIRST, LATER = "first recorded step", "later recorded step"
EVERY_STEP = "0-999999"
TIME_GOAL, MEMORY_GOAL_MB = 6, 300
OPERATIONS = 50
WRITTEN = {torch.float32: "fp32", torch.bfloat16: "bf16"}

# the largest resident size in a forward of the Llama of `six_statistics`, recorded or not; 5 forgets
# what was larger before
_MEMORY = """
from tests.benchmarks.figures import Size
from tests.benchmarks.six_statistics import llama
path, dtype, smallest = sys.argv[1:]
made, tokens = llama(Size(smallest == "True"), getattr(torch, dtype))
made(tokens, use_cache=False)
open("/proc/self/clear_refs", "w").write("5")
if path != "bare":
    otel_torch.start(jsonl=path, capture="graph")
made(tokens, use_cache=False)
otel_torch.stop()
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps(int(peak.split()[1]) * 1024 / 1e6))
"""


class Chain(nn.Module):
    """Multiplies a tensor by a number, again and again."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(OPERATIONS):
            x = x * 1.0001
        return x


def measure(size: Size) -> list[Figure]:
    """Measure time and memory of a recorded forward, and operations a second."""
    one_thread()
    figures: list[Figure] = []
    for dtype in WRITTEN:
        figures += forwards(size, dtype)
    figures += [memory(size, dtype) for dtype in WRITTEN]
    return figures + [rate(count, size) for count in (2**10, 2**16, size.of(2**20, 2**10))]


def forwards(size: Size, dtype: torch.dtype) -> list[Figure]:
    """Compare a recorded forward with a bare one."""
    model, tokens = llama(size, dtype)
    timings, rows = take_turns(model, lambda: model(tokens, use_cache=False), size.count(15), True)
    forward = median(timings.cpu.seconds[BARE])
    detail = (
        f"{rows[FIRST]:,.0f} rows, {rows[LATER]:,.0f} a later step, bare {1e3 * forward:.0f} ms and "
        f"with itself {timings.cpu.overhead(CONTROL)}"
    )
    return [
        Figure.estimated(
            f"graph of operations, {WRITTEN[dtype]}, {side}: time over the bare forward",
            timings.cpu.ratio(side),
            TIME_GOAL,
            f"{timings.cpu.ratio(side)}; on the wall {timings.wall.ratio(side)}; {detail}",
        )
        for side in (FIRST, LATER)
    ]


def memory(size: Size, dtype: torch.dtype) -> Figure:
    """Compare the largest size of a process that records with one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        turns = [
            [
                finished(child(_MEMORY, path, str(dtype).removeprefix("torch."), size.smallest))
                for path in ("bare", Path(folder) / f"{turn}.jsonl")
            ]
            for turn in range(min(size.count(3), 3))
        ]
    more = median(recorded - bare for bare, recorded in turns)
    differences = ", ".join(f"{recorded - bare:.0f}" for bare, recorded in turns)
    name = f"graph of operations, {WRITTEN[dtype]}: MB more than the bare program"
    detail = f"the largest resident size, bare {turns[0][0]:.0f} MB; in each turn {differences}"
    return Figure(name, more, MEMORY_GOAL_MB, detail)


def rate(values: int, size: Size) -> Figure:
    """Measure what an operation on so many values costs."""
    model, tensor = Chain().eval(), torch.randn(values)
    timings, rows = take_turns(model, lambda: model(tensor), size.count(11), False)
    surplus = timings.cpu.estimated_surplus(LATER)
    cost = 1e6 * surplus.value / OPERATIONS
    name = f"graph of operations, {values:,} values: µs more an operation"
    each = 1e6 * median(timings.cpu.seconds[BARE]) / OPERATIONS
    detail = (
        f"{cost:.0f} ({1e6 * surplus.low / OPERATIONS:.0f} to {1e6 * surplus.high / OPERATIONS:.0f}), bare {each:.1f}; "
        f"{1e6 / (cost + each):,.0f} operations a second; {rows[LATER]:,.0f} rows a step"
    )
    return Figure(name, cost, None, detail)


def take_turns(
    model: nn.Module, body: Callable[[], object], rounds: int, with_first: bool
) -> tuple[Measured, dict[str, float]]:
    """Time one forward of each side per round; return the rows of a forward, too."""

    def forward() -> None:
        with torch.no_grad():
            body()

    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(model, forward, Path(folder))
        first = sides.ours(FIRST, capture="graph")
        later = sides.ours(LATER, capture="graph", steps=EVERY_STEP)
        # the first step of a session has no warm-up, so the others bring their own
        turns = {name: _warm(side) for name, side in (sides.bare() | {LATER: later}).items()}
        turns |= {FIRST: first} if with_first else {}
        return interleave(turns, rounds, warm_up=0), sides.records


def _warm(side: Side) -> Side:
    @contextmanager
    def entered() -> Iterator[Callable[[], object]]:
        with side() as body:
            body()
            yield body

    return entered


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
