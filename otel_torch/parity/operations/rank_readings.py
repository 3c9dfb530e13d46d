"""How the values of ranks may be read together: as terms of a sum, or with a factor of their own.

Ranks of one program run nearly the same operations. What the same operation in the same line made
on each of them, for the same time, belongs together: a value of one process may be the sum of
theirs. In a backward pass a rank's value may be larger, for its loss is a mean over fewer rows.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otel_torch.recording.rows import Row
from otel_torch.statistics.rank_cuts import mesh_sizes


class RankReading(NamedTuple):
    """A value that is made of ranks' values for the comparison alone.

    Attributes:
        name: What is done to them.
        values: Their numbers.
        row: Shape, dtype and sketch of what is made.
    """

    name: str
    values: Sequence[int]
    row: Row


def sketch_of(row: Row) -> NDArray[Any] | None:
    """Return the numbers of a row's sketch, if it has one."""
    sketch = row.get("sketch")
    if isinstance(sketch, str):
        return np.frombuffer(a2b_base64(sketch), "<f4")
    return sketch if isinstance(sketch, np.ndarray) else None


def readings_of_ranks(
    rows: Mapping[int, tuple[Row, int]], lines: Sequence[tuple[Any, ...]]
) -> Iterator[RankReading]:
    """Yield how values of ranks may be read.

    Args:
        rows: By number of the value, each with its maker; of one process there are no readings.
        lines: The table that the rows index.
    """
    ranks = {row.get("rank") for row, _ in rows.values()}
    if len(ranks) < 2:
        return
    times: Counter[Any] = Counter()
    together: dict[Any, list[int]] = defaultdict(list)
    for number, (row, _) in rows.items():
        if row.get("sketch") and "float" in str(row.get("dtype")):
            place = _place(row, lines)
            time = times[row["rank"], place]
            times[row["rank"], place] += 1
            together[place, time].append(number)
    for unordered in together.values():
        values = sorted(unordered)  # of ascending ranks
        if len(values) == len(ranks):
            yield from _readings(values, [rows[value][0] for value in values])


def _readings(values: Sequence[int], rows: Sequence[Row]) -> Iterator[RankReading]:
    """Yield how what ranks have of one value may be read."""
    sketches = np.array([sketch_of(row) for row in rows], np.float64)
    row = {name: rows[0][name] for name in ("shape", "dtype")}
    counts = mesh_sizes(len(values))
    shares = [1, *counts] if rows[0].get("phase") != "forward" else [1]
    for group in _groups(len(values), counts):
        is_replicated = (sketches[group] == sketches[group[0]]).all()
        for share in [] if is_replicated else shares:
            total = sketches[group].sum(axis=0) / share
            members = [values[rank] for rank in group]
            yield RankReading("otel_torch.sum", members, row | {"sketch": total})
    for value, sketch in zip(values, sketches, strict=True):
        for share in shares[1:]:
            yield RankReading("otel_torch.share", [value], row | {"sketch": sketch / share})


def _groups(ranks: int, counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the groups of ranks that a mesh may have: neighbors, and equally spaced ones.

    >>> list(_groups(4, [2, 4]))
    [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3]]
    """
    for count in counts:
        yield from (list(range(first, first + count)) for first in range(0, ranks, count))
        spaces = ranks // count
        if spaces > 1:
            yield from (list(range(first, ranks, spaces)) for first in range(spaces))


def _place(row: Row, lines: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what the same value of two ranks has in common."""
    numbers = row.get("line"), row.get("forward_line")
    where = [lines[number] for number in numbers if number is not None and number < len(lines)]
    names = ("op", "leaf", "name", "makes", "model", "module", "phase", "loop", "step")
    return (*where, *(row.get(name) for name in names), tuple(row.get("shape") or ()))
