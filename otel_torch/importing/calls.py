"""Rebuilds the calls of modules from the order in which their tensors were computed.

A dump has names and an order, but no calls. A module encloses the modules whose names begin with
its own, and its call lasts from the first of their tensors to its own last one:

    embed out, layers.0.attn out, layers.0 out, (model) out

    call           entered  exited  parent
    (model)              0       7
    embed                1       2       0
    layers.0             3       6       0
    layers.0.attn        4       5       3
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from otel_torch.importing.manifest import Entry


@dataclass(slots=True, eq=False)
class DumpedCall:
    """A call of a module.

    Attributes:
        first, last: Indices of the first and the last entry during the call.
        entered, exited: Positions in the order of all entries and exits of the run.
        parent: The enclosing call; None for the model's own.
    """

    module: str
    first: int
    last: int
    entered: int = -1
    exited: int = -1
    parent: DumpedCall | None = None

    @property
    def enclosing(self) -> Iterator[DumpedCall]:
        """The calls that enclose it, the innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    @property
    def outermost(self) -> DumpedCall:
        """The call of the whole model."""
        return next(reversed([self, *self.enclosing]))


def find_calls(entries: Sequence[Entry]) -> list[DumpedCall | None]:
    """Return the call of each entry; None for parameters and gradients, which belong to none."""
    calls: list[DumpedCall | None] = []
    clock = itertools.count()
    for _, forward in itertools.groupby(entries, lambda e: (e.forward, e.model, e.loop, e.step)):
        calls += _calls_of_forward(list(forward), clock)
    return calls


def _calls_of_forward(entries: list[Entry], clock: itertools.count[int]) -> list[DumpedCall | None]:
    found: dict[tuple[str, int], DumpedCall] = {}
    calls: list[DumpedCall | None] = [None] * len(entries)
    for index, entry in enumerate(entries):
        if entry.phase == "forward":
            # a model is called once in a forward, whatever the numbers of its tensors
            key = entry.module, entry.call if entry.module else 0
            call = calls[index] = found.setdefault(key, DumpedCall(entry.module, index, index))
            call.last = index
    if not found:
        return calls
    found.setdefault(("", 0), DumpedCall("", 0, len(entries) - 1))
    _nest(list(found.values()))
    _number(list(found.values()), clock)
    return calls


def _nest(calls: list[DumpedCall]) -> None:
    """Give each call its enclosing one, which lasts at least as long."""
    by_module: dict[str, list[DumpedCall]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    for call in sorted(calls, key=lambda call: -_level(call.module)):
        name = call.module
        while name and call.parent is None:
            name = name.rpartition(".")[0]
            candidates = by_module.get(name, [])
            # the call whose output comes next, else the last one before
            later = (candidate for candidate in candidates if candidate.last >= call.last)
            call.parent = next(later, candidates[-1] if candidates else None)
        if call.parent is not None:
            call.parent.first = min(call.parent.first, call.first)
            call.parent.last = max(call.parent.last, call.last)


def _level(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _number(calls: list[DumpedCall], clock: itertools.count[int]) -> None:
    """Number entries and exits in order: outer calls are entered first and left last."""
    depths = {call: len(list(call.enclosing)) for call in calls}
    entries = [(call.first, 0, depths[call], call) for call in calls]
    exits = [(call.last, 1, -depths[call], call) for call in calls]
    for _, is_exit, _, call in sorted([*entries, *exits], key=lambda event: event[:3]):
        if is_exit:
            call.exited = next(clock)
        else:
            call.entered = next(clock)
