"""OTLP messages as bytes, written straight from what is recorded: what is encoded in the background
holds the interpreter's lock, so the program pays for it. Records are written by columns: a run of
records with the same statistics is checked and packed by a few calls for all of it, and what comes
again every step (names, shapes, keys) is encoded once.

What is as long as a batch comes in pieces, which `request` puts together: large blocks of memory
are not copied, and not asked for, more than once. Field numbers are OTLP's, which never change.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress, pairwise, repeat
from math import isfinite
from operator import add, attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from otel_torch.records import FINGERPRINTS, Record
from otel_torch.telemetry.attributes import ACTIVATION, NO_GAUGE, plain

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

_pack_double = struct.Struct("<d").pack
_pack_fixed64 = struct.Struct("<Q").pack
_pack_fixed32 = struct.Struct("<I").pack

# the fields that hold attributes, of the messages that are written here
_SPAN_ATTRIBUTE, _EVENT_ATTRIBUTE, _LINK_ATTRIBUTE, _LOG_ATTRIBUTE, _POINT_ATTRIBUTE = 9, 3, 4, 6, 7
_SPAN_EVENT, _SPAN_LINK, _POINT = 11, 13, 1
# spans, log records and metrics have the same number in what holds them
ITEM = 2

# -- single values
# --------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """A base-128 number; negative ones as 64-bit two's complement.

    >>> varint(300)
    b'\\xac\\x02'
    """
    number &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class _Remembered(dict[Any, bytes]):
    """Encoded once and kept. As a mapping, so that `map` fetches a whole column without a call in
    Python for each.
    """

    def __init__(self, encode: Callable[[Any], bytes], limit: int = 65536) -> None:
        super().__init__()
        self._encode, self._limit = encode, limit

    def __missing__(self, key: Any) -> bytes:
        if len(self) >= self._limit:
            self.clear()
        encoded = self[key] = self._encode(key)
        return encoded


@lru_cache(None)
def _prefixes(field: int) -> _Remembered:
    """What stands before a field, by the bytes that it takes."""
    tag = varint(field << 3 | 2)
    return _Remembered(lambda length: tag + varint(length))


def _prefix(field: int, length: int) -> bytes:
    return _prefixes(field)[length]


def part(field: int, payload: bytes) -> bytes:
    """A field that holds bytes, text or a message."""
    return _prefix(field, len(payload)) + payload


def _value(value: object) -> bytes:
    """An AnyValue message."""
    if value is None:
        return b""
    if isinstance(value, bool):
        return b"\x10" + varint(value)
    if isinstance(value, int):
        return b"\x18" + varint(value)
    if isinstance(value, float):
        return b"\x21" + _pack_double(value)
    if isinstance(value, bytes):
        return part(7, value)
    if isinstance(value, (list, tuple)):
        return part(5, b"".join(part(1, _value(item)) for item in value))
    if isinstance(value, Mapping):
        return part(6, b"".join(_attribute(1, str(key), item) for key, item in value.items()))
    return part(1, str(value).encode())


def _attribute(field: int, key: str, value: object) -> bytes:
    return part(field, part(1, key.encode()) + part(2, _value(value)))


@lru_cache(65536, typed=True)
def _known(field: int, key: str, value: str | int | bool) -> bytes:
    return _attribute(field, key, value)


def _attributes(field: int, attributes: Mapping[str, Any] | None) -> bytes:
    return b"".join(
        [
            _known(field, key, value)
            if type(value) is str or type(value) is bool
            else _attribute(field, key, value)
            for key, value in (attributes or {}).items()
        ]
    )


# -- records by columns
# ------------------------------------------------------------------------------------------------


class _Messages:
    """A field that holds a message, many times: `count` messages of the same shape, put together
    piece by piece.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[Sequence[bytes]] = []  # what is put together: a piece of each message
        self._lengths: list[Iterable[int]] = []  # of the pieces that are not of one length
        self._fixed = 0  # bytes that every message has besides
        self._codes: list[str] = []  # the neighbouring parts of one length, which one call packs
        self._columns: list[Iterable[Any]] = []
        self._constant = b""

    def same(self, piece: bytes) -> None:
        """The same bytes in all messages."""
        self._constant += piece

    def each(self, pieces: Sequence[bytes]) -> None:
        """Bytes of each message's own."""
        if pieces.count(pieces[0]) == self._count:
            self.same(pieces[0])
        else:
            self._end_packed()
            self._lengths.append(map(len, pieces))
            self._pieces.append(pieces)

    def numbers(self, before: bytes, code: str, numbers: Iterable[float]) -> None:
        """Eight bytes of each message's own, by a code of `struct`, after bytes that are the same
        in all.
        """
        self.same(before)
        self._end_constant()
        self._codes.append(code)
        self._columns.append(numbers)

    def _end_constant(self) -> None:
        if self._constant:
            self._codes.append(f"{len(self._constant)}s")
            self._columns.append(repeat(self._constant))
            self._constant = b""

    def _end_packed(self) -> None:
        if self._columns:
            self._end_constant()
            packer = _packer("".join(self._codes))
            self._pieces.append([packer.pack(*row) for row in zip(*self._columns, strict=False)])
            self._fixed += packer.size
            self._codes, self._columns = [], []
        elif self._constant:
            self._pieces.append([self._constant] * self._count)
            self._fixed += len(self._constant)
            self._constant = b""

    def pieces(self, field: int) -> list[bytes]:
        """All messages, each as a field of that number, in pieces."""
        self._end_packed()
        fixed, stride = self._fixed, len(self._pieces) + 1
        parts = [_prefix(field, fixed)] * (stride * self._count)
        if self._lengths:
            lengths: Iterable[int] = repeat(fixed, self._count)
            for more in self._lengths:
                lengths = map(add, lengths, more)
            parts[::stride] = list(map(_prefixes(field).__getitem__, lengths))
        for at, pieces in enumerate(self._pieces, 1):
            parts[at::stride] = pieces
        return parts


@lru_cache(1024)
def _packer(codes: str) -> struct.Struct:
    return struct.Struct("<" + codes)


def _eights(code: str, column: Iterable[float]) -> Sequence[bytes]:
    """The eight bytes of each number, by a code of `struct`."""
    numbers = tuple(column)
    return struct.unpack("8s" * len(numbers), struct.pack(f"<{len(numbers)}{code}", *numbers))


_FLOAT, _WHOLE, _TEXT, _LIST, _NO_NUMBERS, _KEPT = (
    {float},
    {int},
    {str},
    {list},
    {str, list, tuple},
    {int, str},
)
_who = attrgetter("model", "module", "tensor", "phase", "branch")
_when = attrgetter("step", "call", "loop")
_time = attrgetter("time_ns")
_stats = attrgetter("stats")
_values = methodcaller("values")


@lru_cache(None)
def _identities(field: int) -> _Remembered:
    """The attributes that a place always has, by what `_who` gets."""
    keys = ("torch.model", "torch.module", "torch.tensor", "torch.phase", "torch.branch")

    def encode(who: tuple[str | None, ...]) -> bytes:
        return b"".join(
            _attribute(field, key, value)
            for key, value in zip(keys, who, strict=True)
            if value is not None
        )

    return _Remembered(encode)


@lru_cache(4096)
def _moment(field: int, when: tuple[int, int, int]) -> bytes:
    keys = ("torch.step", "torch.call", "torch.loop")
    return b"".join(_attribute(field, key, value) for key, value in zip(keys, when, strict=True))


@lru_cache(1024)
def _before_double(field: int, statistic: str) -> bytes:
    """All of a statistic's attribute but its last eight bytes."""
    return _attribute(field, f"torch.stat.{statistic}", 0.0)[:-8]


@lru_cache(1024)
def _shapes(field: int, statistic: str) -> _Remembered:
    """Attributes of a statistic that is a few whole numbers."""
    return _Remembered(lambda value: _attribute(field, f"torch.stat.{statistic}", plain(value)))


@lru_cache(16384, typed=True)
def _kept_statistic(field: int, statistic: str, value: int | str) -> bytes:
    return _attribute(field, f"torch.stat.{statistic}", plain(value))


def _statistics(field: int, statistic: str, types: set[type], column: Sequence[Any]) -> list[bytes]:
    """Attributes of a statistic that may be no finite double: a count, a shape, a dtype, a NaN."""
    if types == _LIST and max(map(len, column)) <= 8:
        return list(map(_shapes(field, statistic).__getitem__, map(tuple, column)))
    return [
        _kept_statistic(field, statistic, value)
        if type(value) in _KEPT
        else _attribute(field, f"torch.stat.{statistic}", plain(value))
        for value in column
    ]


def _runs(
    records: Sequence[Record],
) -> Iterator[tuple[Sequence[Record], dict[str, tuple[Any, ...]]]]:
    """Neighbouring records that have the same statistics, and those by name."""
    names = list(map(tuple, map(_stats, records)))
    starts = [0] if names else []
    if names and names.count(names[0]) != len(names):
        starts += [at for at in range(1, len(names)) if names[at] != names[at - 1]]
    for start, end in pairwise([*starts, len(names)]):
        some = records[start:end]
        yield (
            some,
            dict(
                zip(names[start], zip(*map(_values, map(_stats, some)), strict=True), strict=True)
            ),
        )


def _are_doubles(types: set[type], column: Sequence[Any]) -> bool:
    """Whether these are finite doubles, and nothing else. A sum is finite only if everything in it
    is.
    """
    return types == _FLOAT and isfinite(sum(column))


def _are_one(types: set[type], column: Sequence[Any]) -> bool:
    """Whether these are one text or one whole number."""
    return (types in (_TEXT, _WHOLE)) and column.count(column[0]) == len(column)


def _describe(
    messages: _Messages, field: int, records: Sequence[Record], stats: dict[str, tuple[Any, ...]]
) -> None:
    """Write what an activation's attributes are: who, when, and its statistics."""
    messages.each(list(map(_identities(field).__getitem__, map(_who, records))))
    moments = list(map(_when, records))
    if moments.count(moments[0]) == len(moments):
        messages.same(_moment(field, moments[0]))
    else:
        messages.each([_moment(field, when) for when in moments])
    for name, column in stats.items():
        if name in FINGERPRINTS:
            continue
        types = set(map(type, column))
        if _are_doubles(types, column):
            messages.numbers(_before_double(field, name), "d", column)
        elif _are_one(types, column):
            messages.same(_kept_statistic(field, name, column[0]))
        else:
            messages.each(_statistics(field, name, types, column))


def _activations(records: Sequence[Record], head: bytes, attribute: int, item: int) -> list[bytes]:
    """Records as messages of field `item`: a time, what is the same in all, and attributes of field
    `attribute`.
    """
    found: list[bytes] = []
    for some, stats in _runs(records):
        messages = _Messages(len(some))
        messages.numbers(b"\x09", "Q", map(_time, some))
        messages.same(head)
        _describe(messages, attribute, some, stats)
        found += messages.pieces(item)
    return found


_EVENT_NAME = part(2, ACTIVATION.encode())


def span_events(records: Sequence[Record]) -> list[bytes]:
    """Records as the events of a span."""
    return _activations(records, _EVENT_NAME, _EVENT_ATTRIBUTE, _SPAN_EVENT)


# severity INFO; the name is the body as well, as Loki shows no event names
_LOG_HEAD = (
    b"\x10\x09" + part(3, b"INFO") + part(5, _value(ACTIVATION)) + part(12, ACTIVATION.encode())
)


def log_records(
    records: Sequence[Record], observed_ns: int, trace_id: int, span_id: int, flags: int
) -> list[bytes]:
    """Records as log records. `trace_id` and `span_id` are 0 where there is no span."""
    where = (
        part(9, trace_id.to_bytes(16, "big")) + part(10, span_id.to_bytes(8, "big"))
        if trace_id
        else b""
    )
    head = b"\x59" + _pack_fixed64(observed_ns) + _LOG_HEAD + b"\x45" + _pack_fixed32(flags) + where
    return _activations(records, head, _LOG_ATTRIBUTE, ITEM)


def gauge_metrics(records: Sequence[Record], *, with_step: bool) -> tuple[list[bytes], int]:
    """Records as metrics, one a statistic, each record a point at its own time; and how many points
    there are.
    """
    found: dict[
        str, list[bytes]
    ] = {}  # of each statistic's points, two pieces each: all but the value, and the value
    for some, stats in _runs(records):
        heads = list(map(_identities(_POINT_ATTRIBUTE).__getitem__, map(_who, some)))
        if with_step:
            heads = [
                head + _known(_POINT_ATTRIBUTE, "torch.step", record.step)
                for head, record in zip(heads, some, strict=True)
            ]
        prefixes = map(_prefixes(_POINT).__getitem__, map((18).__add__, map(len, heads)))
        times = _eights("Q", map(_time, some))
        heads = [b"%b%b\x19%b\x21" % three for three in zip(prefixes, heads, times, strict=True)]
        for name, column in stats.items():
            types = set(map(type, column))
            if name in NO_GAUGE or name in FINGERPRINTS or types <= _NO_NUMBERS:
                continue
            before: Sequence[bytes] = heads
            if not _are_doubles(types, column):
                kept = [isinstance(value, (int, float)) and isfinite(value) for value in column]
                before, column = (
                    list(compress(heads, kept)),
                    tuple(map(float, compress(column, kept))),
                )
            parts = [b""] * (2 * len(column))
            parts[::2], parts[1::2] = before, _eights("d", column)
            if parts:
                found.setdefault(name, []).extend(parts)
    metrics: list[bytes] = []
    for name, parts in found.items():
        metrics += _before_points(f"{ACTIVATION}.{name}", sum(map(len, parts)))
        metrics += parts
    return metrics, sum(map(len, found.values())) // 2


def _before_points(name: str, length: int) -> list[bytes]:
    """What stands before the points of a gauge metric, which take so many bytes."""
    head = part(1, name.encode()) + _prefix(5, length)
    return [_prefix(ITEM, len(head) + length), head]


def gauge_point(name: str, attributes: Mapping[str, Any], time_ns: int, value: int) -> list[bytes]:
    """A metric that is one gauge point, a whole number."""
    point = (
        _attributes(_POINT_ATTRIBUTE, attributes)
        + b"\x19"
        + _pack_fixed64(time_ns)
        + b"\x31"
        + _pack_fixed64(value % 2**64)
    )
    point = part(_POINT, point)
    return [*_before_points(name, len(point)), point]


# -- spans
# --------------------------------------------------------------------------------------------------


def _ids(of: SpanContext) -> bytes:
    """The ids of a span or a link, whose fields have the same numbers."""
    return (
        b"\x0a\x10" + of.trace_id.to_bytes(16, "big") + b"\x12\x08" + of.span_id.to_bytes(8, "big")
    )


def _number(field: int, number: int) -> bytes:
    """A number that is left out where it is zero."""
    return varint(field << 3) + varint(number) if number else b""


def _flags(context: SpanContext | None) -> bytes:
    """Whether the parent is remote is known, and whether it is."""
    return _pack_fixed32(0x300 if context is not None and context.is_remote else 0x100)


def span(of: ReadableSpan, records: Sequence[Record] = ()) -> list[bytes]:
    """A span as it is sent, with records as its last events."""
    context = of.get_span_context()
    assert context is not None
    parts = [_ids(context)]
    if context.trace_state:
        parts.append(
            part(
                3, ",".join(f"{key}={value}" for key, value in context.trace_state.items()).encode()
            )
        )
    if of.parent:
        parts.append(b"\x22\x08" + of.parent.span_id.to_bytes(8, "big"))
    parts.append(part(5, of.name.encode()))
    parts.append(_number(6, of.kind.value + 1))
    parts.append(
        b"\x39" + _pack_fixed64(of.start_time or 0) + b"\x41" + _pack_fixed64(of.end_time or 0)
    )
    parts.append(_attributes(_SPAN_ATTRIBUTE, of.attributes))
    parts.append(_number(10, of.dropped_attributes))
    for event in of.events:
        inside = b"\x09" + _pack_fixed64(event.timestamp) + part(2, event.name.encode())
        inside += _attributes(_EVENT_ATTRIBUTE, event.attributes) + _number(
            4, event.dropped_attributes
        )
        parts.append(part(_SPAN_EVENT, inside))
    parts += span_events(records)
    parts.append(_number(12, of.dropped_events))
    for link in of.links:
        inside = _ids(link.context) + _attributes(_LINK_ATTRIBUTE, link.attributes)
        parts.append(
            part(
                _SPAN_LINK,
                inside + _number(5, link.dropped_attributes) + b"\x35" + _flags(link.context),
            )
        )
    parts.append(_number(14, of.dropped_links))
    message = part(2, of.status.description.encode()) if of.status.description else b""
    parts.append(part(15, message + _number(3, of.status.status_code.value)))
    parts.append(b"\x85\x01" + _flags(of.parent))
    return [_prefix(ITEM, sum(map(len, parts))), *parts]


# -- requests
# --------------------------------------------------------------------------------------------------


def request(resource: bytes, scope: bytes, pieces: Iterable[bytes]) -> bytes:
    """An Export…ServiceRequest of any signal: the three have the same shape and field numbers. The
    pieces are those of this module's spans, log records or metrics.
    """
    inside = [part(1, scope), *pieces]
    length = sum(map(len, inside))
    head = part(1, resource) + _prefix(2, length)
    return b"".join([_prefix(1, len(head) + length), head, *inside])
