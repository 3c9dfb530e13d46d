"""Tells when a model has the parameters that an optimizer's step has computed.

An optimizer that holds the model's own parameters has changed them when it returns. One that holds
copies (fp32 master weights, flat shards) has not: its framework copies them back afterwards, at the
latest before the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torch.process.console import say_once
from otel_torch.sources.events import RunEvents
from otel_torch.sources.steps.training_steps import TrainingStep

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from otel_torch.sources.models.model import Model


class Update(NamedTuple):
    """What an optimizer's step changes in one model: the ids of its parameters."""

    model: Model
    parameters: frozenset[int]
    step: TrainingStep

    def is_copied_back(self, optimizer: Any) -> bool:
        """Return whether the optimizer holds copies of the model's parameters."""
        groups = optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        return held.isdisjoint(self.model.parameter_ids())


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """One step of an optimizer.

    updates: what it changes; of models under OTEL_TORCH_BUDGET, those whose step is recorded.
    scaler: the gradient scaler that makes the step, if one does.
    """

    optimizer: Optimizer
    updates: Sequence[Update]
    scaler: GradScaler | None


class UpdateEvents:
    """Emits `updated` once for each model that a step of an optimizer has changed."""

    def __init__(self, events: RunEvents) -> None:
        self._subscribers = events.updated
        self._begun: dict[int, Sequence[Update]] = {}  # by the id of the optimizer
        self._copied: list[Update] = []
        events.forward_starting.append(self.emit_copied)

    def begin(self, optimizer: Any, updates: Sequence[Update]) -> None:
        """Keep what the optimizer is about to change; a closure may say so several times."""
        if self._subscribers:
            self.emit_copied()
            self._begun[id(optimizer)] = updates

    def end(self, optimizer: Any) -> None:
        """Emit what the optimizer has changed, or wait for its copies to be copied back."""
        updates = self._begun.pop(id(optimizer), [])
        if not updates or _was_skipped(optimizer):
            return
        for update in updates:
            if update.is_copied_back(optimizer):
                self._copied.append(update)
            else:
                self._emit(update)

    def emit_copied(self) -> None:
        while self._copied:
            self._emit(self._copied.pop(0))

    def _emit(self, update: Update) -> None:
        if update.model.root() is None:
            name = update.model.name
            say_once(f"{name} was deleted before the parameters of its last step were seen")
        try:
            for notify in self._subscribers:
                notify(*update)
        except Exception as error:
            say_once(f"updated parameters are not recorded: {type(error).__name__}: {error}")


def _was_skipped(optimizer: Any) -> bool:
    """Return whether a fused optimizer changed nothing, because a scaled gradient was Inf.

    Other optimizers are not called then.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())
