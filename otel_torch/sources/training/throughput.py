"""Counts the samples and tokens of each training step, and what a step takes.

Time and memory differ between identical runs, so they are attributes of the step's scope, and a
summary in the metadata, but no rows.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from otel_torch.sources.events import RunEvents
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import Inputs
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.training_quantities import DEVICE_MEMORY, SAMPLES, TOKENS

# steps whose median is in the summary: the last ones
_MAX_STEPS = 10_000


@dataclass(slots=True)
class _Steps:
    """The training steps of one model: how many, and of each the seconds and the rates."""

    count: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))
    rates: dict[str, deque[float]] = field(default_factory=dict)
    device_memory: int | None = None


class Throughput:
    """The throughput of the training steps of one session."""

    def __init__(self, events: RunEvents) -> None:
        self._models: dict[str, _Steps] = {}
        events.training_forward.append(self.count_inputs)
        events.optimizer_stepped.append(self.read_memory)
        events.step_ended.append(self.step_ended)

    def count_inputs(self, active: ActiveStep, inputs: Inputs) -> None:
        """Add the samples and tokens of a forward to its step."""
        attributes = active.scope.attributes
        for name, number in _count(inputs.values).items():
            attributes[name] = attributes.get(name, 0) + number

    def read_memory(self, optimizer_step: OptimizerStep) -> None:
        """Note the peak of the memory on the device. Starts no device, and waits for none."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        peak = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"]
        for update in optimizer_step.updates:
            if update.step.scope is not None:
                update.step.scope.attributes[DEVICE_MEMORY] = peak

    def step_ended(self, active: ActiveStep) -> None:
        """Add a training step to the summary of its model."""
        if not (active.trains and active.stepped and active.model is not None):
            return
        steps, scope = self._models.setdefault(active.model.name, _Steps()), active.scope
        seconds = (scope.end_ns - scope.start_ns) / 1e9
        steps.count += 1
        steps.seconds.append(seconds)
        steps.device_memory = scope.attributes.get(DEVICE_MEMORY, steps.device_memory)
        for name in (SAMPLES, TOKENS):
            if name in scope.attributes and seconds > 0:
                rates = steps.rates.setdefault(name, deque(maxlen=_MAX_STEPS))
                rates.append(scope.attributes[name] / seconds)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the summary of each model; medians of the times and rates."""
        return {name: _describe(steps) for name, steps in list(self._models.items())}


def _describe(steps: _Steps) -> dict[str, Any]:
    summary = {
        "steps": steps.count,
        "step_s": statistics.median(steps.seconds),
        "samples_per_s": _median(steps.rates.get(SAMPLES)),
        "tokens_per_s": _median(steps.rates.get(TOKENS)),
        "device_memory": steps.device_memory,
    }
    return {name: value for name, value in summary.items() if value is not None}


def _median(values: Iterable[float] | None) -> float | None:
    return None if values is None else statistics.median(values)


def _count(values: Sequence[Any]) -> dict[str, int]:
    """Return the samples, and the tokens if the first tensor is of their numbers.

    >>> _count(({"input_ids": torch.zeros(2, 8, dtype=torch.int64)},))
    {'torch.training.samples': 2, 'torch.training.tokens': 16}
    """
    first = next(tensors_in(values), None)
    if first is None or not first.dim() or not all(type(size) is int for size in first.shape):
        return {}
    counts = {SAMPLES: first.shape[0]}
    if first.dim() == 2 and first.dtype in (torch.int32, torch.int64):
        counts[TOKENS] = first.shape[0] * first.shape[1]
    return counts


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in dicts and sequences there."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
