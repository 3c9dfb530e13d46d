"""Notices batch norms whose running statistics do not move while the model trains.

A batch norm in eval mode keeps them on purpose if its own weights are frozen, too.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.statistics.unwrap_tensor import host_values


class _Norm(NamedTuple):
    """A batch norm as it was when its model began to train.

    counted: how often its count of batches was written. mean: a copy of its running mean; None on a
    device, which is not read.
    """

    name: str
    module: weakref.ref[nn.Module]
    counted: int | None
    mean: Tensor | None

    @torch_private.unobserved
    def is_still(self) -> bool:
        """Return whether its statistics are as they were, though its weights train."""
        module: Any = self.module()
        if module is None or module.running_mean is None:
            return False
        if module.weight is not None and not module.weight.requires_grad:
            return False
        mean = host_values(module.running_mean)
        if self.mean is not None and mean is not None:
            return torch.equal(self.mean, mean)
        return module.momentum == 0 or _counted(module) == self.counted is not None


class StillStatistics:
    """The batch norms of a model that begins to train."""

    @torch_private.unobserved
    def __init__(self, model: Model) -> None:
        self._norms: list[_Norm] = []
        for site in list(model.sites.values()):
            module: Any = site.module()
            if isinstance(module, _BatchNorm) and module.running_mean is not None and site.names:
                mean = host_values(module.running_mean)
                kept = None if mean is None else mean.clone()
                self._norms.append(_Norm(site.names[0][0], site.module, _counted(module), kept))

    def names(self) -> list[str]:
        """Return the modules whose statistics have not moved since then."""
        return [norm.name for norm in self._norms if norm.is_still()]


def _counted(module: Any) -> int | None:
    count = module.num_batches_tracked
    return None if count is None else torch_private.version_of(count)
