"""Statistics of a tensor compared with reading it once, which is the lower bound.

One read is a plain `torch.sum` over the same bytes as fp32: eight in a vector, no conversion,
nothing written. Passes follow each other, so that what fits into the cache is read from there, like
an output that was just computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from otel_torch.statistics.measure import measure as measure_tensor
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import BARE, interleave, plainly
from tests.benchmarks.sides import one_thread

COPY, SEPARATE, PLAIN, WITH_SKETCH = (
    "memcpy",
    "separate reductions",
    "measure",
    "measure with the sketch",
)
SUMS = ("min", "max", "sum", "squares", "magnitudes")
_READ_A_ROUND = (
    2**26
)  # bytes: long enough for the clock, short enough for both sides to meet the same machine


def separate(values: Tensor) -> tuple[Tensor, ...]:
    """Compute five numbers by five plain reductions."""
    flat = values.view(-1)
    return flat.amin(), flat.amax(), flat.sum(), torch.dot(flat, flat), flat.abs().sum()


def seconds(values: Tensor, rounds: int, times: int) -> dict[str, float]:
    """Return each side's time over that of one read of `values`, and the read's CPU seconds."""
    raw, copy = values.view(torch.float32), torch.empty_like(values)
    bodies: dict[str, Callable[[], object]] = {
        BARE: raw.sum,
        COPY: lambda: copy.copy_(values),
        SEPARATE: lambda: separate(values),
        PLAIN: lambda: measure_tensor(values, SUMS),
        WITH_SKETCH: lambda: measure_tensor(values, (*SUMS, "sketch")),
    }
    measured_seconds = interleave(
        {name: plainly(body) for name, body in bodies.items()}, rounds, times, warm_up=1
    ).cpu
    ratios = {name: measured_seconds.ratio(name).value for name in bodies if name != BARE}
    return ratios | {BARE: min(measured_seconds.seconds[BARE])}


def measure(size: Size) -> list[Figure]:
    """Compare `measure` with one read, for each size and dtype."""
    one_thread()
    figures = []
    for dtype in (torch.float32, torch.bfloat16):
        for label, count in (("4 k", 2**12), ("64 k", 2**16), ("1 M", 2**20), ("4 M", 2**22)):
            values = torch.randn(count).to(dtype)
            size_in_bytes = count * dtype.itemsize
            times = 1 if size.smallest else max(2, min(1000, _READ_A_ROUND // size_in_bytes))
            measured_seconds = seconds(values, size.count(7), times)
            read = measured_seconds.pop(BARE)
            ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in measured_seconds.items())
            ours_us = 1e6 * read * measured_seconds[PLAIN]
            detail = f"one read {1e6 * read:.1f} µs, {size_in_bytes / read / 1e9:.1f} GB/s; ours {ours_us:.1f} µs; in reads: {ratios}"
            name = (
                f"{label} values, {str(dtype).removeprefix('torch.')}: five numbers over one read"
            )
            figures.append(Figure(name, measured_seconds[PLAIN], None, detail))
    return figures


def main(argv: Sequence[str]) -> int:
    """Measure and print the figures."""
    return command(__doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
