"""A tensor's way from its measurement to a record.

MeasuredTensor (numbers still on the device)
    -> TensorReader.read, once per step -> _PendingRecords -> Record

Rows of the compiled observer (`compact_records.py`) go the same way, in the order of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from otel_torch.records import (
    PARAMETER_PHASES,
    TOKENS,
    Record,
    Scope,
    Statistic,
    TensorPosition,
)
from otel_torch.settings import PARITY_STATISTICS, Settings
from otel_torch.sources.steps.forwards import ForwardContext
from otel_torch.sources.tensors.compact_records import (
    CompactRow,
    LineEncoder,
    ReadRecords,
    ReadRows,
    Row,
    without_fingerprints,
)
from otel_torch.sources.tensors.identity import Identity, IdentityRegistry, compact_digest, digest
from otel_torch.statistics.measure import Measurement
from otel_torch.statistics.read_rows import RowTransfer
from otel_torch.statistics.table import derive
from otel_torch.statistics.token_rows import token_statistics
from otel_torch.torch_private import unobserved
from otel_torch.training_quantities import PHASE


@dataclass(slots=True)
class RecordedCall:
    """One call of a module, to which the records of its tensors belong.

    The indices count the entries and exits of all calls, in order; they are None outside of parity
    recordings. parent_index: `entry_index` of the enclosing call. is_recorded: False for a call of
    a shared module by a name that is not selected. inputs: the identities of its input tensors;
    None if they are not known. step_scope: the scope of its step.
    """

    model: str
    module: str
    step: int
    call: int
    loop: int
    phase: str
    branch: str | None
    is_recorded: bool = True
    class_name: str = ""
    entry_index: int | None = None
    exit_index: int | None = None
    parent_index: int | None = None
    inputs: frozenset[Identity] | None = frozenset()
    step_scope: Scope | None = None


@dataclass(slots=True)
class MeasuredTensor:
    """A tensor of a call, measured; its numbers may still be on their device.

    copy: the whole tensor, if OTEL_TORCH_TENSORS asks for it. identity: only in parity recordings.
    argument: the input's name in forward's signature. is_of_graph: whether it is a row of the
    graph of operations, which has statistics of its own and which no search for NaN or Inf sees.
    """

    is_of_graph: ClassVar[bool] = False

    call: RecordedCall
    label: str
    measurement: Measurement
    time_ns: int
    copy: torch.Tensor | None = None
    identity: Identity | None = None
    argument: str | None = None

    def position(self) -> TensorPosition | None:
        """Return the tensor's position in the run, which only parity recordings have."""
        identity, call = self.identity, self.call
        if identity is None or identity.number is None:
            return None
        storage = None if identity.storage is None else identity.storage.number
        shard = self.measurement.shard
        return TensorPosition(
            call.class_name,
            self.argument,
            identity.number,
            storage,
            (call.entry_index, call.exit_index),
            call.parent_index,
            None if shard is None else shard._asdict(),
        )

    def own_record(self, row: Row) -> Record:
        """Return the record of a row of the graph, given its numbers if they were on a device."""
        raise NotImplementedError

    def as_record(self, stats: dict[str, Statistic]) -> Record:
        call = self.call
        return Record(
            call.module,
            self.label,
            call.step,
            call.call,
            call.loop,
            call.model,
            call.phase,
            call.branch,
            stats,
            self.time_ns,
            None if self.copy is None else [self.copy.cpu()],
            None if self.identity is None else self.position(),
        )


class TensorReader:
    """Reads measured tensors back to the host and makes records of them.

    Made before the recorder, which calls `read`, and shared with the sources that measure.
    """

    def __init__(self, settings: Settings) -> None:
        self.parity = "parity" in settings.capture
        required = PARITY_STATISTICS if self.parity else ()
        rows = ("rows",) if "tokens" in settings.capture else ()
        self.stats = tuple(dict.fromkeys((*settings.stats, *required, *rows)))
        # of the first record of a tensor; those that were not measured are left out
        sketches = ("part_sketches",) if self.parity else ()
        self.first_stats = tuple(dict.fromkeys((*self.stats, *sketches)))
        # by phase, where it has others
        self._stats = {PHASE: tuple(dict.fromkeys((*self.stats, "mean")))}
        if self.parity:
            self._stats |= dict.fromkeys(PARAMETER_PHASES, (*self.first_stats, "row_sketch"))
        self.identities = IdentityRegistry()
        self.repeated_stats = without_fingerprints(self.stats)
        self.encoder = LineEncoder(self.stats)
        # called with the records of a flush and their rows
        self.observers: list[Callable[[Sequence[Record], ReadRows], None]] = []

    def read(self, pending: list[MeasuredTensor | CompactRow]) -> _PendingRecords:
        """Start copying the measurements to the host, all tensors of a device together."""
        records = _PendingRecords(self, pending)
        self.identities.end_step()
        return records

    def as_record(self, tensor: MeasuredTensor, row: Row) -> Record:
        """Return the record of a tensor, given its row of numbers."""
        identity, measurement = tensor.identity, tensor.measurement
        if tensor.is_of_graph:
            return tensor.own_record(row)
        if tensor.call.phase == TOKENS:
            return tensor.as_record(token_statistics(row or (), measurement))
        is_new = identity is None or self.identities.assign_number(
            identity, digest(measurement, row)
        )
        names = self._stats.get(tensor.call.phase, self.first_stats)
        return tensor.as_record(derive(names if is_new else self.repeated_stats, row, measurement))

    def with_numbers(self, row: CompactRow) -> CompactRow:
        """Return a compact row of a parity recording with the numbers of its tensor."""
        *_, data, identity, _, _ = row
        is_new = self.identities.assign_number(identity, compact_digest(data))
        storage = identity.storage
        return (*row, identity.number, None if storage is None else storage.number, is_new)


class _PendingRecords:
    """The records of measured tensors, made in the order in which these were measured."""

    def __init__(self, reader: TensorReader, pending: list[MeasuredTensor | CompactRow]) -> None:
        self._reader, self._pending = reader, pending
        measured = [row.measurement for row in pending if not isinstance(row, tuple)]
        self._needs_no_work = not measured and not reader.parity
        self._transfer = RowTransfer(measured)
        self.ready = self._transfer.is_ready

    @unobserved
    def records(self) -> ReadRecords:
        reader, numbers = self._reader, iter(self._transfer.fetch())
        items: list[Any] = self._pending
        rows: list[Any] = self._pending
        if not self._needs_no_work:
            items, rows = [], []
            for measured in self._pending:
                if isinstance(measured, tuple):
                    items.append(reader.with_numbers(measured) if reader.parity else measured)
                    rows.append(measured)
                else:
                    row = next(numbers)
                    items.append(reader.as_record(measured, row))
                    is_hidden = measured.call.phase == TOKENS or measured.is_of_graph
                    rows.append(None if is_hidden else row)
        records = ReadRecords(items, reader.stats, reader.encoder)
        for observe in reader.observers:
            observe(records, ReadRows(rows))
        return records


def step_of(row: MeasuredTensor | CompactRow) -> Scope | None:
    if not isinstance(row, tuple):
        return row.call.step_scope
    context: ForwardContext = row[3]
    return context.active.scope
