"""Knows the optimizers of the process: which models each trains, and at which step it is.

An optimizer may hold copies of a model's parameters (fp32 master weights, the shards of a
distributed optimizer). It then trains whichever model no other optimizer holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch.sources.steps.training_clock import TrainingClock
from otel_torch.torch_private import place_among_ranks, unobserved, unseen_by_function_modes


class Trained(Protocol):
    """The part of a model that optimizers are matched by; `clock` remembers which they are."""

    clock: TrainingClock

    def parameter_ids(self) -> frozenset[int]: ...

    def trainable_parameters(self) -> Sequence[nn.Parameter]: ...


# states that are loaded into optimizers and remembered
_MOST_LOADS = 16
# new optimizers that are remembered though they may be gone
_MOST_NEW = 64


class OptimizerClock:
    """The steps of one optimizer, and the parameters that it trains.

    Attributes:
        kind: the name of its class.
        serial: tells optimizers, and their loaded states, apart; an `id` may be used again.
        parameters: the ids of the parameters in its groups.
        elements: how many numbers these have.
        copied: the ids of the parameters that it holds copies of, where a framework says so.
        says: returns the step that its framework counts; None if it counts none.
        is_claimed: whether it holds parameters of a model that has run.
        is_in_use: whether it was made or has stepped while this session ran.
        is_read: whether `completed` goes on from the optimizer's state.
        is_loaded: whether its state was loaded.
        steps: how many it has made while this session ran.
        stepped_at, loaded_at: how many steps all optimizers had made by then.
    """

    @unseen_by_function_modes
    def __init__(self, serial: int, optimizer: Any) -> None:
        self.serial, self.kind = serial, type(optimizer).__name__
        self.parameters = optimized_parameters(optimizer)
        self.elements = sum(
            parameter.numel() for group in optimizer.param_groups for parameter in group["params"]
        )
        self.copied: frozenset[int] = frozenset()
        self.says: Callable[[], int | None] = lambda: None
        self.completed = self.steps = self.stepped_at = self.loaded_at = 0
        self.is_claimed = self.is_in_use = False
        self.is_read = self.is_loaded = False

    def trains(self, parameter_ids: frozenset[int]) -> bool:
        return not (
            self.parameters.isdisjoint(parameter_ids) and self.copied.isdisjoint(parameter_ids)
        )


class Optimizers:
    """The optimizers of one session. Holds none of them alive.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> model = SimpleNamespace(parameter_ids=lambda: {id(weight)}, clock=TrainingClock())
    >>> optimizers, adam = Optimizers(), torch.optim.Adam([weight])
    >>> optimizers.made(adam)
    >>> weight.sum().backward(); adam.step(); _ = optimizers.stepped(adam)
    >>> optimizers.step_of(optimizers.training(model))
    1
    """

    def __init__(self) -> None:
        self._clocks: Any = WeakIdKeyDictionary()
        self.has_stepped = False
        self._made = self._steps = 0
        self._loads: list[OptimizerClock] = []  # of those into which a state was loaded
        self._new: deque[OptimizerClock] = deque(maxlen=_MOST_NEW)  # of those made here
        self._changes = 0  # of which optimizer holds which parameters

    def __len__(self) -> int:
        return len(self._clocks)

    def __iter__(self) -> Iterator[OptimizerClock]:
        return iter(list(self._clocks.values()))

    @property
    def changes(self) -> tuple[int, int]:
        """What is another value when an optimizer is made, is gone or holds other parameters."""
        return self._changes, len(self._clocks)

    # -- what optimizers do

    def found(self, optimizer: Any) -> None:
        """Follow an optimizer that existed before this session."""
        self._clock(optimizer)

    def made(self, optimizer: Any) -> None:
        """Follow a new optimizer."""
        clock = self._clock(optimizer)
        clock.is_in_use = True
        self._new.append(clock)

    def loaded(self, optimizer: Any) -> None:
        """Go on where a loaded state says, as if the optimizer was another one."""
        clock = self._clock(optimizer)
        clock.is_read, clock.is_loaded = False, True
        self._made += 1
        clock.serial, clock.loaded_at = self._made, self._steps
        self._loads = [*self._loads[1 - _MOST_LOADS :], clock]

    def stepping(self, optimizer: Any) -> OptimizerClock:
        """Return the clock of an optimizer that is about to step, by the groups it has now."""
        clock, parameters = self._clock(optimizer), optimized_parameters(optimizer)
        if parameters != clock.parameters:
            clock.parameters = parameters
            self._changes += 1
        return clock

    def stepped(self, optimizer: Any) -> OptimizerClock:
        self.has_stepped = True
        clock = self._clock(optimizer)
        self._steps += 1
        clock.stepped_at = self._steps
        clock.completed += 1
        clock.steps += 1
        self._changes += not clock.is_in_use
        clock.is_in_use = True
        return clock

    def follow(
        self,
        optimizer: Any,
        says: Callable[[], int | None],
        parameters: Iterable[Any] = (),
    ) -> None:
        """Believe a framework which step its optimizer is at, and what it trains by copies.

        Args:
            says: must not keep the optimizer or the framework's objects alive.
            parameters: those of which the optimizer holds copies.
        """
        clock = self._clock(optimizer)
        clock.says = says
        if copied := frozenset(map(id, parameters)):
            clock.copied = copied
            self._changes += 1

    # -- what they say

    def completed(self, optimizer: Any) -> int | None:
        """Return how many steps the optimizer has completed; None if it is not followed."""
        clock = self._clocks.get(optimizer)
        return None if clock is None else clock.completed

    def unstepped(self) -> list[OptimizerClock]:
        """Return those that were made while this session ran and have never stepped."""
        return [clock for clock in self._new if not clock.steps]

    def has_lost_load(self, stepping: OptimizerClock) -> bool:
        """Return whether an optimizer has stepped after a state was loaded into another one of its
        class, which never has.
        """
        return any(
            clock.kind == stepping.kind
            and not clock.steps
            and clock.loaded_at < stepping.stepped_at
            for clock in self._loads
        )

    def training(self, model: Trained) -> list[OptimizerClock]:
        """Return the optimizers that hold parameters of a model, or else copies of them.

        Copies are recognized by their number: no model holds the tensors, and they have as many
        elements as the model trains, or as a rank's piece of these in one vector has.
        """
        parameter_ids, held = model.parameter_ids(), model.clock.held_by
        state = self._changes, len(self._clocks), parameter_ids
        if held is None or held[0] != state:
            clocks = [clock for clock in self if clock.trains(parameter_ids)]
            for clock in clocks:
                self._changes += not clock.is_claimed
                clock.is_claimed = True
            if not clocks:
                elements = _count_elements(model.trainable_parameters())
                sizes = {elements, -(-elements // place_among_ranks()[1])}
                clocks = [
                    clock
                    for clock in self
                    if clock.is_in_use and not clock.is_claimed and clock.elements in sizes
                ]
            state = self._changes, len(self._clocks), parameter_ids
            held = model.clock.held_by = state, clocks
        return held[1]

    def updated_by(self, optimizer: Any, model: Trained) -> frozenset[int]:
        """Return the ids of the parameters that a step of the optimizer changes in a model."""
        clock = self._clock(optimizer)
        if clock.is_claimed or clock not in self.training(model):
            return clock.parameters | clock.copied
        return model.parameter_ids()  # it holds copies

    def first_step(self) -> int | None:
        """Return the step at which a training loop begins; None if none is about to begin."""
        clocks = [clock for clock in self if clock.is_in_use]
        return None if self.has_stepped or not clocks else self.step_of(clocks)

    def step_of(self, clocks: Iterable[OptimizerClock]) -> int:
        """Return the step that the busiest of the optimizers is at."""
        return max(map(self._step, clocks), default=0)

    def _step(self, clock: OptimizerClock) -> int:
        said = clock.says()
        if said is not None:
            return said
        if not clock.is_read:
            clock.is_read = True
            optimizer = next((key for key, value in self._clocks.items() if value is clock), None)
            in_state = None if optimizer is None else _step_in_state(optimizer)
            clock.completed = clock.completed if in_state is None else in_state
        return clock.completed

    def _clock(self, optimizer: Any) -> OptimizerClock:
        clock: OptimizerClock | None = self._clocks.get(optimizer)
        if clock is None:
            self._made += 1
            self._changes += 1
            clock = OptimizerClock(self._made, optimizer)
            self._clocks[optimizer] = clock
        return clock


def optimized_parameters(optimizer: Any) -> frozenset[int]:
    return frozenset(
        map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups))
    )


@unobserved  # a tracer would take the sizes into its graph
def _count_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


@unobserved
def _step_in_state(optimizer: Any) -> int | None:
    """Return the steps that an optimizer's state counts, as Adam's does; None if it counts none."""
    counted = [*optimizer.state.values(), *optimizer.param_groups]
    steps = [
        int(values["step"]) for values in counted if isinstance(values, dict) and "step" in values
    ]
    return max(steps, default=None)


def steps_counted(optimizer: Any, group: dict[str, Any]) -> Any:
    """Return the steps that the state of a group's first parameter counts, None if it counts none.

    A number, or a tensor of one element, on a device where the optimizer keeps it there.
    """
    states = (optimizer.state.get(parameter) for parameter in group["params"])
    first = next(filter(None, states), group)
    return first.get("step") if isinstance(first, dict) else None
