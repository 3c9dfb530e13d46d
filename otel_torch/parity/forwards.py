"""Cut a recording into its outermost forwards, so that long runs are compared in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.call_graph import Parameter, build_parameters
from otel_torch.recording.reader import iterate_attach_rows
from otel_torch.recording.row_batches import RowBatch, RowKinds, RowRecord, iterate_batches
from otel_torch.recording.rows import Row

# phases outside of forwards, or of a forward that is already recorded
SKIPPED_PHASES = frozenset({"attach", "backward", "recompute"})
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
        parts: (batch, start, stop) of its rows.
    """

    key: ForwardKey
    kinds: RowKinds
    cut: bool = False
    repeated: bool = False
    length: int = 0
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
        return *self.key, self.record(0).call

    def record(self, index: int) -> RowRecord:
        """Return one of its rows, decoded at each access."""
        for batch, start, stop in self.parts:
            if index < stop - start:
                return batch.record(start + index)
            index -= stop - start
        raise IndexError(index)

    def row(self, index: int) -> Row:
        """Return one of its rows as a dict."""
        for batch, start, stop in self.parts:
            if index < stop - start:
                return batch.rows(start + index, start + index + 1)[0]
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
    path: str | Path,
    kinds: RowKinds,
    problem: Callable[[str], None] = lambda message: None,
    read: Callable[[int], None] = lambda count: None,
) -> Iterator[ForwardRows]:
    """Yield the forwards of a recording.

    Args:
        kinds: Filled with the kinds of rows.
        problem: Called with each warning.
        read: Called with the number of bytes of each batch.

    Raises:
        RecordingError: The file is not a recording.
    """
    cutter = _ForwardCutter(kinds)
    for batch in iterate_batches(path, kinds, problem, read):
        yield from cutter.cut(batch)
    if cutter.current is not None:
        yield cutter.current


class _ForwardCutter:
    """Collects the rows of the current forward."""

    def __init__(self, kinds: RowKinds) -> None:
        self.current: ForwardRows | None = None
        self._kinds = kinds
        self._is_skipped: list[bool] = []  # by kind
        self._exit = -1  # of the outermost call; -1 while unknown
        self._first_entry = -1
        self._seen: set[Any] = set()  # tensors of a forward without calls
        self._last_key: ForwardKey | None = None  # of the previous row

    def cut(self, batch: RowBatch) -> Iterator[ForwardRows]:
        """Yield the forwards that end in a batch."""
        entered, exited = batch.order.T
        self._is_skipped += [
            kind.phase in SKIPPED_PHASES or kind.tensor.startswith(_OPERATION_PREFIX)
            for kind in self._kinds.kinds[len(self._is_skipped) :]
        ]
        skipped = np.array(self._is_skipped)[batch.kinds]
        row, end = 0, len(skipped)
        while row < end:
            if skipped[row]:
                row = end if skipped[row:].all() else row + int(np.argmin(skipped[row:]))
                continue
            current = self.current
            is_inside = 0 <= entered[row] <= self._exit
            if is_inside and current is not None and current.length < _LONGEST:
                is_outside = (entered[row:] > self._exit) | (entered[row:] < 0) | skipped[row:]
                stop = row + int(np.argmax(is_outside)) if is_outside.any() else end
                current.append(batch, row, stop)
                row = stop
                continue
            yield from self._add_row(batch, row, int(entered[row]), int(exited[row]))
            row += 1

    def _add_row(
        self, batch: RowBatch, row: int, entered: int, exited: int
    ) -> Iterator[ForwardRows]:
        """Add a row to the current forward, or yield that and start the next one."""
        record = batch.record(row)
        key = record.model, record.loop, record.step, record.phase
        name = record.module, record.tensor, record.call
        is_new = is_cut = False
        current = self.current
        if current is None:
            is_new = True
        elif entered < 0:  # without calls, a tensor occurs once in a forward
            is_repeated = name in self._seen and key == current.key
            is_new = key != current.key or is_repeated
            current.repeated = current.repeated or (is_repeated and record.step is not None)
        elif entered <= self._exit:  # inside a forward that is too long
            is_new = is_cut = key != self._last_key
        elif record.parent is None:
            is_new = self._exit >= 0 or entered > self._first_entry
        else:
            is_new = self._exit >= 0 or key != current.key
        if is_new:
            if current is not None:
                yield current
            current = self.current = ForwardRows(key, self._kinds, is_cut)
            self._exit = self._exit if is_cut else -1
            self._first_entry = entered
            self._seen.clear()
        assert current is not None
        self._last_key = key
        self._first_entry = min(self._first_entry, entered)
        if entered < 0:
            self._seen.add(name)
        elif record.parent is None:
            self._exit = max(exited, entered)
        current.append(batch, row, row + 1)


def read_parameters(path: str | Path, meta: dict[str, Any] | None = None) -> list[Parameter]:
    """Read the parameters at attach, without parsing the rest of a long recording in full.

    Args:
        meta: The recording's metadata. That of a run that ended cleanly names all models, so that
            reading can stop early.
    """
    models = meta.get("models") if meta and meta.get("ended_cleanly") else None
    return build_parameters(iterate_attach_rows(path, models if isinstance(models, dict) else ()))
