"""The first step that differs, where the recorded one does not.

Of every forward the runs also hold what enters and leaves the outermost modules. A fault between
two steps, in a sampler or an optimizer, shows in what the next forward gets. What comes after the
last forward shows in nothing: there the last step tells.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from otel_torch.graph.distances import relative_distances
from otel_torch.graph.error_model import JUMP
from otel_torch.graph.graph import Floats, Indices
from otel_torch.parity.sides import Sides
from otel_torch.recording.reader import load_recording

# OTEL_TORCH_STEPS for all steps, in each of which operations are recorded
EVERY_STEP = "*/1"
# of how many operations a graph of all steps may consist: recording as many takes from ten seconds
# for small tensors to three minutes for those of a million elements
MOST_OPERATIONS = 100_000
# settings by which a run holds the inputs and outputs of all outermost forwards
SETTINGS = {
    "capture": "graph,inputs,outputs",
    "modules": "^$",
    "stats": "sketch,numel,nonfinite,shape,dtype,l2",
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
    is_last: bool = False

    @property
    def is_every(self) -> bool:
        """Whether the forwards are other ones in each program, so that all steps count."""
        return self.steps.port == EVERY_STEP

    def __str__(self) -> str:
        if self.is_every:
            return "the first steps match, and the programs' forwards are others: recording all"
        if self.is_last:
            return f"all forwards match, recording step {self.steps.port} for what comes after them"
        return f"the first steps match, step {self.steps.port} does not"


@dataclass(frozen=True, slots=True)
class TooManyOperations:
    """All steps would have to be compared, and have too many operations."""

    count: int

    def __str__(self) -> str:
        return (
            "only the first step of each model was compared: the programs' forwards are other "
            f"ones, and all steps have some {self.count:,} operations (--step selects one)"
        )


def find_later_step(
    paths: Sides[Sequence[Path]], limit: float
) -> LaterStep | TooManyOperations | None:
    """Return the first step that differs, or the last one; None if its operations were recorded.

    Errors grow from step to step by themselves; a fault makes one grow at once.

    Args:
        paths: Recordings made with `SETTINGS`: of each program one, or those of all ranks.
        limit: The relative error that a forward may have.

    Raises:
        RecordingError: A recording cannot be read.
    """
    programs = _programs(paths)
    before = 0.0
    needed = Sides[set[_RecordedStep]](set(), set())
    is_last = True
    for index, (reference, port) in enumerate(zip_longest(*(own.tensors for own in programs))):
        error = None if reference is None or port is None else _error(reference, port)
        if error is None:  # other forwards: what follows cannot be paired by order
            return _every_step(programs, float(np.hypot(limit, JUMP * before)))
        if error > np.hypot(limit, JUMP * before):
            needed = _needed(programs, index)
            if _are_recorded(programs, needed):  # and match: the same place holds other tensors
                return _every_step(programs, float(np.hypot(limit, JUMP * before)))
            is_last = False
            break
        needed = Sides({reference.step}, {port.step})
        before = max(before, error)
    if _are_recorded(programs, needed):
        return None
    steps = needed.map(lambda own: ",".join(map(str, sorted({step.step for step in own}))))
    return LaterStep(steps, float(np.hypot(limit, JUMP * before)), is_last)


def has_short_steps(paths: Sides[Sequence[Path]], *, has_others: bool = False) -> bool:
    """Return whether further steps of two programs may be recorded: there are some, and all have
    not too many operations. Raises RecordingError if a recording cannot be read.

    Args:
        has_others: Only where the forwards of both programs are other ones: in order, what enters
            and leaves them has other sizes.
    """
    programs = _programs(paths)
    if has_others and not any(
        reference is None or port is None or _error(reference, port) is None
        for reference, port in zip_longest(*(own.tensors for own in programs))
    ):
        return False
    return isinstance(_every_step(programs, 0.0), LaterStep)


def _programs(paths: Sides[Sequence[Path]]) -> Sides[_Program]:
    return paths.map(lambda own: _joined([_read(path) for path in own]))


def _needed(programs: Sides[_Program], index: int) -> Sides[set[_RecordedStep]]:
    """Return the steps of both programs in which a tensor is made, and what may have made it wrong.

    Each model counts its own steps, and one number selects those of all models: what is recorded of
    one program for that is recorded of the other one as well.
    """
    indices = set[int]().union(*(own.before(index) for own in programs))
    while True:
        steps = Sides(*(own.steps_of(indices) for own in programs))
        more = set[int]()
        for own, chosen in zip(programs, steps, strict=True):
            numbers = {step.step for step in chosen}
            more |= {i for i in range(index + 1) if own.tensors[i].step.step in numbers}
        if more <= indices:
            return steps
        indices |= more


def _are_recorded(programs: Sides[_Program], steps: Sides[set[_RecordedStep]]) -> bool:
    """Return whether the operations of some steps of both programs were recorded."""
    return all(own.recorded >= those for own, those in zip(programs, steps, strict=True))


def _every_step(
    programs: Sides[_Program], tolerance: float
) -> LaterStep | TooManyOperations | None:
    """Return all steps, unless their operations were recorded or are too many."""
    if _are_recorded(programs, programs.map(lambda own: own.steps)):
        return None
    most = max(own.operations * len(own.steps) // max(len(own.recorded), 1) for own in programs)
    if most > MOST_OPERATIONS:
        return TooManyOperations(most)
    return LaterStep(Sides(EVERY_STEP, EVERY_STEP), tolerance)


class _RecordedStep(NamedTuple):
    model: str
    loop: int
    step: int


class _OutermostTensor(NamedTuple):
    """A tensor that enters or leaves an outermost forward.

    Attributes:
        step, call: Of the forward.
        numel, sketch, norm: Of what each rank has of it.
    """

    step: _RecordedStep
    call: int
    numel: Indices
    sketch: Floats
    norm: Floats


@dataclass(slots=True)
class _Program:
    """One program: its outermost tensors, the steps whose operations were recorded, and how many
    these are.
    """

    tensors: list[_OutermostTensor] = field(default_factory=list)
    recorded: set[_RecordedStep] = field(default_factory=set)
    operations: int = 0

    @property
    def steps(self) -> set[_RecordedStep]:
        """All steps with a forward."""
        return {tensor.step for tensor in self.tensors}

    def steps_of(self, indices: Iterable[int]) -> set[_RecordedStep]:
        """Return the steps of some tensors."""
        return {self.tensors[index].step for index in indices}

    def before(self, index: int) -> set[int]:
        """Return the index of a tensor, that of the last one of the forward before, whose result
        may enter it, and of the step before of the same model, which an optimizer may have changed.
        """
        tensors, own = self.tensors, self.tensors[index]
        earlier = range(index - 1, -1, -1)
        forward = (i for i in earlier if (tensors[i].step, tensors[i].call) != (own.step, own.call))
        step = (
            i
            for i in earlier
            if tensors[i].step.model == own.step.model and tensors[i].step != own.step
        )
        return {index, next(forward, index), next(step, index)}


def _error(reference: _OutermostTensor, port: _OutermostTensor) -> float | None:
    """Return how far a tensor is off in one rank at least; None if these are not the same tensor.

    Of ranks that have parts of it, all that is known is how large all parts are.
    """
    sizes = {*reference.numel.tolist(), *port.numel.tolist()}
    if len(sizes) == 1:
        return float(relative_distances(reference.sketch, port.sketch).max())
    if len(reference.numel) == len(port.numel):
        return None
    norms = [
        np.sqrt((own.norm**2).sum() / max(own.numel.sum() // max(sizes), 1))
        for own in (reference, port)
    ]
    return float(abs(norms[0] - norms[1]) / max(*norms, np.finfo(float).tiny))


def _joined(ranks: Sequence[_Program]) -> _Program:
    """Merge the outermost tensors of all ranks, one by one in their order."""
    tensors = [
        own[0]._replace(
            numel=np.concatenate([rank.numel for rank in own]),
            sketch=np.concatenate([rank.sketch for rank in own]),
            norm=np.concatenate([rank.norm for rank in own]),
        )
        for own in zip(*(rank.tensors for rank in ranks), strict=False)
    ]
    return _Program(tensors, ranks[0].recorded, ranks[0].operations)


def _read(path: Path) -> _Program:
    program = _Program()
    for row in load_recording(path).rows:
        step = _RecordedStep(row["model"], row["loop"], row["step"])
        tensor = str(row["tensor"])
        if "op" in row:
            program.recorded.add(step)
            program.operations += 1
        elif row["module"] == "" and tensor.startswith(("in", "out")) and "sketch" in row:
            sketch = np.frombuffer(a2b_base64(row["sketch"]), "<f4").astype(np.float64)
            program.tensors.append(
                _OutermostTensor(
                    step,
                    row["call"],
                    np.array([row["numel"]]),
                    sketch[None],
                    np.array([row["l2"]], np.float64),
                )
            )
    return program
