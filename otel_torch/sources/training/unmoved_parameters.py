"""Notices parameters with a gradient that no step of their optimizer changes.

A module's update ratio does not show them where its bias moves and its weight does not. Nothing is
read from a device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otel_torch.laws.facts import FEWEST_STEPS
from otel_torch.sources.models.model import Model
from otel_torch.sources.training.owned_parameters import OwnedTensors
from otel_torch.statistics.norms import squared_norms

# of the gradient of all: the bias in front of a norm has one of rounding errors alone, about 1e-7
_ROUNDING = 1e-5
_WIDE = (torch.float32, torch.float64)


@dataclass(slots=True, eq=False)
class _UnmovedSoFar:
    """The steps of one set of parameters so far.

    still: of each parameter, whether no step has changed it. due: the step at which the gradients
    are looked at. confirmed: the parameters that were still then, and should have changed.
    """

    names: list[str]
    still: Tensor
    count: int = 0
    due: int = FEWEST_STEPS
    confirmed: list[str] = field(default_factory=list)


class UnmovedParameters:
    """The parameters of each model that were not changed in any step looked at."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Model, _UnmovedSoFar] = weakref.WeakKeyDictionary()

    def changed(
        self,
        model: Model,
        owned: OwnedTensors,
        changes: Tensor,
        gradients: Callable[[], OwnedTensors],
    ) -> None:
        """Note which parameters a step has changed.

        Args:
            changes: of each of the parameters, on any device.
            gradients: returns the gradients that the step has read; called only if needed.
        """
        if not changes.is_cpu:
            return
        names, steps = owned.names, self._models.get(model)
        if steps is None or steps.names != names:
            steps = self._models[model] = _UnmovedSoFar(
                names, torch.ones_like(changes, dtype=torch.bool)
            )
        steps.still &= changes == 0
        steps.count += 1
        if steps.count >= steps.due:
            # an unused parameter is still for ever, and the norms of all gradients take long
            steps.due *= 2
            is_suspicious = bool(steps.still.any()) and not bool(steps.still.all())
            steps.confirmed = _with_gradient(steps, owned, gradients()) if is_suspicious else []

    def names(self, model: Model) -> list[str]:
        """Return the parameters with a gradient that no step has changed."""
        steps = self._models.get(model)
        if steps is None:
            return []
        is_still = dict(zip(steps.names, steps.still.tolist(), strict=True))
        return [name for name in steps.confirmed if is_still[name]]


def _with_gradient(steps: _UnmovedSoFar, owned: OwnedTensors, gradients: OwnedTensors) -> list[str]:
    """Return the unchanged parameters whose gradients are more than rounding errors.

    In half precision a small update may be lost to rounding, which is another law.
    """
    if not gradients.tensors:
        return []
    norms = squared_norms(gradients.tensors).sqrt()
    is_large = norms > _ROUNDING * norms.square().sum().sqrt()
    has_gradient = dict(zip(gradients.parameter_ids, is_large.tolist(), strict=True))
    columns = zip(
        steps.names, steps.still.tolist(), owned.parameter_ids, owned.tensors, strict=True
    )
    return [
        name
        for name, is_still, key, tensor in columns
        if is_still and has_gradient.get(key) and tensor.dtype in _WIDE
    ]
