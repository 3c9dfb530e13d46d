"""Cut a recording into its outermost forwards, so that long runs are compared in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import Parameter, build_parameters
from otel_torch.parity.recording_source import RecordingSource
from otel_torch.recording.row_batches import Place, RowBatch, RowKinds
from otel_torch.recording.row_schema import RowRecord
from otel_torch.recording.rows import Row
from otel_torch.records import TOKENS

# of a framework's own forwards on dummy inputs, which are compared only if asked
WARM_UP = "warmup"
# phases outside of forwards, or of a forward that is already recorded
SKIPPED_PHASES = frozenset({"attach", "backward", "recompute", TOKENS, "train", "update", WARM_UP})
# prefix of the tensors of OTEL_TORCH_OPERATIONS: two programs may compute the same by different
# operations
_OPERATION_PREFIX = "op["
# rows after which a forward is cut where its step changes
_LONGEST = 50_000
ForwardKey = tuple[str, int | None, int | None, str]  # model, loop, step, phase


@dataclass(slots=True, eq=False)
class ForwardRows:
    """The rows of one outermost forward, in the recording's order.

    Without recorded calls, these are the rows of one model in one step, up to the first tensor that
    repeats.

    Attributes:
        key: Of the first row.
        cut: The forward is longer, and was cut at a change of step.
        repeated: A tensor repeated within the step, and no call was recorded.
        tokens: The row that says which tokens it computes, if one was recorded.
        log_probabilities: The row of the likeliest next tokens, likewise.
        parts: (batch, start, stop) of its rows.
    """

    key: ForwardKey
    kinds: RowKinds
    cut: bool = False
    repeated: bool = False
    length: int = 0
    tokens: Row | None = None
    log_probabilities: Row | None = None
    parts: list[tuple[RowBatch, int, int]] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model whose forward it is."""
        return self.key[0]

    @property
    def loop(self) -> int | None:
        """The loop of its first row."""
        return self.key[1]

    @property
    def step(self) -> int | None:
        """The step of its first row."""
        return self.key[2]

    @property
    def rows(self) -> list[Row]:
        """Its rows as dicts, decoded at each access."""
        return [row for batch, start, stop in self.parts for row in batch.rows(start, stop)]

    @property
    def part_ends(self) -> list[int]:
        """The index after the last row of each part."""
        return list(accumulate(stop - start for _, start, stop in self.parts))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identifies it within its run."""
        return *self.key, self.place(0)[2]

    def record(self, index: int) -> RowRecord:
        """Return one of its rows, decoded at each access."""
        batch, position = self._locate(index)
        return batch.record(position)

    def row(self, index: int) -> Row:
        """Return one of its rows as a dict."""
        batch, position = self._locate(index)
        return batch.rows(position, position + 1)[0]

    def place(self, index: int) -> Place:
        """Return loop, step and call of one of its rows."""
        batch, position = self._locate(index)
        return batch.place(position)

    def _locate(self, index: int) -> tuple[RowBatch, int]:
        for batch, start, stop in self.parts:
            if index < stop - start:
                return batch, start + index
            index -= stop - start
        raise IndexError(index)

    def append(self, batch: RowBatch, start: int, stop: int) -> None:
        """Add neighboring rows of a batch."""
        self.length += stop - start
        if self.parts and self.parts[-1][0] is batch and self.parts[-1][2] == start:
            self.parts[-1] = batch, self.parts[-1][1], stop
        else:
            self.parts.append((batch, start, stop))


def iterate_forwards(
    source: RecordingSource,
    kinds: RowKinds,
    problem: Callable[[str], None] = lambda message: None,
    read: Callable[[int], None] = lambda count: None,
    skipped: frozenset[str] = SKIPPED_PHASES,
) -> Iterator[ForwardRows]:
    """Yield the forwards of a recording.

    Args:
        kinds: Filled with the kinds of rows.
        problem: Called with each warning.
        read: Called with the number of bytes of each batch.
        skipped: The phases to leave out.

    Raises:
        RecordingError: The file is not a recording.
    """
    cutter = _ForwardCutter(kinds, skipped)
    for batch in source.batches(kinds, problem, read):
        yield from cutter.cut(batch)
    yield from cutter.finish()


class _ForwardCutter:
    """Collects the rows of the current forward: those of an outermost call and of all calls in it.

    A call in it may be of another model: a module that its owner keeps in a list or a closure is a
    model by itself. Rows without recorded calls are cut by `_UnorderedCutter`.
    """

    def __init__(self, kinds: RowKinds, skipped: frozenset[str]) -> None:
        self._kinds, self._skipped = kinds, skipped
        self._unordered = _UnorderedCutter(kinds)
        self._is_skipped: list[bool] = []  # by kind
        self._has_parents = False  # whether the recording names enclosing calls
        self._current: ForwardRows | None = None
        self._is_open = False  # whether the outermost call was seen entering, but not leaving
        self._exit = -1  # of the outermost call; -1 while unknown
        self._first_entry = -1
        self._calls: set[int] = set()  # while the outermost call was not seen
        self._last_key: ForwardKey | None = None  # of the previous row of the current model
        self._tokens: Row | None = None  # of the next forward

    def cut(self, batch: RowBatch) -> Iterator[ForwardRows]:
        """Yield the forwards that end in a batch."""
        entered, exited = batch.order.T
        self._is_skipped += [
            kind.phase in self._skipped or kind.tensor.startswith(_OPERATION_PREFIX)
            for kind in self._kinds.kinds[len(self._is_skipped) :]
        ]
        skipped = np.array(self._is_skipped)[batch.kinds]
        row, end = 0, len(skipped)
        while row < end:
            if skipped[row]:
                stop = end if skipped[row:].all() else row + int(np.argmin(skipped[row:]))
                self._find_tokens(batch, row, stop)
                row = stop
                continue
            current = self._current
            is_inside = 0 <= entered[row] <= self._exit
            if is_inside and current is not None and current.length < _LONGEST:
                most = min(end, row + _LONGEST - current.length)
                entries = entered[row:most]
                is_outside = (entries > self._exit) | (entries < 0) | skipped[row:most]
                stop = row + int(np.argmax(is_outside)) if is_outside.any() else most
                current.append(batch, row, stop)
                row = stop
                continue
            if entered[row] < 0:
                yield from self._unordered.add(batch, row)
            else:
                yield from self._add_row(batch, row, int(entered[row]), int(exited[row]))
            row += 1

    def _find_tokens(self, batch: RowBatch, start: int, stop: int) -> None:
        """Keep the rows of a forward's tokens (before the forward) and of what may follow them."""
        kinds = self._kinds.kinds
        for row in range(start, stop):
            kind = kinds[int(batch.kinds[row])]
            if kind.phase != TOKENS:
                continue
            (entry,) = batch.rows(row, row + 1)
            if kind.tensor == "tokens":
                self._tokens = entry
            elif self._current is not None:
                self._current.log_probabilities = entry

    def finish(self) -> Iterator[ForwardRows]:
        """Yield the forwards that the recording's end ends."""
        yield from self._unordered.finish()
        if self._current is not None:
            yield self._current

    def _add_row(
        self, batch: RowBatch, row: int, entered: int, exited: int
    ) -> Iterator[ForwardRows]:
        """Add a row to the current forward, or yield that and start the next one."""
        kind, (loop, step, _) = self._kinds.kinds[int(batch.kinds[row])], batch.place(row)
        key = kind.model, loop, step, kind.phase
        parent = batch.parent(row)
        self._has_parents = self._has_parents or parent is not None
        current = self._current
        is_cut = current is not None and self._is_cut(current, key, entered)
        if current is None or is_cut or self._starts_forward(current, parent, key, entered):
            if current is not None:
                yield current
            tokens, self._tokens = self._tokens, None
            current = self._current = ForwardRows(key, self._kinds, is_cut, tokens=tokens)
            if not is_cut:
                self._is_open, self._exit, self._first_entry = False, -1, entered
                self._calls.clear()
        if kind.model == current.model:
            self._last_key = key
        is_outermost = parent is None and entered <= self._first_entry
        self._first_entry = min(self._first_entry, entered)
        if is_outermost:
            self._exit, self._is_open = exited, exited < 0
        elif self._exit < 0 and not self._is_open:
            self._calls.update((entered, -1 if parent is None else parent))
        current.append(batch, row, row + 1)

    def _is_cut(self, current: ForwardRows, key: ForwardKey, entered: int) -> bool:
        """Return whether a forward that is too long is cut here, where its step changes."""
        is_inside = entered <= self._exit
        return is_inside and key[0] == current.model and key != self._last_key

    def _starts_forward(
        self, current: ForwardRows, parent: int | None, key: ForwardKey, entered: int
    ) -> bool:
        """Return whether a row belongs to another outermost call than the rows before."""
        if self._exit >= 0:
            return entered > self._exit
        if self._is_open and not self._has_parents:
            return False
        if parent is None:
            return entered > self._first_entry
        return not self._is_open and key != current.key and parent not in self._calls


@dataclass(slots=True, eq=False)
class _UnorderedForward:
    """A forward whose rows name no calls.

    Attributes:
        models: Its own model, and those whose rows stand between its own.
        seen: The tensors of its own model.
        is_running: Whether its root has not returned.
    """

    rows: ForwardRows
    models: set[str]
    seen: set[Any] = field(default_factory=set)
    is_running: bool = True


class _UnorderedCutter:
    """Collects rows without recorded calls: of each model those of one step, each tensor once.

    Rows of another model between those of a model that has not returned belong to its forward.
    """

    def __init__(self, kinds: RowKinds) -> None:
        self._kinds = kinds
        self._open: list[_UnorderedForward] = []  # in the order of their first rows

    def add(self, batch: RowBatch, row: int) -> Iterator[ForwardRows]:
        """Add a row; yield the forwards that end before it."""
        record = batch.record(row)
        key, name = _key(record), (record.module, record.tensor, record.call)
        forward = next((f for f in self._open if record.model in f.models), None)
        if forward is not None and record.model == forward.rows.model:
            is_same_step = key == forward.rows.key
            if not is_same_step or name in forward.seen:
                is_repeated = is_same_step and record.step is not None
                forward.rows.repeated = forward.rows.repeated or is_repeated
                yield from self._close(self._open.index(forward) + 1)
                forward = None
        if forward is None:
            forward = _UnorderedForward(ForwardRows(key, self._kinds), {record.model})
            self._open.append(forward)
        elif forward.is_running:
            self._absorb_later(forward)
        if record.model == forward.rows.model:
            forward.seen.add(name)
            is_returned = not record.module and record.tensor.startswith("out")
            forward.is_running = forward.is_running and not is_returned
        forward.rows.append(batch, row, row + 1)

    def _absorb_later(self, forward: _UnorderedForward) -> None:
        """Add the forwards that began after this one to it."""
        first = self._open.index(forward) + 1
        for later in self._open[first:]:
            forward.models |= later.models
            for part in later.rows.parts:
                forward.rows.append(*part)
        del self._open[first:]

    def _close(self, count: int) -> Iterator[ForwardRows]:
        """Yield the first `count` open forwards."""
        closed, self._open = self._open[:count], self._open[count:]
        yield from (forward.rows for forward in closed)

    def finish(self) -> Iterator[ForwardRows]:
        """Yield the forwards that the recording's end ends."""
        return self._close(len(self._open))


def _key(record: RowRecord) -> ForwardKey:
    return record.model, record.loop, record.step, record.phase


def read_parameters(source: RecordingSource, meta: dict[str, Any] | None = None) -> list[Parameter]:
    """Read the parameters at attach, without parsing the rest of a long recording in full.

    Args:
        meta: The recording's metadata. That of a run that ended cleanly names all models, so that
            reading can stop early.
    """
    models = meta.get("models", ()) if meta and meta.get("ended_cleanly") else ()
    return build_parameters(source.attach_rows(models))
