"""Notices gradients that nobody clears between two steps of an optimizer.

The first and the last parameter with a gradient stand for all. Whoever clears a gradient makes it
another tensor, or writes to it outside of a backward pass; a backward pass of another loss may add
to it before. Each thread looks at the optimizers that it steps itself: a gradient that a backward
pass of another thread is writing must not be read, because torch would crash.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.tensors.parameter_data import GradientState, gradient_state
from otel_torch.sources.training.training_rows import TrainingRows


class _Probe:
    """A parameter whose gradient an optimizer has used."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self.used = self.latest = self.state()
        self.is_cleared = False

    @torch_private.unseen_by_function_modes
    def state(self) -> GradientState:
        return gradient_state(self._parameter())

    @property
    def is_added_to(self) -> bool:
        """Whether a gradient was added to the one that was used, in its own memory."""
        used, now = self.used, self.state()
        is_same_tensor = used is not None and now is not None and used[0] == now[0]
        return is_same_tensor and now != used and not self.is_cleared


class _SteppedHere(threading.local):
    """`probes`: those of each optimizer that has stepped in a thread."""

    def __init__(self) -> None:
        self.probes: Any = WeakIdKeyDictionary()


class GradientClearing:
    """Adds a row to each step whose gradients add to those of the step before."""

    def __init__(self, rows: TrainingRows) -> None:
        self._rows, self._thread = rows, _SteppedHere()

    def backward_starting(self, _: Any) -> None:
        """Note which gradients were cleared since the last backward pass or step."""
        for probe in self._all():
            probe.is_cleared = probe.is_cleared or probe.state() != probe.latest

    def backward_ended(self) -> None:
        """Note what the backward pass has written."""
        for probe in self._all():
            probe.latest = probe.state()

    def optimizer_stepped(self, step: OptimizerStep) -> None:
        """Add a row if the gradients of the step before are still in those of this one, which a
        closure may have computed, and follow these.
        """
        probes = self._thread.probes.get(step.optimizer) or ()
        if any(probe.is_added_to for probe in probes):
            for model, _, position in step.updates:
                if self._rows.are_wanted(model, position):
                    self._rows.add_numbers(model, position, [("", "uncleared")], [1.0])

        groups = step.optimizer.param_groups
        first, last = _first_with_gradient(groups, iter), _first_with_gradient(groups, reversed)
        used = [first] if first is last else [first, last]
        self._thread.probes[step.optimizer] = [_Probe(each) for each in used if each is not None]

    def _all(self) -> Iterator[_Probe]:
        for probes in list(self._thread.probes.values()):
            yield from probes


@torch_private.unseen_by_function_modes
def _first_with_gradient(
    groups: list[dict[str, Any]], order: Callable[[list[Any]], Iterator[Any]]
) -> Tensor | None:
    """Return the first parameter with a gradient; `order` is `iter` or `reversed`."""
    parameters = (each for group in order(groups) for each in order(group["params"]))
    return next((each for each in parameters if each.grad is not None), None)
