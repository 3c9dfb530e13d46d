"""Counts the steps of learning rate schedulers, for the metadata: one may never step, or too early.

A scheduler is seen when it is made. One whose class has a `step` of its own that calls none of
torch's is not followed, and nothing is said of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from otel_torch import torch_private
from otel_torch.sources.program_lines import current_line, place_of
from otel_torch.sources.replacements import Replacements


@dataclass(slots=True, eq=False)
class Schedule:
    """A scheduler of an optimizer.

    changes_rate: whether making it has changed the learning rate. steps: by the program.
    steps_before: those before the first step of its optimizer; None until then. resumed_at: where a
    loaded state has put it by then; None if none was loaded. line: `file:line` of its first step,
    or of where it was made if it has made none.
    """

    name: str
    first_epoch: int
    changes_rate: bool = False
    steps: int = 0
    steps_before: int | None = None
    resumed_at: int | None = None
    line: str = ""

    def describe(self) -> dict[str, Any]:
        """Return its part of the metadata."""
        return {
            "class": self.name,
            "changes_rate": self.changes_rate,
            "steps": self.steps,
            "steps_before": self.steps_before or 0,
            "resumed_at": self.resumed_at,
            "line": self.line,
        }


class LearningRateSchedules:
    """The schedulers of one session. Holds none of them alive."""

    def __init__(self) -> None:
        self._schedules: Any = WeakIdKeyDictionary()  # by scheduler
        self._of_optimizer: Any = WeakIdKeyDictionary()  # by optimizer, a list of schedules

    def install(self, replacements: Replacements) -> None:
        """Watch every scheduler that is made from here on."""
        for kind in _kinds():
            if "__init__" in vars(kind):
                replacements.replace(kind, "__init__", self._wrap_init)
            if "step" in vars(kind):
                # a frame around `step` would be where torch's own warnings point to
                name = torch_private.inside_step_of_scheduler() if kind is LRScheduler else "step"
                replacements.replace(kind, name, self._wrap_step)

    def _wrap_init(self, make: Callable[..., None]) -> Callable[..., None]:
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            optimizer = args[0] if args else kwargs.get("optimizer")
            before = _rates(optimizer)
            make(scheduler, *args, **kwargs)
            self._made(scheduler, _rates(optimizer) != before)

        return init

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def count_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            schedule = self._schedules.get(scheduler)
            if schedule is not None:
                if not schedule.steps:
                    schedule.line = place_of(current_line())
                schedule.steps += 1
            return step(scheduler, *args, **kwargs)

        return count_step

    def _made(self, scheduler: Any, changes_rate: bool) -> None:
        """Follow a scheduler, and no longer those that it steps itself."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or not _is_followed(type(scheduler)):
            return
        epoch = getattr(scheduler, "last_epoch", 0)
        epoch = epoch if isinstance(epoch, int) else 0
        schedule = Schedule(
            type(scheduler).__name__, epoch, changes_rate, line=place_of(current_line())
        )
        own = self._of_optimizer.setdefault(optimizer, [])
        if scheduler in self._schedules:  # its own `__init__`, behind that of its base
            schedule.changes_rate |= self._schedules[scheduler].changes_rate
            own.remove(self._schedules[scheduler])
        for part in getattr(scheduler, "_schedulers", ()):
            if part in self._schedules:
                own[:] = [known for known in own if known is not self._schedules[part]]
        self._schedules[scheduler] = schedule
        own.append(schedule)

    def optimizer_steps_first(self, optimizer: Any) -> list[Schedule]:
        """Note where the schedulers of an optimizer are before its first step; return them."""
        own: list[Schedule] = self._of_optimizer.get(optimizer) or []
        for scheduler, schedule in self._schedules.items():
            if schedule in own and schedule.steps_before is None:
                schedule.steps_before = schedule.steps
                moved = getattr(scheduler, "last_epoch", 0) - schedule.first_epoch
                schedule.resumed_at = moved if moved > max(1, schedule.steps) else None
        return own


def _rates(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", None) or ()
    return [rate for group in groups if isinstance(rate := group.get("lr"), int | float)]


def _kinds() -> Iterator[type]:
    """Yield torch's own classes of schedulers that make or step one by code of their own."""
    for kind in vars(lr_scheduler).values():
        is_kind = inspect.isclass(kind) and issubclass(kind, LRScheduler)
        if is_kind and (kind is LRScheduler or "step" in vars(kind)):
            yield kind


def _is_followed(kind: type) -> bool:
    """Return whether the steps of a class are counted."""
    owner = next(base for base in kind.__mro__ if "step" in vars(base))
    return owner.__module__ == lr_scheduler.__name__
