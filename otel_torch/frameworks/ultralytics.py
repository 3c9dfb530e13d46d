"""Support for ultralytics: forwards on dummy images are warm-ups.

It runs models on zeros to learn their strides, and on memory that holds anything, NaNs included, to
count their operations and to warm up a device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from otel_torch.frameworks.patches import Patches
from otel_torch.sources.steps.warm_ups import warming_up

_patches = Patches()


def _warm_up(owner: Any, *names: str) -> None:
    """Make warm-ups of the functions that this version defines."""
    for name in names:
        if name in vars(owner):
            _patches.replace(owner, name, warming_up())


def _watch_construction(module: ModuleType) -> None:
    for name in ("DetectionModel", "SemanticSegmentationModel"):
        if name in vars(module):
            _warm_up(vars(module)[name], "__init__")


uninstall = _patches.restore

HOOKS = {
    "ultralytics.utils.torch_utils": lambda module: _warm_up(module, "get_flops", "profile_ops"),
    "ultralytics.nn.tasks": _watch_construction,
    "ultralytics.nn.autobackend": lambda module: _warm_up(module.AutoBackend, "warmup"),
}
