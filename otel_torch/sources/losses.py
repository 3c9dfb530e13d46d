"""The losses that a program calls `backward` on, until it is known which training step they are of.

A loss is measured before its backward pass, and taken by the next optimizer step of a model whose
gradients that pass has changed. A generator's loss also changes the gradients of the critic, whose
optimizer steps later, and two losses may run backward before any optimizer steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler

from otel_torch import torch_private
from otel_torch.sources.active_steps import ActiveStep
from otel_torch.sources.forwards import Inputs
from otel_torch.sources.modules import Model
from otel_torch.statistics.measure import Measurement, measure
from otel_torch.statistics.norms import measure_numbers

# so many losses wait for an optimizer step; those of a saliency map wait in vain
_MAX_PENDING = 256
# models that are trained in turns, such as a generator and its critics
_MAX_TRAINED = 16
# how many operations may follow `GradScaler.scale`: `(scaler.scale(loss) / 4).backward()`
_MAX_OPERATIONS = 4


@dataclass(slots=True, eq=False)
class PendingLoss:
    """A loss that was measured. `reached`: the models that it gave gradients; None if unknown."""

    measurement: Measurement
    reached: frozenset[Model] | None = None


class PendingLosses:
    """The losses of one session that no optimizer step has taken yet."""

    def __init__(self) -> None:
        self._trained: list[weakref.ref[Model]] = []  # that ran last, the newest at the end
        self._pending: deque[PendingLoss] = deque(maxlen=_MAX_PENDING)
        self._running: list[PendingLoss] = []  # of the backward pass that runs
        self._before: list[tuple[Model, list[object]]] = []
        # by number of the operation that has scaled a loss: the loss, and the scale
        self._scaled: dict[int, tuple[Measurement, Tensor | None]] = {}
        self._probes: weakref.WeakKeyDictionary[Model, list[weakref.ref[nn.Parameter]]]
        self._probes = weakref.WeakKeyDictionary()

    # -- scaling

    def scaled(self, scaler: GradScaler, outputs: Any, result: Any) -> None:
        """Remember what a gradient scaler has multiplied."""
        if isinstance(outputs, (list, tuple)):
            for output, scaled in zip(outputs, result, strict=True):
                self.scaled(scaler, output, scaled)
        elif outputs is not result and _is_loss(outputs):
            number = torch_private.number_of_operation(result.grad_fn)
            if number is not None:
                while len(self._scaled) >= _MAX_PENDING:
                    del self._scaled[next(iter(self._scaled))]
                self._scaled[number] = measure(outputs), torch_private.scale_of(scaler)

    def _measure(self, root: Tensor) -> Measurement:
        """Measure a loss as it was before a gradient scaler multiplied it."""
        nodes = [root.grad_fn]
        for distance in range(_MAX_OPERATIONS if self._scaled else 0):
            for node in nodes:
                number = torch_private.number_of_operation(node)
                loss, scale = self._scaled.get(number, (None, None)) if number else (None, None)
                if loss is not None and not distance:
                    return loss
                if scale is not None:
                    return measure_numbers(_divide(root, scale))[0]
            nodes = [
                above for node in nodes if node is not None for above, _ in node.next_functions
            ]
        return measure(root)

    # -- backward passes

    def forward_starting(self, active: ActiveStep, inputs: Inputs) -> None:
        """Note a model whose gradients a backward pass may change."""
        model = active.model
        if isinstance(model, Model) and not (self._trained and self._trained[-1]() is model):
            others = [other for other in self._trained if other() not in (None, model)]
            self._trained = [*others[1 - _MAX_TRAINED :], weakref.ref(model)]

    @torch_private.unseen_by_function_modes
    def backward_starting(self, roots: Iterable[Tensor]) -> None:
        """Measure the roots of one element; others are no losses."""
        self._running = [PendingLoss(self._measure(root)) for root in roots if _is_loss(root)]
        self._before = []
        if self._running:
            models = [reference() for reference in self._trained]
            self._before = [(model, self._gradients(model)) for model in models if model]

    @torch_private.unseen_by_function_modes
    def backward_ended(self) -> None:
        """Find the models that the losses have given gradients."""
        reached = frozenset(
            model for model, before in self._before if self._gradients(model) != before
        )
        for loss in self._running:
            loss.reached = reached or None
            self._pending.append(loss)
        self._running, self._before = [], []

    def _gradients(self, model: Model) -> list[object]:
        """Return what a backward pass changes, of the first and the last parameter of a model."""
        probes = self._probes.get(model)
        parameters = [] if probes is None else [reference() for reference in probes]
        if not parameters or not all(
            parameter is not None and parameter.requires_grad for parameter in parameters
        ):
            trainable = model.trainable_parameters()
            parameters = [trainable[0], trainable[-1]] if trainable else []
            self._probes[model] = [
                weakref.ref(parameter) for parameter in parameters if parameter is not None
            ]
        return [
            None
            if parameter is None or (gradient := parameter.grad) is None
            else (id(gradient), torch_private.version_of(gradient))
            for parameter in parameters
        ]

    # -- optimizer steps

    def take(self, model: Model) -> list[PendingLoss]:
        """Return the losses of a model that is about to be updated, in order."""
        # an optimizer may step inside of the backward pass
        self._pending += self._running
        self._running = []
        taken = [loss for loss in self._pending if loss.reached is None or model in loss.reached]
        self._pending = deque((loss for loss in self._pending if loss not in taken), _MAX_PENDING)
        return [loss for loss in taken if loss.measurement.row is not None]


def _is_loss(value: Any) -> bool:
    """Return whether a value is a tensor of one element, which is not symbolic."""
    return isinstance(value, Tensor) and type(value.numel()) is int and value.numel() == 1


@torch_private.unobserved
def _divide(root: Tensor, scale: Tensor) -> Tensor:
    return (root.detach() / scale.to(root.device)).reshape(1)
