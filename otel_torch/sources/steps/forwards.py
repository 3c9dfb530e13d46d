"""One outermost forward: what it is called with, what a framework knows of it, and its step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from otel_torch.sources.modules.uncalled_roots import RootMethodRun
from otel_torch.sources.steps.active_steps import ActiveStep, Rule
from otel_torch.sources.steps.calls import CallCounter, StepCalls
from otel_torch.sources.steps.optimizers import OptimizerClock
from otel_torch.sources.steps.training_clock import TrainingClock


@dataclass(frozen=True, slots=True)
class Hint:
    """A framework's knowledge of the forward that is about to run; None for what is unknown.

    `bounded`: whether the framework's loop has a known length.
    """

    step: int | None = None
    loop: int | None = None
    branch: str | None = None
    phase: str | None = None
    bounded: bool = True


# Asked in order, in the calling thread, at the start of every outermost forward. The first that
# returns a hint wins.
hint_providers: list[Callable[[], Hint | None]] = []


def ask_for_hint() -> Hint | None:
    """Return what the first framework that knows the next forward tells of it."""
    for provider in hint_providers:
        try:
            hint = provider()
        except Exception:
            hint = None
        if hint is not None:
            return hint
    return None


class TrackedModel(Protocol):
    """The part of a model that the tracker needs."""

    name: str
    completed: int
    calls: CallCounter
    clock: TrainingClock
    method_run: RootMethodRun

    def parameter_ids(self) -> frozenset[int]: ...

    def parameter_ids_of(self, module: nn.Module) -> frozenset[int]: ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]: ...

    def is_in_training_mode(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an outermost forward was called with. `module`: None if a compiled graph was called."""

    module: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments without their names."""
        return *self.args, *self.kwargs.values()

    def carry_gradients(self) -> bool:
        """Return whether an input was computed from parameters that a backward pass will reach."""
        return any(
            isinstance(value, torch.Tensor) and value.grad_fn is not None for value in self.values
        )


NO_INPUTS = Inputs()


@dataclass(frozen=True, slots=True)
class Forward:
    """An outermost forward that begins.

    `optimizers`: those that train the model; empty if the program updates it without any; None if
    it is not trained.
    """

    model: TrackedModel
    inputs: Inputs
    hint: Hint
    optimizers: list[OptimizerClock] | None


@dataclass(slots=True)
class ForwardContext:
    """One outermost forward: the part of a record's key that all its modules share.

    `calls` counts the module calls of the step. `opened_step`: whether this forward began `active`.
    """

    step: int
    loop: int
    phase: str
    branch: str | None
    rule: Rule
    recording: bool
    calls: StepCalls
    active: ActiveStep
    opened_step: bool = False


class PendingForward(threading.local):
    """A forward of this thread whose end torch does not report.

    `vae.decode(z)` calls the modules of `vae` but never `vae` itself, and a compiled function calls
    no module at all. Such a forward ends when the next one begins, or at a point where it must have
    ended, such as the end of a pipeline.
    """

    def __init__(self) -> None:
        self.model: TrackedModel | None = None
        self.context: ForwardContext | None = None
        self.first_compiled: object = None  # the compiled module whose call began the forward
        self.whole_ran = False  # whether a module that holds every parameter has run in it
