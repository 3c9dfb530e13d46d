"""Which steps are recorded where recording may cost only a share of their time (OTEL_TORCH_BUDGET)?
Knows no torch.

What a recorded step costs is what it takes longer than steps of its kind that are not recorded,
which no timer around a hook could tell: work that the device does later, caches that are lost. Only
the reading of numbers and their way to the sinks, which may come steps later, is timed. Steps are
picked from a ladder (every one, every second, every fourth, …), so that ranks and runs that decide
alone pick the same ones, or one of them a part of the other's.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any, NamedTuple

# so many steps of each kind after one in which a value was first seen that is not finite are
# recorded whatever they cost
FULL_STEPS = 3
# a place whose values have so often begun to be not finite (a mask, masked scores) is no news any
# more
_ONSETS = 3
# the newest steps that are compared, of each sort; and how many are needed of each, the first step
# of a kind left out
_WINDOW, _ENOUGH = 32, 2
# the ladder's lowest rung until then: every second step, so that there are recorded and other ones
# to compare
_AT_FIRST = 2
_TOP = 2**40


class Kind(NamedTuple):
    """Steps that can be compared with each other: told by the same rule (see `steps`), begun by the
    same model's forward in the same phase.
    """

    rule: str
    model: str
    phase: str


@dataclass(slots=True)
class _Step:
    """A step that is going on, or the last one. Times in seconds; `reading` is what of them went
    into reading numbers.

    recorded: None until it was asked for. mixed: some of its models are recorded, so that it is
    like no other step.
    """

    began: float
    ended: float = 0.0
    kind: Kind | None = None
    loop: int = 0
    recorded: bool | None = None
    mixed: bool = False
    reading: float = 0.0


@dataclass(slots=True)
class _Known:
    """What is known of the steps of a kind. wanted: those of them that might be recorded.

    seconds: what they took, and steps: how many they were, but for the first, which compiles and
    allocates. plain, full: what of its time a step took that was not, or was, recorded, reading
    left out; readings: what reading took, a recorded step. cost: of recording one, in seconds; None
    as long as nothing can be compared.
    """

    seen: int = 0
    wanted: int = 0
    recorded: int = 0
    full_steps: int = 0
    seconds: float = 0.0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    full: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    readings: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    cost: float | None = None
    every: int = _AT_FIRST
    full_left: int = 0  # steps that are recorded whatever they cost
    passed: int = 0  # steps since one that stood high enough on the ladder
    loop: int = -1
    in_loop: int = 0
    longest_loop: int = 1  # a power of two, not less than the steps of any loop
    _charged: float = 0.0
    _recent: int = (
        0  # recorded steps that are charged at today's cost: an early estimate may be far off
    )

    @property
    def spent(self) -> float:
        """Seconds that recording has cost, as far as is known."""
        return self._charged + self._recent * (self.cost or 0.0)

    def meet(self, loop: int) -> None:
        """A step begins."""
        self.seen += 1
        self.in_loop = self.in_loop + 1 if loop == self.loop else 1
        self.loop = loop
        while self.longest_loop < self.in_loop:
            self.longest_loop *= 2

    def rung(self, step: int) -> int:
        """The highest power of two that divides the step's number. A loop's first step stands above
        all others of the loop, as high as the loop's number says: what is only seen there is seen
        in every loop before any step is seen twice.
        """
        if step:
            return step & -step
        return self.longest_loop * (self.loop & -self.loop) if self.loop > 0 else _TOP

    def picks(self, step: int, allowance: float) -> bool:
        """Whether a step that begins is recorded, where `allowance` seconds may have been spent by
        now.
        """
        self.wanted += 1
        # a program may number its steps so that none stands on the ladder (1, 3, 5)
        on_ladder = (
            self.rung(step) >= self.every or self.passed + 1 >= 2 * self.every or not self.recorded
        )
        self.passed = 0 if on_ladder else self.passed + 1
        if self.full_left:
            self.full_left -= 1
            self.full_steps += 1
            return True
        return on_ladder and (self.cost is None or self.spent + self.cost <= allowance)

    def charge(self) -> None:
        """A step is recorded."""
        self.recorded += 1
        if self.recorded == 2:
            self.readings.clear()  # the first one opened files
        self.readings.append(0.0)
        if self._recent < _WINDOW:
            self._recent += 1
        else:
            self._charged += self.cost or 0.0

    def compare(self) -> None:
        """Estimate the cost anew. The lower of two middle values: what disturbs a step only ever
        makes it longer.
        """
        if min(len(self.plain), len(self.full), len(self.readings)) >= _ENOUGH:
            longer = median_low(self.full) - median_low(self.plain)
            # what was recorded last may not have been read yet
            read = [seconds for seconds in self.readings if seconds]
            self.cost = max(0.0, longer) + (fmean(read) if read else 0.0)


class Cadence:
    """Says which steps are recorded, so that recording costs at most `percent` of the time that all
    steps take.

    The first step of each kind is recorded, and so is every second one until recording it can be
    compared with not recording it. From then on a kind's steps are recorded as densely as the
    kind's part of the budget allows: half of the budget belongs to the kinds by the time that they
    take, half to all alike, or what runs once a video would never be seen.

    percent: above 0, at most 100. clock: seconds, as `time.perf_counter` gives them. One step at a
    time; not thread-safe but for `saw`. The same times give the same picks.
    """

    def __init__(self, percent: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.percent = percent
        self._clock = clock
        self.forked()

    def forked(self) -> None:
        """Forget everything: a forked child counts its own steps."""
        self._kinds: dict[Kind, _Known] = {}
        self._step: _Step | None = None
        self._before: _Step | None = None
        self._read_for: _Known | None = None  # whose numbers are read next
        self._met: set[str] = set()  # models of which a step was recorded
        self._not_finite: set[Hashable] = set()
        self._onsets: Counter[Hashable] = Counter()

    # -- what happens
    # ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        if self._step is not None and self._step.kind is not None:
            self._before = self._step
        self._step = _Step(self._clock())

    def choose(self, kind: Kind, step: int, loop: int, wanted: bool = True) -> bool:
        """Whether a forward in the step that began is recorded. The first forward says of which
        kind the step is, the first that is `wanted` at all decides for the whole step; a model of
        which nothing was recorded yet is recorded anyway.
        """
        now = self._step
        if now is None:
            return wanted
        if now.kind is None:
            now.kind, now.loop = kind, loop
            self._settle(now)
            self._kinds.setdefault(kind, _Known()).meet(loop)
        if not wanted:
            return False
        if now.recorded is None:
            known = self._kinds[now.kind]
            now.recorded = known.picks(step, self._allowance(known))
            if now.recorded:
                known.charge()
                self._read_for = known
        elif not now.recorded and kind.model not in self._met:
            now.mixed = True
            self._met.add(kind.model)
            return True
        if now.recorded:
            self._met.add(kind.model)
        return now.recorded

    def read(self, seconds: float) -> None:
        """So long it took to read recorded numbers and to hand them on, in a step, between steps or
        a step later.
        """
        if self._step is not None:
            self._step.reading += seconds
        if self._read_for is not None:
            self._read_for.readings[-1] += seconds

    def end(self) -> None:
        """The step that is going on has ended."""
        if self._step is not None:
            self._step.ended = self._clock()

    def saw(self, place: Hashable, finite: bool) -> None:
        """A tensor was seen at `place`. The first that is not finite has the steps that follow
        recorded, whatever they cost; one that stays so has not, nor one that is so time and again.
        May be called from any thread.
        """
        if finite:
            self._not_finite.discard(place)
        elif place not in self._not_finite:
            self._not_finite.add(place)
            self._onsets[place] += 1
            if self._onsets[place] <= _ONSETS:
                for known in list(self._kinds.values()):
                    known.full_left = FULL_STEPS

    # -- what it means
    # ----------------------------------------------------------------------------------------------

    def _settle(self, following: _Step) -> None:
        """Take in what the step before took. In a loop that is the time until the next step begins,
        or a device that is waited for in between would cost nothing; between forwards that are
        steps of their own a program may do anything.
        """
        before, self._before = self._before, None
        if before is None or before.kind is None:
            return
        goes_on = (
            before.kind == following.kind
            and before.loop == following.loop
            and before.kind.rule != "forward"
        )
        seconds = (following.began if goes_on else max(before.ended, before.began)) - before.began
        known = self._kinds[before.kind]
        if known.seen == 1:
            return
        known.seconds += seconds
        if not before.mixed:
            (known.full if before.recorded else known.plain).append(seconds - before.reading)
        if before.recorded or known.cost is None:
            known.compare()
        if known.cost is not None:
            known.every = self._rung_for(known, known.cost)

    def _allowance(self, known: _Known) -> float:
        """Seconds that recording steps of a kind may have cost by now."""
        total = sum(other.seconds for other in self._kinds.values())
        return self.percent / 100 * (known.seconds + total / len(self._kinds)) / 2

    def _rung_for(self, known: _Known, cost: float) -> int:
        """The smallest power of two such that every so manieth of the steps that are wanted can be
        recorded for good.
        """
        a_step = self._allowance(known) / max(1, known.wanted - 1)
        every = 1
        while every < _TOP and cost > a_step * every:
            every *= 2
        return every

    # -- what is said
    # ----------------------------------------------------------------------------------------------

    @property
    def cost_percent(self) -> float | None:
        """What recording has cost so far, in percent of the steps' time; None as long as nothing
        could be compared.
        """
        total = sum(known.seconds for known in self._kinds.values())
        if not total or all(known.cost is None for known in self._kinds.values()):
            return None
        return float(f"{100 * sum(known.spent for known in self._kinds.values()) / total:.3g}")

    def describe(self) -> dict[str, Any]:
        """As the metadata of a recording has it.

        >>> Cadence(2.5).describe()
        {'percent': 2.5, 'steps': 0, 'recorded': 0, 'in_full': 0, 'cost_percent': None, 'kinds': []}
        """
        kinds = [
            {
                **kind._asdict(),
                "steps": known.seen,
                "recorded": known.recorded,
                "every": known.every,
            }
            for kind, known in list(self._kinds.items())
        ]
        return {
            "percent": self.percent,
            "steps": sum(known.seen for known in self._kinds.values()),
            "recorded": sum(known.recorded for known in self._kinds.values()),
            "in_full": sum(known.full_steps for known in self._kinds.values()),
            "cost_percent": self.cost_percent,
            "kinds": kinds,
        }

    def line(self) -> str:
        """The same in one line.

        >>> Cadence(2.5).line()
        'OTEL_TORCH_BUDGET=2.5: 0 of 0 steps were recorded'
        """
        told = self.describe()
        text = f"OTEL_TORCH_BUDGET={self.percent:g}: {told['recorded']} of {told['steps']} steps were recorded"
        if told["in_full"]:
            text += f", {told['in_full']} of them because a value was not finite"
        if self._kinds:
            busiest = max(
                self._kinds, key=lambda kind: (self._kinds[kind].seconds, self._kinds[kind].seen)
            )
            every = self._kinds[busiest].every
            text += (
                f"; at the end {'each' if every == 1 else f'one in {every}'} of {busiest.model}'s"
            )
        cost = told["cost_percent"]
        return text + (f"; that cost about {cost:g} % of their time" if cost is not None else "")
