"""Notices a step that has the batch of the step before, made anew.

A program that passes the same tensor in each step trains on all of its data on purpose.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import Inputs
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.training.throughput import tensors_in
from otel_torch.sources.training.training_rows import TrainingRows
from otel_torch.statistics.norms import whole_values
from otel_torch.statistics.samples import sample
from otel_torch.statistics.unwrap_tensor import has_memory


@dataclass(slots=True)
class _Batch:
    """The first input of a step. `origin`: the tensor that it is, or all of which it views."""

    place: tuple[int, int]
    origin: weakref.ref[Tensor]
    values: Tensor


class RepeatedBatches:
    """Adds a row to each step with the batch of the step before; on a device, to each step."""

    def __init__(self, rows: TrainingRows) -> None:
        self._rows = rows
        self._batches: weakref.WeakKeyDictionary[Model, _Batch] = weakref.WeakKeyDictionary()

    @torch_private.unobserved
    def training_forward(self, active: ActiveStep, inputs: Inputs) -> None:
        model, position = active.model, active.position
        place = position.loop, position.step
        if not isinstance(model, Model):
            return
        before = self._batches.get(model)
        if before is not None and before.place == place:
            return
        step = TrainingStep(position.step, position.loop, active.scope)
        if not self._rows.are_wanted(model, step):
            return
        tensor = next(tensors_in(inputs.values), None)
        values = None if tensor is None else _values_of(tensor)
        if tensor is None or values is None:
            self._batches.pop(model, None)
            return
        origin = _origin_of(tensor)
        batch = self._batches[model] = _Batch(
            place, weakref.ref(origin), sample(values.detach()).clone()
        )
        if (
            before is None
            or before.origin() is origin
            or before.values.shape != batch.values.shape
            or before.values.device != batch.values.device
        ):
            return
        is_same = _are_equal(before.values, batch.values)
        if batch.values.is_cpu and not is_same.item():
            return
        self._rows.add_numbers(model, step, [("", "repeated_batch")], is_same.reshape(1))


def _values_of(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a batch, token ids among them; None if there are too few to tell."""
    values = whole_values(tensor)
    is_plain = type(tensor.data) is Tensor and tensor.layout is torch.strided
    if values is None and is_plain and has_memory(tensor):
        values = tensor
    is_known = values is not None and values.numel() > 1 and not values.is_complex()
    return values if is_known else None


def _origin_of(tensor: Tensor) -> Tensor:
    """Return the tensor all of which another one is or views, or that one itself."""
    base = tensor._base
    return base if base is not None and base.numel() == tensor.numel() else tensor


def _are_equal(first: Tensor, second: Tensor) -> Tensor:
    """Return whether two tensors are equal and not of one number, as 0 or 1, on their device."""
    varies = (second != second.reshape(-1)[0]).any()
    return ((first == second).all() & varies).to(torch.float32)
