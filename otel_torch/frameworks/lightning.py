"""Support for Lightning, under both of its names: the Trainer counts its optimizers' steps."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from otel_torch.frameworks import training_loops
from otel_torch.frameworks.patches import Patches

_patches = Patches()


def _step(trainer: Any) -> int:
    return int(trainer.global_step)


def _follow(trainer: Any) -> None:
    training_loops.follow(trainer, trainer.optimizers, _step)


def _watch_trainer(module: ModuleType) -> None:
    _patches.before(module.Trainer, "_run_stage", _follow)


def _watch_evaluation(module: ModuleType) -> None:
    training_loops.install()
    _patches.around(
        module._EvaluationLoop,
        "run",
        lambda loop: training_loops.evaluating(loop.trainer, _step),
    )


def _watch_manual_optimization(module: ModuleType) -> None:
    _patches.around(module._ManualOptimization, "run", lambda loop: training_loops.one_step())


def uninstall() -> None:
    """Restore the Trainer."""
    _patches.restore()
    training_loops.uninstall()


HOOKS = {
    f"{package}.{module}": watch
    for package in ("lightning.pytorch", "pytorch_lightning")
    for module, watch in (
        ("trainer.trainer", _watch_trainer),
        ("loops.evaluation_loop", _watch_evaluation),
        ("loops.optimization.manual", _watch_manual_optimization),
    )
}
