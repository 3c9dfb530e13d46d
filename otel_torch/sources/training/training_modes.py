"""Notices a model that trains in eval mode, or is evaluated in training mode.

Only a dropout or a batch norm makes a difference. A part that is in eval mode and whose parameters
are frozen, too, is so on purpose.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.training.training_rows import TrainingRows


class TrainingModes:
    """Adds a row to each step whose forwards are in the wrong mode."""

    def __init__(self, rows: TrainingRows) -> None:
        self._rows = rows
        # by model: how many modules it had, and those that depend on the mode
        self._asking: weakref.WeakKeyDictionary[Model, tuple[int, list[weakref.ref[nn.Module]]]]
        self._asking = weakref.WeakKeyDictionary()
        # by model: whether each training forward since its last step was in eval mode
        self._in_eval: weakref.WeakKeyDictionary[Model, bool] = weakref.WeakKeyDictionary()

    def training_forward(self, active: ActiveStep, _: Inputs) -> None:
        """Note the mode of a training forward; one in training mode counts for the whole step."""
        model = active.model
        if isinstance(model, Model):
            self._in_eval[model] = self._is_in_eval(model) and self._in_eval.get(model, True)

    def forward_began(self, model: Model, context: ForwardContext, _: Inputs) -> None:
        """Add a row for a forward of an evaluation in training mode."""
        if context.phase != "eval" or not model.is_in_training_mode():
            return
        step = TrainingStep(context.step, context.loop, context.active.scope)
        if any(module.training for module in self._modules(model)):
            self._add(model, step, "train_evaluations")

    def optimizer_stepping(self, optimizer_step: OptimizerStep) -> None:
        """Add a row for a step whose forwards were all in eval mode."""
        for model, _, step in optimizer_step.updates:
            if self._in_eval.pop(model, False):
                self._add(model, step, "eval_forwards")

    def _add(self, model: Model, step: TrainingStep, label: str) -> None:
        if self._rows.are_wanted(model, step):
            self._rows.add_numbers(model, step, [("", label)], [1.0])

    def _is_in_eval(self, model: Model) -> bool:
        """Return whether all that depends on the mode is in eval mode: the model itself, or every
        dropout of a part that trains.
        """
        modules = self._modules(model)
        if not modules or any(module.training for module in modules):
            return False
        has_dropout = any(isinstance(module, _DropoutNd) for module in modules)
        return has_dropout or not model.is_in_training_mode()

    def _modules(self, model: Model) -> list[nn.Module]:
        """Return the modules of a model that depend on the mode."""
        known = self._asking.get(model)
        if known is None or known[0] != len(model.sites):
            known = self._asking[model] = len(model.sites), list(_asking(model))
        return [module for reference in known[1] if (module := reference()) is not None]


def _asking(model: Model) -> Iterator[weakref.ref[nn.Module]]:
    """Yield the modules that depend on the mode, without those of parts that are frozen."""
    sites = list(model.sites.values())
    training = {
        holder
        for site in sites
        if (module := site.module()) is not None and _trains(module)
        for name, _ in site.names
        for holder in _holders(name)
    }
    for site in sites:
        module = site.module()
        if isinstance(module, _DropoutNd):
            if module.p and any(name.rpartition(".")[0] in training for name, _ in site.names):
                yield site.module
        elif isinstance(module, _BatchNorm):
            weight = module.weight
            if module.track_running_stats and (weight is None or weight.requires_grad):
                yield site.module


def _trains(module: nn.Module) -> bool:
    parameters = module._parameters.values()
    return any(parameter is not None and parameter.requires_grad for parameter in parameters)


def _holders(name: str) -> Iterator[str]:
    """Yield the names of a module and of all that hold it.

    >>> list(_holders("blocks.0.fc"))
    ['blocks.0.fc', 'blocks.0', 'blocks', '']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
