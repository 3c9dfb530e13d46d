"""Converts OTLP requests to lines of JSON and back, in the format of OpenTelemetry's file exporter:
one request per line.

Written by hand because OpenTelemetry's own encoder (`opentelemetry-exporter-otlp-json-common`
0.66b1) takes 5 times as long for a span of 300 records (60 µs a record, ours 12), and protobuf's
JSON 8 times, in a thread that holds the interpreter's lock, so the program would wait for it.

`write_line` works on the bytes that are sent, with the message types of opentelemetry-proto. Names,
shapes and keys that repeat every step are converted once and cached. As OTLP requires, ids are
hexadecimal and enumerations are numbers. The rest is protobuf's JSON: 64-bit integers, NaN and Inf
are strings, other bytes are base64.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import isfinite
from typing import Any

import msgspec

from otel_torch.telemetry.otlp.otlp_requests import SHAPES, request_class

_HEXADECIMAL = frozenset({"trace_id", "span_id", "parent_span_id"})
_ID_BYTES = (8, 16)
# before OTLP 0.19; their content is the same
_OLD_NAMES = {
    "instrumentationLibrarySpans": "scope_spans",
    "instrumentationLibraryMetrics": "scope_metrics",
    "instrumentationLibraryLogs": "scope_logs",
    "instrumentation_library_spans": "scope_spans",
    "instrumentation_library_metrics": "scope_metrics",
    "instrumentation_library_logs": "scope_logs",
    "instrumentationLibrary": "scope",
    "instrumentation_library": "scope",
    "logs": "log_records",
}
# message type -> the fields that hold its spans, points or records
_CONTENTS = {
    "ResourceSpans": {"scope_spans"},
    "ResourceMetrics": {"scope_metrics"},
    "ResourceLogs": {"scope_logs"},
    "ScopeSpans": {"spans"},
    "ScopeMetrics": {"metrics"},
    "ScopeLogs": {"log_records"},
    "Metric": {"gauge", "sum", "histogram", "exponential_histogram", "summary"},
    "Gauge": {"data_points"},
    "Sum": {"data_points"},
    "Histogram": {"data_points"},
    "ExponentialHistogram": {"data_points"},
    "Summary": {"data_points"},
}
# the message type of attributes, most of which repeat
_ATTRIBUTE = "opentelemetry.proto.common.v1.KeyValue"
_CACHE_SIZE = 65536


class NotOtlp(ValueError):
    """A text that is not a line of OTLP JSON; the message says why."""


# writes a double twenty times as fast as `repr`
_encode_json = msgspec.json.Encoder().encode
_read_double = struct.Struct("<d").unpack_from

# -- scalars


@lru_cache(4096)
def _write_text(raw: bytes) -> str:
    return json.dumps(raw.decode("utf-8", "backslashreplace"), ensure_ascii=False)


def _write_double(value: float) -> str:
    """Return a double as JSON; NaN and Inf as strings."""
    if isfinite(value):
        return _encode_json(value).decode()
    if value != value:
        return '"NaN"'
    return '"Infinity"' if value > 0 else '"-Infinity"'


def _to_signed(number: int) -> int:
    return number - 2**64 if number >> 63 else number


def _from_zigzag(number: int) -> int:
    return number >> 1 ^ -(number & 1)


def _quote(number: int) -> str:
    return f'"{number}"'


def _unpack_with(form: str, write: Callable[[Any], str]) -> Callable[[bytes], str]:
    unpack = struct.Struct(form).unpack
    return lambda raw: write(unpack(raw)[0])


@dataclass(frozen=True)
class _Scalar:
    """A scalar type of protobuf: its wire type, and the function that writes a value as JSON."""

    wire: int
    write: Callable[[Any], str]


# by protobuf's type numbers
_SCALARS = {
    1: _Scalar(1, _unpack_with("<d", _write_double)),
    2: _Scalar(5, _unpack_with("<f", _write_double)),
    3: _Scalar(0, lambda number: _quote(_to_signed(number))),  # int64
    4: _Scalar(0, _quote),  # uint64
    5: _Scalar(0, lambda number: str(_to_signed(number))),  # int32
    6: _Scalar(1, _unpack_with("<Q", _quote)),
    7: _Scalar(5, _unpack_with("<I", str)),
    8: _Scalar(0, lambda number: "true" if number else "false"),
    9: _Scalar(2, _write_text),
    12: _Scalar(2, lambda raw: f'"{base64.b64encode(raw).decode()}"'),
    13: _Scalar(0, str),  # uint32
    14: _Scalar(0, lambda number: str(_to_signed(number))),  # enumerations
    15: _Scalar(5, _unpack_with("<i", str)),
    16: _Scalar(1, _unpack_with("<q", _quote)),
    17: _Scalar(0, lambda number: str(_from_zigzag(number))),  # sint32
    18: _Scalar(0, lambda number: _quote(_from_zigzag(number))),  # sint64
}
_DOUBLE, _FLOAT, _BOOL, _STRING, _MESSAGE, _BYTES, _ENUM = 1, 2, 8, 9, 11, 12, 14
_ID = _Scalar(2, lambda raw: f'"{raw.hex()}"')

# -- bytes to JSON


# a field: its name with quotes and colon, whether it is repeated, the function that writes a value,
# and the function that writes further values with the same tag, if there may be many
_Field = tuple[str, bool, Callable[[Any], str], Callable[[bytes, int, int, list[str]], int] | None]


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7


def _write_packed(data: bytes, scalar: _Scalar) -> str:
    if scalar.wire == 0:
        texts, position = [], 0
        while position < len(data):
            number, position = _read_varint(data, position)
            texts.append(scalar.write(number))
        return ",".join(texts)
    width = 8 if scalar.wire == 1 else 4
    return ",".join(
        scalar.write(data[start : start + width]) for start in range(0, len(data), width)
    )


class _MessageWriter:
    """Writes the messages of one type as JSON."""

    write_following: Callable[[bytes, int, int, list[str]], int] | None = None

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self._fields: dict[int, _Field] | None = None

    def _make_fields(self) -> dict[int, _Field]:
        fields = self._fields = {}
        for field in self._descriptor.fields:
            name, repeated = f'"{field.json_name}":', _is_repeated(field)
            if field.type == _MESSAGE:
                writer = _message_writer(field.message_type)
                fields[field.number << 3 | 2] = name, repeated, writer, writer.write_following
                continue
            scalar = _ID if field.name in _HEXADECIMAL else _SCALARS[field.type]
            fields[field.number << 3 | scalar.wire] = name, repeated, scalar.write, None
            if repeated and scalar.wire != 2:
                write_packed = partial(_write_packed, scalar=scalar)
                fields[field.number << 3 | 2] = name, repeated, write_packed, None
        return fields

    def __call__(self, data: bytes) -> str:
        fields = self._fields or self._make_fields()
        singles: list[str] = []
        lists: dict[str, list[str]] = {}
        position, end = 0, len(data)
        value: Any
        while position < end:
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = _read_varint(data, position - 1)
            if tag & 7 == 2:
                length = data[position]
                position += 1
                if length > 0x7F:
                    length, position = _read_varint(data, position - 1)
                value = data[position : position + length]
                position += length
            elif tag & 7:
                width = 8 if tag & 7 == 1 else 4
                value = data[position : position + width]
                position += width
            else:
                value, position = _read_varint(data, position)
            if tag not in fields:
                continue
            name, repeated, write, write_following = fields[tag]
            if not repeated:
                singles.append(name + write(value))
                continue
            texts = lists.get(name)
            if texts is None:
                texts = lists[name] = []
            texts.append(write(value))
            if write_following is not None:
                position = write_following(data, position, tag, texts)
        singles += [f"{name}[{','.join(texts)}]" for name, texts in lists.items()]
        return f"{{{','.join(singles)}}}"


class _AttributeWriter(_MessageWriter):
    """Writes attributes. Whole attributes are cached; for those that hold a double, the text up to
    the number is.
    """

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        self._texts: dict[bytes, str] = {}
        self._double_prefixes: dict[bytes, str] = {}
        self.write_following = self._write_following

    def __call__(self, data: bytes) -> str:
        text = self._texts.get(data)
        if text is not None:
            return text
        size = len(data)
        # a key, then an AnyValue of nine bytes, which is a double
        if size > 12 and data[1] == size - 13 and data[-11:-8] == b"\x12\x09\x21":
            key = data[:-8]
            prefix = self._double_prefixes.get(key)
            if prefix is None:
                prefix = super().__call__(key + bytes(8)).removesuffix("0.0}}")
                _add_to_cache(self._double_prefixes, key, prefix)
            return f"{prefix}{_write_double(_read_double(data, size - 8)[0])}}}}}"
        return _add_to_cache(self._texts, data, super().__call__(data))

    def _write_following(self, data: bytes, position: int, tag: int, texts: list[str]) -> int:
        """Append the attributes that follow with the same tag, up to a long one, and return the
        position after them.
        """
        find_text, find_prefix = self._texts.get, self._double_prefixes.get
        end = len(data) - 1
        while position < end and data[position] == tag:
            length = data[position + 1]
            if length > 0x7F:
                break
            start = position + 2
            position = start + length
            attribute = data[start:position]
            text = find_text(attribute)
            if text is None:
                prefix = find_prefix(attribute[:-8])
                if prefix is not None and data[start + 1] == length - 13:
                    value = _read_double(data, position - 8)[0]
                    if isfinite(value):
                        text = f"{prefix}{_encode_json(value).decode()}}}}}"
                    else:
                        text = self(attribute)
                else:
                    text = self(attribute)
            texts.append(text)
        return position


def _add_to_cache(texts: dict[bytes, str], key: bytes, text: str) -> str:
    if len(texts) >= _CACHE_SIZE:
        texts.clear()
    texts[key] = text
    return text


@cache
def _message_writer(descriptor: Any) -> _MessageWriter:
    if descriptor.full_name == _ATTRIBUTE:
        return _AttributeWriter(descriptor)
    return _MessageWriter(descriptor)


def _is_repeated(field: Any) -> bool:
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)  # older versions of protobuf


def write_line(signal: str, request: bytes) -> bytes:
    """Return the bytes of a request as a line of JSON.

    >>> request = request_class("logs")(resource_logs=[{"schema_url": "x"}])
    >>> write_line("logs", request.SerializeToString())
    b'{"resourceLogs":[{"schemaUrl":"x"}]}\\n'
    """
    return _message_writer(request_class(signal).DESCRIPTOR)(request).encode() + b"\n"


# -- JSON to messages


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _read_integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise TypeError(f"{value!r} is not an integer")
    return int(value)


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


def _read_bytes(value: Any) -> bytes:
    text = _read_text(value).replace("-", "+").replace("_", "/")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def _read_id(value: Any) -> bytes:
    text = _read_text(value)
    try:
        return bytes.fromhex(text)
    except ValueError:
        pass
    try:
        is_base64 = len(_read_bytes(text)) in _ID_BYTES
    except ValueError:
        is_base64 = False
    if is_base64:
        raise ValueError(
            "its ids are in base64, as protobuf writes JSON, and those of OTLP JSON are "
            "hexadecimal; write it with an exporter of OTLP JSON"
        )
    raise ValueError(f"{_shorten(text)} is not a hexadecimal id")


def _read_enum(value: Any, *, values: Any) -> int:
    """Accept numbers, which OTLP requires, and names, which protobuf's JSON has."""
    if isinstance(value, str) and value in values:
        return int(values[value].number)
    return _read_integer(value)


_SCALAR_READERS: dict[int, Callable[[Any], Any]] = {
    _DOUBLE: _read_number,
    _FLOAT: _read_number,
    _BOOL: _read_bool,
    _STRING: _read_text,
}


def _find_reader(field: Any) -> Callable[[Any], Any]:
    """Return the function that converts a JSON value for a field."""
    if field.type == _MESSAGE:
        return _message_reader(field.message_type)
    if field.type == _BYTES:
        return _read_id if field.name in _HEXADECIMAL else _read_bytes
    if field.type == _ENUM:
        return partial(_read_enum, values=field.enum_type.values_by_name)
    return _SCALAR_READERS.get(field.type, _read_integer)


class _MessageReader:
    """Converts a JSON object to the arguments of one protobuf class. Unknown fields are ignored, as
    OTLP requires.
    """

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self._fields: dict[str, tuple[str, bool, Callable[[Any], Any]]] | None = None

    def _make_fields(self) -> dict[str, tuple[str, bool, Callable[[Any], Any]]]:
        fields = self._fields = {}
        for field in self._descriptor.fields:
            entry = field.name, _is_repeated(field), _find_reader(field)
            fields[field.json_name] = fields[field.name] = entry
        for old, name in _OLD_NAMES.items():
            if name in fields:
                fields.setdefault(old, fields[name])
        return fields

    def __call__(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"{_shorten(value)} in place of a {self._descriptor.name}")
        fields = self._fields or self._make_fields()
        arguments: dict[str, Any] = {}
        for key, item in value.items():
            if item is None or key not in fields:
                continue
            name, repeated, read = fields[key]
            if not repeated:
                arguments[name] = read(item)
            elif isinstance(item, list):
                arguments.setdefault(name, []).extend([read(element) for element in item])
            else:
                raise TypeError(f"{_shorten(item)} in place of the list {key}")
        contents = _CONTENTS.get(self._descriptor.name)
        if contents is not None and contents.isdisjoint(arguments):
            self._check_unknown(value, fields)
        return arguments

    def _check_unknown(self, value: dict[str, Any], fields: dict[str, Any]) -> None:
        """Raise TypeError if the content is under a name that is unknown, or it would be lost."""
        for key, item in value.items():
            if key not in fields and isinstance(item, (list, dict)) and item:
                raise TypeError(f"unknown field {_shorten(key)} of {self._descriptor.name}")


@cache
def _message_reader(descriptor: Any) -> _MessageReader:
    return _MessageReader(descriptor)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def read_line(line: bytes | str) -> tuple[str, Any]:
    """Return the signal of a document and its Export…ServiceRequest as a protobuf message.

    A list of requests of one signal is read as one request.

    Raises:
        NotOtlp: the line is not OTLP JSON.

    >>> signal, request = read_line('{"resourceLogs": [{"schemaUrl": "x"}]}')
    >>> signal, len(request.resource_logs)
    ('logs', 1)
    """
    try:
        value = _decode_json(line)
    except (ValueError, RecursionError) as error:
        raise NotOtlp(f"not JSON: {error}") from None
    if not isinstance(value, list):
        return _read_request(value)
    (signal, request), *others = map(_read_request, value or [value])
    for other_signal, other_request in others:
        if other_signal != signal:
            raise NotOtlp("a list of requests of several signals; write one a line")
        request.MergeFrom(other_request)
    return signal, request


def _read_request(value: Any) -> tuple[str, Any]:
    if not isinstance(value, dict):
        raise NotOtlp(f"{_shorten(value)} is not an object")
    signals = [
        signal for signal, shape in SHAPES.items() if {shape.json_key, shape.resources} & set(value)
    ]
    if len(signals) != 1:
        keys = ", ".join(shape.json_key for shape in SHAPES.values())
        count = "several" if signals else "none"
        raise NotOtlp(f"a line of OTLP JSON holds exactly one of {keys}; this line holds {count}")
    signal = signals[0]
    message = request_class(signal)
    try:
        return signal, message(**_message_reader(message.DESCRIPTOR)(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotOtlp(f"its {signal} cannot be read: {error}") from None


def _decode_json(line: bytes | str) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)  # accepts the bare NaN of other writers
