"""The norms of the parameters, and by how much of them an optimizer step changes them.

Parameters that no optimizer holds are measured again right before the next forward: an optimizer
that holds copies has copied them back by then, and others show that they do not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.optimizers import Optimizers, optimized_parameters
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.tensors.parameter_data import gradient_of, value_of
from otel_torch.sources.training.owned_parameters import (
    OwnedTensors,
    ParameterOwners,
    say_incomplete,
)
from otel_torch.sources.training.restored_parameters import RestoredParameters
from otel_torch.sources.training.rewritten_parameters import RewrittenParameters
from otel_torch.sources.training.training_rows import ENDED, TrainingRows
from otel_torch.sources.training.unmoved_parameters import UnmovedParameters
from otel_torch.statistics.norms import squared_norms, sums_of_parts
from otel_torch.statistics.samples import Samples
from otel_torch.training_quantities import row_label

# steps at which parameters that no optimizer holds may have gradients for the first time
_LOOKED_AT = (5, 10, 100, 1000)
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Before:
    """The parameters of a model as they are before an optimizer step."""

    model: Model
    step: TrainingStep
    owned: OwnedTensors
    squares: Tensor
    samples: Samples
    shared: frozenset[str] = frozenset()  # modules with parameters that an optimizer holds, too


class ParameterUpdates:
    """Records parameter norms and update ratios for one session."""

    def __init__(self, rows: TrainingRows, owners: ParameterOwners, optimizers: Optimizers) -> None:
        self._rows, self._owners, self._optimizers = rows, owners, optimizers
        self._restored, self._unmoved = RestoredParameters(), UnmovedParameters()
        self._rewritten = RewrittenParameters(rows)
        # by optimizer that is stepping, and model
        self._before: dict[int, dict[Model, _Before]] = {}
        self._unheld: weakref.WeakKeyDictionary[Model, _Before] = weakref.WeakKeyDictionary()
        # by model, and for a state of its parameters and optimizers
        self._watched: weakref.WeakKeyDictionary[
            Model, tuple[object, frozenset[int], frozenset[str]]
        ] = weakref.WeakKeyDictionary()

    @torch_private.unobserved
    def starting(self, optimizer_step: OptimizerStep) -> None:
        """Measure the parameters that an optimizer is about to change."""
        held = optimized_parameters(optimizer_step.optimizer)
        measured = self._before.setdefault(id(optimizer_step.optimizer), {})
        for model, parameter_ids, step in optimizer_step.updates:
            if not (self._rows.are_wanted(model, step) and self._rows.are_detailed(step)):
                continue
            self._measure_unheld(model, step)
            owned = self._owners.tensors(model, parameter_ids & held, _if_trainable)
            if not owned.is_complete:
                say_incomplete(model, "norm and update ratio")
            elif owned.tensors:
                squares, samples = squared_norms(owned.tensors), Samples(owned.tensors)
                self._restored.measured(model, owned, squares)
                self._rewritten.starting(model, owned, step, squares)
                measured[model] = _Before(model, step, owned, squares, samples)

    def describe(self, model: Model) -> dict[str, list[str]]:
        """Return the parameters of a model whose every step was undone, and those that no step
        changed.
        """
        return {
            "restored_parameters": self._restored.names(model),
            "unmoved_parameters": self._unmoved.names(model),
        }

    def _measure_unheld(self, model: Model, step: TrainingStep) -> None:
        """Measure the parameters of a model that no optimizer holds, once a step."""
        if step.step in _LOOKED_AT:
            self._watched.pop(model, None)
        watched, shared = self._unheld_parameters(model)
        if not watched or model in self._unheld:
            return
        owned = self._owners.tensors(model, watched, _if_trainable)
        if not owned.is_complete or not owned.tensors:
            return
        squares, samples = squared_norms(owned.tensors), Samples(owned.tensors)
        step = step._replace(scope=ENDED)
        self._unheld[model] = _Before(model, step, owned, squares, samples, shared)

    def _unheld_parameters(self, model: Model) -> tuple[frozenset[int], frozenset[str]]:
        """Return the parameters that no optimizer holds and that have gradients or copies, and the
        modules with others, "" included.
        """
        ids = model.parameter_ids()
        state = self._optimizers.changes, ids
        known = self._watched.get(model)
        if known is None or known[0] != state:
            held = frozenset().union(*(clock.parameters for clock in self._optimizers))
            others = self._owners.tensors(model, ids & held, value_of).modules
            shared = frozenset(["", *(module for module, _ in others)] if others else [])
            tensor_of = gradient_of if others else value_of
            unheld = self._owners.tensors(model, ids - held, tensor_of).parameter_ids
            known = self._watched[model] = state, frozenset(unheld), shared
        return known[1:]

    @torch_private.unobserved
    def forward_starting(self) -> None:
        """Record how much of the parameters has changed that no optimizer holds."""
        while self._unheld:
            before = self._unheld.popitem()[1]
            changes = before.samples.squared_changes(before.owned.tensors)
            if changes is not None:
                self._record(before, changes)

    @torch_private.unobserved
    def ended(self, optimizer_step: OptimizerStep) -> None:
        for before in self._before.pop(id(optimizer_step.optimizer), {}).values():
            changes = before.samples.squared_changes(before.owned.tensors)
            if changes is not None:
                self._restored.changed(before.model, before.owned, changes)
                self._unmoved.changed(
                    before.model, before.owned, changes, partial(self._gradients, before)
                )
                self._record(before, changes)
                self._record_rounded(before)
                self._rewritten.ended(before.model, before.owned, before.step)

    def _gradients(self, before: _Before) -> OwnedTensors:
        ids = frozenset(before.owned.parameter_ids)
        return self._owners.tensors(before.model, ids, gradient_of)

    def _record_rounded(self, before: _Before) -> None:
        """Record how much of what should change in half precision has not."""
        owned = before.owned
        halves = {
            key: index
            for index, key in enumerate(owned.parameter_ids)
            if owned.tensors[index].dtype in _HALVES
        }
        gradients = self._owners.tensors(before.model, frozenset(halves), gradient_of)
        if not gradients.tensors:
            return
        indices = [halves[key] for key in gradients.parameter_ids]
        share = before.samples.unchanged_share(indices, owned.tensors, gradients.tensors)
        self._rows.add_numbers(before.model, before.step, [("", "rounded_away")], share)

    def _record(self, before: _Before, changes: Tensor) -> None:
        counts = [count for _, count in before.owned.modules]
        labels: list[tuple[str, str]] = []
        numbers: list[Tensor] = []
        totals = before.squares.sum(), changes.sum()
        by_module = sums_of_parts(before.squares, counts), sums_of_parts(changes, counts)
        for label, compute in _QUANTITIES.items():
            if "" not in before.shared:
                labels.append(("", label))
                numbers.append(compute(*totals))
            values = compute(*by_module)
            for index, (module, _) in enumerate(before.owned.modules):
                if module and module not in before.shared and self._rows.has_module(module):
                    labels.append((module, label))
                    numbers.append(values[index])
        ratios, owned = _ratio(before.squares, changes), before.owned
        for index, (module, key) in enumerate(zip(owned.owners, owned.keys, strict=True)):
            if module in before.shared and self._rows.has_module(module):
                labels.append((module, row_label("update_ratio", key)))
                numbers.append(ratios[index])
        if numbers:
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
