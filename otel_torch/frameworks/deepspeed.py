"""Support for DeepSpeed: its engine counts the steps, and ZeRO keeps parameters and gradients.

ZeRO's optimizers hold flat fp32 copies of a model's parameters. Right before they step, the copies
have the gradients, unscaled and clipped, and the parameters have none.
"""

from __future__ import annotations

import math
import weakref
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otel_torch.frameworks import training_loops
from otel_torch.frameworks.patches import Patches
from otel_torch.sources.tensors import parameter_data
from otel_torch.sources.training import gradient_clipping
from otel_torch.sources.training.gradient_clipping import Clip

_patches = Patches()
# those whose optimizer has the gradients, clipped; the parameters have none
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def _step(engine: Any) -> int:
    return int(engine.global_steps)


def _follow(engine: Any) -> None:
    optimizer = engine.basic_optimizer
    if optimizer is not None:
        training_loops.follow(engine, [optimizer], _step, engine.module.parameters())
    if engine.zero_optimization():
        _engines.add(engine)


def _clip(parameter_ids: frozenset[int]) -> Clip | None:
    """Return how ZeRO's optimizer has clipped the gradients with which it steps."""
    for engine in list(_engines):
        ids = frozenset(map(id, engine.module.parameters()))
        norm = getattr(engine.optimizer, "_global_grad_norm", None)
        if norm is not None and not ids.isdisjoint(parameter_ids):
            limit = engine.optimizer.clip_grad or math.inf
            return Clip(ids, torch.as_tensor(norm), True, limit, scale=None)
    return None


def _value(parameter: Any) -> Tensor | None:
    """Return the value of a parameter of ZeRO-3, if this rank has all of it."""
    whole: Tensor | None = getattr(parameter, "ds_tensor", None)
    if parameter.numel() or whole is None or whole.numel() != parameter.ds_numel:
        return None
    return whole.detach().view(parameter.ds_shape)


class _Part(NamedTuple):
    """What this rank holds of a parameter: `length` of its `whole` numbers, in `copies`."""

    copies: Tensor | None
    start: int
    length: int
    shape: torch.Size
    whole: int


def _part(parameter: Any) -> _Part | None:
    """Return what this rank's optimizer holds of a parameter, if anything."""
    if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
        place = mapping.hp_fragment_address
        copies = mapping.hp_fragment._base
        return _Part(copies, place.start, place.numel, parameter.shape, parameter.numel())
    if (zero := getattr(parameter, "_z3_optimizer", None)) is not None:
        group, start, length = zero.grad_position[zero.get_param_id(parameter)]
        copies = zero.fp32_partitioned_groups_flat[group]
        return _Part(copies, start, length, parameter.ds_shape, parameter.ds_numel)
    return None


def _gradient(parameter: Any) -> Tensor | None:
    """Return the gradient that ZeRO's optimizer is about to use, if this rank has all of it."""
    part = _part(parameter)
    if part is None or part.copies is None or part.copies.grad is None or part.length != part.whole:
        return None
    gradient: Tensor = part.copies.grad.detach().narrow(0, part.start, part.length).view(part.shape)
    return gradient


def _is_spread(parameter: Any) -> bool:
    part = _part(parameter)
    return part is not None and part.length != part.whole


def _watch_engine(module: ModuleType) -> None:
    _patches.add(parameter_data.value_sources, _value)
    _patches.add(parameter_data.gradient_sources, _gradient)
    _patches.add(parameter_data.part_tests, _is_spread)
    _patches.add(gradient_clipping.clip_sources, _clip)
    _patches.after(module.DeepSpeedEngine, "__init__", _follow)
    _patches.after(module.DeepSpeedEngine, "step", lambda engine: training_loops.copied_back())


uninstall = _patches.restore

HOOKS = {"deepspeed.runtime.engine": _watch_engine}
