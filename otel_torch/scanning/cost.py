"""Estimate what recording a forward would write and send, before a disk is full or a collector
rejects it.

Records are made as in a session, with typical numbers, and encoded by the encoders of the real
sinks, so no second model of their size is needed.

For example, one call of `Linear(4, 4)` on 2 x 4 float32 values, with capture=outputs:

| step                   | result                                                                 |
|------------------------|------------------------------------------------------------------------|
| list planned records   | module `linear`, tensor `out`, call 0, phase `forward`                 |
| bytes that are read    | 2 x 4 x 4 = 32                                                         |
| make the record        | its statistics from typical sums of 8 values, such as `"mean": 0.1234` |
| encode it              | one line of JSON, about 0.3 kB: `jsonl_bytes`; likewise for OTLP       |
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from otel_torch.records import FINGERPRINTS, PARAMETER_PHASES, Record, TensorPosition
from otel_torch.scanning.scanned_forward import (
    ScannedCall,
    ScannedForward,
    ScannedModule,
    ScannedTensor,
)
from otel_torch.settings import PARITY_STATISTICS, Settings


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of some records. Sizes are in bytes, and lower bounds if shapes depend on the data.

    Args:
        records: The number of records.
        jsonl_bytes: In a recording.
        span_event_bytes, log_event_bytes, metric_bytes: Sent by OTLP, before compression.
        span_event_file_bytes, log_event_file_bytes, metric_file_bytes: As JSON lines in
            `OTEL_TORCH_OTLP_FILE`.
        tensor_bytes: In the files of `OTEL_TORCH_TENSORS`.
        read_bytes: Of the tensors that the statistics read.
    """

    records: int = 0
    jsonl_bytes: int = 0
    span_event_bytes: int = 0
    log_event_bytes: int = 0
    metric_bytes: int = 0
    span_event_file_bytes: int = 0
    log_event_file_bytes: int = 0
    metric_file_bytes: int = 0
    tensor_bytes: int = 0
    read_bytes: int = 0


def cost_of_forward(forward: ScannedForward, settings: Settings) -> Cost:
    """Estimate one forward, and its backward pass if gradients are recorded."""
    return _estimate(forward.model, list(_plan_forward(forward, settings)), settings)


def cost_of_parameters(forward: ScannedForward, settings: Settings) -> Cost:
    """Estimate what is recorded once, before the first forward."""
    return _estimate(forward.model, list(_plan_parameters(forward, settings)), settings)


# -- the planned records


class _PlannedRecord(NamedTuple):
    module: str
    class_name: str
    call: int
    order: int
    phase: str
    tensor: ScannedTensor
    is_input: bool = False


def _plan_forward(forward: ScannedForward, settings: Settings) -> Iterator[_PlannedRecord]:
    capture = settings.capture
    for call in forward.calls:
        if not call.selected:
            continue
        if "inputs" in capture:
            for tensor in call.inputs:
                yield _plan_call(call, "forward", tensor, is_input=True)
        if "outputs" in capture:
            for tensor in call.outputs:
                yield _plan_call(call, "forward", tensor)
        if "gradients" in capture:
            for tensor in call.outputs:
                if tensor.requires_grad:
                    yield _plan_call(call, "backward", _gradient_of(tensor))
    if "parameters" in capture and "gradients" in capture:
        for module in _selected_modules(forward):
            for parameter in module.parameters:
                if parameter.requires_grad:
                    yield _plan_module(module, "backward", _gradient_of(parameter))
    if "updates" in capture:
        for module in _selected_modules(forward):
            for parameter in module.parameters:
                if parameter.requires_grad:
                    yield _plan_module(
                        module, "update", dataclasses.replace(parameter, number=None)
                    )


def _plan_parameters(forward: ScannedForward, settings: Settings) -> Iterator[_PlannedRecord]:
    if "parameters" not in settings.capture:
        return
    for module in _selected_modules(forward):
        for parameter in module.parameters:
            yield _plan_module(module, "attach", parameter)
        if "parity" in settings.capture:
            for buffer in module.buffers:
                yield _plan_module(module, "attach", buffer)


def _selected_modules(forward: ScannedForward) -> Iterator[ScannedModule]:
    return (module for module in forward.modules if module.selected)


def _plan_call(
    call: ScannedCall, phase: str, tensor: ScannedTensor, is_input: bool = False
) -> _PlannedRecord:
    return _PlannedRecord(
        call.module, call.class_name, call.call, call.order, phase, tensor, is_input
    )


def _plan_module(module: ScannedModule, phase: str, tensor: ScannedTensor) -> _PlannedRecord:
    return _PlannedRecord(module.name, module.class_name, 0, 0, phase, tensor)


def _gradient_of(tensor: ScannedTensor) -> ScannedTensor:
    kind, rest = re.fullmatch(r"(out|param)(.*)", tensor.label, re.S).groups()  # type: ignore[union-attr]
    gradient_kind = {"out": "grad", "param": "param_grad"}[kind]
    return dataclasses.replace(tensor, label=gradient_kind + rest, number=None)


# -- their size


def _estimate(model: str, planned: Sequence[_PlannedRecord], settings: Settings) -> Cost:
    if not planned:
        return Cost()
    from otel_torch.recording.rows import encode_rows
    from otel_torch.telemetry.otlp import otlp_protobuf

    records, read_bytes = _make_records(model, planned, settings)
    # a gauge keeps only the last of several calls with the same attributes
    points = {(record.module, record.tensor, record.phase): record for record in records}
    metrics, _ = otlp_protobuf.encode_gauges(
        list(points.values()), with_step=settings.metric_step != "time"
    )
    events = otlp_protobuf.encode_span_events(records)
    logs = otlp_protobuf.encode_log_records(records, _TIME_NS, _TRACE_ID, _SPAN_ID, 1)
    # a file holds events as part of their span
    span = otlp_protobuf.encode_field(otlp_protobuf.ITEM_FIELD, b"".join(events))
    tensor_bytes = sum((item.tensor.bytes or 0) + _header_bytes(model, item) for item in planned)
    return Cost(
        records=len(records),
        jsonl_bytes=len(encode_rows(records)),
        span_event_bytes=_length(events),
        log_event_bytes=_length(logs),
        metric_bytes=_length(metrics),
        span_event_file_bytes=_length_in_file("traces", [span]),
        log_event_file_bytes=_length_in_file("logs", logs),
        metric_file_bytes=_length_in_file("metrics", metrics),
        tensor_bytes=tensor_bytes,
        read_bytes=read_bytes,
    )


def _make_records(
    model: str, planned: Sequence[_PlannedRecord], settings: Settings
) -> tuple[list[Record], int]:
    """Return the records and the bytes that their statistics read."""
    # a session that records inputs reads a tensor once, however often it is passed
    reads_once = "inputs" in settings.capture
    numbers: set[int | None] = set()
    records = []
    read_bytes = 0
    for item in planned:
        number = item.tensor.number
        is_first = number is None or number not in numbers
        numbers.add(number)
        records.append(_make_record(model, item, settings, is_first))
        if is_first or not reads_once:
            read_bytes += item.tensor.bytes or 0
    return records, read_bytes


# the sums over one element: derived statistics have as many digits as those of a real tensor
_TYPICAL = {
    "min": -3.051757812500123,
    "max": 3.141592653589793,
    "sum": -0.577215664901532,
    "squares": 1.047197551196597,
    "magnitudes": 0.797884560802865,
}
_TIME_NS, _TRACE_ID, _SPAN_ID = 1_700_000_000_000_000_000, 2**127, 2**63
_ARGUMENT = "hidden_states"  # a typical parameter name of a forward


def _make_record(model: str, planned: _PlannedRecord, settings: Settings, is_first: bool) -> Record:
    """Return a record as a session would make it.

    Args:
        is_first: Whether no earlier record is of the same tensor.
    """
    from otel_torch.statistics.measure import Measurement
    from otel_torch.statistics.row_layout import SCALARS, VECTORS
    from otel_torch.statistics.table import columns_for, derive

    tensor = planned.tensor
    names = _statistics_for(planned, settings, is_first)
    columns = columns_for(names)
    numel = math.prod(map(abs, tensor.shape))
    measured = Measurement(None, columns, numel, numel, list(tensor.shape), f"torch.{tensor.dtype}")
    row = [_TYPICAL.get(name, 0.0) * (1 if name in ("min", "max") else numel) for name in SCALARS]
    row += [_TYPICAL["min"]] * sum(VECTORS.get(name, 0) for name in columns)
    if "rows" in columns:
        row += [_TYPICAL["min"]] * (VECTORS["rows"] * (_count_rows(tensor.shape) - 1))
    return Record(
        module=planned.module,
        tensor=tensor.label,
        step=0,
        call=planned.call,
        loop=0,
        model=model,
        phase=planned.phase,
        branch=None,
        stats=derive(names, row if numel else None, measured),
        time_ns=_TIME_NS,
        position=_make_position(planned) if "parity" in settings.capture else None,
    )


def _statistics_for(planned: _PlannedRecord, settings: Settings, is_first: bool) -> tuple[str, ...]:
    if "parity" not in settings.capture:
        return tuple(dict.fromkeys(settings.stats))
    names = tuple(dict.fromkeys((*settings.stats, *PARITY_STATISTICS)))
    if not is_first:
        return tuple(name for name in names if name not in FINGERPRINTS)
    if planned.phase in PARAMETER_PHASES:
        return (*(name for name in names if name != "rows"), "row_sketch")
    return (*names, "rows") if "tokens" in settings.capture and "rows" not in names else names


def _count_rows(shape: Sequence[int]) -> int:
    """Return of how many rows a tensor has sketches."""
    from otel_torch.statistics.row_layout import ROWS_MAX

    return min(ROWS_MAX, math.prod(map(abs, shape[:-1])))


def _make_position(planned: _PlannedRecord) -> TensorPosition:
    number = planned.tensor.number or 0
    order = None if planned.phase in PARAMETER_PHASES else planned.order
    argument = _ARGUMENT if planned.is_input else None
    return TensorPosition(planned.class_name, argument, number, number, (order, order), order, None)


def _length(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


def _length_in_file(signal: str, pieces: Sequence[bytes]) -> int:
    """Return how much longer the pieces make a line of an OTLP file."""
    from otel_torch.telemetry.otlp import otlp_protobuf
    from otel_torch.telemetry.otlp.otlp_json import write_line

    empty = write_line(signal, otlp_protobuf.request(b"", b"", []))
    return len(write_line(signal, otlp_protobuf.request(b"", b"", pieces))) - len(empty)


def _header_bytes(model: str, planned: _PlannedRecord) -> int:
    """Return the bytes of a tensor's entry in the header of a safetensors file."""
    tensor = planned.tensor
    key = f"{model}/{planned.module}/{tensor.label}/call{planned.call}/{planned.phase}"
    entry = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [10**8, 10**8]}
    return len(json.dumps({key: entry}, separators=(",", ":")))
