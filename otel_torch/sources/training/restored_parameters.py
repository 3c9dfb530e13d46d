"""Notices parameters that an optimizer changes and that are what they were before its next step.

Their norm, which is measured before each detailed step anyway, tells which may be such; only of
those the numbers are kept from one step to the next. Nothing is read from a device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.laws.facts import FEWEST_STEPS
from otel_torch.sources.models.model import Model
from otel_torch.sources.training.owned_parameters import OwnedTensors
from otel_torch.statistics.samples import Samples


@dataclass(slots=True, eq=False)
class _PastSteps:
    """The steps of a model so far.

    restored: of each parameter, whether its norm was the same before each step, though each has
    changed it. kept: numbers of the parameters of which that is so, by their indices. confirmed:
    those whose numbers were the same before the next step.
    """

    names: list[str]
    squares: Tensor
    changes: Tensor
    restored: Tensor
    count: int = 0
    kept: tuple[list[int], Samples] | None = None
    confirmed: list[str] = field(default_factory=list)


class RestoredParameters:
    """The parameters of each model that were as before in all steps looked at."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Model, _PastSteps] = weakref.WeakKeyDictionary()

    @torch_private.unobserved
    def measured(self, model: Model, owned: OwnedTensors, squares: Tensor) -> None:
        """Compare the parameters before a step with those before the last one."""
        if not squares.is_cpu:
            return
        names, past = owned.names, self._models.get(model)
        if past is None or past.names != names:
            whole = torch.ones_like(squares, dtype=torch.bool)
            self._models[model] = _PastSteps(names, squares, torch.zeros_like(squares), whole)
            return
        past.restored &= (squares == past.squares) & (past.changes > 0)
        past.squares, past.count = squares, past.count + 1
        if past.count >= FEWEST_STEPS:
            _confirm(past, owned.tensors)

    def changed(self, model: Model, owned: OwnedTensors, changes: Tensor) -> None:
        """Note by how much a step has changed each parameter."""
        past = self._models.get(model)
        if past is not None and past.names == owned.names:
            past.changes = changes

    def names(self, model: Model) -> list[str]:
        """Return the parameters whose every step was undone."""
        past = self._models.get(model)
        return [] if past is None else past.confirmed


def _confirm(past: _PastSteps, tensors: list[Tensor]) -> None:
    """Compare the numbers of what may have been restored with those that were kept."""
    indices = past.restored.nonzero().flatten().tolist()
    chosen = [tensors[index] for index in indices]
    if past.kept is not None:
        known, samples = past.kept
        changes = samples.squared_changes([tensors[index] for index in known])
        is_same = [] if changes is None else (changes == 0).tolist()
        past.confirmed = [
            past.names[index]
            for index, same in zip(known, is_same, strict=False)
            if same and index in indices
        ]
    past.kept = (indices, Samples(chosen)) if chosen else None
