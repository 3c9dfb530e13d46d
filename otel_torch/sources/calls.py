"""How often has a module already run in this step? That number tells a record from those of the
same module and step.
"""

from __future__ import annotations

import threading
from collections import defaultdict

# so many steps of each phase are counted at a time: optimizers, threads and pipelines work at
# several in turn
_KEPT = 8


class StepCalls(dict[str, int]):
    """How often each module has run in one step so far. begin: where a module's numbers begin that
    has not run in it.
    """

    __slots__ = ("begin",)

    def __init__(self, begin: dict[str, int]) -> None:
        super().__init__()
        self.begin = begin

    def so_far(self, module: str) -> int:
        """The number of the module's next call."""
        return self.get(module) or self.begin.get(module, 0)


class _Phase:
    """What is counted in one phase. most: of each module, behind which number all calls of
    forgotten steps are.
    """

    __slots__ = ("begin", "highest", "most", "steps")

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], StepCalls] = {}
        self.begin: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.highest = -1, -1

    def step(self, when: tuple[int, int]) -> StepCalls:
        """A step that is not counted. One that was forgotten and comes again (a new optimizer
        counts from 0) begins a pass through the steps: from there on all go on behind every call of
        before.
        """
        if when <= self.highest:
            for counted in list(self.steps):
                self.forget(counted)
            self.begin, self.highest = self.most.copy(), (-1, -1)
        elif len(self.steps) >= _KEPT:
            self.forget(next(iter(self.steps)))
        calls = self.steps[when] = StepCalls(self.begin)
        return calls

    def forget(self, when: tuple[int, int]) -> None:
        self.highest = max(self.highest, when)
        for module, calls in self.steps.pop(when).items():
            self.most[module] = max(self.most.get(module, 0), calls)


class Calls:
    """Counts the calls of one model's modules. A step is a pair of its loop and its number."""

    def __init__(self) -> None:
        self._phases: defaultdict[str, _Phase] = defaultdict(_Phase)
        self._lock = threading.Lock()

    def forked(self) -> None:
        """In a forked child another thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()

    def of(self, phase: str, loop: int, step: int) -> StepCalls:
        """What is counted in a step."""
        when = loop, step
        with self._lock:
            known = self._phases[phase]
            calls = known.steps.get(when)
            return known.step(when) if calls is None else calls

    def next(self, calls: StepCalls, module: str) -> int:
        """How often the module has already run in that step; counts this run."""
        with self._lock:
            call = calls.so_far(module)
            calls[module] = call + 1
        return call

    def modules(self) -> frozenset[str]:
        """The modules of which any call was seen."""
        phases = list(self._phases.values())
        counted = [calls for phase in phases for calls in (phase.most, *list(phase.steps.values()))]
        return frozenset().union(*counted)
