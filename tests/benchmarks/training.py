"""The cost of recording the health of a training, without activations, over the same step bare.

    python -m tests.benchmarks.training [--rounds N] [--json FILE] [--smallest]

A transformer of 100 M parameters shows the share of a real step; 50 layers of 16 x 16, with almost
no arithmetic, what each step costs whatever it computes. Every tenth step also has the rows of
modules. It is a side of its own, so that each timed step stands beside a bare one, and counts a
tenth.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.benchmarks.compiled import llama
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.pairing import BARE, CONTROL, Measured, Rounds, Side, interleave
from tests.benchmarks.sides import Sides, one_thread

GOAL = 1.01
ORDINARY, DETAILED = "rows of the model", "rows of modules too"
_SHARES = {ORDINARY: 0.9, DETAILED: 0.1}
# at which step a side begins to warm up: the next step is timed
_BEFORE = {ORDINARY: 1001, DETAILED: 1009}


class Program:
    """A training that knows nothing of recording, on the device of its batch."""

    def __init__(self, model: nn.Module, batch: Tensor, *, clips: bool = True) -> None:
        self.model, self._batch, self._clips = model.to(batch.device).train(), batch, clips
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.step()

    def step(self) -> None:
        """Make one training step."""
        loss = self.model(self._batch).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        if self._clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def finished_step(self) -> None:
        """Make one training step, and wait for the device."""
        self.step()
        if self._batch.is_cuda:
            torch.cuda.synchronize()

    def go_to(self, step: int) -> None:
        """Let the optimizer have completed so many steps, from which a recording goes on."""
        for state in self._optimizer.state.values():
            state["step"].fill_(step)


def take_turns(program: Program, rounds: int) -> Measured:
    """Time one step of each side per round, in one process and on one model."""
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(program.model, program.finished_step, Path(folder))
        ours = {
            name: _beginning_at(step, program, sides.ours(name, activations="0"))
            for name, step in _BEFORE.items()
        }
        return interleave(sides.bare() | ours, rounds)


def _beginning_at(step: int, program: Program, side: Side) -> Side:
    @contextmanager
    def entered() -> Iterator[Callable[[], object]]:
        program.go_to(step)
        with side() as body:
            yield body

    return entered


def waits(program: Program) -> int:
    """Count how often recording waits for the device, in a step with the rows of modules."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Sides(program.model, program.step, Path(folder)).ours("", activations="0")
        with _beginning_at(_BEFORE[DETAILED], program, ours)() as step:
            step()
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def _share(name: str, program: Program, rounds: int) -> Figure:
    """Measure the time of a step over that of a bare one."""
    measured = take_turns(program, rounds)
    cpu, wall = (times.mixed_ratio(_SHARES) for times in (measured.cpu, measured.wall))
    # the processor waits for a GPU
    times, ratio = (measured.wall, wall) if torch.cuda.is_available() else (measured.cpu, cpu)
    sides = "; ".join(f"{side} {times.ratio(side):.4f}" for side in _SHARES)
    control = times.ratio(CONTROL)
    off = abs(control.value - 1)
    size = sum(parameter.numel() for parameter in program.model.parameters())
    detail = (
        f"processor's time of a step to that without us {cpu:.4f}; by the wall {wall:.4f}; {sides}; "
        f"bare to itself {control:.4f}; by the fastest steps {_by_fastest(times):.4f}; {size / 1e6:.1f} M parameters, a step takes "
        f"{1e3 * min(times.seconds[BARE]):.0f} ms"
    )
    return Figure(name, ratio.value, GOAL, detail, spread=(ratio.low - off, ratio.high + off))


def _by_fastest(times: Rounds) -> float:
    """Return the same ratio of the fastest steps, which other load disturbs least."""
    bare = min(*times.seconds[BARE], *times.seconds[CONTROL])
    return sum(share * min(times.seconds[side]) for side, share in _SHARES.items()) / bare


def _fixed_cost(program: Program, rounds: int) -> Figure:
    """Measure what recording adds to a step of almost no arithmetic."""
    times = take_turns(program, rounds).cpu
    bare = 1e6 * min(times.seconds[BARE])
    costs = {side: 1e6 * times.surplus(side) for side in (*_SHARES, CONTROL)}
    mixed = sum(share * costs[side] for side, share in _SHARES.items())
    detail = "; ".join(f"{side} {cost:.0f} µs" for side, cost in costs.items())
    return Figure(
        "health of a training of 50 tiny layers: µs of the processor per step",
        mixed,
        None,
        f"{detail}; a bare step takes {bare:.0f} µs",
    )


def measure(size: Size) -> list[Figure]:
    """Measure the figures of the table."""
    one_thread()
    on_gpu = torch.cuda.is_available()
    shape = size.of(16, 1) if on_gpu else size.of(2, 1), size.of(512, 16) if on_gpu else 64
    ids = torch.zeros(shape, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    rounds = size.count(40)
    figures = []
    for how, clips in (("clipped by norm", True), ("not clipped", False)):
        program = Program(llama(size.of(768, 32), size.of(13, 1)), ids, clips=clips)
        figures.append(_share(f"health of a training, gradients {how}", program, rounds))
        if on_gpu:
            name = f"health of a training, gradients {how}: waits for the device in a step"
            figures.append(Figure(name, waits(program), 0))
    tiny = nn.Sequential(*(nn.Linear(16, 16) for _ in range(size.of(50, 2))))
    figures.append(_fixed_cost(Program(tiny, torch.randn(4, 16)), 5 * rounds))
    return figures


if __name__ == "__main__":
    sys.exit(command(__doc__, measure, sys.argv[1:]))
