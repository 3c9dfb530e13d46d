"""What is noted of a model when it begins to train, and what has become of it since."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from otel_torch import torch_private
from otel_torch.laws.facts import FEWEST_STEPS
from otel_torch.sources.models.model import Model
from otel_torch.sources.modules.call_stack import thread_state
from otel_torch.sources.replacements import Replacements
from otel_torch.sources.steps.active_steps import ActiveStep
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.training.loaded_state import LoadedState, LoadedStates
from otel_torch.sources.training.still_statistics import StillStatistics
from otel_torch.sources.training.tied_heads import TiedHeads

# a model may be gone when the program ends, so its state is kept before: after so many times as
# many steps as the last time
_RARER = 2


class _ModelState:
    """A model that trains. `steps`: those that it has made; `due`: when its state is kept."""

    def __init__(self, model: Model, loaded: LoadedState) -> None:
        self.steps, self.due = 0, FEWEST_STEPS
        self._tied, self._still, self._loaded = TiedHeads(model), StillStatistics(model), loaded

    def describe(self) -> dict[str, Any]:
        """Return what is as it should not be."""
        return {
            "parted_weights": self._tied.parted(),
            "still_statistics": self._still.names(),
            **self._loaded.describe(),
        }


class ModelStates:
    """The models of one session that train.

    Args:
        has_run: whether a module was seen to run as a model.
        changes: returns which parameters of a model its steps have left as they were.
    """

    def __init__(
        self,
        has_run: Callable[[nn.Module], bool],
        changes: Callable[[Model], dict[str, list[str]]],
    ) -> None:
        self._loads, self._changes = LoadedStates(has_run), changes
        self._models: weakref.WeakKeyDictionary[Model, _ModelState] = weakref.WeakKeyDictionary()
        self._described: dict[str, dict[str, Any]] = {}
        # models without an optimizer by the model in whose forward, or after which, they run
        self._beside: weakref.WeakKeyDictionary[Model, weakref.WeakSet[Model]]
        self._beside = weakref.WeakKeyDictionary()
        self._latest: Callable[[], Model | None] = lambda: None  # that trains

    def install(self, replacements: Replacements) -> None:
        self._loads.install(replacements)

    def training_forward(self, active: ActiveStep, _: Inputs) -> None:
        """Note the state of a model that begins to train, and what has become of it since.

        Before a step, because a program may put something back behind the one before.
        """
        model = active.model
        if not isinstance(model, Model):
            return
        state = self._models.get(model)
        if state is None:
            self._models[model] = _ModelState(model, self._loads.of(model))
        elif state.steps >= state.due:
            state.due = max(2 * FEWEST_STEPS, state.due * _RARER)
            self._describe(model, state)

    def optimizer_stepped(self, step: OptimizerStep) -> None:
        for model, _, _ in step.updates:
            if (state := self._models.get(model)) is not None:
                state.steps += 1

    def forward_began(self, model: Model, context: ForwardContext, _: Inputs) -> None:
        """Note a model that runs inside of another one or after it, and is no part of it."""
        if not torch.is_grad_enabled() or context.phase != "forward":
            return
        if model in self._models:
            self._latest = weakref.ref(model)
            return
        stack = thread_state.stack
        holder = stack[-1].model if stack else self._latest()
        if holder is not None:
            beside = self._beside.setdefault(holder, weakref.WeakSet())
            if model not in beside and model.trainable_parameters():
                beside.add(model)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what is as it should not be, by model."""
        return {name: state for name, state in self._described.items() if state}

    def _describe(self, model: Model, state: _ModelState) -> None:
        beside = self._beside.get(model, ())
        unheld = [part.name for part in beside if part not in self._models and _is_unheld(part)]
        states = {
            **self._changes(model),
            "unheld_parts": sorted(unheld),
            **state.describe(),
        }
        self._described[model.name] = {name: value for name, value in states.items() if value}


@torch_private.unseen_by_function_modes
def _is_unheld(model: Model) -> bool:
    """Return whether a model without an optimizer gets gradients, and should train.

    One in eval mode is there for what it computes, such as the features of a perceptual loss.
    """
    if model.clock.is_trained or not model.is_in_training_mode():
        return False
    return any(parameter.grad is not None for parameter in model.trainable_parameters())
