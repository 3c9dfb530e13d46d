"""Which of the records with NaN or Inf matter.

Programs make Inf on purpose: masks of -Inf, distances that a `where` replaces. So a value counts
once it comes out: it is traced through the outputs of the calls around it, up to the outermost one
that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from otel_torch.records import Record
from otel_torch.statistics.row_layout import nonfinite_kind

Row = Sequence[float] | None
FORWARD_PHASES = ("forward", "eval", "recompute")
IsBad = Callable[[Row], bool]


def is_alarming(row: Row) -> bool:
    """Return whether a tensor has a NaN or +Inf; -Inf alone is a mask's."""
    return row is not None and nonfinite_kind(row) in ("NaN", "Inf")


def is_nonfinite(row: Row) -> bool:
    """Return whether a tensor has a NaN or Inf of any kind."""
    return row is not None and nonfinite_kind(row) is not None


def comes_out(records: Sequence[Record], rows: Sequence[Row], index: int, is_bad: IsBad) -> bool:
    """Return whether every recorded call around a record has bad outputs, too.

    Args:
        records: of whole forwards, in order of completion, with their rows.
    """
    while (around := _outputs_around(records, index)) is not None:
        bad = [output for output in around if is_bad(rows[output])]
        if not bad:
            return False
        index = bad[0]
    return True


def _outputs_around(records: Sequence[Record], index: int) -> list[int] | None:
    """Return the outputs of the recorded call that encloses a record; None if there is none."""
    inner = records[index]
    outputs = _completed_after(records, index)
    for output in outputs:
        call = _call(records[output])
        if _encloses(records[output], inner):
            return [output, *(later for later in outputs if _call(records[later]) == call)]
    return None


def _completed_after(records: Sequence[Record], index: int) -> Iterator[int]:
    """Yield the outputs of the same model, step and phase that were recorded later."""
    inner = records[index]
    for later in range(index + 1, len(records)):
        record = records[later]
        if record.tensor.startswith("out") and _forward(record) == _forward(inner):
            yield later


def _forward(record: Record) -> tuple[str, int, int, str]:
    return record.model, record.loop, record.step, record.phase


def _call(record: Record) -> tuple[str, int]:
    return record.module, record.call


def _encloses(outer: Record, inner: Record) -> bool:
    if outer.module == inner.module:
        return inner.tensor.startswith("in") and outer.call == inner.call
    return not outer.module or inner.module.startswith(outer.module + ".")


def first_that_comes_out(
    records: Sequence[Record], rows: Sequence[Row], bad: Sequence[int], is_bad: IsBad
) -> int | None:
    """Return the index of the first record of a forward whose NaN or Inf comes out, or None.

    Args:
        bad: the indices of the records with NaN or Inf.
    """
    for index in bad:
        if (
            records[index].phase in FORWARD_PHASES
            and is_bad(rows[index])
            and comes_out(records, rows, index, is_bad)
        ):
            return index
    return None
