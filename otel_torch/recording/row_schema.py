"""The types of a row's fields: every reader of recordings checks its rows against them.

Unknown fields are allowed: another version, or the user, may have added them. They are kept as
they are, within a limit of nesting.

>>> describe_fault({"module": "fc", "tensor": "out", "step": 0, "shape": [[2], 3]})
'is not a record: `shape` is not a list of integers: [[2], 3]'
"""

from __future__ import annotations

import reprlib
import sys
from collections import deque
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from otel_torch.records import json_safe

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# the largest that a double holds exactly, because comparisons keep such numbers in its arrays
Index = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# NaN and Inf are text; so is what FastVideo's own trace writes for a statistic that failed
Number = float | str | None
_LARGEST = sys.float_info.max
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None
Count = Integer | str | None
Sizes = tuple[Integer, ...] | str | None
Integers = tuple[Integer, ...] | None
Indices = tuple[Index, ...] | None
Values = list[Any] | None
Order = tuple[Index | None, Index | None] | None

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

# nested deeper than that, a value could exhaust the stack of whoever writes it again
_DEEPEST = 64


class RowShard(msgspec.Struct, gc=False):
    """The part of a distributed tensor that a row describes."""

    shape: tuple[Integer, ...]
    offset: tuple[Integer, ...]
    partial: bool


class RowHeader(msgspec.Struct, gc=False, rename={"cls": "class"}):
    """The fields of a row that identify it, and the numbers needed where sketches decide.

    The fields mean what docs/record-format.md says; a null is an absent field. `sketch` is
    decoded: little-endian float32.
    """

    module: str
    tensor: str
    step: Integer | None
    model: str = ""
    phase: str = "forward"
    cls: str = ""
    argument: str | None = None
    value: Index | None = None
    order: Order = None
    parent: Index | None = None
    l2: Number = None
    nonfinite: Count = None
    numel: Count = None
    dtype: str = ""
    sketch: bytes | None = None
    call: Integer | None = None
    loop: Integer | None = None


class RowRecord(RowHeader, gc=False, rename={"cls": "class"}):
    """A whole row."""

    branch: str | None = None
    storage: Index | None = None
    shard: RowShard | None = None
    abs_mean: Number = None
    sum: Number = None
    min: Number = None
    max: Number = None
    mean: Number = None
    std: Number = None
    rms: Number = None
    zeros: Count = None
    histogram: Sizes = None
    shape: Sizes = None
    row_sketch: bytes | None = None
    rows: bytes | None = None
    part_sketches: bytes | None = None
    ids: Integers = None
    hashes: bytes | None = None
    positions: Integers = None
    requests: Integers = None
    updates: Count = None
    # of the graph of operations
    op: str | None = None
    args: Values = None
    reads: Indices = None
    makes: Index | None = None
    moves: bool | None = None
    casts: bool | None = None
    random: bool | None = None
    collective: bool | None = None
    group: Indices = None
    line: Index | None = None
    forward_line: Index | None = None
    inside: Index | None = None
    leaf: str | None = None
    name: str | None = None
    end: str | None = None


class FiniteRow(RowRecord, gc=False, rename={"cls": "class"}):
    """A row whose statistics are all finite numbers."""

    abs_mean: Finite = None
    sum: Finite = None
    min: Finite = None
    max: Finite = None
    mean: Finite = None
    std: Finite = None
    rms: Finite = None
    l2: Finite = None


# what a message calls each type
_EXPECTED: dict[Any, str] = {
    str: "text",
    str | None: "text",
    Integer | None: "an integer of 64 bits",
    Index | None: "an integer from 0 to 2**53",
    Number: "a number that fits a double",
    Count: "an integer of 64 bits",
    Sizes: "a list of integers",
    Integers: "a list of integers",
    Indices: "a list of integers from 0 to 2**53",
    Values: "a list",
    bool | None: "a flag: true or false",
    Order: "a list of two integers from 0 to 2**53",
    RowShard | None: "an object with `shape`, `offset` and `partial`",
    bytes | None: "text in base64",
}

_FIELDS = {field.encode_name: field for field in msgspec.structs.fields(RowRecord)}
_REQUIRED = {name for name, field in _FIELDS.items() if field.required}
KNOWN_FIELDS = frozenset(_FIELDS)
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxlong = _shown.maxother = 40

# -- lines, fast

decode_dict = msgspec.json.Decoder().decode
decode_record = msgspec.json.Decoder(RowRecord).decode
_decode_finite = msgspec.json.Decoder(FiniteRow).decode


def are_finite(lines: Iterable[bytes]) -> bool:
    try:
        deque(map(_decode_finite, lines), maxlen=0)
    except UNREADABLE:
        return False
    return True


def check_lines(lines: Iterable[bytes]) -> None:
    """Raise one of `UNREADABLE` unless all lines are rows."""
    deque(map(decode_record, lines), maxlen=0)


def have_unknown_fields(rows: Iterable[dict[str, Any]]) -> bool:
    """Return whether any row has a field that is not in this schema."""
    return not all(map(KNOWN_FIELDS.issuperset, rows))


# -- a row, with what is wrong in it


def record_of(row: dict[str, Any]) -> RowRecord:
    """Return a row as a record. Raises one of `UNREADABLE` if a field has another type."""
    try:
        return msgspec.convert(row, FiniteRow)
    except UNREADABLE:
        fields = {
            name: json_safe(value)
            for name, value in row.items()
            if value is not None or name == "step"
        }
        return msgspec.convert(fields, RowRecord)


def describe_fault(row: Any) -> str:
    """Return what is wrong with a JSON value that should be a row, in one line; "" for a row."""
    if type(row) is not dict:
        return "is not a JSON object"
    if not row.keys() >= _REQUIRED:
        return "is not a record: it needs `module`, `tensor` and `step`"
    for name in row.keys() & _FIELDS.keys():
        field, value = _FIELDS[name], row[name]
        if not _fits(value, field):
            return f"is not a record: `{name}` is not {_EXPECTED[field.type]}: {_shown.repr(value)}"
    name = find_deep_field(row)
    return name and f"is not a record: {_shown.repr(name)} is nested over {_DEEPEST} levels deep"


def _fits(value: Any, field: msgspec.structs.FieldInfo) -> bool:
    if value is None and not field.required:
        return True
    try:
        msgspec.convert(value, field.type)
    except UNREADABLE:
        return False
    return True


def find_deep_field(row: dict[str, Any]) -> str:
    """Return an unknown field whose lists and objects are nested too deep, "" if there is none."""
    return next((name for name in row.keys() - _FIELDS.keys() if is_deep(row[name])), "")


def is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than any reader here expects."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return False
    return True


def _items(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    return value if type(value) is list else ()
