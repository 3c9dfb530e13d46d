"""Counts the steps of denoise schedules, such as the schedulers of diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary


@dataclass(slots=True)
class _Schedule:
    length: int
    completed: int = 0

    @property
    def is_running(self) -> bool:
        return self.completed < self.length


class Schedules:
    """The schedules of one session. Holds none of them alive.

    >>> schedules, scheduler = Schedules(), type("Scheduler", (), {})()
    >>> schedules.set(scheduler, 2); schedules.step(), schedules.stepped(scheduler)
    (0, None)
    >>> schedules.step(), schedules.stepped(scheduler), schedules.step()
    (1, None, None)
    """

    def __init__(self) -> None:
        self._schedules: Any = WeakIdKeyDictionary()

    def set(self, scheduler: Any, length: int) -> None:
        self._schedules[scheduler] = _Schedule(length)

    def stepped(self, scheduler: Any, *, last: bool = False) -> None:
        """Count a completed step; `last` ends a schedule before its length."""
        state = self._schedules.setdefault(scheduler, _Schedule(0))
        state.completed += 1
        if last:
            state.length = min(state.length, state.completed)

    def step(self) -> int | None:
        """Return the completed steps of the busiest schedule that is not used up, if any."""
        running = [state.completed for state in list(self._schedules.values()) if state.is_running]
        return max(running, default=None)

    def clear(self) -> None:
        """Forget every schedule, also one that its loop has left unfinished."""
        self._schedules.clear()
