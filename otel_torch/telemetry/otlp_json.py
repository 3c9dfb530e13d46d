"""OTLP messages as lines of JSON and back: the format of OpenTelemetry's file exporter, a request a
line.

Written from the bytes that are sent, by the tables of opentelemetry-proto, because protobuf's own
JSON takes fifty times as long as encoding them did, with the interpreter's lock held: the program
would pay for it. What comes again every step (names, shapes, keys) is written once. Ids are
hexadecimal and enumerations are numbers, as OTLP asks; for the rest the JSON is that of protobuf:
64-bit numbers and what is not finite are strings, other bytes are base64.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from math import isfinite
from typing import Any

import msgspec

# (what a line of a signal holds, its service)
SIGNALS = {
    "traces": ("resourceSpans", "Trace"),
    "metrics": ("resourceMetrics", "Metrics"),
    "logs": ("resourceLogs", "Logs"),
}
_HEXADECIMAL = frozenset({"trace_id", "span_id", "parent_span_id"})
# attributes: the messages of which most come again
_REPEATING = "opentelemetry.proto.common.v1.KeyValue"
_REMEMBERED = 65536


class NotOtlp(ValueError):
    """The text is no line of OTLP JSON; the message says why."""


@cache
def request_class(signal: str) -> Any:
    """The protobuf class of a signal's Export…ServiceRequest."""
    service = SIGNALS[signal][1]
    module = import_module(
        f"opentelemetry.proto.collector.{service.lower()}.v1.{service.lower()}_service_pb2"
    )
    return getattr(module, f"Export{service}ServiceRequest")


_encode = msgspec.json.Encoder().encode  # which writes a double twenty times as fast as `repr`
_read_double = struct.Struct("<d").unpack_from

# -- scalars
# --------------------------------------------------------------------------------------------------


@lru_cache(4096)
def _text(raw: bytes) -> str:
    return json.dumps(raw.decode("utf-8", "backslashreplace"), ensure_ascii=False)


def _number(value: float) -> str:
    """A double as JSON; what JSON has no number for is a string."""
    if isfinite(value):
        return _encode(value).decode()
    return '"NaN"' if value != value else '"Infinity"' if value > 0 else '"-Infinity"'


def _signed(number: int) -> int:
    return number - 2**64 if number >> 63 else number


def _zigzag(number: int) -> int:
    return number >> 1 ^ -(number & 1)


def _quoted(number: int) -> str:
    return f'"{number}"'


def _unpacked(form: str, write: Callable[[Any], str]) -> Callable[[bytes], str]:
    unpack = struct.Struct(form).unpack
    return lambda raw: write(unpack(raw)[0])


@dataclass(frozen=True)
class _Scalar:
    """A type of protobuf's: how it lies on the wire, and how it is written as JSON."""

    wire: int
    write: Callable[[Any], str]


# by protobuf's numbers of types
_SCALARS = {
    1: _Scalar(1, _unpacked("<d", _number)),
    2: _Scalar(5, _unpacked("<f", _number)),
    3: _Scalar(0, lambda number: _quoted(_signed(number))),  # int64
    4: _Scalar(0, _quoted),  # uint64
    5: _Scalar(0, lambda number: str(_signed(number))),  # int32
    6: _Scalar(1, _unpacked("<Q", _quoted)),
    7: _Scalar(5, _unpacked("<I", str)),
    8: _Scalar(0, lambda number: "true" if number else "false"),
    9: _Scalar(2, _text),
    12: _Scalar(2, lambda raw: f'"{base64.b64encode(raw).decode()}"'),
    13: _Scalar(0, str),  # uint32
    14: _Scalar(0, lambda number: str(_signed(number))),  # enumerations
    15: _Scalar(5, _unpacked("<i", str)),
    16: _Scalar(1, _unpacked("<q", _quoted)),
    17: _Scalar(0, lambda number: str(_zigzag(number))),  # sint32
    18: _Scalar(0, lambda number: _quoted(_zigzag(number))),  # sint64
}
_MESSAGE, _BYTES, _ENUM = 11, 12, 14
_IDS = _Scalar(2, lambda raw: f'"{raw.hex()}"')

# -- bytes to JSON
# --------------------------------------------------------------------------------------------------


# a field as it is found on the wire: its name with quotes and colon, whether it is repeated, what
# writes its value, and what writes those that follow at once, where there may be many
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


def _packed(data: bytes, scalar: _Scalar) -> str:
    """The values of a repeated number that share one field."""
    if scalar.wire == 0:
        found, position = [], 0
        while position < len(data):
            number, position = _read_varint(data, position)
            found.append(scalar.write(number))
        return ",".join(found)
    width = 8 if scalar.wire == 1 else 4
    return ",".join(
        scalar.write(data[start : start + width]) for start in range(0, len(data), width)
    )


class _Writer:
    """Writes the messages of one type."""

    write_following: Callable[[bytes, int, int, list[str]], int] | None = None

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self._fields: dict[int, _Field] | None = None

    def _make_fields(self) -> dict[int, _Field]:
        """By the tags that stand before their values on the wire."""
        fields = self._fields = {}
        for field in self._descriptor.fields:
            name, repeated = f'"{field.json_name}":', _is_repeated(field)
            if field.type == _MESSAGE:
                writer = _writer(field.message_type)
                fields[field.number << 3 | 2] = name, repeated, writer, writer.write_following
                continue
            scalar = _IDS if field.name in _HEXADECIMAL else _SCALARS[field.type]
            fields[field.number << 3 | scalar.wire] = name, repeated, scalar.write, None
            if repeated and scalar.wire != 2:
                fields[field.number << 3 | 2] = (
                    name,
                    repeated,
                    partial(_packed, scalar=scalar),
                    None,
                )
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


class _AttributeWriter(_Writer):
    """Writes attributes. One that has come before is remembered, of one that is a double the key."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        self._known: dict[bytes, str] = {}
        self._doubles: dict[bytes, str] = {}
        self.write_following = self._write_following

    def __call__(self, data: bytes) -> str:
        text = self._known.get(data)
        if text is not None:
            return text
        size = len(data)
        # a key of so many bytes, then an AnyValue of nine bytes, which is a double
        if size > 12 and data[1] == size - 13 and data[-11:-8] == b"\x12\x09\x21":
            key = data[:-8]
            before = self._doubles.get(key)
            if before is None:
                before = _keep(
                    self._doubles, key, super().__call__(key + bytes(8)).removesuffix("0.0}}")
                )
            return f"{before}{_number(_read_double(data, size - 8)[0])}}}}}"
        return _keep(self._known, data, super().__call__(data))

    def _write_following(self, data: bytes, position: int, tag: int, texts: list[str]) -> int:
        """Write the attributes that follow with the same tag, and return where they end. The rare
        long ones are left.
        """
        known, doubles, end = self._known.get, self._doubles.get, len(data) - 1
        while position < end and data[position] == tag:
            length = data[position + 1]
            if length > 0x7F:
                break
            start = position + 2
            position = start + length
            one = data[start:position]
            text = known(one)
            if text is None:
                before = doubles(one[:-8])
                if before is not None and data[start + 1] == length - 13:
                    value = _read_double(data, position - 8)[0]
                    text = (
                        f"{before}{_encode(value).decode()}}}}}" if isfinite(value) else self(one)
                    )
                else:
                    text = self(one)
            texts.append(text)
        return position


def _keep(known: dict[bytes, str], key: bytes, text: str) -> str:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = text
    return text


@cache
def _writer(descriptor: Any) -> _Writer:
    return (_AttributeWriter if descriptor.full_name == _REPEATING else _Writer)(descriptor)


def _is_repeated(field: Any) -> bool:
    """Of protobuf's descriptors: newer ones say it themselves."""
    return bool(
        field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    )


def write_line(signal: str, request: bytes) -> bytes:
    """A request's bytes as a line of JSON, its end included. signal: `traces`, `metrics` or `logs`.

    >>> write_line("logs", request_class("logs")(resource_logs=[{"schema_url": "x"}]).SerializeToString())
    b'{"resourceLogs":[{"schemaUrl":"x"}]}\\n'
    """
    return _writer(request_class(signal).DESCRIPTOR)(request).encode() + b"\n"


# -- JSON to messages
# --------------------------------------------------------------------------------------------------


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _read_whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise TypeError(f"{value!r} is no whole number")
    return int(value)


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _read_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _read_bytes(value: Any) -> bytes:
    text = _read_text(value).replace("-", "+").replace("_", "/")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def _read_enum(value: Any, *, values: Any) -> int:
    """OTLP asks for numbers; protobuf's own JSON has names."""
    return (
        int(values[value].number)
        if isinstance(value, str) and value in values
        else _read_whole(value)
    )


def _reader_of(field: Any) -> Callable[[Any], Any]:
    """What makes a value for a field, of one of JSON."""
    if field.type == _MESSAGE:
        return _reader(field.message_type)
    if field.type == _BYTES:
        return bytes.fromhex if field.name in _HEXADECIMAL else _read_bytes
    if field.type == _ENUM:
        return partial(_read_enum, values=field.enum_type.values_by_name)
    return {1: _read_number, 2: _read_number, 8: _read_switch, 9: _read_text}.get(
        field.type, _read_whole
    )


class _Reader:
    """Makes what the protobuf class of one type takes, out of an object of JSON. What is not known
    is left out, as OTLP asks.
    """

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self._fields: dict[str, tuple[str, bool, Callable[[Any], Any]]] | None = None

    def _make_fields(self) -> dict[str, tuple[str, bool, Callable[[Any], Any]]]:
        fields = self._fields = {}
        for field in self._descriptor.fields:
            fields[field.json_name] = fields[field.name] = (
                field.name,
                _is_repeated(field),
                _reader_of(field),
            )
        return fields

    def __call__(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"{_brief(value)} stands for {self._descriptor.name}")
        fields = self._fields or self._make_fields()
        found: dict[str, Any] = {}
        for key, item in value.items():
            if item is None or key not in fields:
                continue
            name, repeated, read = fields[key]
            if not repeated:
                found[name] = read(item)
            elif isinstance(item, list):
                found[name] = [read(one) for one in item]
            else:
                raise TypeError(f"{_brief(item)} stands for the list {key}")
        return found


@cache
def _reader(descriptor: Any) -> _Reader:
    return _Reader(descriptor)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def read_line(line: bytes | str) -> tuple[str, Any]:
    """The signal of a line and its Export…ServiceRequest, as opentelemetry-proto's message. Raises
    NotOtlp.

    >>> signal, request = read_line('{"resourceLogs": [{"schemaUrl": "x"}]}'); signal, len(request.resource_logs)
    ('logs', 1)
    """
    try:
        value = _decode(line)
    except (ValueError, RecursionError) as error:
        raise NotOtlp(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise NotOtlp(f"{_brief(value)} is no object")
    found = [signal for signal, (key, _) in SIGNALS.items() if key in value]
    if len(found) != 1:
        keys = ", ".join(key for key, _ in SIGNALS.values())
        raise NotOtlp(
            f"a line of OTLP JSON holds one of {keys}; this one {'none' if not found else 'several'}"
        )
    message = request_class(found[0])
    try:
        return found[0], message(**_reader(message.DESCRIPTOR)(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotOtlp(f"its {found[0]} cannot be read: {error}") from None


def _decode(line: bytes | str) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)  # which takes the bare NaN that others write


# -- parts of messages
# -------------------------------------------------------------------------------------------------

# what a request is nested of, down to what receivers count; of metrics that is one deeper
_NESTING = {
    "traces": ("resource_spans", "scope_spans", "spans"),
    "metrics": ("resource_metrics", "scope_metrics", "metrics"),
    "logs": ("resource_logs", "scope_logs", "log_records"),
}


def _counted(signal: str, request: Any) -> Iterator[Any]:
    """The lists of spans, log records or data points of a request, in order."""
    resources, scopes, things = _NESTING[signal]
    for resource in getattr(request, resources):
        for scope in getattr(resource, scopes):
            if signal != "metrics":
                yield getattr(scope, things)
                continue
            for metric in scope.metrics:
                yield from _points(metric)


def _points(metric: Any) -> Iterator[Any]:
    kind = metric.WhichOneof("data")
    if kind is not None:
        yield getattr(metric, kind).data_points


def count_items(signal: str, request: Any) -> int:
    """How many spans, log records or data points a request holds."""
    return sum(map(len, _counted(signal, request)))


def take_items(signal: str, request: Any, first: int, last: int) -> Any:
    """A request of the items from `first` up to, and without, `last`, each with its resource and
    scope.

    >>> logs = [{"log_records": [{"severity_number": n} for n in range(4)]}]
    >>> request = request_class("logs")(resource_logs=[{"scope_logs": logs}, {"scope_logs": logs}])
    >>> part = take_items("logs", request, 3, 5); len(part.resource_logs), count_items("logs", part)
    (2, 2)
    """
    part = request_class(signal)()
    part.CopyFrom(request)
    before = 0
    for items in _counted(signal, part):
        here = len(items)
        del items[max(0, min(here, last - before)) :]
        del items[: max(0, first - before)]
        before += here
    resources, scopes, things = _NESTING[signal]
    for resource in getattr(part, resources):
        for scope in getattr(resource, scopes):
            if signal == "metrics":
                _drop(scope.metrics, lambda metric: not any(map(len, _points(metric))))
        _drop(getattr(resource, scopes), lambda scope: not getattr(scope, things))
    _drop(getattr(part, resources), lambda resource: not getattr(resource, scopes))
    return part


def _drop(messages: Any, unwanted: Callable[[Any], bool]) -> None:
    for index in reversed(range(len(messages))):
        if unwanted(messages[index]):
            del messages[index]
