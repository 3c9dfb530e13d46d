"""Notices parameters that something else than their optimizer changes between two steps, where
other ranks train with this one: they may be averaged, or sent from one rank.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.training.owned_parameters import OwnedTensors
from otel_torch.sources.training.training_rows import TrainingRows
from otel_torch.statistics.norms import squared_norms


class RewrittenParameters:
    """Adds a row to each step that begins with other parameters than the one before has left; on a
    device, to each step.
    """

    def __init__(self, rows: TrainingRows) -> None:
        self._rows = rows
        # by model: the step, the names of the parameters, and their sums of squares after it
        self._after: weakref.WeakKeyDictionary[Model, tuple[int, list[str], Tensor]]
        self._after = weakref.WeakKeyDictionary()

    @torch_private.unobserved
    def ended(self, model: Model, owned: OwnedTensors, step: TrainingStep) -> None:
        """Measure what a step has left."""
        if torch_private.has_other_ranks():
            self._after[model] = step.step, owned.names, squared_norms(owned.tensors)

    @torch_private.unobserved
    def starting(
        self, model: Model, owned: OwnedTensors, step: TrainingStep, squares: Tensor
    ) -> None:
        """Compare the parameters before a step with those after the one before it."""
        number, names, after = self._after.pop(model, (step.step, owned.names, squares))
        if number != step.step - 1 or names != owned.names or after.device != squares.device:
            return
        is_other = (after != squares).any().to(torch.float32)
        if not is_other.is_cpu or is_other.item():
            self._rows.add_numbers(model, step, [("", "rewritten")], is_other.reshape(1))
