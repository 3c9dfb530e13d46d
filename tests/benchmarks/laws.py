"""The time that the laws of training take of an ordinary step, and of one that they are asked in.

    python -m tests.benchmarks.laws [--rounds N] [--json FILE] [--smallest]

The step is that of `tests.benchmarks.training`: a transformer of 100 M parameters. The functions that
gather facts for the laws, and those that ask them, are timed by wrappers in the step itself, so that
no noise of another step is in the ratio.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from otel_torch import bootstrap
from otel_torch.sources.training.equal_outputs import EqualOutputs
from otel_torch.sources.training.gradient_clearing import GradientClearing
from otel_torch.sources.training.law_watch import LawWatch
from otel_torch.sources.training.learning_rate_schedules import LearningRateSchedules
from otel_torch.sources.training.model_states import ModelStates
from otel_torch.sources.training.repeated_batches import RepeatedBatches
from otel_torch.sources.training.restored_parameters import RestoredParameters
from otel_torch.sources.training.training_modes import TrainingModes
from tests.benchmarks.compiled import llama
from tests.benchmarks.figures import Figure, Size, command
from tests.benchmarks.sides import one_thread
from tests.benchmarks.training import Program

GOAL = 0.005
TIMED: dict[type, tuple[str, ...]] = {
    EqualOutputs: ("training_forward", "forward_returned"),
    GradientClearing: (
        "backward_starting", "backward_ended", "optimizer_stepping", "optimizer_stepped",
    ),
    LawWatch: ("observe", "optimizer_stepped"),
    LearningRateSchedules: ("optimizer_steps_first",),
    ModelStates: ("training_forward", "forward_began", "optimizer_stepped"),
    RepeatedBatches: ("training_forward",),
    RestoredParameters: ("measured", "changed"),
    TrainingModes: ("training_forward", "forward_began", "optimizer_stepping"),
}  # fmt: skip


class Clock:
    """The seconds that wrapped functions take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, kind: type, name: str) -> None:
        """Time a method of a class."""
        method: Callable[..., Any] = getattr(kind, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(kind, name, timed)


def measure(size: Size) -> list[Figure]:
    """Return the share of a step, by the median of all steps."""
    one_thread()
    clock = Clock()
    for kind, names in TIMED.items():
        for name in names:
            clock.wrap(kind, name)
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        bootstrap.start(activations=False, jsonl=str(Path(folder) / "run.jsonl"))
        try:
            batch = torch.randint(0, 2, (size.of(2, 1), 64))
            program = Program(llama(size.of(768, 32), size.of(13, 1)), batch)
            for _ in range(size.count(40)):
                clock.seconds, began = 0.0, time.perf_counter()
                program.step()
                shares.append(clock.seconds / (time.perf_counter() - began))
        finally:
            bootstrap.stop()
    detail = f"{len(shares)} steps; at most {100 * max(shares):.2f} %, of a step in which the laws are asked"
    name = "laws of training: share of an ordinary step"
    return [Figure(name, statistics.median(shares), GOAL, detail)]


if __name__ == "__main__":
    sys.exit(command(__doc__, measure, sys.argv[1:]))
