"""Support for torch.distributed.pipelining: a forward by which a stage learns shapes is a warm-up.

Before its first step, a stage runs its modules on memory that holds anything, or on a microbatch
that it runs again.
"""

from __future__ import annotations

from types import ModuleType

from otel_torch import torch_private
from otel_torch.frameworks.patches import Patches
from otel_torch.sources.steps.warm_ups import warming_up

_patches = Patches()


def _watch_stages(module: ModuleType) -> None:
    stage = module.PipelineStage
    for name in torch_private.PIPELINE_SHAPE_METHODS:
        if name in vars(stage):
            _patches.replace(stage, name, warming_up())


uninstall = _patches.restore

HOOKS = {"torch.distributed.pipelining.stage": _watch_stages}
