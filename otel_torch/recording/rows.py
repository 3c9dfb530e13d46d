"""A row of a recording and its line of JSON: one file defines both directions.

A row is a record as a flat dict: the fields that identify it (`Record.key`), its position in the
run if that was recorded (`TensorPosition.fields`), and its statistics. JSON has no NaN or Inf, so
these are the strings `NaN`, `Infinity` and `-Infinity`.

>>> from otel_torch.records import Record
>>> record = Record("mlp", "out", 3, 1, 0, "N", "eval", None, {"max": float("inf")}, 0)
>>> line = encode_rows([record])
>>> print(line.decode(), end="")
{"module":"mlp","tensor":"out","step":3,"call":1,"loop":0,"model":"N","phase":"eval","max":"Infinity"}
>>> parse_line(line)["max"]
inf
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from otel_torch.records import Record, json_safe

Row = dict[str, Any]

# fields that hold text, so that the text "NaN" in them stays text
_TEXT_FIELDS = frozenset(
    {
        "module",
        "tensor",
        "model",
        "phase",
        "branch",
        "dtype",
        "class",
        "sketch",
        "hash",
        "hashes",
        "rows",
        "op",
        "leaf",
        "name",
        "end",
    }
)
# fields of a record's position that may be null: an outermost call has no parent
_NULLABLE_FIELDS = (b'"parent":null', b'"storage":null')
_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


# -- records to lines


def encode_rows(records: Sequence[Record]) -> bytes:
    """Return the lines of records, one each.

    Raises:
        TypeError, ValueError: a record holds something that JSON cannot hold.
    """
    rows = [_to_row(record) for record in records]
    encode_lines = json_encoder().encode_lines
    try:
        data: bytes = encode_lines(rows)
        # the encoder writes NaN and Inf as null
        if data.count(b":null") > sum(map(data.count, _NULLABLE_FIELDS)):
            data = encode_lines([spell_numbers(row) for row in rows])
        return data
    except (UnicodeEncodeError, OverflowError):
        # half a surrogate pair in a name, or an integer beyond 64 bits
        return "".join(map(_encode_slowly, rows)).encode(errors="backslashreplace")


def _to_row(record: Record) -> Row:
    row = record.key()
    if record.position is not None:
        row |= record.position.fields()
    row |= record.stats
    return row


def spell_numbers(row: Row) -> Row:
    """Return a row whose NaN and Inf are text, as JSON cannot spell them."""
    return {name: json_safe(value) for name, value in row.items()}


def _encode_slowly(row: Row) -> str:
    text = json.dumps(
        spell_numbers(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return f"{text}\n"


@functools.cache
def json_encoder() -> Any:
    """Return the encoder of rows: msgspec's, which writes NaN and Inf as null."""
    import msgspec  # slow to import, and a reader of the metadata alone does not need it

    return msgspec.json.Encoder()


# -- lines to rows

# faults of a line that a kill may have cut off
UNPARSABLE = ("is not UTF-8", "is not JSON")


def parse_line(line: bytes) -> Row | str:
    """Return the row of a line, or what is wrong with it: "" for a blank line.

    Accepts bare NaN and Infinity, which FastVideo writes.
    """
    from otel_torch.recording.row_schema import describe_fault

    try:
        text = line.decode("utf-8")
        if not text.strip():
            return ""
        row = json.loads(text)
    except UnicodeDecodeError:
        return UNPARSABLE[0]
    except (ValueError, RecursionError):
        return UNPARSABLE[1]
    fault = describe_fault(row)
    if fault:
        return fault
    _restore_floats(row)
    checked: Row = row
    return checked


def parse_lines(lines: list[bytes]) -> list[Row] | None:
    """Return the rows of lines, faster than `parse_line`; None unless each line is a valid row."""
    from otel_torch.recording import row_schema

    try:
        rows: list[Row] = list(map(row_schema.decode_dict, lines))
        are_finite = row_schema.are_finite(lines)
        if not are_finite:
            row_schema.check_lines(lines)
    except row_schema.UNREADABLE:
        return None
    if row_schema.have_unknown_fields(rows):
        if any(map(row_schema.find_deep_field, rows)):
            return None
    elif are_finite:
        return rows
    for row, line in zip(rows, lines, strict=True):
        if b'NaN"' in line or b'Infinity"' in line:
            _restore_floats(row)
    return rows


def _restore_floats(row: Row) -> None:
    """Replace the strings `NaN`, `Infinity` and `-Infinity` by floats, in place."""
    for name, value in row.items():
        if name in _TEXT_FIELDS:
            continue
        if type(value) is str:
            row[name] = _FLOATS.get(value, value)
        elif type(value) is list:
            row[name] = [_FLOATS.get(item, item) if type(item) is str else item for item in value]
