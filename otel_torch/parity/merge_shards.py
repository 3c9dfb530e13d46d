"""Merges the recordings of ranks that each hold shards of tensors into one recording.

The row of a rank describes its shard. Additive fields (sums, squares, counts, sketches) are
added by position, which gives the row that a single process with the whole tensor would have
written:

    rank 0  {"tensor": "out", "numel": 4, "sum": 1.0, "max": 2.0, "shard": {"offset": [0, 0], …}}
    rank 1  {"tensor": "out", "numel": 4, "sum": 3.0, "max": 1.5, "shard": {"offset": [2, 0], …}}
    merged  {"tensor": "out", "numel": 8, "sum": 4.0, "max": 2.0}

DuckDB groups the rows, on disk if needed: the recordings of sixty-four ranks do not fit in memory.
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from otel_torch.parity.layouts.whole_statistics import STATISTICS, ShardColumns, merge_statistics
from otel_torch.parity.recording_source import MadeRecording, Warn
from otel_torch.recording.metadata import read_metadata
from otel_torch.recording.reader import RecordingError, iterate_rows
from otel_torch.recording.rows import Row

_DATABASE_MEMORY = "256MB"  # beyond that, DuckDB uses the disk
_ROWS_PER_QUERY = 100_000  # rows of all ranks that are grouped at a time
# Relative difference that the mean magnitudes of a replicated tensor may have: ranks add up in
# different orders.
_REPLICA_TOLERANCE = 1e-4
_KEY = ("module", "tensor", "model", "loop", "step", "call", "phase", "branch")
_SHARD_COLUMNS = (*STATISTICS, "whole", "at", "partial", "shape")
_TEXTS = ("module", "tensor", "model", "phase", "branch", "sketch", "row_sketch")
_INTEGERS = ("loop", "step", "call", "numel", "nonfinite", "zeros")
_FLOATS = ("abs_mean", "sum", "min", "max", "std", "l2", "rms", "mean")
_COLUMN_TYPES = {
    **dict.fromkeys(_TEXTS, "VARCHAR"),
    **dict.fromkeys(_INTEGERS, "BIGINT"),
    **dict.fromkeys(_FLOATS, "VARCHAR"),  # NaN and Inf are spelled out
    "shape": "BIGINT[]",
    "shard": 'STRUCT(shape BIGINT[], "offset" BIGINT[], partial BOOLEAN)',
}
# Numbers that identify something within a rank; they are made unique across ranks.
_RANK_STRIDE = 10**9


def merge_shards(
    folder: Path, ranks: Mapping[int, Path], warn: Warn, leave_out: Warn
) -> MadeRecording:
    """Return the recordings of several ranks as one.

    Args:
        folder: The folder of the recordings, for messages.
        ranks: Rank -> recording.
        warn: Called with a line for each problem.
        leave_out: Called with a line for rows that are left out.

    Raises:
        RecordingError: Without DuckDB, or if the recordings cannot be merged.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise RecordingError(
            f"{folder}: its ranks hold shards of tensors; merging them needs DuckDB: "
            "pip install 'otel-torch[ranks]'"
        ) from None
    merged = MadeRecording(folder)
    with (
        tempfile.TemporaryDirectory(prefix="otel-torch-ranks-") as temporary,
        duckdb.connect(f"{temporary}/rows.duckdb") as database,
    ):
        try:
            try:
                _load_rows(database, list(ranks.values()), temporary)
            except duckdb.Error:
                _check_rows(ranks.values(), leave_out)
                # what the reader accepts may be skipped: a last line that was cut off
                _load_rows(database, list(ranks.values()), temporary, skip_errors=True)
            counts = database.execute("SELECT rank, count(*) FROM rows GROUP BY rank").fetchall()
            merged.extend(_merged_rows(database, ranks, leave_out))
            _warn_of_different_replicas(database, list(ranks), warn)
        except duckdb.Error as error:
            reason = " ".join(str(error).split())[:200]
            raise RecordingError(f"{folder}: cannot be merged ({reason})") from None
    metadata = [read_metadata(path, warn) for path in ranks.values()]
    are_whole = all(
        metadata[index].get("ended_cleanly", True)
        and count >= metadata[index].get("records_written", 0)
        for index, count in counts
    )
    merged.meta = {**metadata[0], "ended_cleanly": are_whole}
    merged.meta.pop("records_written", None)  # those of one rank
    return merged


# -- the database


def _check_rows(paths: Iterable[Path], leave_out: Warn) -> None:
    """Raise a RecordingError that names the first line that is wrong."""
    for path in paths:
        deque(iterate_rows(path, leave_out), maxlen=0)


def _load_rows(database: Any, paths: list[Path], temporary: str, skip_errors: bool = False) -> None:
    """Load all rows, and group them by place.

    Table `rows`: `rank` is the index of the recording, `line` the number of the row in it, `place`
    the hash of its key. Table `places`: the lowest rank with a place owns it; its row is kept.
    """
    database.execute(f"SET memory_limit = '{_DATABASE_MEMORY}'")
    database.execute("SET threads = 1")  # lists of shards in each exceed the limit
    database.execute("SET temp_directory = ?", [temporary])
    key = ", ".join(f'"{name}"' for name in _KEY)
    statistics = ", ".join(map(_statistic_column, STATISTICS))
    for index, path in enumerate(paths):
        target = "INSERT INTO rows" if index else "CREATE OR REPLACE TABLE rows AS"
        database.execute(
            f"{target} SELECT {index}::INTEGER AS rank, row_number() OVER () AS line, "
            f"hash({key}) AS place, {statistics}, shape, shard.shape AS whole, "
            'shard."offset" AS at, coalesce(shard.partial, false) AS partial '
            "FROM read_json(?, format = 'newline_delimited', columns = ?, ignore_errors = ?)",
            [str(path), _COLUMN_TYPES, skip_errors],
        )
    database.execute(
        "CREATE TABLE places AS SELECT place, min(rank) AS owner, arg_min(line, rank) AS line, "
        "count(whole) > 0 AS sharded, max(abs_mean) - min(abs_mean) AS difference, "
        "max(abs_mean) AS largest, count(DISTINCT rank) AS ranks FROM rows GROUP BY place"
    )


def _statistic_column(name: str) -> str:
    return f'TRY_CAST("{name}" AS DOUBLE) AS "{name}"' if name in _FLOATS else f'"{name}"'


def _owned_rows(database: Any, rank_index: int, path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of the rows of a rank that no lower one has."""
    query = "SELECT line FROM places WHERE owner = ?"
    lines = database.cursor().execute(query, [rank_index]).fetchnumpy()["line"]
    is_owned = np.zeros(lines.max(initial=0), dtype=bool)
    is_owned[lines - 1] = True
    return compress(enumerate(iterate_rows(path), 1), is_owned.tolist())


def _sharded_places(database: Any) -> Iterator[tuple[int, int, ShardColumns]]:
    """Yield (owner, line, fields of all shards) of each sharded place, in the order of the rows."""
    lists = ", ".join(f'list(r."{name}" ORDER BY r.rank)' for name in _SHARD_COLUMNS)
    count, ranks = database.execute(
        "SELECT count(*), max(ranks) FROM places WHERE sharded"
    ).fetchone()
    places_per_query = max(1, _ROWS_PER_QUERY // max(ranks or 1, 1))
    for start in range(0, count, places_per_query):
        result = database.cursor().execute(
            f"SELECT any_value(p.owner), any_value(p.line), {lists} FROM rows r "
            "JOIN (SELECT * FROM places WHERE sharded ORDER BY owner, line LIMIT ? OFFSET ?) p "
            "USING (place) WHERE r.whole IS NOT NULL GROUP BY r.place ORDER BY 1, 2",
            [places_per_query, start],
        )
        while rows := result.fetchmany(500):
            for owner, line, *columns in rows:
                yield owner, line, dict(zip(_SHARD_COLUMNS, columns, strict=True))


def _warn_of_different_replicas(database: Any, ranks: list[int], warn: Warn) -> None:
    """Warn of tensors that every rank holds as a whole, and that differ between ranks."""
    differs = f"NOT sharded AND ranks > 1 AND difference > {_REPLICA_TOLERANCE} * largest"
    (count,) = database.execute(f"SELECT count(*) FROM places WHERE {differs}").fetchone()
    if not count:
        return
    place, owner, line = database.execute(
        f"SELECT place, owner, line FROM places WHERE {differs} ORDER BY owner, line LIMIT 1"
    ).fetchone()
    magnitudes = database.execute(
        "SELECT rank, abs_mean FROM rows WHERE place = ? ORDER BY rank", [place]
    ).fetchall()
    first_magnitude = magnitudes[0][1]
    rank_index, _ = max(magnitudes, key=lambda item: abs(item[1] - first_magnitude))
    warn(
        f"{count} tensors that are not sharded differ between ranks, first on rank "
        f"{ranks[rank_index]} (line {line} of rank {ranks[owner]}): the lowest rank's is compared"
    )


# -- rows


def _merged_rows(database: Any, ranks: Mapping[int, Path], leave_out: Warn) -> Iterator[Row]:
    """Yield the rows of the owners; rows of shards become rows of the whole tensor."""
    sharded = _sharded_places(database)
    next_sharded = next(sharded, None)
    incomplete: list[Row] = []
    for rank_index, path in enumerate(ranks.values()):
        for line, row in _owned_rows(database, rank_index, path):
            if next_sharded is not None and next_sharded[:2] == (rank_index, line):
                is_complete = _make_whole(row, next_sharded[2])
                next_sharded = next(sharded, None)
                if not is_complete:
                    incomplete.append(row)
                    continue
            yield _with_unique_numbers(row, rank_index)
    if incomplete:
        first = incomplete[0]
        leave_out(
            f"{len(incomplete)} rows were left out because some shards of their tensors are "
            "missing (is a rank's recording missing?); the first is "
            f"{first['module'] or first.get('model')} {first['tensor']}"
        )


def _make_whole(row: Row, shards: ShardColumns) -> bool:
    """Turn the row of a shard into the row of the whole tensor.

    Partial shards (terms of a sum) have the shape of the whole tensor, and all of them count. Of
    several shards at the same offset only one counts.

    Returns:
        Whether all shards are there; if not, the row is unchanged.
    """
    shape = shards["whole"][0]
    numel = math.prod(shape)
    is_partial = any(shards["partial"])
    if not is_partial:
        indices = _first_at_each_offset(shards["at"])
        shards = {name: [values[index] for index in indices] for name, values in shards.items()}
    sizes = [
        math.prod(shard_shape) if size is None else size
        for size, shard_shape in zip(shards["numel"], shards["shape"], strict=True)
    ]
    if not is_partial and sum(sizes) != numel:
        return False
    del row["shard"]
    row["shape"] = list(shape)
    merged = merge_statistics(shards, sizes, numel, is_partial)
    for name in (*STATISTICS, "histogram"):
        if name in row:
            value = merged.get(name)
            if value is None:
                del row[name]
            else:
                row[name] = value
    return True


def _first_at_each_offset(offsets: list[list[int]]) -> list[int]:
    first: dict[tuple[int, ...], int] = {}
    for index, offset in enumerate(offsets):
        first.setdefault(tuple(offset), index)
    return sorted(first.values())


def _with_unique_numbers(row: Row, rank_index: int) -> Row:
    """Shift the numbers of values and calls, so that no two ranks share one."""
    if rank_index == 0:
        return row
    offset = rank_index * _RANK_STRIDE
    for name in ("value", "storage", "parent"):
        if isinstance(row.get(name), int):
            row[name] += offset
    if isinstance(row.get("order"), list):
        row["order"] = [None if number is None else number + offset for number in row["order"]]
    return row
