"""Support for transformers: the Trainer counts its steps, and goes on from a checkpoint's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from otel_torch.frameworks import training_loops
from otel_torch.frameworks.patches import Patches

_patches = Patches()


def _step(trainer: Any) -> int:
    return int(trainer.state.global_step)


def _follow(trainer: Any) -> None:
    optimizer = trainer.optimizer
    while (wrapped := getattr(optimizer, "optimizer", None)) is not None:  # by accelerate
        optimizer = wrapped
    if optimizer is not None:
        training_loops.follow(trainer, [optimizer], _step)


def _watch_trainer(module: ModuleType) -> None:
    training_loops.install()
    _patches.before(module.Trainer, "training_step", _follow)
    for name in ("evaluation_loop", "prediction_loop"):
        if name in vars(module.Trainer):
            _patches.around(
                module.Trainer, name, lambda trainer: training_loops.evaluating(trainer, _step)
            )


def uninstall() -> None:
    """Restore the Trainer."""
    _patches.restore()
    training_loops.uninstall()


HOOKS = {"transformers.trainer": _watch_trainer}
