"""The rows that the compiled observer left, as lines of a recording or as records.

observer.c -> CompactRow -> LineEncoder.encode -> lines of the recording
                         -> record_of          -> Record, only if a sink or a search asks for it
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from otel_torch.recording.rows import encode_rows, json_encoder
from otel_torch.records import FINGERPRINTS, LazyRecords, Record, TensorPosition
from otel_torch.sources.tensors.module_signature import ModuleSignature
from otel_torch.statistics import cpu_kernel
from otel_torch.statistics.compact_rows import DTYPE_NAMES, encoding_plan, unpack
from otel_torch.statistics.native_functions import ObjectFunctions
from otel_torch.statistics.row_layout import NONFINITE
from otel_torch.statistics.table import derive

# site, module, label, the forward that it is a call of, and the row; in a parity recording also the
# tensor's identity, the module's signature and the times of the call (`CallTimes`), and once the
# row is read, the numbers of the tensor and its storage, and whether the tensor is new
CompactRow = tuple[Any, ...]
Row = Sequence[float] | None


def is_compact(row: object) -> bool:
    """Return whether a pending row is one of the compiled observer's."""
    return type(row) is tuple


def record_of(row: CompactRow, statistics: Sequence[str]) -> Record:
    site, module, label, context, data, *of_parity = row
    call, time_ns, measurement = unpack(data)
    position = None
    if of_parity:
        _, signature, (entry, exit_, parent), value, storage, is_new = of_parity
        order = entry, exit_
        position = TensorPosition(
            signature.class_name, signature.argument(label), value, storage, order, parent, None
        )
        statistics = statistics if is_new else without_fingerprints(statistics)
    return Record(
        module,
        label,
        context.step,
        call,
        context.loop,
        site.model.name,
        context.phase,
        context.branch,
        derive(statistics, measurement.row, measurement),  # type: ignore[arg-type]
        time_ns,
        None,
        position,
    )


def without_fingerprints(statistics: Sequence[str]) -> tuple[str, ...]:
    """Return the statistics that every record of a tensor has, and not only its first."""
    return tuple(name for name in statistics if name not in FINGERPRINTS)


class LineEncoder:
    """Encodes compact rows as `encode_rows` encodes their records.

    It loads nothing before the first row: most processes of a program record none.

    Args:
        statistics: of each line, in order.
    """

    def __init__(self, statistics: tuple[str, ...]) -> None:
        self._plan = encoding_plan(statistics)
        self._keys = tuple(f',"{name}":'.encode() for name in statistics)
        self._dtypes = [f'"{name}"'.encode() for name in DTYPE_NAMES]
        # by label and module
        self._texts: dict[str, dict[str, bytes]] = {}
        # by label and signature
        self._signature_texts: dict[str, dict[ModuleSignature, bytes]] = {}

    @functools.cached_property
    def _functions(self) -> ObjectFunctions | None:
        kernel = cpu_kernel.load()
        return None if kernel is None else kernel.objects

    @functools.cached_property
    def _encode(self) -> Callable[[object], bytes]:
        encode: Callable[[object], bytes] = json_encoder().encode
        return encode

    def encode(self, rows: list[CompactRow]) -> bytes | None:
        """Return the lines of the rows; None if only their records can be encoded."""
        functions, plan = self._functions, self._plan
        if functions is None or plan is None:
            return None
        numbers = self._encode(functions.statistics(rows, plan))
        if b"n" in numbers:
            return None  # a null: the square of a finite number may be infinite
        try:
            return functions.lines(
                rows, plan, self._keys, self._dtypes, numbers,
                self._texts, self._make_text, self._describe,
                self._signature_texts, self._make_signature_text,
            )  # fmt: skip
        except UnicodeEncodeError:
            return None  # half a surrogate pair in a name

    def _make_text(self, module: str, label: str) -> bytes:
        """Return the beginning of a line, up to its step, which is kept for the next ones."""
        text = b'{"module":%b,"tensor":%b,"step":' % (self._encode(module), self._encode(label))
        self._texts.setdefault(label, {})[module] = text
        return text

    def _make_signature_text(self, signature: ModuleSignature, label: str) -> bytes:
        """Return the beginning of a position, which is kept for the next ones."""
        fields = {"class": signature.class_name}
        if (argument := signature.argument(label)) is not None:
            fields["argument"] = argument
        text = b"," + self._encode(fields)[1:-1]
        self._signature_texts.setdefault(label, {})[signature] = text
        return text

    def _describe(self, row: CompactRow) -> tuple[bytes, bytes]:
        """Return what is before the number of a call in a line, and what is after it."""
        site, _, _, context, *_ = row
        after = {"loop": context.loop, "model": site.model.name, "phase": context.phase}
        if context.branch is not None:
            after["branch"] = context.branch
        return b'%d,"call":' % context.step, b"," + self._encode(after)[1:-1]


class ReadRecords(LazyRecords):
    """The records of a flush, in order.

    Args:
        items: a record, or a compact row of which one is made when it is asked for.
        statistics: of the records that are made.
    """

    def __init__(
        self,
        items: Sequence[Record | CompactRow],
        statistics: Sequence[str],
        encoder: LineEncoder,
    ) -> None:
        self._items, self._statistics, self._encoder = items, statistics, encoder
        self._records: list[Record] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> ReadRecords: ...
    def __getitem__(self, index: int | slice) -> Record | ReadRecords:
        if isinstance(index, slice):
            return ReadRecords(self._items[index], self._statistics, self._encoder)
        return self._made()[index]

    def own_records(self) -> Iterator[Record]:
        """Yield the records that are no compact rows, such as those of a training."""
        return (item for item in self._items if not isinstance(item, tuple))

    def modules_of_compact_rows(self) -> Iterator[str]:
        """Yield the modules of the other records, none of which is made for it."""
        return (item[1] for item in self._items if isinstance(item, tuple))

    def _made(self) -> list[Record]:
        if self._records is None:
            self._records = [
                record_of(item, self._statistics) if isinstance(item, tuple) else item
                for item in self._items
            ]
        return self._records

    def lines(self) -> bytes | None:
        parts: list[bytes] = []
        for compact, run in itertools.groupby(self._items, is_compact):
            part = self._encode(compact, list(run))
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def _encode(self, compact: bool, run: list[Any]) -> bytes | None:
        if compact:
            return self._encoder.encode(run)
        try:
            return encode_rows(run)
        except (TypeError, ValueError):
            return None  # the sink finds the record that is at fault


class ReadRows(Sequence[Row]):
    """The rows of a flush as floats, made when they are asked for. None for what is no tensor."""

    def __init__(self, items: Sequence[Row | CompactRow]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> ReadRows: ...
    def __getitem__(self, index: int | slice) -> Row | ReadRows:
        if isinstance(index, slice):
            return ReadRows(self._items[index])
        item: Any = self._items[index]
        if not is_compact(item):
            return item  # type: ignore[no-any-return]
        _, _, _, _, data, *_ = item
        return unpack(data).measurement.row  # type: ignore[return-value]

    def nonfinite(self) -> list[int]:
        """Return the indices of the rows with a NaN or Inf, which no compact row has."""
        return [
            index
            for index, item in enumerate(self._items)
            if not is_compact(item) and item is not None and item[NONFINITE]
        ]
