"""A recording as scalars over steps, which trackers of experiments draw as curves.

train/loss, train/learning_rate, train/gradient_norm ...   the numbers of a training
gradient_norm/Net.body.0, update_ratio/Net.body.0 ...      those of its modules
laws/gradients_not_cleared                                 a law that the training breaks
abs_mean/Net.body.0.out, std/Net.body.0.out ...            statistics of tensors
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import groupby, islice, repeat
from typing import NamedTuple

from otel_torch.exporting.exported_recording import ExportedRecording
from otel_torch.laws.series import SeriesName, TrainingSeries
from otel_torch.laws.table import broken_laws
from otel_torch.recording.rows import Row
from otel_torch.records import FORWARD_PHASES
from otel_torch.statistics.table import DEFINITIONS
from otel_torch.training_quantities import PHASE, ROWS, row_label, split_label

_LAW = "broken_law"
_MOST_TOGETHER = 1000
# of the rows of tensors, those of these phases; not those of the graph of operations
_PHASES = (*FORWARD_PHASES, "recompute", "backward", "update")
_OF_GRAPH = ("op", "leaf", "end")


class Scalar(NamedTuple):
    """A point of a curve."""

    tag: str
    step: int
    value: float


class _StepAxis:
    """The steps of all loops of a model on one axis: those of a loop follow the loops before."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, int], int] = {}
        self._next: dict[str, int] = {}

    def position(self, model: str, loop: int | None, step: int | None) -> int:
        loop, step = loop or 0, step or 0
        following = self._next.get(model, 0)
        start = self._starts.setdefault((model, loop), following)
        position = start + step
        self._next[model] = max(following, position + 1)
        return position


def steps_of(recording: ExportedRecording) -> Iterator[list[Scalar]]:
    """Yield the scalars of a recording, each time some of one step.

    Raises:
        RecordingError: The file is not a recording.
    """
    for _, scalars in groupby(_scalars_of(recording), lambda scalar: scalar.step):
        while some := list(islice(scalars, _MOST_TOGETHER)):
            yield some


def _scalars_of(recording: ExportedRecording) -> Iterator[Scalar]:
    """Yield statistics as they were recorded, then the training."""
    axis, training, modules = _StepAxis(), TrainingSeries(), dict[str, None]()
    for row in recording.rows():
        phase, model = row.get("phase", "forward"), row.get("model") or ""
        if phase == PHASE:
            axis.position(model, row.get("loop"), row["step"])
            training.add(row)
        elif phase in _PHASES and not any(row.get(field) for field in _OF_GRAPH):
            modules.setdefault(row["module"])
            step = axis.position(model, row.get("loop"), row["step"])
            place = _place_of(row)
            for name in DEFINITIONS:
                value = row.get(name)
                if isinstance(value, int | float) and name != "numel":
                    yield Scalar(f"{name}/{place}", step, value)
    yield from _training_scalars(training, axis)
    said = {name.label for name in training.series}
    for law in broken_laws(training, recording.metadata, modules):
        if row_label(_LAW, law.law) not in said:
            last = training.steps[-1]
            yield Scalar(f"laws/{law.law}", axis.position(law.model, *last), 1)


def _training_scalars(training: TrainingSeries, axis: _StepAxis) -> Iterator[Scalar]:
    """Yield the numbers of a training, step by step."""
    first = next(iter(training.models), "")
    by_step = merge(
        *(
            zip(series.steps, repeat(_training_tag(name, first)), repeat(name.model), series.values)
            for name, series in training.series.items()
        )
    )
    for index, tag, model, value in by_step:
        yield Scalar(tag, axis.position(model, *training.steps[index]), value)


def _training_tag(name: SeriesName, first_model: str) -> str:
    """Return the tag of a series.

    >>> _training_tag(SeriesName("Net", "", "lr[0]"), "Net")
    'train/learning_rate'
    >>> _training_tag(SeriesName("Net", "", "lr[head]"), "Net")
    'train/learning_rate/head'
    >>> _training_tag(SeriesName("Critic", "", "loss"), "Net")
    'train/loss (Critic)'
    >>> _training_tag(SeriesName("Net", "body.0", "grad_norm"), "Net")
    'gradient_norm/Net.body.0'
    """
    quantity, group = split_label(name.label)
    known = ROWS.get(quantity)
    title = known.metric.split(".", 2)[2] if known else quantity
    of_group = f"/{group}" if group not in (None, "0") else ""
    if quantity == _LAW:
        return f"laws/{group}"
    if name.module:
        return f"{title}/{name.model}.{name.module}{of_group}"
    of_model = f" ({name.model})" if name.model != first_model else ""
    return f"train/{title}{of_group}{of_model}"


def _place_of(row: Row) -> str:
    """Return the tensor of a row in words.

    >>> _place_of({"model": "Net", "module": "body.0", "tensor": "out", "phase": "eval", "call": 1})
    'Net.body.0.out (eval, call 1)'
    """
    place = ".".join(filter(None, (row.get("model"), row["module"], row["tensor"])))
    phase, call = row.get("phase", "forward"), row.get("call")
    details = [
        *([phase] if phase != "forward" else []),
        *([row["branch"]] if row.get("branch") else []),
        *([f"call {call}"] if call else []),
    ]
    return f"{place} ({', '.join(details)})" if details else place
