"""Numbers the calls of a module within a step, so that repeated calls have records of their own.

with trace_step(0):
    block(x)  # call 0
    block(x)  # call 1
with trace_step(1):
    block(x)  # call 0
"""

from __future__ import annotations

import threading
from collections import defaultdict

from otel_torch.statistics import cpu_kernel

# How many steps of a phase are counted at a time: optimizers, threads and pipelines alternate
# between a few steps.
_MAX_STEPS = 8


class StepCalls(dict[str, int]):
    """The calls of each module in one step so far.

    `first` has the number of a module's first call in this step, if it is not 0.
    """

    __slots__ = ("first",)

    def __init__(self, first: dict[str, int]) -> None:
        super().__init__()
        self.first = first

    def next_number(self, module: str) -> int:
        return self.get(module) or self.first.get(module, 0)


class _PhaseCounts:
    """The counted steps of one phase.

    Attributes:
        first: where the numbers of a module begin in a new step.
        highest: the highest step whose counts were dropped.
        most: the most calls of each module in any dropped step.
    """

    __slots__ = ("first", "highest", "most", "steps")

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], StepCalls] = {}
        self.first: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.highest = -1, -1

    def add(self, step: tuple[int, int]) -> StepCalls:
        """Start counting a step.

        A step whose counts were dropped may come again, as after a new optimizer, which counts from
        0. From there on, numbers continue after all earlier calls, so that none occurs twice.
        """
        if step <= self.highest:
            for counted in list(self.steps):
                self.drop(counted)
            self.first, self.highest = self.most.copy(), (-1, -1)
        elif len(self.steps) >= _MAX_STEPS:
            self.drop(next(iter(self.steps)))
        calls = self.steps[step] = StepCalls(self.first)
        return calls

    def drop(self, step: tuple[int, int]) -> None:
        self.highest = max(self.highest, step)
        for module, calls in self.steps.pop(step).items():
            self.most[module] = max(self.most.get(module, 0), calls)


class CallCounter:
    """Counts the calls of one model's modules.

    >>> counter = CallCounter()
    >>> step = counter.of("forward", loop=0, step=3)
    >>> counter.count(step, "block"), counter.count(step, "block")
    (0, 1)
    >>> counter.count(counter.of("forward", loop=0, step=4), "block")
    0
    """

    def __init__(self) -> None:
        self._phases: defaultdict[str, _PhaseCounts] = defaultdict(_PhaseCounts)
        self._lock = threading.Lock()
        # counts in one piece, as the compiled observer does, which takes no lock
        kernel = cpu_kernel.load()
        functions = None if kernel is None else kernel.objects
        self._count_call = None if functions is None else functions.count_call

    def forked(self) -> None:
        """Replace the lock, which another thread of the parent may hold."""
        self._lock = threading.Lock()

    def of(self, phase: str, loop: int, step: int) -> StepCalls:
        key = loop, step
        with self._lock:
            counts = self._phases[phase]
            calls = counts.steps.get(key)
            return counts.add(key) if calls is None else calls

    def count(self, calls: StepCalls, module: str) -> int:
        """Count a call of the module in that step, and return its number."""
        if self._count_call is not None:
            return self._count_call(calls, calls.first, module)
        with self._lock:
            call = calls.next_number(module)
            calls[module] = call + 1
        return call

    def modules(self) -> frozenset[str]:
        """Return the modules of which at least one call was counted."""
        names: set[str] = set()
        for phase in list(self._phases.values()):
            names.update(phase.most, *list(phase.steps.values()))
        return frozenset(names)
