"""What a training loop does between forwards: optimizers that are made and step, and backward
passes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from otel_torch import torch_private
from otel_torch.console import say_once
from otel_torch.records import Scope
from otel_torch.regions import entry
from otel_torch.sources.steps import Clock


class Training:
    """Watches every optimizer and `backward` of the process, for one session.

    stepping(optimizer, step): told right before an optimizer's step, when the gradients are
    complete.
    """

    def __init__(self, clock: Clock, stepping: Callable[[Optimizer, int], None]) -> None:
        self._clock = clock
        self._stepping = stepping
        self._scopes: dict[int, Scope | None] = {}
        self._restore: list[Callable[[], None]] = []

    def install(self) -> None:
        """Watch from here on; optimizers that exist already are taken in."""
        clock, make, backward = self._clock, Optimizer.__init__, torch.autograd.backward

        @functools.wraps(make)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            clock.optimizer_made(optimizer)

        @functools.wraps(backward)
        def traced_backward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return backward(*args, **kwargs)
            scope = entry.open_region("training_backward")
            try:
                backward(*args, **kwargs)
            except BaseException as error:
                entry.close_region(scope, error)
                raise
            entry.close_region(scope)

        torch_private.keep_out_of_frames(traced_backward, with_callees=False)
        for inside in (entry.open_region, entry.close_region):
            torch_private.keep_out_of_frames(inside)

        def restore() -> None:
            if Optimizer.__init__ is init:
                Optimizer.__init__ = make  # type: ignore[method-assign]
            if torch.autograd.backward is traced_backward:
                torch.autograd.backward = backward

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        torch.autograd.backward = traced_backward
        self._restore += [
            restore,
            register_optimizer_step_pre_hook(self._before).remove,
            register_optimizer_step_post_hook(self._after).remove,
        ]
        for found in gc.get_objects():
            if issubclass(type(found), Optimizer):
                clock.optimizer_made(found)

    def uninstall(self) -> None:
        """Stop watching."""
        while self._restore:
            self._restore.pop()()

    @torch_private.keep_out_of_frames
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _leave_graph()
        self._scopes[id(optimizer)] = entry.open_region("training_optimizer", lexical=False)
        try:
            self._stepping(optimizer, self._clock.steps_of(optimizer))
        except Exception as error:
            say_once(f"the gradients of a step are not recorded: {type(error).__name__}: {error}")

    @torch_private.keep_out_of_frames
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _leave_graph()
        entry.close_region(self._scopes.pop(id(optimizer), None))
        try:
            self._clock.optimizer_stepped(optimizer)
        except Exception as error:
            say_once(
                f"a step of {type(optimizer).__name__} is not counted: {type(error).__name__}: {error}"
            )


def _leave_graph() -> None:
    """Traced: have the compiler call the caller as it is. Torch breaks the graph around every
    optimizer's step anyway.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
