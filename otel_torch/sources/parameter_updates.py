"""The norms of the parameters, and by how much of them an optimizer step changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.sources.models import Model
from otel_torch.sources.optimizers import optimized_parameters
from otel_torch.sources.owned_parameters import OwnedTensors, ParameterOwners, say_incomplete
from otel_torch.sources.parameter_data import value_of
from otel_torch.sources.training_rows import TrainingRows
from otel_torch.sources.training_steps import TrainingStep
from otel_torch.sources.updates import OptimizerStep
from otel_torch.statistics.norms import squared_norms, sums_of_parts
from otel_torch.statistics.samples import Samples


@dataclass(frozen=True, slots=True)
class _Before:
    """The parameters of a model as they are before an optimizer step."""

    model: Model
    step: TrainingStep
    owned: OwnedTensors
    squares: Tensor
    samples: Samples


class ParameterUpdates:
    """Records parameter norms and update ratios for one session."""

    def __init__(self, rows: TrainingRows, owners: ParameterOwners) -> None:
        self._rows, self._owners = rows, owners
        # by optimizer that is stepping, and model
        self._before: dict[int, dict[Model, _Before]] = {}

    @torch_private.unobserved
    def starting(self, optimizer_step: OptimizerStep) -> None:
        """Measure the parameters that an optimizer is about to change."""
        held = optimized_parameters(optimizer_step.optimizer)
        measured = self._before.setdefault(id(optimizer_step.optimizer), {})
        for model, parameter_ids, step in optimizer_step.updates:
            if not (self._rows.are_wanted(model, step) and self._rows.are_detailed(step)):
                continue
            # what it holds copies of changes later
            owned = self._owners.tensors(model, parameter_ids & held, _if_trainable)
            if not owned.is_complete:
                say_incomplete(model, "norm and update ratio")
            elif owned.tensors:
                squares, samples = squared_norms(owned.tensors), Samples(owned.tensors)
                measured[model] = _Before(model, step, owned, squares, samples)

    @torch_private.unobserved
    def ended(self, optimizer_step: OptimizerStep) -> None:
        """Record what an optimizer has changed."""
        for before in self._before.pop(id(optimizer_step.optimizer), {}).values():
            changes = before.samples.squared_changes(before.owned.tensors)
            if changes is not None:
                self._record(before, changes)

    def _record(self, before: _Before, changes: Tensor) -> None:
        counts = [count for _, count in before.owned.modules]
        labels: list[tuple[str, str]] = []
        numbers: list[Tensor] = []
        totals = before.squares.sum(), changes.sum()
        by_module = sums_of_parts(before.squares, counts), sums_of_parts(changes, counts)
        for label, compute in _QUANTITIES.items():
            labels.append(("", label))
            numbers.append(compute(*totals))
            values = compute(*by_module)
            for index, (module, _) in enumerate(before.owned.modules):
                if module and self._rows.has_module(module):
                    labels.append((module, label))
                    numbers.append(values[index])
        self._rows.add_numbers(before.model, before.step, labels, torch.stack(numbers))


def _if_trainable(parameter: Tensor) -> Tensor | None:
    return value_of(parameter) if parameter.requires_grad else None


def _ratio(squares: Tensor, changes: Tensor) -> Tensor:
    """Return the norm of the change over the norm before it; of parameters that were zero, 1."""
    is_zero = squares == 0
    ratio = (changes / torch.where(is_zero, 1.0, squares)).sqrt()
    return torch.where(is_zero, (changes > 0).to(ratio.dtype), ratio)


_QUANTITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "param_norm": lambda squares, changes: squares.sqrt(),
    "update_ratio": _ratio,
}
