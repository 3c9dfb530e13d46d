"""The losses that a program calls `backward` on, until it is known which training step they are of.

A loss is measured before its backward pass, and taken by the next optimizer step of a model whose
gradients that pass has changed. A generator's loss also changes the gradients of the critic, whose
optimizer steps later, and two losses may run backward before any optimizer steps. Threads may train
models of their own; a gradient that a backward pass of another thread is writing must not be read,
because torch would crash.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import Inputs
from otel_torch.sources.tensors.parameter_data import gradient_state
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
    """A loss that was measured.

    reached: the models that it gave gradients, or may be giving gradients now; None if unknown.
    """

    measurement: Measurement
    reached: frozenset[Model] | None = None


class _ThreadLosses(threading.local):
    """What one thread trains."""

    def __init__(self) -> None:
        self.trained: list[weakref.ref[Model]] = []  # that ran last, the newest at the end
        self.running: list[PendingLoss] = []  # of the backward pass that runs
        self.before: list[tuple[Model, list[object]]] = []  # gradients when it began
        # by number of the operation that has scaled a loss: the loss, and the scale
        self.scaled: dict[int, tuple[Measurement, Tensor | None]] = {}


class PendingLosses:
    """The losses of one session that no optimizer step has taken yet."""

    def __init__(self) -> None:
        self._thread = _ThreadLosses()
        # of all threads: an optimizer may step in another one than the backward pass
        self._pending: deque[PendingLoss] = deque(maxlen=_MAX_PENDING)
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
                known = self._thread.scaled
                while len(known) >= _MAX_PENDING:
                    del known[next(iter(known))]
                known[number] = measure(outputs), torch_private.scale_of(scaler)

    def _measure(self, root: Tensor) -> Measurement:
        """Measure a loss as it was before a gradient scaler multiplied it."""
        nodes, scaled = [root.grad_fn], self._thread.scaled
        for distance in range(_MAX_OPERATIONS if scaled else 0):
            for node in nodes:
                number = torch_private.number_of_operation(node)
                loss, scale = scaled.get(number, (None, None)) if number else (None, None)
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
        model, trained = active.model, self._thread.trained
        if isinstance(model, Model) and not (trained and trained[-1]() is model):
            others = [other for other in trained if other() not in (None, model)]
            self._thread.trained = [*others[1 - _MAX_TRAINED :], weakref.ref(model)]

    @torch_private.unseen_by_function_modes
    def backward_starting(self, roots: Iterable[Tensor]) -> None:
        """Measure the roots of one element; others are no losses."""
        thread = self._thread
        self._drop(thread.running)  # of a backward pass that has failed
        thread.before, thread.running = [], []
        measured = [self._measure(root) for root in roots if _is_loss(root)]
        if measured:
            models = [model for reference in thread.trained if (model := reference())]
            thread.before = [(model, self._gradients(model)) for model in models]
            thread.running = [PendingLoss(loss, frozenset(models) or None) for loss in measured]
            self._pending += thread.running  # an optimizer may step inside of the backward pass

    @torch_private.unseen_by_function_modes
    def backward_ended(self) -> None:
        """Find the models that the losses have given gradients."""
        thread = self._thread
        reached = frozenset(
            model for model, before in thread.before if self._gradients(model) != before
        )
        for loss in thread.running:
            loss.reached = reached or None
        thread.running, thread.before = [], []

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
        return [gradient_state(parameter) for parameter in parameters]

    # -- optimizer steps

    def take(self, model: Model) -> list[PendingLoss]:
        """Return the losses of a model that is about to be updated, in order."""
        pending = list(self._pending)
        taken = [loss for loss in pending if loss.reached is None or model in loss.reached]
        self._drop(taken)
        return [loss for loss in taken if loss.measurement.row is not None]

    def unused(self) -> Counter[Model | None]:
        """Return how many losses have given gradients to each model since its last step; to None,
        how many to models that no optimizer holds.
        """
        return Counter(model for loss in list(self._pending) for model in loss.reached or (None,))

    def _drop(self, losses: list[PendingLoss]) -> None:
        for loss in losses:
            with suppress(ValueError):  # another thread has taken it
                self._pending.remove(loss)


def _is_loss(value: Any) -> bool:
    """Return whether a value is a tensor of one element, which is not symbolic."""
    return isinstance(value, Tensor) and type(value.numel()) is int and value.numel() == 1


@torch_private.unobserved
def _divide(root: Tensor, scale: Tensor) -> Tensor:
    return (root.detach() / scale.to(root.device)).reshape(1)
