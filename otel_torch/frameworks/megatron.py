"""Support for Megatron-core: its optimizers hold fp32 copies of parameters, whole or in shards.

Right before they step, the copies have the gradients, unscaled and clipped by the norm of all
ranks, and the parameters have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from otel_torch.frameworks import training_loops
from otel_torch.frameworks.patches import Patches
from otel_torch.sources.tensors import parameter_data
from otel_torch.sources.training.gradient_clipping import note_clip

_patches = Patches()
# the optimizers that hold copies
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
# by parameter: its copy or this rank's shard of it; None if another rank has all of it
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _follow(optimizer: Any) -> None:
    if optimizer.is_stub_optimizer:
        return
    parameters = _parameters(optimizer)
    _optimizers.add(optimizer)
    _copies.update(dict.fromkeys(parameters))
    _copies.update(dict(_pairs(optimizer)))
    # the program counts the steps, Megatron's optimizers do not
    training_loops.follow(optimizer, [optimizer.optimizer], lambda _: None, parameters)


def _parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer updates, with those that other ranks update."""
    if (buffers := getattr(optimizer, "buffers", None)) is not None:
        return [parameter for buffer in buffers for parameter in buffer.params]
    groups = (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups)
    return [parameter for group in groups for parameter in group]


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters that this rank updates by a copy or shard, with that."""
    if hasattr(optimizer, "buffers"):
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_float16_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    else:
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    for groups, copied_groups in pairs:
        for parameters, copies in zip(groups, copied_groups, strict=True):
            for parameter, copy in zip(parameters, copies, strict=True):
                if copy is not None:  # a fused optimizer may keep it itself
                    yield parameter, copy


def _gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient with which a copy is about to be updated, if this rank has all of it."""
    copy: Tensor | None = _copies.get(parameter)  # type: ignore[no-untyped-call]
    gradient: Tensor | None = getattr(copy, "grad", None)
    if gradient is None:
        gradient = getattr(copy, "decoupled_grad", None)
    if gradient is None or gradient.numel() != parameter.numel():
        return None
    return gradient.detach().view(parameter.shape)


def _is_spread(parameter: Tensor) -> bool:
    """Return whether other ranks have the gradient of a parameter, or parts of it."""
    if parameter not in _copies:
        return False
    copy = _copies[parameter]
    return copy is None or copy.numel() != parameter.numel()


def _copied(copies: list[Tensor]) -> list[Tensor]:
    """Return the parameters of the optimizer that holds these copies, or else the list itself."""
    for optimizer in list(_optimizers):
        if any(copy is copies[0] for copy in optimizer.get_parameters()):
            return _parameters(optimizer)
    return copies


def _noting_clips(clip: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's function that clips, and notes by which norm the parameters are clipped."""

    def run(parameters: Any, max_norm: float, total_norm: float, *args: Any, **kwargs: Any) -> Any:
        copies = list(parameters)
        note_clip(_copied(copies), max_norm, torch.as_tensor(total_norm))
        return clip(copies, max_norm, total_norm, *args, **kwargs)

    return run


def _watch_optimizers(module: ModuleType) -> None:
    _patches.add(parameter_data.gradient_sources, _gradient)
    _patches.add(parameter_data.part_tests, _is_spread)
    _patches.replace(module, "clip_grad_by_total_norm_fp32", _noting_clips)
    _patches.after(module.Float16OptimizerWithFloat16Params, "__init__", _follow)
    for cls in (module.MixedPrecisionOptimizer, module.ChainedOptimizer):
        _patches.after(cls, "step", lambda optimizer: training_loops.copied_back())


def uninstall() -> None:
    """Restore the optimizers, and forget their copies."""
    _patches.restore()
    _optimizers.clear()
    _copies.clear()


HOOKS = {
    "megatron.core.optimizer.optimizer": _watch_optimizers,
    "megatron.core.optimizer.distrib_optimizer": lambda module: _patches.after(
        module.DistributedOptimizer, "__init__", _follow
    ),
}
