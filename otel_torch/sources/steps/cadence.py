"""Picks the steps to record if recording may cost only a share of the time (OTEL_TORCH_BUDGET).

The cost of recording a step is the time by which recorded steps of a kind take longer than others
of that kind. A timer around the hooks would miss work that the device does later, and lost caches.
Only reading the results and passing them to the sinks, which may happen some steps later, is timed.

Steps are picked from a ladder (every step, every second, every fourth, …). So ranks and runs that
decide for themselves pick the same steps, or one of them picks some of the other's.

`Cadence` has an example. This module knows no torch.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any, NamedTuple

# How many steps of each kind are recorded in full, whatever they cost, after the first NaN or Inf.
FULL_STEPS = 3
# A key whose values became NaN or Inf this often (a mask, masked scores) is no longer news.
_MAX_ONSETS = 3
# How many of the newest steps of a kind are compared, recorded ones and others, and how many of
# each are needed.
_WINDOW, _ENOUGH = 32, 2
# The rung until the cost is known: every second step, so that there are both to compare.
_FIRST_RUNG = 2
_TOP_RUNG = 2**40


class Kind(NamedTuple):
    """Steps that can be compared with each other.

    `rule` is the one that numbers them (see `steps`); `model` and `phase` are those of the forward
    that begins them.
    """

    rule: str
    model: str
    phase: str


@dataclass(slots=True)
class _TimedStep:
    """The current step, or the last one. Times are in seconds.

    Attributes:
        recorded: None until the first forward that may be recorded asks.
        mixed: some of its models are recorded, so that it compares with no other step.
        reading: the part of its time that went into reading results.
    """

    began: float
    ended: float = 0.0
    kind: Kind | None = None
    loop: int = 0
    recorded: bool | None = None
    mixed: bool = False
    reading: float = 0.0


@dataclass(slots=True)
class _KindCosts:
    """The times of the steps of one kind, and which of them are recorded. Times are in seconds.

    Attributes:
        seen, recorded: how many steps.
        eligible: how many steps OTEL_TORCH_STEPS selects.
        full_steps, full_left: steps recorded in full because of a NaN or Inf, so far and to come.
        seconds: the time of all steps but the first, which compiles and allocates.
        plain, full: the times of steps that were not and that were recorded, without reading.
        readings: the time that reading took, for each recorded step.
        cost: of recording one step; None until there is something to compare.
        rung: steps whose number is a multiple of this are picked.
        passed: steps since the last one on the ladder.
        longest_loop: a power of two, at least the number of steps of any loop.
        charged: the cost of the recorded steps, without the `recent` newest. Those are charged at
            the current cost, because an early estimate may be far off.
    """

    seen: int = 0
    eligible: int = 0
    recorded: int = 0
    full_steps: int = 0
    full_left: int = 0
    seconds: float = 0.0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    full: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    readings: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    cost: float | None = None
    rung: int = _FIRST_RUNG
    passed: int = 0
    loop: int = -1
    steps_in_loop: int = 0
    longest_loop: int = 1
    charged: float = 0.0
    recent: int = 0

    @property
    def spent(self) -> float:
        """Seconds that recording has cost, as far as is known."""
        return self.charged + self.recent * (self.cost or 0.0)

    def begin_step(self, loop: int) -> None:
        self.seen += 1
        self.steps_in_loop = self.steps_in_loop + 1 if loop == self.loop else 1
        self.loop = loop
        while self.longest_loop < self.steps_in_loop:
            self.longest_loop *= 2

    def highest_rung(self, step: int) -> int:
        """Return the highest rung that picks a step: the largest power of two that divides it.

        The first step of a loop is above all others of the loop, by the number of the loop. What
        only it shows is then recorded in every loop before any other step is recorded twice.
        """
        if step:
            return step & -step
        return self.longest_loop * (self.loop & -self.loop) if self.loop > 0 else _TOP_RUNG

    def picks(self, step: int, allowance: float) -> bool:
        """Return whether to record a step that begins, if recording may have cost `allowance`."""
        self.eligible += 1
        # A program may number its steps so that none is on the ladder (1, 3, 5).
        on_ladder = (
            self.highest_rung(step) >= self.rung
            or self.passed + 1 >= 2 * self.rung
            or not self.recorded
        )
        self.passed = 0 if on_ladder else self.passed + 1
        if self.full_left:
            self.full_left -= 1
            self.full_steps += 1
            return True
        return on_ladder and (self.cost is None or self.spent + self.cost <= allowance)

    def charge(self) -> None:
        self.recorded += 1
        if self.recorded == 2:
            self.readings.clear()  # the first one opened files
        self.readings.append(0.0)
        if self.recent < _WINDOW:
            self.recent += 1
        else:
            self.charged += self.cost or 0.0

    def estimate_cost(self) -> None:
        """Estimate the cost from the newest steps.

        Compares low medians: whatever disturbs a step makes it longer, never shorter.
        """
        if min(len(self.plain), len(self.full), len(self.readings)) >= _ENOUGH:
            difference = median_low(self.full) - median_low(self.plain)
            # The results of the last recorded steps may not have been read yet.
            read = [seconds for seconds in self.readings if seconds]
            self.cost = max(0.0, difference) + (fmean(read) if read else 0.0)


class Cadence:
    """Decides which steps are recorded, so that recording costs at most `percent` of their time.

    The first step of each kind is recorded, and every second one until recording can be compared
    with not recording. From then on, steps are recorded as densely as the kind's part of the budget
    allows. One half of the budget is divided by the time that the kinds take, the other equally, so
    that a kind that runs once per video is seen too.

    In this example a step takes 1 s, and 0.5 s more if it is recorded. Steps 0, 2 and 4 show that.
    With 5 %, one recorded step costs the allowance of 10 steps, so every 16th step is recorded,
    once the allowance covers the first three:

    >>> now = 0.0
    >>> cadence = Cadence(percent=5, clock=lambda: now)
    >>> kind, recorded = Kind("optimizer", "Net", "forward"), []
    >>> for step in range(100):
    ...     cadence.begin()
    ...     is_recorded = cadence.choose(kind, step, loop=0)
    ...     now += 1.5 if is_recorded else 1.0
    ...     cadence.end()
    ...     if is_recorded:
    ...         recorded.append(step)
    >>> recorded
    [0, 2, 4, 48, 64, 80, 96]

    Args:
        percent: above 0, at most 100.
        clock: returns seconds, as `time.perf_counter` does.

    One step at a time. Only `observe` may be called from other threads. The same times give the
    same picks.
    """

    def __init__(self, percent: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.percent = percent
        self._clock = clock
        self.forked()

    def forked(self) -> None:
        """Forget everything: a forked child counts its own steps."""
        self._kinds: dict[Kind, _KindCosts] = {}
        self._step: _TimedStep | None = None
        self._last_step: _TimedStep | None = None
        self._read_for: _KindCosts | None = None  # whose results are read next
        self._recorded_models: set[str] = set()
        self._nonfinite: set[Hashable] = set()
        self._onsets: Counter[Hashable] = Counter()

    # -- events of the run

    def begin(self) -> None:
        if self._step is not None and self._step.kind is not None:
            self._last_step = self._step
        self._step = _TimedStep(self._clock())

    def choose(self, kind: Kind, step: int, loop: int, wanted: bool = True) -> bool:
        """Return whether to record a forward of the current step.

        The first forward sets the kind of the step. The first that is `wanted` at all decides for
        the whole step, except that a model that was never recorded is recorded anyway.
        """
        current = self._step
        if current is None:
            return wanted
        if current.kind is None:
            current.kind, current.loop = kind, loop
            self._account_last_step(current)
            self._kinds.setdefault(kind, _KindCosts()).begin_step(loop)
        if not wanted:
            return False
        if current.recorded is None:
            costs = self._kinds[current.kind]
            current.recorded = costs.picks(step, self._allowance(costs))
            if current.recorded:
                costs.charge()
                self._read_for = costs
        elif not current.recorded and kind.model not in self._recorded_models:
            current.mixed = True
            self._recorded_models.add(kind.model)
            return True
        if current.recorded:
            self._recorded_models.add(kind.model)
        return current.recorded

    def read(self, seconds: float) -> None:
        """Charge the time it took to read results and pass them to the sinks."""
        if self._step is not None:
            self._step.reading += seconds
        if self._read_for is not None:
            self._read_for.readings[-1] += seconds

    def end(self) -> None:
        if self._step is not None:
            self._step.ended = self._clock()

    def observe(self, key: Hashable, is_finite: bool) -> None:
        """Note whether the tensor at `key` has no NaN or Inf. Any thread may call this.

        When it gets its first one, the next steps are recorded in full. A tensor that keeps its
        NaN has no further effect, nor one that got and lost them several times.
        """
        if is_finite:
            self._nonfinite.discard(key)
        elif key not in self._nonfinite:
            self._nonfinite.add(key)
            self._onsets[key] += 1
            if self._onsets[key] <= _MAX_ONSETS:
                for costs in list(self._kinds.values()):
                    costs.full_left = FULL_STEPS

    # -- accounting

    def _account_last_step(self, following: _TimedStep) -> None:
        """Add the last step to the times of its kind.

        Within a loop a step lasts until the next one begins, so that waiting for the device in
        between is included. Between forwards that are steps by themselves, a program may do
        anything, so such a step lasts until it ends.
        """
        last, self._last_step = self._last_step, None
        if last is None or last.kind is None:
            return
        is_same_loop = (
            last.kind == following.kind
            and last.loop == following.loop
            and last.kind.rule != "forward"
        )
        end = following.began if is_same_loop else max(last.ended, last.began)
        seconds = end - last.began
        costs = self._kinds[last.kind]
        if costs.seen == 1:
            return
        costs.seconds += seconds
        if not last.mixed:
            times = costs.full if last.recorded else costs.plain
            times.append(seconds - last.reading)
        if last.recorded or costs.cost is None:
            costs.estimate_cost()
        if costs.cost is not None:
            costs.rung = self._affordable_rung(costs, costs.cost)

    def _allowance(self, costs: _KindCosts) -> float:
        """Return how many seconds recording the steps of a kind may have cost by now."""
        total = sum(kind.seconds for kind in self._kinds.values())
        return self.percent / 100 * (costs.seconds + total / len(self._kinds)) / 2

    def _affordable_rung(self, costs: _KindCosts, cost: float) -> int:
        """Return the smallest rung whose steps can all be recorded within the budget."""
        allowance_per_step = self._allowance(costs) / max(1, costs.eligible - 1)
        rung = 1
        while rung < _TOP_RUNG and cost > allowance_per_step * rung:
            rung *= 2
        return rung

    # -- reports

    @property
    def cost_percent(self) -> float | None:
        """The cost of recording so far, in percent of the steps' time; None until it is known."""
        total = sum(costs.seconds for costs in self._kinds.values())
        if not total or all(costs.cost is None for costs in self._kinds.values()):
            return None
        spent = sum(costs.spent for costs in self._kinds.values())
        return float(f"{100 * spent / total:.3g}")

    def describe(self) -> dict[str, Any]:
        """Return what the metadata of a recording has under `budget`.

        >>> Cadence(2.5).describe()
        {'percent': 2.5, 'steps': 0, 'recorded': 0, 'in_full': 0, 'cost_percent': None, 'kinds': []}
        """
        kinds = [
            {
                **kind._asdict(),
                "steps": costs.seen,
                "recorded": costs.recorded,
                "every": costs.rung,
            }
            for kind, costs in list(self._kinds.items())
        ]
        return {
            "percent": self.percent,
            "steps": sum(costs.seen for costs in self._kinds.values()),
            "recorded": sum(costs.recorded for costs in self._kinds.values()),
            "in_full": sum(costs.full_steps for costs in self._kinds.values()),
            "cost_percent": self.cost_percent,
            "kinds": kinds,
        }

    def line(self) -> str:
        """Return the report for the end of the program.

        >>> Cadence(2.5).line()
        'OTEL_TORCH_BUDGET=2.5: 0 of 0 steps were recorded'
        """
        totals = self.describe()
        text = (
            f"OTEL_TORCH_BUDGET={self.percent:g}: "
            f"{totals['recorded']} of {totals['steps']} steps were recorded"
        )
        if totals["in_full"]:
            text += f", {totals['in_full']} of them because of a NaN or Inf"
        if self._kinds:
            busiest, costs = max(
                self._kinds.items(), key=lambda item: (item[1].seconds, item[1].seen)
            )
            share = "each" if costs.rung == 1 else f"one in {costs.rung}"
            text += f"; at the end {share} of {busiest.model}'s"
        if totals["cost_percent"] is not None:
            text += f"; that cost about {totals['cost_percent']:g} % of their time"
        return text
