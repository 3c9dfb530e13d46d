"""Notices a model that returns the same for every sample of a batch, though the samples differ, or
are one number alone.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.training.throughput import tensors_in
from otel_torch.sources.training.training_rows import TrainingRows
from otel_torch.statistics.unwrap_tensor import has_memory


class EqualOutputs:
    """Adds a row to each detailed step with such a forward; on a device, to each detailed step."""

    def __init__(self, rows: TrainingRows) -> None:
        self._rows = rows
        # by model whose training forward runs: its step, and whether its inputs vary
        self._running: weakref.WeakKeyDictionary[Model, tuple[TrainingStep, Tensor]]
        self._running = weakref.WeakKeyDictionary()

    @torch_private.unobserved
    def training_forward(self, active: ActiveStep, inputs: Inputs) -> None:
        """See whether the samples of the first forward of a step differ."""
        model, position = active.model, active.position
        step = TrainingStep(position.step, position.loop, active.scope)
        if not (
            isinstance(model, Model)
            and self._rows.are_detailed(step)
            and self._rows.are_wanted(model, step)
        ):
            return
        tensor = next(tensors_in(inputs.values), None)
        if tensor is not None and _has_samples(tensor):
            self._running[model] = step, ~_are_equal(tensor) | _is_one_number(tensor)

    @torch_private.unobserved
    def forward_returned(self, model: Model, _: ForwardContext, output: Any) -> None:
        step, differ = self._running.pop(model, (None, None))
        if step is None or differ is None:
            return
        output = next((tensor for tensor in tensors_in([output]) if _has_samples(tensor)), None)
        if output is None or output.device != differ.device:
            return
        is_equal = (_are_equal(output) & differ).to(torch.float32)
        if is_equal.is_cpu and not is_equal.item():
            return
        if self._rows.are_wanted(model, step):
            self._rows.add_numbers(model, step, [("", "equal_outputs")], is_equal.reshape(1))


def _has_samples(tensor: Tensor) -> bool:
    """Return whether a tensor has several samples of several numbers, in memory of its own."""
    is_plain = tensor.layout is torch.strided and type(tensor.data) is Tensor
    is_batch = is_plain and tensor.dim() >= 2 and tensor.shape[0] > 1 and tensor.numel() > 0
    return is_batch and has_memory(tensor)


def _is_one_number(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    return (values == values[(0,) * values.dim()]).all()


def _are_equal(tensor: Tensor) -> Tensor:
    """Return whether all samples of a batch are the same, shape (), on its device."""
    values = tensor.detach()
    return (values == values[:1]).all()
