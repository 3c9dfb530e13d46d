"""The records of the last steps, to tell how a value grew and what else ran in its step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from otel_torch.records import Record
from otel_torch.sources.nonfinite.report import number
from otel_torch.sources.nonfinite.suspects import Row
from otel_torch.statistics.row_layout import largest_magnitude

# how many flushes and records are kept: more would only be more for the garbage collector to visit
_FLUSHES, _RECORDS = 6, 5000
_TREND = 3  # steps


class RecentRecords:
    """The records of the last flushes with their rows, in order of execution."""

    def __init__(self) -> None:
        self._flushes: deque[tuple[Sequence[Record], Sequence[Row]]] = deque()

    def add(self, records: Sequence[Record], rows: Sequence[Row]) -> None:
        """Keep the records of a flush, and forget the oldest."""
        self._flushes.append((records, rows))
        while len(self._flushes) > 1 and (
            len(self._flushes) > _FLUSHES or self._count() > _RECORDS
        ):
            self._flushes.popleft()

    def clear(self) -> None:
        self._flushes.clear()

    def of_model(self, name: str) -> list[tuple[Record, Row]]:
        return [
            (record, row)
            for records, rows in self._flushes
            for record, row in zip(records, rows, strict=True)
            if record.model == name
        ]

    def trend(self, record: Record) -> list[str]:
        """Return in words how large a record's tensor was in the last steps, if that is known."""
        sizes = {
            (other.loop, other.step): largest_magnitude(row)
            for other, row in self.of_model(record.model)
            if row is not None and _tensor(other) == _tensor(record)
        }
        sizes.pop((record.loop, record.step), None)
        if not sizes:
            return []
        last = list(sizes)[-_TREND:]
        steps = ", ".join(str(step) for _, step in last)
        values = ", ".join(number(sizes[key]) for key in last)
        return [f"largest |{record.tensor}| at step{'s' * (len(last) > 1)} {steps}: {values}"]

    def _count(self) -> int:
        return sum(len(records) for records, _ in self._flushes)


def _tensor(record: Record) -> tuple[str, str, str]:
    return record.module, record.tensor, record.phase
