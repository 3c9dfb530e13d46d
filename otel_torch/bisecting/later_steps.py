"""The first step that differs, where the recorded one does not.

Of every forward the runs also hold what enters and leaves the outermost modules. A fault between
two steps, in a sampler or an optimizer, shows in what the next forward gets. What comes after the
last forward shows in nothing: there the last step tells.
"""

from __future__ import annotations

from binascii import a2b_base64
from pathlib import Path
from typing import NamedTuple

import numpy as np

from otel_torch.graph.distances import relative_distances
from otel_torch.graph.error_model import JUMP
from otel_torch.graph.graph import Floats
from otel_torch.parity.sides import Sides
from otel_torch.recording.reader import load_recording

# settings by which a run holds the inputs and outputs of all outermost forwards
SETTINGS = {
    "capture": "graph,inputs,outputs",
    "modules": "^$",
    "stats": "sketch,numel,nonfinite,shape,dtype",
    "signals": "",
}


class LaterStep(NamedTuple):
    """Where two programs differ after the recorded step, or may do so.

    Attributes:
        steps: To record in each program, as OTEL_TORCH_STEPS has it: the one before, too.
        tolerance: The relative error that both programs may have brought along to there.
        is_last: Whether all forwards match, and only what comes after them is unknown.
    """

    steps: Sides[str]
    tolerance: float
    is_last: bool

    def __str__(self) -> str:
        if self.is_last:
            return f"all forwards match, recording step {self.steps.port} for what comes after them"
        return f"the first steps match, step {self.steps.port} does not"


def find_later_step(paths: Sides[Path], limit: float) -> LaterStep | None:
    """Return the first step that differs, or the last one; None if its operations were recorded.

    Errors grow from step to step by themselves; a fault makes one grow at once.

    Args:
        paths: Recordings made with `SETTINGS`.
        limit: The relative error that a forward may have.

    Raises:
        RecordingError: A recording cannot be read.
    """
    programs = paths.map(_read)
    before = 0.0
    needed = Sides[set[_RecordedStep]](set(), set())
    is_last = True
    for index, (reference, port) in enumerate(
        zip(*(own.tensors for own in programs), strict=False)
    ):
        if reference.numel != port.numel:
            return None  # other forwards: what follows cannot be paired by order
        error = float(relative_distances(reference.sketch[None], port.sketch[None])[0])
        if error > np.hypot(limit, JUMP * before):
            needed = Sides(*(own.needed(index) for own in programs))
            is_last = False
            break
        needed = Sides({reference.step}, {port.step})
        before = max(before, error)
    if all(own.recorded >= steps for own, steps in zip(programs, needed, strict=True)):
        return None
    steps = needed.map(lambda own: ",".join(map(str, sorted({step.step for step in own}))))
    return LaterStep(steps, float(np.hypot(limit, JUMP * before)), is_last)


class _RecordedStep(NamedTuple):
    model: str
    loop: int
    step: int


class _OutermostTensor(NamedTuple):
    """A tensor that enters or leaves an outermost forward."""

    step: _RecordedStep
    call: int
    is_input: bool
    numel: int
    sketch: Floats


class _Program(NamedTuple):
    """One program: its outermost tensors, and the steps whose operations were recorded."""

    tensors: list[_OutermostTensor]
    recorded: set[_RecordedStep]

    def needed(self, index: int) -> set[_RecordedStep]:
        """Return the step of a tensor, and that of the forward before if it is an input."""
        own = self.tensors[index]
        if not own.is_input:
            return {own.step}
        forward = own.step, own.call
        before = (t for t in reversed(self.tensors[:index]) if (t.step, t.call) != forward)
        return {own.step, next(before, own).step}


def _read(path: Path) -> _Program:
    program = _Program([], set())
    for row in load_recording(path).rows:
        step = _RecordedStep(row["model"], row["loop"], row["step"])
        tensor = str(row["tensor"])
        if "op" in row:
            program.recorded.add(step)
        elif row["module"] == "" and tensor.startswith(("in", "out")) and "sketch" in row:
            sketch = np.frombuffer(a2b_base64(row["sketch"]), "<f4").astype(np.float64)
            is_input, numel = tensor.startswith("in"), int(row["numel"])
            program.tensors.append(_OutermostTensor(step, row["call"], is_input, numel, sketch))
    return program
