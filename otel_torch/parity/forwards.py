"""Cuts a recording into episodes, one outermost forward each, so that two long runs can be compared
in little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import Parameter, build_parameters
from otel_torch.parity.row_batches import RowBatch, RowKinds, RowRecord, iterate_batches
from otel_torch.recording.reader import iterate_attach_rows
from otel_torch.recording.rows import Row

# not forwards, or forwards that were there before
PASSED_OVER = frozenset({"attach", "backward", "recompute"})
# how the tensors of OTEL_TORCH_OPERATIONS begin: programs that compute the same need not do so by
# the same operations
OPERATION = "op["
# rows after which an episode is cut where its step changes
_LONGEST = 50_000
Moment = tuple[str, int | None, int | None, str]  # model, loop, step, phase


@dataclass(slots=True, eq=False)
class ForwardRows:
    """The rows of one outermost forward, in the recording's order; without recorded calls those of
    one model in one step, up to the first place that comes again.

    cut: it was longer, and no end of a forward was known at which it could be cut. repeated: a
    place came again in its step, and said no call. parts: where its rows are.
    """

    moment: Moment
    kinds: RowKinds
    cut: bool = False
    repeated: bool = False
    length: int = 0
    parts: list[tuple[RowBatch, int, int]] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model whose forward it is."""
        return self.moment[0]

    @property
    def loop(self) -> int | None:
        """Of its first row."""
        return self.moment[1]

    @property
    def step(self) -> int | None:
        """Of its first row."""
        return self.moment[2]

    @property
    def rows(self) -> list[Row]:
        """Its rows as dicts: read again from the bytes of the recording at each time."""
        return [row for batch, start, stop in self.parts for row in batch.rows(start, stop)]

    @property
    def ends(self) -> list[int]:
        """Where each of its parts ends, in rows."""
        return list(accumulate(stop - start for _, start, stop in self.parts))

    @property
    def when(self) -> tuple[Any, ...]:
        """What names it within its run."""
        return *self.moment, self.line(0).call

    def line(self, at: int) -> RowRecord:
        """One of its rows; read again at each time."""
        for batch, start, stop in self.parts:
            if at < stop - start:
                return batch.line(start + at)
            at -= stop - start
        raise IndexError(at)

    def row(self, at: int) -> Row:
        """One of its rows as a dict."""
        for batch, start, stop in self.parts:
            if at < stop - start:
                return batch.rows(start + at, start + at + 1)[0]
            at -= stop - start
        raise IndexError(at)

    def take(self, batch: RowBatch, start: int, stop: int) -> None:
        """Add neighbouring lines of a batch."""
        self.length += stop - start
        if self.parts and self.parts[-1][0] is batch and self.parts[-1][2] == start:
            self.parts[-1] = batch, self.parts[-1][1], stop
        else:
            self.parts.append((batch, start, stop))


def iterate_forwards(
    path: str | Path,
    kinds: RowKinds,
    problem: Callable[[str], None] = lambda message: None,
    read: Callable[[int], None] = lambda count: None,
) -> Iterator[ForwardRows]:
    """The episodes of a recording one after the other. Raises RecordingError; see
    `iterate_batches`.
    """
    cutter = _Cutter(kinds)
    for batch in iterate_batches(path, kinds, problem, read):
        yield from cutter.cut(batch)
    if cutter.episode is not None:
        yield cutter.episode


class _Cutter:
    """What is known of the episode that is going on."""

    def __init__(self, kinds: RowKinds) -> None:
        self.episode: ForwardRows | None = None
        self._kinds = kinds
        self._passed: list[bool] = []  # of each kind, whether its rows are passed over
        self._until = -1  # when the outermost call is left; -1 while that is not known
        self._first = -1  # when the first call was entered
        self._seen: set[Any] = set()  # the tensors of an episode without calls
        self._head: Any = None  # the first of them
        self._moment: Moment | None = None  # of the row before

    def cut(self, batch: RowBatch) -> Iterator[ForwardRows]:
        """The episodes that end in a batch."""
        entered, left = batch.order.T
        self._passed += [
            kind.phase in PASSED_OVER or kind.tensor.startswith(OPERATION)
            for kind in self._kinds.known[len(self._passed) :]
        ]
        passed = np.array(self._passed)[batch.kinds]
        at, end = 0, len(passed)
        while at < end:
            if passed[at]:
                at += int(np.argmin(passed[at:])) if not passed[at:].all() else end - at
                continue
            start = int(entered[at])
            if (
                0 <= start <= self._until
                and self.episode is not None
                and self.episode.length < _LONGEST
            ):
                outside = (entered[at:] > self._until) | (entered[at:] < 0) | passed[at:]
                stop = at + int(np.argmax(outside)) if outside.any() else end
                self.episode.take(batch, at, stop)
                at = stop
                continue
            yield from self._one(batch, at, start, int(left[at]))
            at += 1

    def _one(self, batch: RowBatch, at: int, entered: int, left: int) -> Iterator[ForwardRows]:
        """Take a single row."""
        episode = self.episode
        line = batch.line(at)
        moment = line.model, line.loop, line.step, line.phase
        key = line.module, line.tensor, line.call
        new = cut = False
        if episode is None:
            new = True
        elif entered < 0:  # no calls: a place comes once in a forward
            again = key in self._seen and moment == episode.moment
            new = moment != episode.moment or again
            episode.repeated = episode.repeated or (again and moment[2] is not None)
        elif entered <= self._until:  # long
            new = cut = moment != self._moment
        elif line.parent is None:
            new = self._until >= 0 or entered > self._first
        else:
            new = self._until >= 0 or moment != episode.moment
        if new:
            if episode is not None:
                yield episode
            episode = self.episode = ForwardRows(moment, self._kinds, cut)
            self._until = self._until if cut and entered >= 0 else -1
            self._first = entered
            self._seen.clear()
            self._head = key
        assert episode is not None
        self._moment = moment
        self._first = min(self._first, entered)
        if entered < 0:
            self._seen.add(key)
        elif line.parent is None:
            self._until = max(left, entered)
        episode.take(batch, at, at + 1)


def read_parameters(path: str | Path, meta: dict[str, Any] | None = None) -> list[Parameter]:
    """The parameters at attach, without reading the rest of a long recording in full.

    meta: the recording's metadata: of a run that ended cleanly it names all models.
    """
    models = meta.get("models") if meta and meta.get("ended_cleanly") else None
    return build_parameters(iterate_attach_rows(path, models if isinstance(models, dict) else ()))
