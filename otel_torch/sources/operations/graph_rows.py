"""The rows of a graph: one for each value that an operation makes, each leaf and each end."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from otel_torch import torch_private
from otel_torch.records import GraphFields, Record
from otel_torch.sources.tensors.tensor_reader import MeasuredTensor, RecordedCall
from otel_torch.statistics.gpu_kernel import TRITON_TYPES
from otel_torch.statistics.measure import Measurement, measure
from otel_torch.statistics.row_layout import MAX, MIN, NONFINITE, SCALARS
from otel_torch.statistics.table import derive

STATISTICS = (
    "abs_mean", "min", "max", "mean", "std", "l2", "nonfinite", "numel", "shape", "dtype", "sketch",
    "rows",
)  # fmt: skip
COLUMNS = (*SCALARS, "sketch")
COLUMNS_WITH_ROWS = (*COLUMNS, "rows")
NOTHING = Measurement(None, (), 0, 0, None, "")

# The number that a mask fills in: by custom at least 1e4, less what it is added to, and a hundred
# times anything else, for beside a smaller one an error of 1e-2 would still be seen.
_LEAST_FILL = 8192.0
_FILL_FACTOR = 100.0

_SCALARS_SIZE = 8 * len(SCALARS)
# of larger tensors on a device no copy is made: recording may take 300 MB there
_MAX_COPY = 2**27


class PackedRow:
    """The numbers of a value on the host: the scalar columns in fp64, and its sketches in fp32, as
    which they are recorded anyway.
    """

    __slots__ = ("_data",)

    def __init__(self, numbers: Sequence[float]) -> None:
        scalars, sketch = numbers[: len(SCALARS)], numbers[len(SCALARS) :]
        self._data = array("d", scalars).tobytes() + array("f", sketch).tobytes()

    def numbers(self) -> list[float]:
        sketch = array("f")
        sketch.frombytes(self._data[_SCALARS_SIZE:])
        return [*self.scalars(), *sketch]

    def scalars(self) -> array[float]:
        scalars = array("d")
        scalars.frombytes(self._data[:_SCALARS_SIZE])
        return scalars


@dataclass(slots=True)
class GraphRow(MeasuredTensor):
    """A row of a graph, whose numbers may still be on their device.

    fields: what it has besides its place and its statistics. packed: its numbers, if they are on
    the host already.
    """

    is_of_graph: ClassVar[bool] = True
    fields: dict[str, Any] = field(default_factory=dict)
    packed: PackedRow | None = None

    def own_record(self, row: Sequence[float] | None) -> Record:
        numbers = row if self.packed is None else self.packed.numbers()
        stats = (
            derive(STATISTICS, numbers, self.measurement) if self.measurement is not NOTHING else {}
        )
        record = self.as_record(stats)
        record.position = GraphFields(self.fields)
        return record


@dataclass(slots=True)
class MeasuredValue:
    """A value as it was measured. packed: its row, if that is on the host; else the measurement
    has it.
    """

    measurement: Measurement
    packed: PackedRow | None


def make_row(
    call: RecordedCall, label: str, measured: MeasuredValue, fields: dict[str, Any]
) -> GraphRow:
    """Make a row of what happens now."""
    return GraphRow(
        call, label, measured.measurement, time.time_ns(), fields=fields, packed=measured.packed
    )


UNMEASURED = MeasuredValue(NOTHING, None)


def measure_value(tensor: torch.Tensor, columns: tuple[str, ...]) -> MeasuredValue:
    """Measure a value. Its sketches leave out NaN, Inf and the number that a mask fills in."""
    if not tensor.is_cpu and _may_be_copied(tensor):
        return MeasuredValue(_measure_on_device(tensor, columns), None)
    measurement = measure(tensor, columns)
    row = measurement.row
    if row is None or isinstance(row, torch.Tensor):
        return MeasuredValue(measurement, None)
    if len(row) > len(SCALARS) and (row[NONFINITE] or max(-row[MIN], row[MAX]) > _LEAST_FILL):
        row = [*row[: len(SCALARS)], *_finite_sketches(tensor, columns)]
    measurement.row = None
    return MeasuredValue(measurement, PackedRow(row))


def _may_be_copied(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    is_plain = is_plain and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.dtype in TRITON_TYPES and tensor.nbytes <= _MAX_COPY


@torch_private.unobserved
def _measure_on_device(tensor: torch.Tensor, columns: tuple[str, ...]) -> Measurement:
    """Measure a tensor without waiting to know whether it has any NaN or Inf."""
    measurement = measure(_without_fills(torch.nan_to_num(tensor, 0, 0, 0)), columns)
    scalars = measure(tensor, SCALARS).row
    if isinstance(measurement.row, torch.Tensor) and isinstance(scalars, torch.Tensor):
        measurement.row[: len(SCALARS)].copy_(scalars)
    return measurement


def _finite_sketches(tensor: torch.Tensor, columns: tuple[str, ...]) -> Sequence[float]:
    """Return the sketches of a tensor with zeros in place of NaN, Inf and fills."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.itemsize == 1:  # torch computes nothing in fp8
        tensor = tensor.float()
    # NaN and Inf are what is not 0 when it is taken from itself: four times faster than `isfinite`
    finite = tensor.masked_fill(tensor - tensor != 0, 0)
    row = measure(_without_fills(finite), columns).row
    assert isinstance(row, list)
    return row[len(SCALARS) :]


def _without_fills(tensor: torch.Tensor) -> torch.Tensor:
    """Return a finite tensor with zeros in place of the large number that masks it, as -1e9 does.

    Beside such a number nothing else would be seen: scores that are wrong by half are right within
    1e-9 then, and what masks with -inf never has the same values. A mask itself stays as it is.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    smallest, largest = tensor.aminmax()
    fill = torch.where(-smallest > largest, smallest, largest)
    is_filled = (tensor / fill - 1).abs() < 1 / _FILL_FACTOR
    rest = tensor.masked_fill(is_filled, 0)
    most = rest.abs().amax()
    is_masked = (fill.abs() > _LEAST_FILL) & (most * _FILL_FACTOR < fill.abs()) & (most > 0)
    return torch.where(is_masked & (is_filled.sum() > 1), rest, tensor)
