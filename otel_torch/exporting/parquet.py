"""Parquet files of rows, values and metadata, in folders by rank and step.

    FOLDER/rows/rank=0/step=3/*.parquet      a row of the recording each
    FOLDER/values/rank=0/step=3/*.parquet    a value each, as the row in which it is seen first
    FOLDER/metadata/rank=0/*.parquet         a recording each

Rows go through the reader of recordings, so that what it accepts is exported as it reads it, and
on to DuckDB in pieces: however long a recording is, one piece is in memory.
"""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from otel_torch.exporting.exported_recording import ExportedRecording
from otel_torch.exporting.new_folder import check_new_folder, new_folder
from otel_torch.recording import row_schema
from otel_torch.recording.rows import Row, json_encoder
from otel_torch.records import json_safe

_MEMORY = "512MB"  # beyond that, DuckDB uses the disk
_PIECE_BYTES = 32 << 20
_LONGEST_LINE = 16 << 20  # what DuckDB takes unless it is told
# type of a field -> how DuckDB reads it, and what becomes of that: a statistic may be text
_COLUMN_TYPES: dict[Any, tuple[str, str]] = {
    str: ("VARCHAR", "{}"),
    str | None: ("VARCHAR", "{}"),
    row_schema.Integer | None: ("BIGINT", "{}"),
    row_schema.Index | None: ("BIGINT", "{}"),
    row_schema.Number: ("VARCHAR", "try_cast({} AS DOUBLE)"),
    row_schema.Count: ("VARCHAR", "try_cast({} AS BIGINT)"),
    row_schema.Sizes: ("VARCHAR", "try_cast({} AS BIGINT[])"),
    row_schema.Integers: ("BIGINT[]", "{}"),
    row_schema.Indices: ("BIGINT[]", "{}"),
    row_schema.Order: ("BIGINT[]", "{}"),
    row_schema.Values: ("JSON", "{}::VARCHAR"),
    row_schema.RowShard | None: (
        'STRUCT(shape BIGINT[], "offset" BIGINT[], partial BOOLEAN)',
        "{}",
    ),
    bytes | None: ("VARCHAR", "from_base64({})"),
    bool | None: ("BOOLEAN", "{}"),
}
_FIELDS = {
    field.encode_name: _COLUMN_TYPES[field.type]
    for field in msgspec.structs.fields(row_schema.RowRecord)
} | {"hash": ("VARCHAR", "{}")}
_COLUMNS = _FIELDS | {
    "other": ("JSON", "{}::VARCHAR"),  # all fields that are not known
    "row_number": ("BIGINT", "{}"),
    "recording": ("VARCHAR", "{}"),
    "rank": ("BIGINT", "{}"),
}
_METADATA = {
    **dict.fromkeys(("recording", "run_id", "host", "start", "end", "metadata"), "VARCHAR"),
    **dict.fromkeys(("rank", "world_size", "records_written"), "BIGINT"),
    "ended_cleanly": "BOOLEAN",
}
_OF_VALUES = (
    "rank, step, recording, value, row_number, model, module, tensor, loop, call, phase, op, leaf, "
    "name, line, shape, dtype, abs_mean, min, max, mean, std, l2, nonfinite, numel, "
    "seen, coalesce(readers, 0) AS readers"
)

check = check_new_folder


def write(recordings: Sequence[ExportedRecording], destination: str) -> dict[str, Any]:
    """Write the files, and return how many rows and values they have."""
    import duckdb

    counts = {"recordings": len(recordings), "rows": 0, "values": 0}
    with (
        new_folder(destination) as folder,
        tempfile.TemporaryDirectory() as temporary,
        duckdb.connect() as database,
    ):
        database.execute(f"SET memory_limit = '{_MEMORY}'")
        database.execute("SET temp_directory = ?", [temporary])
        writer = _Writer(database, folder, Path(temporary) / "piece.jsonl")
        for number, recording in enumerate(recordings):
            rows, has_values = _write_rows(writer, number, recording)
            counts["rows"] += rows
            if has_values:
                recording.progress(f"values of {recording.path}")
                counts["values"] += writer.write_values(number, recording)
        metadata = "".join(json.dumps(_metadata_row(recording)) + "\n" for recording in recordings)
        writer.piece.write_text(metadata, encoding="utf-8")
        source = writer.read(_METADATA, len(metadata.encode()))
        columns = ", ".join(map(_name, _METADATA))
        writer.copy(f"SELECT {columns} FROM {source}", "metadata", "rank", "run")
    return counts


def _write_rows(writer: _Writer, number: int, recording: ExportedRecording) -> tuple[int, bool]:
    """Write the rows of a recording; return how many there are, and whether any has a value."""
    fields = {"recording": recording.name, "rank": recording.rank}
    pieces, row_number, has_values = count(), 0, False
    lines: list[bytes] = []
    size = 0
    for row_number, row in enumerate(recording.rows(), 1):
        has_values = has_values or row.get("value") is not None
        lines.append(_line(row, fields | {"row_number": row_number}))
        size += len(lines[-1])
        if size > _PIECE_BYTES:
            writer.write_rows(lines, f"{number}_{next(pieces)}")
            lines, size = [], 0
    if lines:
        writer.write_rows(lines, f"{number}_{next(pieces)}")
    return row_number, has_values


def _line(row: Row, fields: dict[str, Any]) -> bytes:
    """Return a row as strict JSON, with what is not known of it in one field."""
    known = {name: _spelled(value) for name, value in row.items() if name in _FIELDS}
    if len(known) < len(row):
        known["other"] = {name: row[name] for name in row.keys() - _FIELDS.keys()}
    known |= fields
    try:
        line: bytes = json_encoder().encode(known)
    except (UnicodeEncodeError, OverflowError):
        # half a surrogate pair in a name, or an integer beyond 64 bits
        line = json.dumps(known, ensure_ascii=False).encode(errors="replace")
    return line + b"\n"


def _spelled(value: Any) -> Any:
    return list(map(json_safe, value)) if type(value) is list else json_safe(value)


def _metadata_row(recording: ExportedRecording) -> dict[str, Any]:
    named = {name: recording.metadata[name] for name in _METADATA if name in recording.metadata}
    return {
        **named,
        "recording": recording.name,
        "rank": recording.rank,
        "metadata": json.dumps(recording.metadata),
    }


class _Writer:
    """Writes what a file of JSON lines holds to the tables of an export."""

    def __init__(self, database: Any, folder: Path, piece: Path) -> None:
        self._database = database
        self._folder = folder
        self.piece = piece

    def write_rows(self, lines: Sequence[bytes], name: str) -> None:
        """Add rows to their table, as a file of this name in each folder."""
        with open(self.piece, "wb") as file:
            file.writelines(lines)
        columns = {field: read_as for field, (read_as, _) in _COLUMNS.items()}
        chosen = ", ".join(
            f"{cast.format(_name(field))} AS {_name(field)}"
            for field, (_, cast) in _COLUMNS.items()
        )
        source = self.read(columns, max(map(len, lines)))
        self.copy(f"SELECT {chosen} FROM {source}", "rows", "rank, step", name)

    def write_values(self, number: int, recording: ExportedRecording) -> int:
        """Add the values of a recording whose rows are written; return their number."""
        files = f"{glob.escape(str(self._folder))}/rows/rank={recording.rank}/*/{number}_*.parquet"
        rows = f"read_parquet({_text(files)}, hive_partitioning = true)"
        (written,) = self.copy(
            f"WITH seen AS (SELECT value, min(row_number) AS row_number, count(*) AS seen "
            f"FROM {rows} WHERE value IS NOT NULL GROUP BY value), "
            f"reading AS (SELECT unnest(list_distinct(reads)) AS value FROM {rows}), "
            "readers AS (SELECT value, count(*) AS readers FROM reading GROUP BY value) "
            f"SELECT {_OF_VALUES} FROM {rows} JOIN seen USING (value, row_number) "
            "LEFT JOIN readers USING (value)",
            "values",
            "rank, step",
            str(number),
        )
        return int(written)

    def read(self, columns: dict[str, str], longest: int) -> str:
        """Return the SQL that reads the file. longest: bytes of its longest line."""
        types = ", ".join(f"{_text(name)}: {_text(kind)}" for name, kind in columns.items())
        return (
            f"read_json({_text(self.piece)}, format = 'newline_delimited', "
            f"columns = {{{types}}}, maximum_object_size = {max(_LONGEST_LINE, 2 * longest)})"
        )

    def copy(self, query: str, table: str, partitions: str, name: str) -> tuple[int]:
        """Write the result of a query to a table; return the number of its rows."""
        result: tuple[int] = self._database.execute(
            f"COPY ({query}) TO {_text(self._folder / table)} (FORMAT parquet, COMPRESSION zstd, "
            f"PARTITION_BY ({partitions}), FILENAME_PATTERN '{name}_{{i}}', OVERWRITE_OR_IGNORE)"
        ).fetchone()
        return result


def _name(column: str) -> str:
    return f'"{column}"'


def _text(content: object) -> str:
    return "'" + str(content).replace("'", "''") + "'"
