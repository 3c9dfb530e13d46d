"""The rows of several ranks as those of one program: each reads what it got from others.

Ranks run at the same time, so their rows are put into an order in which a value comes before what
reads it. Which value a collective got shows in its numbers: another rank gave the same to one. Of a
sum and of parts they do not show it: these are of what all ranks of its group gave. Each of them
calls its collectives in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from otel_torch.parity.operations.rank_readings import sketch_of
from otel_torch.recording.rows import Row

# what the rows of one operation have in common: loop, step, and the number in their label
Operation = tuple[object, object, str]
# what the calls of one collective have in common on all ranks: their ranks, what it is, which call
Exchange = tuple[tuple[int, ...], str, int]


def join_ranks(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of all ranks, each in its own order; collectives read what they got, too.

    Args:
        ranks: The rows of each, of which no two name a value by the same number.
    """
    computed = [_computed(rows) for rows in ranks]
    waiting = [
        deque(_with_sources(rows, computed[rank], computed[:rank] + computed[rank + 1 :]))
        for rank, rows in enumerate(ranks)
    ]
    joined: list[Row] = []
    made: set[int] = set()
    while any(waiting):
        ready = (rows for rows in waiting if rows and made.issuperset(rows[0][1]))
        # equal numbers may come about otherwise: what would wait for ever got nothing
        rows = next(ready, None) or next(filter(None, waiting))
        row, sources = rows.popleft()
        received = [source for source in sources if source in made]
        joined.append(row | {"reads": [*(row.get("reads") or ()), *received]} if received else row)
        if "value" in row:
            made.add(row["value"])
    return joined


class _Computed(NamedTuple):
    """What a rank has computed and may have given to others: values by their numbers.

    Attributes:
        read: What collectives read of it.
        all: Everything, for sending makes no value and so leaves no row.
        given: What each collective of a group read.
        exchanges: Which collective each operation is a call of.
    """

    read: dict[bytes, int]
    all: dict[bytes, int]
    given: dict[Exchange, list[int]]
    exchanges: dict[Operation, Exchange]


def _computed(rows: Sequence[Row]) -> _Computed:
    read = {value for row in rows if row.get("collective") for value in row.get("reads") or ()}
    computed = _Computed({}, {}, {}, {})
    calls: Counter[tuple[tuple[int, ...], str]] = Counter()
    for row in rows:
        if row.get("group") and (operation := _operation(row)) not in computed.exchanges:
            code = tuple(row["group"]), str(row["op"])
            exchange = *code, calls[code]
            calls[code] += 1
            computed.exchanges[operation] = exchange
            computed.given[exchange] = list(row.get("reads") or ())
        # what one collective hands on to another was computed elsewhere, with the same numbers
        numbers = None if row.get("collective") else _numbers(row)
        if numbers is not None and "value" in row:
            computed.all.setdefault(numbers, row["value"])
            if row["value"] in read:
                computed.read.setdefault(numbers, row["value"])
    return computed


def _with_sources(
    rows: Sequence[Row], own: _Computed, others: Sequence[_Computed]
) -> Iterator[tuple[Row, list[int]]]:
    """Yield each row of a rank with the values of other ranks that its operation got."""
    sources: dict[Operation, dict[int, None]] = defaultdict(dict)
    for row in rows:
        numbers = _numbers(row) if row.get("collective") else None
        if numbers is None:
            continue
        is_received = not row.get("reads")
        known = (rank.all if is_received else rank.read for rank in others)
        value = next((values[numbers] for values in known if numbers in values), None)
        if value is not None:
            sources[_operation(row)][value] = None
        elif numbers not in own.read and (exchange := own.exchanges.get(_operation(row))):
            given = (value for rank in others for value in rank.given.get(exchange, ()))
            sources[_operation(row)] |= dict.fromkeys(given)
    for row in rows:
        yield row, list(sources.get(_operation(row), ())) if row.get("collective") else []


def _operation(row: Row) -> Operation:
    return row.get("loop"), row.get("step"), str(row.get("tensor")).partition("]")[0]


def _numbers(row: Row) -> bytes | None:
    """Return the sketch of a value as bytes; None where it is unknown, or all zero."""
    sketch = sketch_of(row)
    return sketch.tobytes() if sketch is not None and sketch.any() else None
