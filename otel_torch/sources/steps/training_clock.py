"""Counts the training steps of one model.

Which step a model is at is usually said by its optimizers (`optimizers.py`). Where none holds its
parameters, because a program updates them itself, `UpdateWatch` tells steps apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from otel_torch.sources.steps.optimizers import OptimizerClock


class TrainingClock:
    """The training steps of one model.

    Attributes:
        next_step: the number of the step after the last one that began.
        loop: how often the model was trained from an earlier step again.
        is_trained: whether a step of the model was ever seen.
        is_updated_in_place: whether its parameters change although no optimizer holds them.
        ran_before: how many training steps of any model had begun when this model last ran.
        follows: whether the model is not trained itself but has run in training steps.
        trails: the trained model behind whose step it first ran, such as that of an EMA copy.
        held_by: the optimizers of the model, and the state of the optimizers when they were found.
        updates: watches the parameters of a model that no optimizer holds.

    >>> clock = TrainingClock()
    >>> clock.begin(0, []), clock.begin(1, []), clock.begin(0, [])
    (0, 0, 1)
    """

    def __init__(self) -> None:
        self.next_step = 0
        self.loop = 0
        self.is_trained = self.is_updated_in_place = False
        self.follows = False
        self.trails: str | None = None
        self.ran_before: int | None = None
        self.held_by: tuple[object, list[OptimizerClock]] | None = None
        self.updates: UpdateWatch | None = None
        self._last: tuple[int, frozenset[int]] | None = None  # step and optimizers

    def loop_of(self, step: int, optimizers: Sequence[OptimizerClock]) -> int:
        """Return the loop of a step that these optimizers count.

        A new loop begins where a new optimizer, or one whose earlier state was loaded, counts from
        a step that the model has passed.
        """
        goes_back = step < self.next_step
        if self._last is not None:
            last, serials = self._last
            goes_back = step < last or (goes_back and serials != _serials(optimizers))
        return self.loop + goes_back

    def begin(self, step: int, optimizers: Sequence[OptimizerClock]) -> int:
        """Begin a training step, and return its loop."""
        self.loop = self.loop_of(step, optimizers)
        self._last = step, _serials(optimizers)
        self.next_step = step + 1
        return self.loop


def _serials(optimizers: Sequence[OptimizerClock]) -> frozenset[int]:
    return frozenset(optimizer.serial for optimizer in optimizers)


class UpdateWatch:
    """Tells whether a backward pass of a model was followed by a change of its parameters.

    An optimizer changes parameters in place, which their version counters show, or through
    `parameter.data`, which they do not; then the gradients that it clears show it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._versions = self._read_versions()
        self._gradients: list[tuple[int, int] | None] | None = None

    def backward_ended(self) -> None:
        """Remember the gradients that a backward pass has left."""
        self._gradients = self._read_gradients()

    @property
    def has_changed(self) -> bool:
        """Whether the parameters have changed, or their gradients are gone, since a backward."""
        return self._gradients is not None and (
            self._read_versions() != self._versions or self._read_gradients() != self._gradients
        )

    def _read_versions(self) -> list[int | None]:
        return [
            None if (parameter := reference()) is None else parameter._version
            for reference in self._parameters
        ]

    def _read_gradients(self) -> list[tuple[int, int] | None]:
        return [
            None
            if (parameter := reference()) is None or (gradient := parameter.grad) is None
            else (id(gradient), gradient._version)
            for reference in self._parameters
        ]
