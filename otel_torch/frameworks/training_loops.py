"""What the trainers of several frameworks tell: at which step they are, and that they evaluate."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from otel_torch.sources.steps import forwards
from otel_torch.sources.steps import step_clocks as steps


class _Evaluations(threading.local):
    """The evaluations that this thread is in: functions that return their step."""

    def __init__(self) -> None:
        self.running: list[Callable[[], int | None]] = []


_evaluations = _Evaluations()


def follow(
    trainer: Any,
    optimizers: Iterable[Any],
    step: Callable[[Any], int | None],
    parameters: Iterable[Any] = (),
) -> None:
    """Believe a trainer which step its optimizers are at.

    Args:
        step: returns the trainer's step; None if it counts none.
        parameters: those of which the optimizers hold copies.
    """
    tracker = steps.current_step_tracker()
    if tracker is not None:
        says = _says(trainer, step)
        for optimizer in optimizers:
            tracker.training.optimizers.follow(optimizer, says, parameters)


@contextmanager
def evaluating(trainer: Any, step: Callable[[Any], int]) -> Iterator[None]:
    """Mark what runs in the block as an evaluation at the trainer's step."""
    _evaluations.running.append(_says(trainer, step))
    try:
        yield
    finally:
        _evaluations.running.pop()


def one_step() -> AbstractContextManager[None]:
    """Make the block one training step, in which several optimizers may step."""
    tracker = steps.current_step_tracker()
    return nullcontext() if tracker is None else tracker.training.one_training_step()


def copied_back() -> None:
    """Note that an optimizer's copies of parameters are in the model again."""
    tracker = steps.current_step_tracker()
    if tracker is not None:
        tracker.updates.emit_copied()


def install() -> None:
    """Tell the step tracker of evaluations."""
    if _hint not in forwards.hint_providers:
        forwards.hint_providers.append(_hint)


def uninstall() -> None:
    """Tell nothing more."""
    if _hint in forwards.hint_providers:
        forwards.hint_providers.remove(_hint)


def _hint() -> forwards.Hint | None:
    running = _evaluations.running
    return forwards.Hint(running[-1](), phase="eval") if running else None


def _says(trainer: Any, step: Callable[[Any], int | None]) -> Callable[[], int | None]:
    """Return a function that returns the trainer's step, and does not keep the trainer alive."""
    reference = weakref.ref(trainer)

    def says() -> int | None:
        alive = reference()
        return None if alive is None else step(alive)

    return says
