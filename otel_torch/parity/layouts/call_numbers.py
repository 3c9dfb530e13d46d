"""Number the calls of all ranks as those of one process.

Each rank counts its calls on its own. The first rank's numbers are spread out, and calls that it
does not have (a later stage of a pipeline, another rank's expert) are put into the gap before the
end of the call that encloses them, or after the last one of the step. Several stages of a rank
count as ranks of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from otel_torch.parity.layouts.rank_rows import RankRow
from otel_torch.recording.rows import Row

_GAP = 2**20
_VALUE_STRIDE = 10**9
_CALL = ("model", "module", "loop", "step", "call", "phase", "branch")
_CallKey = tuple[Any, ...]


class CallNumbers:
    """The numbers of the calls of one step, for all ranks.

    Args:
        rows: The rows of all ranks.
        are_in_time: Whether forwards of all ranks are numbered as those of one process already.
    """

    def __init__(self, rows: Iterable[RankRow], are_in_time: bool = False) -> None:
        self._first: dict[_CallKey, list[int]] = {}
        # (index of the stage, entry) -> call, and the entry of the call around it
        self._calls: dict[tuple[int, int], tuple[_CallKey, int | None]] = {}
        by_stage: dict[tuple[int, int], list[RankRow]] = {}
        for rank_row in rows:
            by_stage.setdefault(rank_row.stage, []).append(rank_row)
        self._indices = {stage: index for index, stage in enumerate(sorted(by_stage))}
        self._count = max(len(by_stage), 1)
        self._end = 0  # the last number of the first rank, multiplied
        self._starts: dict[int, int] = {}  # index of a stage -> its first number
        for stage, index in self._indices.items():
            for rank_row in by_stage[stage]:
                row = rank_row.row
                order = row.get("order")
                if not order or order[0] is None or order[1] is None:
                    continue
                call = tuple(row.get(name) for name in _CALL)
                self._starts[index] = min(order[0], self._starts.get(index, order[0]))
                if not index:
                    self._end = max(self._end, _GAP * order[1])
                self._calls[index, order[0]] = call, row.get("parent")
                is_first = not index or (are_in_time and row.get("parent") is None)
                self._first.setdefault(call, order if is_first else [])

    def renumber(self, owner: RankRow) -> Row:
        """Return a row with numbers that are unique among all ranks."""
        row, index = dict(owner.row), self._indices[owner.stage]
        for name in ("value", "storage"):
            if isinstance(row.get(name), int):
                row[name] += owner.rank * _VALUE_STRIDE
        order = row.get("order")
        if order and order[0] is not None and order[1] is not None:
            row["order"] = self._order(index, order)
        if isinstance(row.get("parent"), int):
            row["parent"] = self._entry(index, row["parent"])
        return row

    def _order(self, index: int, order: list[int]) -> list[int]:
        call, _ = self._calls[index, order[0]]
        if self._first[call]:
            return [_GAP * number for number in self._first[call]]
        base = self._base(index, order[0])
        return [base + number for number in order]

    def _entry(self, index: int, entry: int) -> int:
        if (index, entry) not in self._calls:
            return _GAP * entry + index
        call, _ = self._calls[index, entry]
        return (
            _GAP * self._first[call][0] if self._first[call] else self._base(index, entry) + entry
        )

    def _base(self, index: int, entry: int) -> int:
        """Return what is added to a number of a call that the first rank does not have."""
        around: int | None = entry
        while around is not None and (index, around) in self._calls:
            call, parent = self._calls[index, around]
            if self._first[call]:
                return _GAP * self._first[call][1] - _GAP + index * _GAP // self._count - around
            around = parent
        # between its last number in this step and the first one of the next step
        return self._end + index * _GAP // self._count - self._starts[index]
