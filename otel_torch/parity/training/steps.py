"""Read the training steps of a recording: its losses, gradients and updated parameters.

    rows of phases backward, update, train  ->  RecordedStep, one for each step of each model

The forwards of a step are kept as they were read, and decoded only where a gradient is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from otel_torch.parity.call_graph import Parameter, Sketch, sketch_bytes
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.recording.row_batches import RowBatch, RowKinds
from otel_torch.recording.row_schema import RowRecord

_TRAINING_PHASES = frozenset({"backward", "update", "train"})
# batches kept for the forwards of a step, and sketches kept for rows that repeat a value
_MOST_PARTS, _MOST_SKETCHES = 4096, 100_000
# statistics that scale with the tensor; these without its sign
_MAGNITUDES = frozenset({"abs_mean", "std", "rms", "l2"})
_SCALING = ("sum", "mean", *sorted(_MAGNITUDES))
_GRADIENT, _PARAMETER_GRADIENT, _PARAMETER = "grad", "param_grad.", "param."


class GradientKey(NamedTuple):
    """A gradient of an output: `tensor` is its label, such as `grad` or `grad[0]`."""

    module: str
    tensor: str
    call: int


def gradient_key(record: RowRecord) -> GradientKey | None:
    """Return the key of the gradient of an output, None if the row is of something else."""
    if not record.tensor.startswith("out"):
        return None
    label = _GRADIENT + record.tensor.removeprefix("out")
    return GradientKey(record.module, label, record.call or 0)


class ParameterKey(NamedTuple):
    """A parameter of a model, by its owner."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class RecordedTensor:
    """A recorded tensor. sketch: float64, shape (64,), or None."""

    record: RowRecord
    sketch: Sketch | None

    @property
    def numel(self) -> int:
        """The number of its elements, 0 where it is not recorded."""
        return self.record.numel if isinstance(self.record.numel, int) else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, empty where it is not recorded."""
        return self.record.shape if isinstance(self.record.shape, tuple) else ()

    @property
    def l2(self) -> float:
        """Its norm, NaN where it is not recorded."""
        return _number(self.record.l2)

    @property
    def is_finite(self) -> bool:
        """Whether it has neither NaN nor Inf."""
        return not self.record.nonfinite

    @property
    def extremes(self) -> tuple[float, float]:
        """Its smallest and largest number, NaN where they are not recorded."""
        return _number(self.record.min), _number(self.record.max)

    def divided_by(self, factor: float) -> RecordedTensor:
        """Return the tensor divided by a number."""
        record = msgspec.structs.replace(
            self.record,
            **{
                name: value / abs(factor) if name in _MAGNITUDES else value / factor
                for name in _SCALING
                if isinstance(value := getattr(self.record, name), int | float)
            },
        )
        sketch = None if self.sketch is None else self.sketch / factor
        return RecordedTensor(record, sketch)


@dataclass(slots=True, eq=False)
class RecordedStep:
    """What one step of a model did, each table in the order of execution.

    Attributes:
        gradients: Those of the outputs of modules.
        parameter_gradients: Those with which the optimizer stepped; of several evaluations of a
            closure the last.
        updated: The parameters after the optimizer's step.
        scalars: (tensor, call) -> value of the rows of training health that describe the model.
        parts: The rows recorded since the step before, not decoded.
    """

    model: str
    loop: int
    step: int
    gradients: dict[GradientKey, RecordedTensor] = field(default_factory=dict)
    parameter_gradients: dict[ParameterKey, RecordedTensor] = field(default_factory=dict)
    updated: dict[ParameterKey, RecordedTensor] = field(default_factory=dict)
    scalars: dict[tuple[str, int], float] = field(default_factory=dict)
    parts: list[RowBatch] = field(default_factory=list)
    kinds: RowKinds = field(default_factory=RowKinds)

    @property
    def position(self) -> tuple[int, int]:
        """Loop and step."""
        return self.loop, self.step

    @property
    def losses(self) -> list[float]:
        """The roots of its backward passes."""
        return [value for (name, _), value in self.scalars.items() if name == "loss"]

    def scalar(self, name: str) -> float | None:
        """Return the last value of a quantity, None where it is not recorded."""
        values = [value for (tensor, _), value in self.scalars.items() if tensor == name]
        return values[-1] if values else None

    def forward_rows(self, phases: Container[str] = ("forward",)) -> Iterator[RecordedTensor]:
        """Decode the rows of the model's forwards in this step."""
        sketches: dict[int, bytes] = {}
        for batch in self.parts:
            for index, kind in enumerate(batch.kinds.tolist()):
                if self.kinds.kinds[kind].phase not in phases:
                    continue
                record = batch.record(index)
                if record.value is not None and record.sketch is not None:
                    sketches.setdefault(record.value, record.sketch)
                if (record.model, record.loop or 0, record.step) == (self.model, *self.position):
                    yield RecordedTensor(record, _sketch_of(record, sketches))


def iterate_steps(source: RecordingSource, parameters: list[Parameter]) -> Iterator[RecordedStep]:
    """Yield the training steps of a recording, those of a model in order.

    Args:
        parameters: Those at attach: a parameter that no step has changed has no other sketch.
    """
    reader = _StepReader(parameters)
    for batch in source.batches(reader.kinds):
        yield from reader.add(batch)
    yield from reader.open_steps.values()


class _StepReader:
    """Sorts rows into the steps that are not over: one for each model."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.kinds = RowKinds()
        self.open_steps: dict[str, RecordedStep] = {}
        self._parts: dict[str, list[RowBatch]] = {}  # of the open step of each model
        self._earlier: list[RowBatch] = []  # read before the first open step
        # sketches by the number of the value: of the parameters at attach, and of recent rows
        self._attached = {
            value: sketch
            for parameter in parameters
            if isinstance(value := parameter.row.get("value"), int)
            and (sketch := sketch_bytes(parameter.row.get("sketch"))) is not None
        }
        self._recent: dict[int, bytes] = {}

    def add(self, batch: RowBatch) -> Iterator[RecordedStep]:
        """Add rows; yield the steps that they end."""
        is_training = np.array([kind.phase in _TRAINING_PHASES for kind in self.kinds.kinds])
        for parts in self._parts.values():
            parts.append(batch)
        self._earlier = [*self._earlier[-1:], batch]
        for index in np.flatnonzero(is_training[batch.kinds]).tolist():
            yield from self._add_row(batch.record(index))

    def _add_row(self, record: RowRecord) -> Iterator[RecordedStep]:
        position = record.loop or 0, record.step or 0
        step = self.open_steps.get(record.model)
        if step is None or position > step.position:
            if step is not None:
                yield step
            parts = self._parts.get(record.model, self._earlier)[-_MOST_PARTS:]
            step = RecordedStep(record.model, *position, parts=parts, kinds=self.kinds)
            self.open_steps[record.model] = step
            self._parts[record.model] = self._earlier[-1:]
            if len(self._recent) > _MOST_SKETCHES:
                self._recent.clear()
        if position == step.position:
            self._sort(step, record)

    def _sort(self, step: RecordedStep, record: RowRecord) -> None:
        """Put a row into its table; the first of equal keys counts, as of a repeated backward."""
        tensor = record.tensor
        if record.phase == "train":
            if not record.module:
                step.scalars[tensor, record.call or 0] = _number(record.mean)
        elif record.phase == "update":
            key = ParameterKey(record.module, tensor.removeprefix(_PARAMETER))
            step.updated[key] = self._measured(record)
        elif tensor.startswith(_PARAMETER_GRADIENT):
            key = ParameterKey(record.module, tensor.removeprefix(_PARAMETER_GRADIENT))
            step.parameter_gradients[key] = self._measured(record)
        elif tensor.startswith(_GRADIENT):
            gradient = GradientKey(record.module, tensor, record.call or 0)
            step.gradients.setdefault(gradient, self._measured(record))

    def _measured(self, record: RowRecord) -> RecordedTensor:
        if record.value is not None and record.sketch is not None:
            self._recent[record.value] = record.sketch
        return RecordedTensor(record, _sketch_of(record, self._recent, self._attached))


def _sketch_of(record: RowRecord, *known: dict[int, bytes]) -> Sketch | None:
    """Return the sketch of a row, recorded with it or with an earlier row of the same value."""
    content = record.sketch
    if content is None and record.value is not None:
        content = next((table[record.value] for table in known if record.value in table), None)
    return None if content is None else np.frombuffer(content, "<f4").astype(np.float64)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
